"""The steps of one rank's restore into the same shape; see `reft.client.restore.run`.

open    own slot, or the capsule that a peer kept for this rank; slots that this rank reads for
        others
make    live tensors for every leaf of the snapshot
load    cells from all ranks' shards over the process group; lost shards are decoded; unreplicated
        leaves from the rank's own slot
finish  inline leaves and host state from the capsule
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from reft.client.link.rank_group import RankGroup
from reft.client.restore.decode import Decoder
from reft.client.restore.load import load, load_unreplicated
from reft.client.restore.materialize import live_tensors
from reft.client.restore.remote_slots import remote_read_s
from reft.client.restore.run import LoadReport, OpenReport, RestoreContext, RestoreResult, Samples, samples_of
from reft.client.restore.transport import Transport
from reft.client.restore.verified_slot import AtChunk
from reft.client.snapshot.replica_check import capsule_digests, earlier_digests
from reft.client.state import serialization
from reft.client.state.tensors import leaf_of
from reft.core.layout.layout import Layout, Leaf
from reft.core.recovery.gather import assign_readers
from reft.errors import FormatError
from reft.wire.messages import places_from, table_from
from reft.wire.slot_format import SlotMap
from reft.wire.v1 import daemon_pb2 as pb

NO_LEAVES = Layout((), (), 0)


@dataclass(frozen=True)
class _OwnState:
    """The snapshot's state of this rank.

    Attributes:
        tree: the capsule's tree; empty if the capsule is damaged.
        leaves: the leaves that this rank had.
        slot: the rank's slot; None if it is lost.
        unreplicated: the leaves that only the slot has.
        lost_digests: the digests of the lost slot's chunks.
    """

    tree: Mapping[str, Any] = field(default_factory=dict)
    leaves: tuple[Leaf, ...] = ()
    slot: SlotMap | None = None
    unreplicated: Layout = NO_LEAVES
    lost_digests: np.ndarray | None = None

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
        decoder: decodes lost shards.
    """

    context: RestoreContext
    predicted: tuple[Leaf, ...]
    decoder: Decoder

    @property
    def remote_read_s(self) -> float:
        """How much longer `open` may take because slots lie on other nodes, in seconds."""
        return remote_read_s(self.context.plan.sources, self._readers(), self.context.nodes)

    def open(self) -> tuple[_OpenedSlots, OpenReport]:
        """Opens the slots that this rank reads, and its own slot or capsule."""
        context, damaged = self.context, set()
        slots: dict[int, SlotMap] = {}
        for old, reader in self._readers().items():
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
        """Fills the live tensors; reports the ranks whose slots are damaged.

        Raises:
            RestoreError: decoded bytes differ from those of the lost rank.
        """
        context, own = self.context, opened.own
        damaged = set(
            load(
                transport=transport,
                placement=context.placement,
                rank=context.rank,
                have=frozenset(context.plan.sources),
                reader_of=self._readers(),
                slots=opened.slots,
                tensors=tensors,
                absent=own.without_cell_bytes,
                lost_digests={} if own.lost_digests is None else {context.rank: own.lost_digests},
                at_chunk=at_chunk,
                decoder=self.decoder,
            )
        )
        if own.slot is not None and not load_unreplicated(own.slot, own.unreplicated, tensors, at_chunk):
            damaged.add(context.rank)
        return LoadReport(tuple(sorted(damaged)))

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

    def _readers(self) -> dict[int, int]:
        return assign_readers(self.context.slot_nodes, self.context.nodes)

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
            return _OwnState(tree, leaves, lost_digests=np.frombuffer(record.digests, "<u8"))
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
            Layout(tuple(leaf for leaf, _ in unreplicated), tuple(at for _, at in unreplicated), layout.data_bytes),
        )
