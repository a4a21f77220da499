"""Tests which shards a rebuild reads and makes, and what that costs."""

from __future__ import annotations

import pytest

from reft.core.coding.placement import Placement
from reft.core.recovery.plan import DecodeOperation, EmitOperation, ReadOperation, TransferOperation
from reft.core.recovery.rebuild_plan import DAEMON, chunk_sources, costs, rebuild_plan
from reft.core.recovery.stripes import NO_CELL, section_stripes
from tests.core.recovery.test_stripes import lanes_of
from tests.support.coded_slots import one_leaf


def operations(placement: Placement, have: set[int], lost: set[int]) -> list[TransferOperation]:
    return list(rebuild_plan(placement, have, lost).operations(DAEMON))


def test_the_cost_counts_bytes_read_copied_and_computed():
    placement = one_leaf(4, 1, 3 * 4 * 64 * 10)
    shard = placement.lanes[0].shard_bytes
    (rebuilt,) = costs(placement, {0, 1, 3}, {2})
    assert (rebuilt.cell, rebuilt.copied, rebuilt.decoded, rebuilt.parity) == (0, 0, 3 * shard, shard)
    assert rebuilt.read == {0: 4 * shard, 1: 4 * shard, 3: 4 * shard}
    assert 4 * shard == placement.rank_placement(2).data_bytes
    in_copies = one_leaf(4, 1, 6400, "arc")
    (copies,) = costs(in_copies, {0, 1, 3}, {2})
    assert (copies.decoded, copies.parity) == (0, 0)
    assert copies.copied == sum(copies.read.values()) == in_copies.rank_placement(2).data_bytes


def test_the_cost_is_that_of_the_operations():
    """The cost takes whole shards; slices of them sum up to the same bytes."""
    placement = one_leaf(5, 2, 1 << 30)
    (cost,) = costs(placement, {0, 2, 4}, {1, 3})
    listed = operations(placement, {0, 2, 4}, {1, 3})
    read = dict.fromkeys((0, 2, 4), 0)
    for each in listed:
        if isinstance(each, ReadOperation):
            read[each.owner] += each.nbytes
    slices = [each.slice for each in listed if isinstance(each, DecodeOperation)]
    made = sum(len(each.stripe.made) * each.stripe.lane.code.w * each.width for each in slices)
    assert len(slices) > placement.lanes[0].D, "some stripe has several slices"
    assert (cost.read, cost.decoded + cost.parity) == (read, made)


def test_only_stripes_of_the_lost_rank_are_read():
    """With declustering a rank takes part in few stripes."""
    placement = one_leaf(70, 2, 1 << 20)
    lane = placement.lanes[0]
    listed = operations(placement, set(range(70)) - {5}, {5})
    slices = [each.slice for each in listed if isinstance(each, DecodeOperation)]
    assert len(slices) == lane.code.k + lane.code.f == 64
    assert all(len(each.stripe.inputs) == lane.code.k and len(each.stripe.made) == 1 for each in slices)
    assert sum(isinstance(each, ReadOperation) for each in listed) == 64 * lane.code.k
    emitted = [each for each in listed if isinstance(each, EmitOperation)]
    assert [each.slice for each in emitted] == slices and not any(each.parts or each.messages for each in emitted)


def test_more_than_f_lost_ranks_are_refused():
    placement = one_leaf(4, 1, 6400)
    with pytest.raises(ValueError, match="it takes 3"):
        operations(placement, {0, 1}, {2, 3})
    with pytest.raises(ValueError, match="it takes 3"):
        costs(placement, {0, 1}, {2, 3})


@pytest.mark.parametrize("scheme", ["aec", "arc"])
def test_the_sources_of_a_chunk_are_those_that_are_read_for_it(scheme):
    placement = one_leaf(5, 2, 6400, scheme, each=2)
    plan = rebuild_plan(placement, set(range(10)) - {2, 6}, {2})
    expected: dict[int, tuple[set[int], set[int]]] = {}
    for each in plan.operations(DAEMON):
        if isinstance(each, ReadOperation) and each.slice is not None:
            (made,) = each.slice.stripe.made
            for byte in range(made.offset, made.offset + each.slice.stripe.lane.shard_bytes):
                lanes, ranks = expected.setdefault(byte // placement.chunk_bytes, (set(), set()))
                lanes.add(each.slice.stripe.number)
                ranks.add(each.owner)
    assert len(expected) == -(-placement.rank_placement(2).data_bytes // placement.chunk_bytes)
    for chunk, (lanes, ranks) in expected.items():
        assert chunk_sources(plan, 2, chunk) == (sorted(lanes), sorted(ranks))


def test_lost_sections_are_decoded_from_slots_and_parity():
    placement = lanes_of([30_000, 64, 20_000])
    (lane,) = placement.guard_lanes
    (cost,) = costs(placement, {0, 1, 3, 4}, {2}, [2])
    assert (cost.cell, cost.decoded, cost.copied, cost.parity) == (NO_CELL, 20_032, 0, 0), "with padding"
    pieces = list(section_stripes(placement, [2], {0, 1, 3, 4}))
    expected: dict[int, int] = {}
    for piece in pieces:
        for each in piece.inputs.values():
            expected[each.owner] = expected.get(each.owner, 0) + min(each.nbytes, piece.nbytes)
    assert cost.read == {number: nbytes for number, nbytes in expected.items() if nbytes}
    assert set(cost.read) <= {0, 1, 3, 4} and {3, 4} <= set(cost.read)
    assert costs(placement, {0, 1}, {2}) == [], "without sections nothing is made"
    with pytest.raises(ValueError, match="can't be decoded without the parity of rank 1, which is lost"):
        costs(placement, {0, 1, 3}, {2}, [2])
    plan = rebuild_plan(placement, {0, 1, 3, 4}, {2}, sections=[2])
    assert chunk_sources(plan, 2, 0) == ([], sorted({each.owner for each in pieces[0].inputs.values()}))
    assert lane.piece_bytes % placement.chunk_bytes == 0
