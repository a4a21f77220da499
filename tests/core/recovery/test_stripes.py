"""Tests the stripes of lost sections: each piece is the XOR of what its stripe reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from reft.core.coding.placement import Placement, place
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf, pack
from reft.core.layout.regions import RegionCopy
from reft.core.recovery.plan import DecodeOperation, SlotReaders, TransferPlan, TransferSizes
from reft.core.recovery.shard_matching import PieceLocation, PieceSource, PieceTransfer
from reft.core.recovery.stripes import (
    Stripe,
    StripeSlice,
    parity_number,
    section_sources,
    section_stripes,
    slot_name,
)
from tests.support.instruction_count import instructions

CHUNK = 4096
SMALL = TransferSizes(piece=4 * CHUNK, band=16 * CHUNK, window=16 * CHUNK, ahead=8 * CHUNK)


def lanes_of(sizes: list[int], f: int = 1, domains: Sequence[int] = ()) -> Placement:
    """Returns the placement of ranks that each have one leaf of so many bytes."""
    layouts = {
        bytes([rank]): pack([Leaf(f"own{rank}", "uint8", (size,), (1,), size, False, (size,), (0,))])
        for rank, size in enumerate(sizes)
    }
    return place(divide(layouts, list(layouts), (), 0), domains or list(range(len(sizes))), "auto", f, CHUNK, slots=4)


def stripes_of(placement: Placement, lost: int) -> list[Stripe]:
    """Returns the stripes of a lost rank, whose parity is lost, too."""
    world = len(placement.domains)
    have = set(range(2 * world)) - {lost, parity_number(placement, lost)}
    return list(section_stripes(placement, [lost], have))


def whole(stripe: Stripe) -> StripeSlice:
    (stripe_slice,) = stripe.slices(stripe.nbytes, keeper=0)
    return stripe_slice


@pytest.fixture
def dirty_memory(monkeypatch):
    """Fills new arrays of numpy with 255."""
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float, **_: np.full(shape, 255, dtype))


@pytest.mark.parametrize("sizes", [[9, 9], [20_000, 64], [30_000] * 4, [70_000, 1, 40_000], [5, 50_000, 9_000, 64, 1]])
def test_each_piece_is_the_xor_of_its_inputs(sizes, dirty_memory):
    placement, chance = lanes_of(sizes), np.random.default_rng(1)
    (lane,) = placement.guard_lanes
    slots = {}
    for rank in range(len(sizes)):
        slots[rank] = chance.integers(0, 256, placement.rank_placement(rank).data_bytes, np.uint8)
    padded = {
        rank: np.pad(slot, (0, lane.D * lane.piece_bytes))[: lane.D * lane.piece_bytes] for rank, slot in slots.items()
    }
    for holder, rank in enumerate(lane.members):  # as core/coding/exchange.py draws it
        parity = np.zeros(lane.piece_bytes, np.uint8)
        for source, other in enumerate(lane.members):
            if other != rank:
                parity ^= padded[other].reshape(-1, lane.piece_bytes)[(holder - source - 1) % lane.D]
        slots[parity_number(placement, rank)] = parity
    for lost in range(len(sizes)):
        made = np.zeros_like(slots[lost])
        for piece in stripes_of(placement, lost):
            assert all(each.owner != lost for each in piece.inputs.values())
            assert parity_number(placement, lost) not in [each.owner for each in piece.inputs.values()]
            stripe_slice = whole(piece)
            rows = stripe_slice.empty_rows().reshape(len(piece.inputs), piece.nbytes)
            for row, (owner, offset, nbytes) in zip(rows, piece.inputs.values(), strict=True):
                used = min(nbytes, piece.nbytes)
                row[:used] = slots[owner][offset : offset + used]
            offset, _ = piece.place
            made[offset : offset + piece.nbytes] = np.bitwise_xor.reduce(rows, 0)
        assert np.array_equal(made, slots[lost]), lost


def test_a_slice_of_columns_knows_its_zeros(dirty_memory):
    """The first piece of rank 0 has 8192 bytes. The piece of rank 2 beside it has 832."""
    piece, _ = stripes_of(lanes_of([9000, 100, 9000]), 0)
    assert [each.nbytes for each in piece.inputs.values()] == [832, 8192] and piece.nbytes == 8192
    for begin, end, zeros in (
        (0, 832, []),
        (0, 896, range(832, 896)),
        (768, 896, range(64, 128)),
        (896, 960, range(64)),
    ):
        rows = replace(whole(piece), begin=begin, end=end).empty_rows()
        assert np.flatnonzero(rows == 0).tolist() == list(zeros)


def test_a_rank_without_a_lane_is_refused():
    with pytest.raises(ValueError, match="old rank 0 are in no guard lane"):
        stripes_of(lanes_of([64]), 0)


def test_slots_are_named_for_people():
    assert [slot_name(number, 3) for number in (0, 2, 3, 5)] == [
        "rank 0", "rank 2", "the parity of rank 0", "the parity of rank 2"
    ]  # fmt: skip


@pytest.mark.parametrize("f", [1, 2])
def test_the_sources_of_sections_cost_the_same_for_any_number_of_bytes(f):
    def work(size: int) -> int:
        placement = lanes_of([size] * 8, f)
        have = set(range(16)) - {0, 8}
        section_sources(placement, [0], have)  # makes the programs, once
        sources: set[int] = set()
        executed = instructions(lambda: sources.update(section_sources(placement, [0], have)))
        read = {each.owner for stripe in section_stripes(placement, [0], have) for each in stripe.inputs.values()}
        assert sources == read
        return executed

    assert work(40 << 20) == work(4 << 20)


def section_plan(size: int, f: int) -> TransferPlan:
    """Returns the plan of 16 ranks on 8 nodes: two guard lanes, and rank 0 has lost its slot."""
    ranks, nodes = range(16), {f"node{node}": [2 * node, 2 * node + 1] for node in range(8)}
    placement = lanes_of([size] * 16, f, [rank // 2 for rank in ranks])
    assert [lane.f for lane in placement.guard_lanes] == [f, f]
    sources = {old: f"node{old % 16 // 2}" for old in range(32) if old not in (0, 16)}
    location = PieceLocation(PieceSource.SLOT, 0, placement.rank_placement(0).unreplicated_offset)
    need = PieceTransfer("own0", size, location, RegionCopy(0, 0, size), (0,))
    return TransferPlan([need], placement, SlotReaders.of(sources, nodes, 16), [0], sizes=SMALL, sections=[0])


def described(plan: TransferPlan, rank: int) -> list[tuple[str, int]]:
    return [(type(each).__name__, each.slice.stripe.index if isinstance(each, DecodeOperation) else each.owner)
            for each in plan.operations(rank)]  # fmt: skip


@pytest.mark.parametrize("f", [1, 2])
def test_ranks_of_another_lane_have_no_work_that_grows_with_the_bytes(f, monkeypatch):
    small, large = section_plan(200_000, f), section_plan(2_000_000, f)
    other = large.placement.guard_lanes[1 - large.placement.guard_lane_of(0)[0]]
    readers = {large.readers.reader_of[old] for old in section_sources(large.placement, [0], large.readers.reader_of)}
    idle = sorted({*other.members} - readers - {0})
    assert idle, "ranks that read no source"
    for plan in (small, large):
        assert not list(plan.operations(idle[0]))
    assert instructions(lambda: list(large.operations(idle[0]))) == instructions(
        lambda: list(small.operations(idle[0]))
    )
    before = [described(large, rank) for rank in range(16)]
    assert sum(map(bool, before)) > 6
    monkeypatch.setattr(TransferPlan, "_takes_part", lambda *_: True)
    assert [described(large, rank) for rank in range(16)] == before
