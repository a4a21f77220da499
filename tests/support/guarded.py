"""Jobs whose unreplicated leaves are guarded, loaded in threads of one process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from reft.client.restore import restore as steps
from reft.client.restore.decode import StripeDecoder
from reft.client.restore.executor import LoadReport
from reft.client.restore.opened import OldRank, RestoreContext, RestoreMatch
from reft.client.restore.restore import Restore
from reft.client.restore.same_shape import match_same_shape
from reft.client.state.tensors import leaf_of
from reft.core.commit.slots import SlotState
from reft.core.layout.layout import Layout
from reft.core.recovery.plan import TransferSizes
from reft.core.recovery.recovery import HeldCapsule, HeldParity, HeldSlot, RecoveryPlan
from reft.wire.slot_format import SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.loads import blank, random
from tests.support.shards import (
    VERSION,
    Postbox,
    Tensors,
    alike,
    make_parity,
    make_slot,
    on_all,
    placed,
    plain_bytes,
)

CHUNK, SLOTS = 4096, 4
INLINE = 64 << 10  # a quarter of the product's limit, so that a test loads less
LEAST = INLINE // 4 + 1  # elements of float32 that don't fit into a capsule
SMALL = TransferSizes(piece=4 * CHUNK, band=16 * CHUNK, window=16 * CHUNK, ahead=8 * CHUNK)


def state(rank: int, has_replicas: bool = True, leaves: int = 2) -> Tensors:
    """Returns replicas, and so many leaves of this rank only, of another size on each rank."""
    own = {f"own{rank}.{i}": random((LEAST + 1777 * rank + i,), torch.float32, 10 * rank + i) for i in range(leaves)}
    return own | ({"w": random((5003,), torch.float32, 1)} if has_replicas else {})


class GuardedJob:
    """A job of one rank a node whose unreplicated leaves are guarded.

    Attributes:
        slots: each rank's slot.
        parity: rank → its parity slot.
        live: the tensors of each rank to load into.
    """

    def __init__(
        self,
        D: int,
        states: Sequence[Tensors] | None = None,
        absent: Collection[str] = (),
        f: int = 1,
        scheme: str = "auto",
    ) -> None:
        self.D, self.states = D, states or [state(rank) for rank in range(D)]
        self.placement = placed(self.states, range(D), scheme, f, CHUNK, SLOTS, INLINE)
        self.absent = absent
        zeros = [{n: torch.zeros_like(t) if n in absent else t for n, t in each.items()} for each in self.states]
        self.slots = [make_slot(self.placement, rank, zeros[rank]) for rank in range(D)]
        guarded = [rank for lane in self.placement.guard_lanes for rank in lane.members]
        self.parity = {rank: make_parity(self.placement, rank, self.slots) for rank in guarded}
        self.digests = [slot.digests[: slot.chunks].tobytes() for slot in self.slots]
        self.live = [blank(tensors) for tensors in self.states]

    def plan(self, lost: Collection[int]) -> RecoveryPlan:
        """Returns the recovery plan after the loss of these ranks' nodes.

        Parity of `self.parity` alone is left, and of lost nodes none.
        """
        where = [f"node{old}" for old in range(self.D)]
        sources = {old: HeldSlot(where[old], old, f"slot-{old}", SlotState.SEALED, VERSION) for old in range(self.D)}
        parity = {
            old: HeldParity(where[old], old, f"parity-{old}", SlotState.SEALED, VERSION)
            for old in self.parity
            if old not in lost
        }
        return RecoveryPlan(
            VERSION,
            {old: slot for old, slot in sources.items() if old not in lost},
            {old: HeldCapsule("node", old, VERSION, 1) for old in lost},
            parity=parity if lost else {},
        )

    def restore(
        self, rank: int, lost: Collection[int], nodes: Mapping[str, Sequence[int]]
    ) -> tuple[Restore, RestoreMatch]:
        slots: dict[str, SlotMap] = {f"slot-{old}": slot for old, slot in enumerate(self.slots)}
        slots |= {f"parity-{old}": slot for old, slot in self.parity.items()}
        unused: Any = dict.fromkeys(("names", "tracked", "tensor_index", "host", "buffer"))
        context = RestoreContext(
            plan=self.plan(lost), placement=self.placement, rank=rank, nodes=nodes, decoder=StripeDecoder(),
            opener=SimpleNamespace(slot=lambda held: slots[held.slot]), **unused,
        )  # fmt: skip
        predicted = [leaf_of(name, tensor, False) for name, tensor in self.states[rank].items()]
        opened = self._opened(rank, rank in lost)
        return Restore(context, predicted), match_same_shape(context, predicted, {rank: opened}, steps.SIZES)

    def _opened(self, rank: int, is_lost: bool) -> OldRank:
        division, part = self.placement.division, self.placement.rank_placement(rank)
        inline = division.inline_leaves[division.layout_of[rank]]
        absent = [name for name in self.states[rank] if name in self.absent]
        tree = {
            "riders": {name: plain_bytes(self.states[rank][name]).tobytes() for name in inline},
            "absent": absent,
        }
        if is_lost:
            return OldRank(tree, (), lost_digests=self.digests[rank])
        names = {leaf.name for leaf in part.unreplicated.leaves} - {*absent}
        leaves = [leaf_of(name, tensor, False) for name, tensor in self.states[rank].items() if name not in absent]
        leaves.sort(key=lambda leaf: leaf.name)
        at = {
            leaf.name: part.unreplicated_offset + begin
            for leaf, begin in zip(part.unreplicated.leaves, part.unreplicated.offsets, strict=True)
        }
        places = {leaf.name: pb.UNREPLICATED if leaf.name in names else pb.CELL for leaf in leaves}
        places |= dict.fromkeys(inline, pb.INLINE)
        layout = Layout(tuple(leaves), tuple(at.get(leaf.name, 0) for leaf in leaves), part.data_bytes)
        return OldRank(tree, (), self.slots[rank], layout, places)

    def load(
        self, lost: Collection[int], nodes: Mapping[str, Sequence[int]] | None = None, box: Postbox | None = None
    ) -> list[Any]:
        """Loads on all ranks, each in a thread; a lost node is replaced by a new one."""
        box = box or Postbox()
        self.live = [blank(tensors) for tensors in self.states]
        here = nodes or {f"new{rank}" if rank in lost else f"node{rank}": [rank] for rank in range(self.D)}

        def one(rank: int) -> LoadReport:
            restore, match = self.restore(rank, lost, here)
            return restore.load(match, self.live[rank], box.of(rank), lambda chunk: None, self.replayed(restore))

        return on_all(self.D, one)

    def replayed(self, restore: Restore) -> dict[int, SlotMap]:
        """Returns the sections that a rank has replayed: none."""
        return {}

    def is_whole(self) -> bool:
        return all(
            alike(self.live[rank], self.states[rank], [name for name in self.states[rank] if name not in self.absent])
            for rank in range(self.D)
        )
