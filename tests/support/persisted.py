"""A job of one rank a node, whose daemons write checkpoints to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.wire import messages
from reft.wire.slot_format import SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.persist.checkpoint_store import CheckpointStore
from reft_daemon.persist.slot_copy import read_head
from reft_daemon.persist.storage_folder import StorageFolder
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import CHUNK, Job, data_of, epoch_of, write
from tests.support.processes import children_with
from tests.support.trainer_forks import Trainer

LINEAGE = "0123456789abcdef"


class PersistedJob(Job):
    """The job, and its checkpoints.

    Args:
        daemons: one for each rank.
        trainer: the process that stands for all trainers.
        root: the folder of `--persist`.
        count: slots of each rank.
        chunks: size of each rank's data.
        **facts: further fields of the manifest.
    """

    def __init__(
        self,
        daemons: Sequence[DaemonProcess],
        trainer: Trainer,
        root: Path,
        count: int = 4,
        chunks: int = 2,
        **facts: object,
    ) -> None:
        super().__init__(
            [(daemon, [rank]) for rank, daemon in enumerate(daemons)], **{"lineage": LINEAGE, "slots": count, **facts}
        )
        self.manifest.named = bool(facts.get("named", True))  # merging leaves a True
        self.trainer, self.root, self.count, self.nbytes = trainer, root, count, chunks * CHUNK
        self.store = CheckpointStore(StorageFolder(root), self.name)
        self.slots_of: dict[int, list[SlotMap]] = {}

    def decision(self, base: Version | None = None) -> pb.Decision:
        decision = super().decision(base)
        decision.known.extend(messages.epoch_to(epoch_of(counter)) for counter in range(self.counter - 1, 0, -1))
        return decision

    def begin(self, base: Version | None = None) -> PersistedJob:
        """Attaches: decides, and leases slots."""
        self.decide(base)
        for rank in self.home:
            self.slots_of[rank] = self.slots(rank, self.trainer, slots=self.count, data_bytes=self.nbytes)
        return self

    def seal(self, *steps: int) -> None:
        """Seals steps on all ranks, as far as the pins allow, and waits until they are whole."""
        for step in steps:
            pins = self.report(0, {}).pins
            kept = {pins.persist} if pins.HasField("persist") else set()
            kept |= {pins.whole} if pins.HasField("whole") else set()
            for rank, slots in self.slots_of.items():
                free = [slot for slot in slots if not _holds(slot, self.version(0), kept)]
                write(min(free, key=_age), self.version(step), nbytes=self.nbytes)
                self.report(rank, {step: StepAnswer.SEALED})
            until(lambda step=step: self.whole() == step, what=f"step {step}")

    def ask(self, node: int = 0, reply: pb.PersistJobReply | None = None, flush: bool = False) -> pb.PersistJobReply:
        """Asks a node for a checkpoint, or how far the one of an earlier reply is."""
        request = pb.PersistJobRequest(job=self.name, flush=flush)
        if reply is not None:
            request = pb.PersistJobRequest(job=self.name, step=reply.step, epoch=reply.epoch)
        return self.daemons[node].call("PersistJob", request)

    def persist(self, node: int = 0) -> pb.PersistJobReply:
        """Asks for a checkpoint, and waits until it is complete or given up."""
        asked = self.ask(node)
        return until(lambda: _ended(self.ask(node, asked)), what="a checkpoint")

    def stored(self) -> list[int]:
        """Returns the steps that are complete on storage, the oldest first."""
        if not (self.root / self.name / LINEAGE).exists():
            return []
        return sorted(each.manifest.version.step for each in self.store.checkpoints(LINEAGE))

    def check(self, *steps: int) -> None:
        """Checks that exactly these steps are complete, each bit as it was sealed."""
        listed = {each.manifest.version.step: each for each in self.store.checkpoints(LINEAGE)}
        assert sorted(listed) == sorted(steps)
        for step in steps:
            files = self.store.indexes(listed[step])
            assert sorted(files) == sorted(self.home)
            for folder, file in files.values():
                with open(self.store.open(folder, file), "rb") as opened:
                    _, header = read_head(opened.fileno())
                    opened.seek(header.geometry.data_offset)
                    assert opened.read(self.nbytes) == data_of(step, self.nbytes)
                assert (header.version, header.state) == (listed[step].manifest.version, SlotState.SEALED)

    def status(self, node: int = 0) -> pb.StorageStatus:
        return self.daemons[node].status(self.name).storage

    def folders(self, step: int) -> list[str]:
        """Returns the names of the nodes' folders of a step."""
        return sorted(each.name for each in self.root.glob(f"*/*/e*-s{step}/node-*"))


def persister_of(daemon: DaemonProcess) -> psutil.Process:
    """Returns the persister of a daemon; waits until it runs."""
    return until(lambda: next(iter(persisters(daemon)), None), what="the persister")


def persisters(daemon: DaemonProcess) -> list[psutil.Process]:
    return children_with(daemon.process.pid, "reft_daemon.persist")


def _ended(reply: pb.PersistJobReply) -> pb.PersistJobReply | None:
    return reply if reply.done or reply.trouble else None


def _holds(slot: SlotMap, now: Version, steps: set[int]) -> bool:
    header = slot.reread()
    return header.version is not None and header.version.epoch == now.epoch and header.version.step in steps


def _age(slot: SlotMap) -> tuple[int, int]:
    version = slot.reread().version
    return (version.epoch.counter, version.step) if version else (-1, -1)
