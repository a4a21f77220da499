"""A restore into the same shape: what only one rank has comes back from its slot and capsule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reft.client.restore import restore as restore_module
from reft.client.restore.decode import StripeDecoder
from reft.client.restore.executor import LoadReport
from reft.client.restore.opened import OldRank, RestoreContext, RestoreMatch
from reft.client.restore.restore import SIZES, Restore
from reft.client.restore.same_shape import match_same_shape
from reft.client.state.tensors import leaf_of
from reft.core.commit.slots import SlotState
from reft.core.layout.cells import INLINE_BYTES_MAX
from reft.core.layout.layout import Layout, Leaf
from reft.core.recovery.recovery import HeldSlot, RecoveryPlan
from reft.errors import LayoutChanged
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.loads import Job, random
from tests.support.shards import VERSION, Postbox, Tensors, alike, on_all, plain_bytes

WORLD, LOST = 3, 2


def state(rank: int) -> Tensors:
    """Returns replicas, two small leaves of this rank, and two large ones unless it is LOST."""
    elements = {} if rank == LOST else {"large": INLINE_BYTES_MAX // 4 + 9, "huge": INLINE_BYTES_MAX // 4 + 5}
    large = {f"own{rank}.{name}": random((n,), torch.float32, rank + n) for name, n in elements.items()}
    small = {f"own{rank}.{name}": random((n,), torch.float64, 10 * rank + n) for name, n in (("b", 7), ("a", 3))}
    return {"w": random((5003,), torch.float32, 1), "v": random((900,), torch.bfloat16, 2)} | small | large


def opened(job: Job, rank: int, is_lost: bool, leaves: list[Leaf]) -> OldRank:
    division, part = job.placement.division, job.placement.rank_placement(rank)
    inline = division.inline_leaves[division.layout_of[rank]]
    tree = {"riders": {name: plain_bytes(job.ranks[rank][name]).tobytes() for name in inline}, "absent": []}
    if is_lost:
        return OldRank(tree, (), lost_digests=job.digests(rank))
    places: dict[str, int] = {leaf.name: pb.INLINE if leaf.name in inline else pb.CELL for leaf in leaves}
    places |= {leaf.name: pb.UNREPLICATED for leaf in part.unreplicated.leaves}
    ends = (part.unreplicated_offset + at for at in part.unreplicated.offsets)
    at = {leaf.name: end for leaf, end in zip(part.unreplicated.leaves, ends, strict=True)}
    layout = Layout(tuple(leaves), tuple(at.get(leaf.name, 0) for leaf in leaves), part.data_bytes)
    return OldRank(tree, (), job.slots[rank], layout, places)


def matched(job: Job, rank: int, lost: tuple[int, ...]) -> tuple[Restore, RestoreMatch]:
    held = {old: HeldSlot(f"node{old}", old, "slot", SlotState.SEALED, VERSION) for old in range(job.world)}
    plan = RecoveryPlan(VERSION, {old: slot for old, slot in held.items() if old not in lost}, {})
    opener: Any = SimpleNamespace(slot=lambda source: job.slots[source.rank])
    unused: Any = dict.fromkeys(("names", "tracked", "tensor_index", "host", "buffer"))
    context = RestoreContext(
        plan=plan, placement=job.placement, rank=rank, nodes=job.nodes, opener=opener, decoder=StripeDecoder(), **unused
    )
    predicted = [leaf_of(name, tensor, False) for name, tensor in job.ranks[rank].items()]
    own = opened(job, rank, rank in lost, sorted(predicted, key=lambda leaf: leaf.name))
    return Restore(context, predicted), match_same_shape(context, predicted, {rank: own}, SIZES)


@pytest.mark.parametrize("lost", [(), (LOST,)])
def test_all_leaves_of_all_ranks_come_back(lost):
    job, box = Job(WORLD, "aec", 1, ranks=[state(rank) for rank in range(WORLD)]), Postbox()

    def one(rank: int) -> LoadReport:
        restore, match = matched(job, rank, lost)
        assert [leaf.name for leaf in match.leaves] == list(job.ranks[rank]), "in the order of their creation"
        return restore.load(match, job.live[rank], box.of(rank), lambda chunk: None)

    assert on_all(WORLD, one) == [LoadReport()] * WORLD
    assert all(alike(job.live[rank], job.ranks[rank], list(job.ranks[rank])) for rank in range(WORLD))


def test_an_inline_leaf_of_another_size_is_refused():
    job = Job(1, "none", 0, ranks=[state(0)])
    restore, match = matched(job, 0, ())
    match.opened[0].tree["riders"]["own0.a"] += b"more"
    with pytest.raises(LayoutChanged, match=r"own0\.a has 28 bytes in the snapshot, not 24"):
        restore.load(match, job.live[0], None, lambda chunk: None)


def test_a_version_whose_lost_slot_alone_had_the_shape_of_an_inline_leaf_is_not_used(monkeypatch):
    """The next plan takes an older version, or a checkpoint."""
    job = Job(WORLD, "aec", 1, ranks=[state(rank) for rank in range(WORLD)])
    restore, match = matched(job, LOST, (LOST,))
    own = match.opened[LOST]
    monkeypatch.setattr(restore_module, "open_old_rank", lambda context, old: own)
    assert restore.open()[1].damaged == ()
    own.tree["riders"][f"own{LOST}.a"] += b"more"
    opened, report = restore.open()
    assert report.damaged == (LOST,) and not opened
