"""One rank's attempt to restore a version in the same shape.

All ranks run the steps together:

open    own slot, or the capsule that a peer kept for this rank;          ┐ damaged: counts
        slots that this rank reads for others;                            │ as lost, and a
        live tensors for every leaf of the snapshot                       │ new plan is made
load    cells from all ranks' shards over the process group; lost shards  │
        are decoded; unreplicated leaves from the rank's own slot         ┘
finish  inline leaves and host state from the capsule
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
from reft.client.restore.remote_slots import RemoteSlots, remote_read_s
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
    """One rank's attempt to restore a version; see the module.

    Args:
        plan: a recovery plan with a base.
        placement: the placement that the base was written with.
        node: id of the node that this rank runs on.
        nodes: node id → its ranks, of the new job.
        predicted: the leaves that this rank had when the base's epoch began.
        tensor_index: the current index of the tracked objects.
        buffer: memory for tensors to create; if too small, another one is allocated.
        decoder: decodes lost shards.
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
    buffer: HugePageBuffer
    decoder: Decoder
    _slots: dict[int, SlotMap] = field(default_factory=dict)
    _own_slot: SlotMap | None = None
    _tree: dict[str, Any] = field(default_factory=dict)
    _digests: np.ndarray | None = None
    _leaves: tuple[Leaf, ...] = ()
    _unreplicated: Layout | None = None
    _predicted_index: dict[str, int] = field(default_factory=dict)
    _mapped_slots: list[MappedSlot] = field(default_factory=list)
    _tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def open(self) -> dict[str, Any]:
        """Opens slots and capsules and creates live tensors, before bytes are loaded.

        Returns:
            "damaged": the ranks whose slots or capsules are damaged; "compared": digests of this
            rank's replicas, at the base and at the steps before it.
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
                sorted(self._leaves, key=self._position_of), self.tracked, self.tensor_index, self.buffer
            )
        return {"damaged": sorted(set(damaged)), "compared": self._compared()}

    @property
    def remote_read_s(self) -> float:
        """How much longer `open` may take because slots lie on other nodes, in seconds."""
        return remote_read_s(self.plan.sources, self._readers(), self.nodes)

    def _compared(self) -> list[list[int]]:
        if not self._tree.get("compared"):
            return []
        return replica_check.capsule_digests(self._tree) + replica_check.earlier_digests(
            self.remote.earlier(self.plan, self.rank)
        )

    def load(self, transport: Transport | None, at_chunk: Callable[[int], object]) -> list[int]:
        """Fills the live tensors; returns the ranks whose slots are damaged.

        Raises:
            RestoreError: decoded bytes differ from those of the lost rank.
        """
        lost = {} if self._digests is None else {self.rank: self._digests}
        damaged = set(
            load.load(
                transport, self.placement, self.rank, frozenset(self.plan.sources), self._readers(), self._slots,
                self._tensors, self._without_cell_bytes, lost, at_chunk, decoder=self.decoder,
            )
        )  # fmt: skip
        if (
            self._own_slot is not None
            and self._unreplicated is not None
            and not load.load_unreplicated(self._own_slot, self._unreplicated, self._tensors, at_chunk)
        ):
            damaged.add(self.rank)
        return sorted(damaged)

    def finish(self) -> dict[str, Any]:
        """Restores inline leaves and host state from the capsule; returns the capsule's tree.

        The generators in the tree come back last.
        """
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
        """Closes the mapped slots."""
        for slot in self._mapped_slots:
            slot.close()

    @property
    def _without_cell_bytes(self) -> frozenset[str]:
        """Leaves without bytes in a cell: they did not exist yet, or were stored unreplicated."""
        unreplicated = self._unreplicated.leaves if self._unreplicated else ()
        return frozenset(self._tree["absent"]) | {leaf.name for leaf in unreplicated}

    def _position_of(self, leaf: Leaf) -> int:
        """Returns a leaf's position in the prediction.

        Optimizers then get their state in the order in which they created it.
        """
        if not self._predicted_index:
            self._predicted_index = {each.name: i for i, each in enumerate(self.predicted)}
        return self._predicted_index.get(leaf.name, len(self._predicted_index))

    def _readers(self) -> dict[int, int]:
        return assign_readers({rank: source.node for rank, source in self.plan.sources.items()}, self.nodes)

    def _slot(self, source: HeldSlot) -> SlotMap:
        if source.node == self.node:
            self._mapped_slots += self.leases.take([source.slot], keeps=True)
            return self._mapped_slots[-1].map
        return self.remote.slot(source)

    def _open_own(self) -> None:
        """Reads this rank's capsule, and which leaves this rank had.

        Raises:
            FormatError: the capsule or the table is damaged.
        """
        source = self.plan.sources.get(self.rank)
        if source is None:
            capsule = self.plan.capsules[self.rank]
            assert self.plan.base is not None, "a capsule without a base"
            record = self.remote.capsule(capsule.node, self.rank, self.plan.base)
            self._tree = serialization.decode(record.capsule)
            self._digests = np.frombuffer(record.digests, "<u8")
            absent = set(self._tree["absent"])
            self._leaves = tuple(leaf for leaf in self.predicted if leaf.name not in absent)
            return
        self._own_slot = self._slots.get(self.rank) or self._slot(source)
        self._tree = serialization.decode(self._own_slot.capsule())
        table = self._own_slot.table()
        layout, places = table_from(table), places_from(table)
        self._leaves = layout.leaves
        unreplicated = [
            (leaf, at)
            for leaf, at in zip(layout.leaves, layout.offsets, strict=True)
            if places[leaf.name] == pb.UNREPLICATED
        ]
        self._unreplicated = Layout(
            tuple(leaf for leaf, _ in unreplicated), tuple(at for _, at in unreplicated), layout.data_bytes
        )
