"""Writes checkpoints to storage from the slots of real daemons, as their persisters would."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.errors import FormatError
from reft.wire import messages
from reft.wire import stored_format as stored
from reft.wire.manifest import placement_of
from reft.wire.slot_format import read_head
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.job_files import decode_copy
from reft_daemon.persist.checkpoint_store import CheckpointStore
from reft_daemon.persist.slot_copy import SlotRange, SlotSource
from reft_daemon.persist.storage_folder import StorageFolder
from tests.support.daemons import DaemonProcess


def record_of(daemon: DaemonProcess, job: str = "job") -> pb.JobRecord:
    return pb.JobRecord.FromString(decode_copy((daemon.folder / job / "record.0").read_bytes()).body)


def ranges_of(manifest: pb.Manifest, rank: int) -> list[SlotRange]:
    """Returns which bytes of a rank's data a checkpoint has: all but parity."""
    part = placement_of(manifest).rank_placement(rank)
    return [SlotRange(0, part.parity_offset), SlotRange(part.unreplicated_offset, 1 << 60)]


def sealed_slots(daemon: DaemonProcess, job: str = "job") -> dict[int, dict[int, Path]]:
    """Returns step → rank → the file of the slot that holds it, of the newest epoch."""
    found: dict[int, dict[int, Path]] = {}
    epoch = messages.epoch_from(record_of(daemon, job).decision.epoch)
    for path in (daemon.folder / job).glob("rank-*.slot-*"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            header = read_head(descriptor)[1]
        except FormatError:
            continue
        finally:
            os.close(descriptor)
        if header.state is SlotState.SEALED and header.version is not None and header.version.epoch == epoch:
            found.setdefault(header.version.step, {})[header.rank] = path
    return found


def persist(root: Path, daemons: Sequence[DaemonProcess], job: str = "job", lineage: str = "") -> Version:
    """Writes the newest step that is sealed everywhere, while nobody trains.

    Args:
        root: the folder of all jobs.
        daemons: the nodes of the job.
        job: name of the job.
        lineage: another one than the job's own.
    """
    record = record_of(daemons[0], job)
    decision, manifest = messages.decision_from(record.decision), record.manifest
    held = [sealed_slots(daemon, job) for daemon in daemons]
    indexes = [record_of(daemon, job).node_index for daemon in daemons]
    steps = [
        step
        for step in held[0]
        if all(
            sorted(each.get(step, {})) == list(manifest.nodes[i].ranks) for i, each in zip(indexes, held, strict=True)
        )
    ]
    version, lineage = Version(decision.epoch, max(steps)), lineage or manifest.lineage
    store = CheckpointStore(StorageFolder(root), job)
    store.put_decision(lineage, decision)
    nodes = []
    for index, each in zip(indexes, held, strict=True):
        slots = [
            SlotSource(rank, os.open(path, os.O_RDONLY), ranges_of(manifest, rank))
            for rank, path in sorted(each[version.step].items())
        ]
        work = store.write_node(lineage, version, index, 0, slots)
        while True:
            try:
                next(work)
            except StopIteration as end:
                nodes.append(end.value)
                break
        for slot in slots:
            os.close(slot.descriptor)
    kept = pb.Manifest()
    kept.CopyFrom(manifest)
    kept.ClearField("token")
    text, decided = kept.SerializeToString(), record.decision.SerializeToString()
    nonce = os.urandom(16).hex()
    store.commit(stored.StoredManifest(version, job, lineage, nonce, text, decided, tuple(nodes)), decision)
    return version
