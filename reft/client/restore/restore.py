"""The steps of one rank's restore into the same shape; see `reft.client.restore.run`.

open    own slot, or the capsule that a peer kept for this rank; slots that this rank reads for
        others
make    live tensors for every leaf of the snapshot
load    cells from all ranks' shards over the process group; lost shards are decoded; unreplicated
        leaves from the rank's own slot
finish  inline leaves and host state from the capsule
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from reft.client.link.rank_group import RankGroup
from reft.client.restore.device_copies import DeviceCopier
from reft.client.restore.executor import LiveTarget
from reft.client.restore.load import LoadReport, chunk_verifier, load
from reft.client.restore.materialize import live_tensors
from reft.client.restore.remote_slots import remote_read_s
from reft.client.restore.run import OpenReport, RestoreContext, RestoreResult, Samples, samples_of
from reft.client.restore.slot_reader import AtChunk, SlotReader
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Transport
from reft.client.restore.verify import PeerMessages
from reft.client.snapshot.replica_check import capsule_digests, earlier_digests
from reft.client.state import serialization
from reft.client.state.tensors import leaf_of
from reft.core.layout.layout import Layout, Leaf, align
from reft.core.layout.regions import RegionCopy
from reft.core.recovery.plan import (
    SlotReaders,
    TransferOperation,
    TransferPlan,
    TransferSizes,
    cell_name,
    cells_near,
    same_shape_needs,
)
from reft.core.recovery.shard_matching import PieceLocation, PieceSource, PieceTransfer
from reft.errors import FormatError
from reft.wire.messages import places_from, table_from
from reft.wire.slot_format import SlotMap
from reft.wire.v1 import daemon_pb2 as pb

NO_LEAVES = Layout((), (), 0)
DEFAULT_SIZES = TransferSizes()


@dataclass(frozen=True)
class _OwnState:
    """The snapshot's state of this rank.

    Attributes:
        tree: the capsule's tree; empty if the capsule is damaged.
        leaves: the leaves that this rank had.
        slot: the rank's slot; None if it is lost.
        unreplicated: the leaves that only the slot has.
        lost_digests: the digests of the lost slot's chunks; empty if the slot is not lost.
    """

    tree: Mapping[str, Any] = field(default_factory=dict)
    leaves: tuple[Leaf, ...] = ()
    slot: SlotMap | None = None
    unreplicated: Layout = NO_LEAVES
    lost_digests: bytes = b""

    @property
    def without_cell_bytes(self) -> frozenset[str]:
        """Leaves without bytes in a cell: they did not exist yet, or were stored unreplicated."""
        return frozenset(self.tree["absent"]) | {leaf.name for leaf in self.unreplicated.leaves}


@dataclass(frozen=True)
class _OpenedSlots:
    """The slots that this rank reads, by old rank, and its own state."""

    slots: Mapping[int, SlotMap]
    own: _OwnState


@dataclass(frozen=True)
class Restore:
    """One rank's restore into the same shape; see the module.

    Args:
        context: what every restore needs.
        predicted: the leaves that this rank had when the base's epoch began.
        sizes: sizes of messages and buffers.
    """

    context: RestoreContext
    predicted: tuple[Leaf, ...]
    sizes: TransferSizes = DEFAULT_SIZES

    @property
    def remote_read_s(self) -> float:
        """How much longer `load` may take because slots lie on other nodes, in seconds."""
        sources, nodes = self.context.plan.sources, self.context.nodes
        # A rank that has moved reads unreplicated leaves from the slot on its earlier node.
        own = remote_read_s(sources, {old: old for old in sources}, nodes)
        return own + remote_read_s(sources, self.context.readers.reader_of, nodes)

    def open(self) -> tuple[_OpenedSlots, OpenReport]:
        """Opens the slots that this rank reads, and its own slot or capsule."""
        context, damaged = self.context, set()
        slots: dict[int, SlotMap] = {}
        for old, reader in context.readers.reader_of.items():
            if reader == context.rank:
                try:
                    slots[old] = context.opener.slot(context.plan.sources[old])
                except FormatError:
                    damaged.add(old)
        try:
            own = self._own_state(slots)
        except FormatError:
            damaged.add(context.rank)
            own = _OwnState()
        return _OpenedSlots(slots, own), OpenReport(tuple(sorted(damaged)), {context.rank: self._samples(own.tree)})

    def match(self, opened: _OpenedSlots, reports: Sequence[OpenReport], rank_group: RankGroup) -> _OpenedSlots:
        """Returns the opened slots: in the same shape every byte goes back to its place."""
        return opened

    def make(self, opened: _OpenedSlots) -> Mapping[str, torch.Tensor]:
        """Returns the live tensor of every leaf; creates missing ones in the predicted order.

        Optimizers then get their state in the order in which they created it.
        """
        context, order = self.context, {leaf.name: i for i, leaf in enumerate(self.predicted)}
        leaves = sorted(opened.own.leaves, key=lambda leaf: order.get(leaf.name, len(order)))
        return live_tensors(leaves, context.tracked, context.tensor_index, context.buffer)

    def load(
        self,
        opened: _OpenedSlots,
        tensors: Mapping[str, torch.Tensor],
        transport: Transport | None,
        at_chunk: AtChunk,
    ) -> LoadReport:
        """Fills the live tensors; reports the ranks whose slots are damaged."""
        context, own = self.context, opened.own
        readers, placement, rank = context.readers, context.placement, context.rank
        needs = same_shape_needs(placement, cells_near(placement, readers, rank), self.sizes)
        lost = [old for old in range(len(placement.domains)) if old not in context.plan.sources]
        plan = TransferPlan(needs, placement, readers, lost, has_live_cells=True, sizes=self.sizes)
        slots, damaged = context.near_slots(plan.owners, opened.slots, self._data_end, at_chunk)
        operations: Iterable[TransferOperation] = plan.operations(rank)
        if own.slot is not None and own.unreplicated.leaves:
            slots[rank] = SlotReader(own.slot, own.unreplicated.data_bytes, at_chunk)
            operations = chain(operations, self._own_plan(own.unreplicated).operations(rank))
        verifiers = {rank: chunk_verifier(placement, rank, own.lost_digests)} if rank in lost else {}
        target = self._target(own, tensors, context.decoder.begin())
        report = load(
            operations,
            self.sizes,
            placement.chunk_bytes,
            PeerMessages(transport, rank),
            slots,
            target,
            context.decoder,
            verifiers=verifiers,
        )
        return LoadReport(tuple(sorted({*damaged, *report.damaged})), report.faults)

    def _data_end(self, old: int) -> int:
        return self.context.placement.rank_placement(old).unreplicated_offset

    def _own_plan(self, unreplicated: Layout) -> TransferPlan:
        """Returns the plan for this rank's unreplicated leaves: the rank reads its own slot."""
        rank, readers = self.context.rank, self.context.readers
        needs = [
            PieceTransfer(
                leaf.name,
                leaf.nbytes,
                PieceLocation(PieceSource.SLOT, rank, at),
                RegionCopy(0, 0, leaf.nbytes),
                (rank,),
            )
            for leaf, at in zip(unreplicated.leaves, unreplicated.offsets, strict=True)
            if leaf.nbytes
        ]
        own = SlotReaders({rank: rank}, {}, {rank: ""}, readers.node_of_rank)
        return TransferPlan(needs, self.context.placement, own, sizes=self.sizes)

    def _target(self, own: _OwnState, tensors: Mapping[str, torch.Tensor], copies: DeviceCopier) -> LiveTarget:
        """Returns this rank's live memory: cells, then unreplicated leaves."""
        placement = self.context.placement
        leaves, at, offsets, end = list[Leaf](), list[int](), dict[str, int](), 0
        for number in placement.division.cells_of[placement.division.layout_of[self.context.rank]]:
            cell = placement.division.cells[number]
            offsets[cell_name(number)] = end
            for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
                if leaf.name not in own.without_cell_bytes:
                    leaves.append(leaf)
                    at.append(end + offset)
            end = align(end + cell.nbytes)
        for leaf in own.unreplicated.leaves:
            offsets[leaf.name] = end
            leaves.append(leaf)
            at.append(end)
            end = align(end + leaf.nbytes)
        return LiveTarget(FlatTensorView(leaves, at, tensors, copies=copies), offsets)

    def finish(self, opened: _OpenedSlots, tensors: Mapping[str, torch.Tensor]) -> RestoreResult:
        """Restores inline leaves and host state from the capsule."""
        tree = opened.own.tree
        for name, data in tree["riders"].items():
            if not data:
                continue  # a leaf without elements
            target = tensors[name]
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(target.dtype)
            with torch.no_grad():
                target.copy_(source.as_strided(target.shape, leaf_of(name, target, False).stride))
        self.context.host.restore(tree)
        return RestoreResult(tree=tree)

    def _samples(self, tree: Mapping[str, Any]) -> Samples:
        if not tree.get("compared"):
            return ()
        earlier = self.context.opener.remote.earlier(self.context.plan, self.context.rank)
        return samples_of(capsule_digests(tree) + earlier_digests(earlier))

    def _own_state(self, slots: Mapping[int, SlotMap]) -> _OwnState:
        """Returns the state of this rank, from its slot or from its capsule.

        Raises:
            FormatError: the slot, the capsule or the table is damaged.
        """
        rank, plan, opener = self.context.rank, self.context.plan, self.context.opener
        source = plan.sources.get(rank)
        if source is None:
            record = opener.capsule(plan, rank)
            tree = serialization.decode(record.capsule)
            absent = set(tree["absent"])
            leaves = tuple(leaf for leaf in self.predicted if leaf.name not in absent)
            return _OwnState(tree, leaves, lost_digests=record.digests)
        slot = slots.get(rank) or opener.slot(source)
        table = slot.table()
        layout, places = table_from(table), places_from(table)
        unreplicated = [
            (leaf, at)
            for leaf, at in zip(layout.leaves, layout.offsets, strict=True)
            if places[leaf.name] == pb.UNREPLICATED
        ]
        return _OwnState(
            serialization.decode(slot.capsule()),
            layout.leaves,
            slot,
            Layout(tuple(leaf for leaf, _ in unreplicated), tuple(at for _, at in unreplicated), _end(unreplicated)),
        )


def _end(placed: Iterable[tuple[Leaf, int]]) -> int:
    return max((at + leaf.nbytes for leaf, at in placed), default=0)
