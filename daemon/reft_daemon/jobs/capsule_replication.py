"""The capsules of one job here: those of its own ranks, and those kept for other nodes.

Capsules of this node's own ranks are read from their slots.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from reft.core.coding.exchange import GuardLane
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
# bytes of the records in one message, which must arrive in time at 100 Mbit/s
BATCH_MAX: Final = 17 << 20
LAYOUTS_MAX: Final = 256  # leaf tables whose unreplicated bytes are remembered


class NodePlacement(NamedTuple):
    """What the placement of a job says about one node.

    Attributes:
        holders: the nodes that keep the capsules of this node's ranks.
        guard_lanes: the lanes of the whole job's exchange.
        sections: rank of this node in a lane → begin and size of its unreplicated section in the
            data of its slot.
    """

    holders: tuple[int, ...] = ()
    guard_lanes: tuple[GuardLane, ...] = ()
    sections: Mapping[int, tuple[int, int]] = MappingProxyType({})


def node_placement(manifest: pb.Manifest, node_index: int) -> NodePlacement:
    """Returns what the placement says about a node.

    Raises:
        ConfigError, FormatError: the manifest contradicts itself.
    """
    if not manifest.layouts:
        return NodePlacement()
    try:
        placement = placement_of(manifest)
        ranks = [frozenset(node.ranks) for node in manifest.nodes]
        holders = holders_among(placement, ranks, node_domains(manifest.nodes), node_index)
        lanes = placement.guard_lanes
        sections = {
            rank: (placement.rank_placement(rank).unreplicated_offset, size)
            for lane in lanes
            for rank, size in zip(lane.members, lane.sizes, strict=True)
            if rank in ranks[node_index]
        }
    except ValueError as error:
        raise ConfigError(f"the manifest of job {manifest.job} can't be placed: {error}.") from error
    return NodePlacement(holders, lanes, sections)


def _cells_of(compared: Mapping[Any, Any]) -> dict[int, int]:
    """Returns cell → digest as a capsule has them.

    Raises:
        ValueError: they are no numbers that a report can carry.
    """
    cells = {int(cell): int(digest) for cell, digest in compared.items()}
    if not all(0 <= cell < 1 << 32 and 0 <= digest < 1 << 64 for cell, digest in cells.items()):
        raise ValueError(f"its {len(cells)} cells and digests are no such numbers")
    return cells


@dataclass
class CapsuleReplication:
    """The capsules that this node keeps, and those that it still owes to holders.

    Args:
        store: keeps the capsules of other nodes' ranks.
    """

    store: CapsuleStore
    capsule_acks: CapsuleAcks = field(default_factory=lambda: CapsuleAcks(()))
    _known_outcome: Outcome = field(default_factory=Outcome)
    _unreplicated_bytes: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def start_epoch(self, holders: Collection[int]) -> None:
        """Starts a new epoch, in which nothing is acknowledged or decided yet."""
        self.capsule_acks = CapsuleAcks(tuple(holders))
        self._known_outcome = Outcome()

    def settle(self, decision: Decision, outcome: Outcome, is_over: bool, may_drop: bool) -> None:
        """Takes the outcome of the round, and drops capsules that are no longer needed.

        Args:
            decision: the decision in force.
            outcome: what the round has decided so far.
            is_over: whether all trainers here closed their sessions. A new run may start from what
                was whole at that moment. So later news removes no capsule then. The number of
                undecided versions stays bounded.
            may_drop: whether capsules may be dropped now; see `JobRecord.may_be_refused`.
        """
        self.capsule_acks.settle(outcome)
        if not is_over:
            self._known_outcome = outcome
        if may_drop:
            self.store.prune(decision, self._known_outcome)

    def batch(self, slots: Collection[SlotFile], epoch: Epoch, holder: int) -> list[pb.CapsuleRecord]:
        """Returns the records that `holder` lacks, oldest step first, at most one message full.

        Args:
            slots: all slots of the job on this node.
            epoch: the epoch in force.
            holder: index of the node.
        """
        batch: list[pb.CapsuleRecord] = []
        bytes_left = BATCH_MAX
        for rank, step in self.capsule_acks.owed(holder):
            record = self.sealed_record(slots, rank, Version(epoch, step))
            if record is None:
                self.capsule_acks.forget(rank, step)
                continue
            bytes_left -= record.ByteSize() + 16  # 16: tag and length
            if batch and bytes_left < 0:
                break
            batch.append(record)
        return batch

    def batches_of_version(self, slots: Collection[SlotFile], version: Version) -> list[list[pb.CapsuleRecord]]:
        """Returns a version's records of all ranks that hold it here.

        There is one list per message.
        """
        batches: list[list[pb.CapsuleRecord]] = [[]]
        bytes_left = BATCH_MAX
        for rank in sorted({slot.rank for slot in slots}):
            record = self.sealed_record(slots, rank, version)
            if record is None:
                continue
            nbytes = record.ByteSize() + 16  # 16: tag and length
            if batches[-1] and nbytes > bytes_left:
                batches.append([])
                bytes_left = BATCH_MAX
            batches[-1].append(record)
            bytes_left -= nbytes
        return [batch for batch in batches if batch]

    def record(self, slots: Collection[SlotFile], rank: int, version: Version) -> pb.CapsuleRecord | None:
        """Returns a rank's record from its slot or from the store.

        The result is None if neither has it.
        """
        return self.sealed_record(slots, rank, version) or self.store.get(rank, version)

    def sealed_record(self, slots: Collection[SlotFile], rank: int, version: Version) -> pb.CapsuleRecord | None:
        """Returns a rank's record from its own slot.

        None if no undamaged slot holds the version SEALED.
        """
        for slot in slots:
            if slot.rank != rank:
                continue
            try:
                record = self._read_record(slot, version)
            except (OSError, FormatError) as error:
                log.error("slot=%s: the capsule of %s can't be read: %s", slot.name, version, error)
                continue
            if record is not None:
                return record
        return None

    def cell_digests(self, slots: Collection[SlotFile], epoch: Epoch) -> dict[int, dict[int, int]]:
        """Returns an epoch's SEALED steps in a rank's slots: step → cell → digest of the cell.

        The digests are compared with those of the replicas. This is needed for a rank that died
        before it reported the step, or that reported it to the previous daemon. Capsules contain
        these digests.
        """
        digests_by_step: dict[int, dict[int, int]] = {}
        for slot in slots:
            try:
                header = slot.map.reread()
                if header.state is SlotState.SEALED and header.version is not None and header.version.epoch == epoch:
                    compared = capsule_format.decode(slot.map.capsule())["compared"]
                    digests_by_step[header.version.step] = _cells_of(compared)
            except (OSError, FormatError, AttributeError, KeyError, TypeError, ValueError) as error:
                log.error("slot=%s is damaged, or has no digests to compare with its replicas: %s", slot.name, error)
        return digests_by_step

    def _read_record(self, slot: SlotFile, version: Version) -> pb.CapsuleRecord | None:
        header = slot.map.reread()
        if header.state is not SlotState.SEALED or header.version != version:
            return None
        try:
            record = pb.CapsuleRecord(
                rank=slot.rank,
                version=messages.version_to(version),
                unreplicated_bytes=self._unreplicated_bytes_of(slot.map),
                capsule=slot.map.capsule(),
                digests=slot.map.digests[: slot.map.chunks].tobytes(),
                capsule_digest=slot.map.header.capsule_digest,
            )
        except FormatError:
            if slot.map.reread().seq == header.seq:
                raise
            return None
        # If `seq` has changed, the trainer has begun to write the slot again during this read.
        return record if slot.map.reread().seq == header.seq else None

    def _unreplicated_bytes_of(self, slot: SlotMap) -> int:
        """Returns the bytes of the slot's unreplicated leaves, which no other slot has."""
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
