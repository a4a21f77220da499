"""One try of one rank to bring a version back; all ranks take these steps together.

open    own slot, or the capsule that a peer kept for it; the slots that this rank reads for others   ┐ damaged: an
        live tensors for every held leaf                                                              │ erasure, and
load    cells from all ranks' shards over the process group, lost ones decoded                        ┘ a new plan
        what only this rank has: kept leaves from its own slot, riders and host state from the capsule
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from reft.client.link.slots import MappedSlot, SlotLeases
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore import load
from reft.client.restore.decode import Decoder
from reft.client.restore.materialize import live_tensors
from reft.client.restore.remote_slots import RemoteSlots, far_s
from reft.client.restore.transport import Transport
from reft.client.snapshot import replica_check
from reft.client.state import serialization
from reft.client.state.host_state import HostState
from reft.client.state.tensors import TensorIndex, leaf_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.coding.placement import Placement
from reft.core.layout.layout import Layout, Leaf
from reft.core.recovery.gather import assign_readers
from reft.core.recovery.recovery import HeldSlot, RecoveryPlan
from reft.errors import FormatError
from reft.wire.messages import places_from, table_from
from reft.wire.slot_format import SlotMap
from reft.wire.v1 import daemon_pb2 as pb


@dataclass
class Restore:
    """See the module.

    Args:
        plan: with a base.
        placement: under which the base was written.
        node: id of the node that this rank runs on.
        nodes: node id → its ranks, of the new job.
        predicted: the leaves that this rank had when the base's epoch began.
        tensor_index: what the subjects have by now.
        room: memory for tensors that do not exist yet; another is made if it is too small.
        decoder: of lost shards.
    """

    plan: RecoveryPlan
    placement: Placement
    rank: int
    node: str
    nodes: Mapping[str, list[int]]
    predicted: tuple[Leaf, ...]
    leases: SlotLeases
    remote: RemoteSlots
    tracked: TrackedObjects
    tensor_index: TensorIndex
    host: HostState
    room: HugePageBuffer
    decoder: Decoder
    _slots: dict[int, SlotMap] = field(default_factory=dict)
    _own: SlotMap | None = None
    _tree: dict[str, Any] = field(default_factory=dict)
    _digests: np.ndarray | None = None
    _leaves: tuple[Leaf, ...] = ()
    _kept: Layout | None = None
    _order: dict[str, int] = field(default_factory=dict)
    _taken: list[MappedSlot] = field(default_factory=list)
    _tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def open(self) -> dict[str, Any]:
        """Everything that can be looked at before bytes move.

        Returns:
            "damaged": the ranks whose slots or capsules are; "compared": what this rank had where others should have the same,
            at the base and at the steps before it.
        """
        damaged = []
        reader_of = self._readers()
        for old, reader in reader_of.items():
            if reader == self.rank:
                try:
                    self._slots[old] = self._slot(self.plan.sources[old])
                except FormatError:
                    damaged.append(old)
        try:
            self._open_own()
        except FormatError:
            damaged.append(self.rank)
        if not damaged:
            self._tensors = live_tensors(
                sorted(self._leaves, key=self._place_of), self.tracked, self.tensor_index, self.room
            )
        return {"damaged": sorted(set(damaged)), "compared": self._compared()}

    @property
    def far_s(self) -> float:
        """How much longer `open` may take because slots lie on other nodes."""
        return far_s(self.plan.sources, self._readers(), self.nodes)

    def _compared(self) -> list[list[int]]:
        if not self._tree.get("compared"):
            return []
        return replica_check.compared(self._tree) + replica_check.compared_before(
            self.remote.earlier(self.plan, self.rank)
        )

    def load(self, transport: Transport | None, at_chunk: Callable[[int], object]) -> list[int]:
        """Fills the live tensors; the ranks whose slots turned out to be damaged.

        Raises:
            RestoreError: what was decoded is not what the lost rank had.
        """
        lost = {} if self._digests is None else {self.rank: self._digests}
        damaged = set(
            load.load(
                transport, self.placement, self.rank, frozenset(self.plan.sources), self._readers(), self._slots,
                self._tensors, self._not_in_cells, lost, at_chunk, decoder=self.decoder,
            )
        )  # fmt: skip
        if (
            self._own is not None
            and self._kept is not None
            and not load.load_unreplicated(self._own, self._kept, self._tensors, at_chunk)
        ):
            damaged.add(self.rank)
        return sorted(damaged)

    def finish(self) -> dict[str, Any]:
        """What only the capsule has: riders and host state; the capsule's tree, whose generators come back last."""
        for name, data in self._tree["riders"].items():
            if not data:
                continue  # a leaf without elements
            target = self._tensors[name]
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(target.dtype)
            with torch.no_grad():
                target.copy_(source.as_strided(target.shape, leaf_of(name, target, False).stride))
        self.host.restore(self._tree)
        return self._tree

    def close(self) -> None:
        """Nothing more is read."""
        for slot in self._taken:
            slot.close()

    @property
    def _not_in_cells(self) -> frozenset[str]:
        """Leaves whose place in a cell, if they have one, is zeros: they did not exist, or not as foreseen and so were kept."""
        kept = self._kept.leaves if self._kept else ()
        return frozenset(self._tree["absent"]) | {leaf.name for leaf in kept}

    def _place_of(self, leaf: Leaf) -> int:
        """Where a leaf stood when it was predicted, so that optimizers get their state back in the order that they made it in."""
        if not self._order:
            self._order = {each.name: i for i, each in enumerate(self.predicted)}
        return self._order.get(leaf.name, len(self._order))

    def _readers(self) -> dict[int, int]:
        return assign_readers({rank: held.node for rank, held in self.plan.sources.items()}, self.nodes)

    def _slot(self, held: HeldSlot) -> SlotMap:
        if held.node == self.node:
            self._taken += self.leases.take([held.slot], keeps=True)
            return self._taken[-1].map
        return self.remote.slot(held)

    def _open_own(self) -> None:
        """The capsule's tree, and which leaves this rank had.

        Raises:
            FormatError: they can't be read.
        """
        source = self.plan.sources.get(self.rank)
        if source is None:
            copy = self.plan.capsules[self.rank]
            assert self.plan.base is not None, "a capsule without a base"
            record = self.remote.capsule(copy.node, self.rank, self.plan.base)
            self._tree = serialization.decode(record.capsule)
            self._digests = np.frombuffer(record.digests, "<u8")
            absent = set(self._tree["absent"])
            self._leaves = tuple(leaf for leaf in self.predicted if leaf.name not in absent)
            return
        self._own = self._slots.get(self.rank) or self._slot(source)
        self._tree = serialization.decode(self._own.capsule())
        table = self._own.table()
        layout, places = table_from(table), places_from(table)
        self._leaves = layout.leaves
        kept = [
            (leaf, at)
            for leaf, at in zip(layout.leaves, layout.offsets, strict=True)
            if places[leaf.name] == pb.UNREPLICATED
        ]
        self._kept = Layout(tuple(leaf for leaf, _ in kept), tuple(at for _, at in kept), layout.data_bytes)
