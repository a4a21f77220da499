"""The capsules of one job on this node: those of its own ranks, made from their slots, and those it keeps for others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from reft.core.coding.placement import holders_among
from reft.core.commit.capsules import CapsuleAcks
from reft.core.commit.decision import Decision
from reft.core.commit.round import Outcome
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.errors import ConfigError, FormatError
from reft.wire import capsule_format, messages
from reft.wire.manifest import node_domains, placement_of
from reft.wire.slot_format import SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import SlotFile
from reft_daemon.arena.capsule_store import CapsuleStore

log = logging.getLogger("reft.daemon")
BATCH_MAX: Final = 17 << 20  # bytes of the records in one message: at 100 Mbit/s it must arrive in time
LAYOUTS_MAX: Final = 256  # leaf tables whose kept bytes are remembered


async def holders_of(manifest: pb.Manifest, node_index: int) -> tuple[int, ...]:
    """The nodes that keep the capsules of a node.

    Raises:
        ConfigError, FormatError: the manifest contradicts itself.
    """
    if not manifest.layouts:
        return ()
    try:
        # A placement of thousands of ranks takes a while, and the round of other jobs must go on.
        return await asyncio.to_thread(_holders_of, manifest, node_index)
    except ValueError as error:
        raise ConfigError(f"the manifest of job {manifest.job} can't be placed: {error}.") from error


def _holders_of(manifest: pb.Manifest, node_index: int) -> tuple[int, ...]:
    ranks = [frozenset(node.ranks) for node in manifest.nodes]
    return holders_among(placement_of(manifest), ranks, node_domains(manifest.nodes), node_index)


@dataclass
class CapsuleReplication:
    """What this node owes to holders, and what it holds.

    Args:
        store: of the capsules of other nodes' ranks.
    """

    store: CapsuleStore
    capsule_acks: CapsuleAcks = field(default_factory=lambda: CapsuleAcks(()))
    _known: Outcome = field(default_factory=Outcome)
    _unreplicated_bytes: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def settle(self, decision: Decision, outcome: Outcome, is_over: bool) -> None:
        """Takes what the round decided.

        Args:
            is_over: all trainers here closed their sessions. They may go on from what was whole by then, so news that come after
                it end nothing that is kept; how many undecided versions are kept stays bounded.
        """
        self.capsule_acks.settle(outcome)
        if not is_over:
            self._known = outcome
        self.store.prune(decision, self._known)

    def batch(self, slots: Collection[SlotFile], epoch: Epoch, holder: int) -> list[pb.CapsuleRecord]:
        """What `holder` should be sent now, as much as one message may hold, the oldest step first.

        Args:
            slots: all slots of the job on this node.
        """
        batch: list[pb.CapsuleRecord] = []
        room = BATCH_MAX
        for rank, step in self.capsule_acks.owed(holder):
            record = self.sealed_record(slots, rank, Version(epoch, step))
            if record is None:
                self.capsule_acks.forget(rank, step)
                continue
            room -= record.ByteSize() + 16  # its tag and length
            if batch and room < 0:
                break
            batch.append(record)
        return batch

    def of_version(self, slots: Collection[SlotFile], version: Version) -> list[list[pb.CapsuleRecord]]:
        """The records of all ranks whose slots hold a version here, in as many lists as messages are needed."""
        batches: list[list[pb.CapsuleRecord]] = [[]]
        room = BATCH_MAX
        for rank in sorted({slot.rank for slot in slots}):
            record = self.sealed_record(slots, rank, version)
            if record is None:
                continue
            nbytes = record.ByteSize() + 16  # its tag and length
            if batches[-1] and nbytes > room:
                batches.append([])
                room = BATCH_MAX
            batches[-1].append(record)
            room -= nbytes
        return [batch for batch in batches if batch]

    def record(self, slots: Collection[SlotFile], rank: int, version: Version) -> pb.CapsuleRecord | None:
        """A rank's record, from its slot or from the store; None if neither has it."""
        return self.sealed_record(slots, rank, version) or self.store.get(rank, version)

    def sealed_record(self, slots: Collection[SlotFile], rank: int, version: Version) -> pb.CapsuleRecord | None:
        """A rank's record as its own slot has it; None if no slot holds this version sealed and sound."""
        for slot in slots:
            if slot.rank != rank:
                continue
            try:
                record = self._read(slot, version)
            except (OSError, FormatError) as error:
                log.error("slot=%s gives no capsule of %s: %s", slot.name, version, error)
                continue
            if record is not None:
                return record
        return None

    def sealed(self, slots: Collection[SlotFile], epoch: Epoch) -> dict[int, dict[int, int]]:
        """What slots of a rank hold sealed of an epoch: step → cell → digest, to be compared with what replicas hold.

        For a rank that died before it said so, or said so to the daemon before this one; capsules have the digests too.
        """
        found: dict[int, dict[int, int]] = {}
        for slot in slots:
            try:
                header = slot.map.reread()
                if header.state is SlotState.SEALED and header.version is not None and header.version.epoch == epoch:
                    compared = capsule_format.decode(slot.map.capsule())["compared"]
                    found[header.version.step] = {int(cell): int(digest) for cell, digest in compared.items()}
            except (OSError, FormatError, AttributeError, KeyError, TypeError, ValueError) as error:
                log.error("slot=%s is damaged, or does not say what its replicas should hold: %s", slot.name, error)
        return found

    def _read(self, slot: SlotFile, version: Version) -> pb.CapsuleRecord | None:
        before = slot.map.reread()
        if before.state is not SlotState.SEALED or before.version != version:
            return None
        try:
            record = pb.CapsuleRecord(
                rank=slot.rank,
                version=messages.version_to(version),
                unreplicated_bytes=self._kept_of(slot.map),
                capsule=slot.map.capsule(),
                digests=slot.map.digests[: slot.map.chunks].tobytes(),
            )
        except FormatError:
            if slot.map.reread().seq == before.seq:
                raise
            return None
        # Else its trainer has begun to write it again while it was read.
        return record if slot.map.reread().seq == before.seq else None

    def _kept_of(self, slot: SlotMap) -> int:
        """Bytes of the leaves that only this slot has."""
        key = (slot.header.layout, slot.header.table_digest)
        if key not in self._unreplicated_bytes:
            try:
                table = pb.LeafTable.FromString(slot.table())
            except DecodeError as error:
                raise FormatError(f"the leaf table can't be read: {error}.") from error
            while len(self._unreplicated_bytes) >= LAYOUTS_MAX:
                self._unreplicated_bytes.pop(next(iter(self._unreplicated_bytes)))
            self._unreplicated_bytes[key] = sum(leaf.nbytes for leaf in table.leaves if leaf.place == pb.UNREPLICATED)
        return self._unreplicated_bytes[key]
