"""Tests the stripes of lost sections: each piece is the XOR of what its stripe reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from reft.core.coding.placement import Placement, place
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf, pack
from reft.core.recovery.stripes import SectionStripe, StripeSlice, parity_number, section_stripes, slot_name

CHUNK = 4096


def lanes_of(sizes: list[int]) -> Placement:
    """Returns the placement of ranks that each have one leaf of so many bytes."""
    layouts = {
        bytes([rank]): pack([Leaf(f"own{rank}", "uint8", (size,), (1,), size, False, (size,), (0,))])
        for rank, size in enumerate(sizes)
    }
    return place(divide(layouts, list(layouts), (), 0), list(range(len(sizes))), "auto", 1, CHUNK, slots=4)


def stripes_of(placement: Placement, lost: int) -> list[SectionStripe]:
    """Returns the stripes of a lost rank, whose parity is lost, too."""
    world = len(placement.domains)
    have = set(range(2 * world)) - {lost, parity_number(placement, lost)}
    return list(section_stripes(placement, [lost], have))


def whole(stripe: SectionStripe) -> StripeSlice:
    (stripe_slice,) = stripe.slices(stripe.nbytes, keeper=0)
    return stripe_slice


@pytest.mark.parametrize("sizes", [[9, 9], [20_000, 64], [30_000] * 4, [70_000, 1, 40_000], [5, 50_000, 9_000, 64, 1]])
def test_each_piece_is_the_xor_of_its_inputs(sizes):
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
            rows = np.full((len(piece.inputs), piece.nbytes), 255, np.uint8)
            for row, (owner, offset, nbytes) in zip(rows, stripe_slice.inputs, strict=True):
                used = min(nbytes, piece.nbytes)
                row[:used] = slots[owner][offset : offset + used]
            for begin, end in stripe_slice.zeros:
                rows.reshape(-1)[begin:end] = 0
            offset, _ = piece.place
            made[offset : offset + piece.nbytes] = np.bitwise_xor.reduce(rows, 0)
        assert np.array_equal(made, slots[lost]), lost


def test_a_slice_of_columns_knows_its_zeros():
    """The first piece of rank 0 has 8192 bytes. The piece of rank 2 beside it has 832."""
    piece, _ = stripes_of(lanes_of([9000, 100, 9000]), 0)
    assert [each.nbytes for each in piece.inputs.values()] == [832, 8192] and piece.nbytes == 8192
    for begin, end, zeros in ((0, 832, []), (0, 896, [(832, 896)]), (768, 896, [(64, 128)]), (896, 960, [(0, 64)])):
        assert list(replace(whole(piece), begin=begin, end=end).zeros) == zeros


def test_a_rank_without_a_lane_is_refused():
    with pytest.raises(ValueError, match="old rank 0 are in no guard lane"):
        stripes_of(lanes_of([64]), 0)


def test_slots_are_named_for_people():
    assert [slot_name(number, 3) for number in (0, 2, 3, 5)] == [
        "rank 0", "rank 2", "the parity of rank 0", "the parity of rank 2"
    ]  # fmt: skip
