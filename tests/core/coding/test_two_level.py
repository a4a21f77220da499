"""The two-level code: every tolerated loss is decoded, from what is sent and folded alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from reft.core.coding.erasure import run_columns
from reft.core.coding.exchange import RANGE_MAX, GuardLane, guard_lanes
from reft.core.coding.two_level import encode_piece, fold_piece, parity_shard, piece_shard, section_program, units
from tests.support.two_level import all_pieces, expected_parity

CHUNK = 4096
LANES = [(D, f) for D in range(2, 9) for f in (1, 2, 3) if f < D]


def lane_of(D: int, f: int, *sizes: int, chunk_bytes: int = CHUNK) -> GuardLane:
    """Returns the lane of ranks on nodes of their own."""
    [lane] = guard_lanes([size or 1 for size in sizes], range(D), chunk_bytes, f)
    return replace(lane, sizes=sizes)


def uneven(D: int, f: int, order: random.Random) -> GuardLane:
    """Returns a lane of several blocks a piece; sections differ, and some end within a block."""
    longest = (D - f) * 3 * CHUNK - 500
    return lane_of(D, f, longest, *(order.choice([0, 1, 5000, longest // 2, longest]) for _ in range(D - 1)))


def sections_of(lane: GuardLane, order: random.Random) -> list[bytes]:
    return [order.randbytes(size) for size in lane.sizes]


def sent(lane: GuardLane, section: bytes, source: int, piece: int) -> np.ndarray:
    """Returns a piece as its source makes it."""
    size, k = lane.piece_bytes, lane.k
    padded = np.zeros(k * size, np.uint8)
    padded[: len(section)] = np.frombuffer(section, np.uint8)
    plain = padded.reshape(k, size)
    if piece < k:
        return plain[piece]
    coded = np.full(size, 255, np.uint8)
    encode_piece(lane.inner, piece - k, list(plain), coded, lane.block_bytes)
    return coded


def folded(lane: GuardLane, sections: list[bytes], holder: int, order: random.Random) -> np.ndarray:
    """Returns a holder's parity, folded from the ranges that it asks for, in any order."""
    parity = np.zeros(lane.parity_bytes, np.uint8)
    ranges = [
        (source, *each) for source in lane.sources_of(holder) for each in lane.requests(source, holder, CHUNK)
    ]  # fmt: skip
    for source, _, at, length in order.sample(ranges, len(ranges)):
        frame = np.zeros(-(-length // lane.block_bytes) * lane.block_bytes if lane.f > 1 else length, np.uint8)
        piece = sent(lane, sections[source], source, lane.piece_of(source, holder))
        frame[:length] = piece[at : at + length]
        fold_piece(lane.code, lane.column_of(source, holder), frame, parity, at, lane.block_bytes)
    return parity


@pytest.mark.parametrize(("D", "f"), [*LANES, (8, 5)])  # the last one has a Cauchy code inside
def test_parity_is_that_of_the_tables_in_any_order_of_ranges(D, f):
    order = random.Random(f"{D} {f}")
    lane = uneven(D, f, order)
    sections = sections_of(lane, order)
    assert f == 1 or lane.blocks >= 3
    for source, section in enumerate(sections):
        for piece, expected in enumerate(all_pieces(lane, section)):
            assert np.array_equal(sent(lane, section, source, piece), expected), (source, piece)
            begin, end = lane.piece_range(source, piece)
            assert not expected[end - begin :].any(), "only zeros are not sent"
    for holder in range(D):
        assert folded(lane, sections, holder, order).tobytes() == expected_parity(lane, sections, holder)


@pytest.mark.parametrize(("D", "f"), [(D, f) for D, f in LANES if D < 8])
def test_every_loss_of_f_members_is_decoded(D, f):
    """Each lost member's parity may be left, or not: its slot alone may be damaged."""
    order = random.Random(f"{D} {f}")
    size = (D - f) * units(D, f) * 64
    lane = lane_of(D, f, *[size] * D)
    sections = sections_of(lane, order)
    plain = [all_pieces(lane, section)[: lane.k] for section in sections]
    parity = [np.frombuffer(expected_parity(lane, sections, holder), np.uint8).reshape(f, -1) for holder in range(D)]
    assert lane.blocks == 1
    for count in range(1, f + 1):
        for lost in itertools.combinations(range(D), count):
            left = [member for member in range(D) if member not in lost]
            holders = sorted({*left, *order.sample(range(D), order.randint(0, D))})
            check_loss(lane, lost, left, plain, parity)
            check_loss(lane, lost, holders, plain, parity)
            if count < f:  # a lane with fewer losses bears lost parity, too
                check_loss(lane, lost, [each for each in holders if each != left[0]], plain, parity)


def check_loss(lane, lost, holders, plain, parity) -> None:
    D, f, w = lane.D, lane.f, units(lane.D, lane.f)
    made = tuple((member, piece) for member in lost for piece in range(lane.k))
    program = section_program(D, f, tuple(lost), tuple(holders), made)
    memory = {piece_shard(D, m, p): plain[m][p] for m in range(D) if m not in lost for p in range(lane.k)}
    memory |= {parity_shard(D, f, holder, i): parity[holder][i] for holder in holders for i in range(f)}
    results = [np.zeros(lane.piece_bytes, np.uint8) for _ in made]
    outputs = [row for each in results for row in each.reshape(w, -1)]
    run_columns(program, [memory[shard].reshape(w, -1)[unit] for shard, unit in program.inputs], outputs)
    for (member, piece), result in zip(made, results, strict=True):
        assert np.array_equal(result, plain[member][piece]), (lost, holders, member, piece)


def test_losses_beyond_f_and_missing_parity_are_refused():
    with pytest.raises(ValueError, match=r"members \(0, 1, 2\) of 5 are lost"):
        section_program(5, 2, (0, 1, 2), (3, 4), ((0, 0),))
    with pytest.raises(ValueError, match=r"parity of \(2, 3\) is at hand"):
        section_program(5, 2, (0,), (2, 3), ((0, 0),))
    with pytest.raises(ValueError, match=r"parity of \(0, 2, 3\) is at hand"):
        section_program(5, 2, (0,), (0, 2, 3), ((0, 0),))
    assert section_program(5, 2, (0,), (2, 3, 4), ((0, 0),)).outputs


@pytest.mark.parametrize(("D", "f"), [(D, f) for D, f in LANES if f > 1] + [(16, 2), (16, 3), (12, 5)])
def test_a_turn_sends_and_keeps_what_the_formulas_say(D, f):
    block = units(D, f) * 64 * (4096 // 64)
    size = (D - f) * 3 * block
    lane = lane_of(D, f, *[size] * D, chunk_bytes=block)
    moved = [
        sum(length for holder in range(D) if holder != source for *_, length in lane.requests(source, holder, block))
        for source in range(D)
    ]
    assert moved == [size * (D - 1) // (D - f)] * D == [lane.sent_bytes(source) for source in range(D)]
    assert lane.parity_bytes == f * size // (D - f) and lane.buffers_bytes == 2 * lane.parity_bytes


@pytest.mark.parametrize("chunk_bytes", [64, 4096, 256 << 10, 6 << 20])
@pytest.mark.parametrize("size", [1, 5000, 1 << 20, 40 << 20])
@pytest.mark.parametrize(("D", "f"), [(3, 2), (6, 2), (8, 2), (8, 3), (16, 3)])
def test_ranges_are_whole_blocks_and_pieces_have_little_padding(D, f, size, chunk_bytes):
    lane = lane_of(D, f, *[size] * D, chunk_bytes=chunk_bytes)
    block = lane.block_bytes
    assert block * lane.blocks == lane.piece_bytes and block % (64 * units(D, f)) == 0 and block <= RANGE_MAX
    least = -(-size // lane.k)
    assert least <= lane.piece_bytes < least + max(block, 4096 + 64 * units(D, f))
    for source, holder in [(0, 1), (0, D - 1), (D - 1, 0)]:
        begin, end = lane.piece_range(source, lane.piece_of(source, holder))
        at = 0
        for offset, in_piece, length in lane.requests(source, holder, chunk_bytes):
            assert (offset, in_piece) == (begin + at, at) and 0 < length <= RANGE_MAX
            at += length
            assert at % block == 0 or begin + at == end
        assert begin + at == end


def test_a_lane_gives_back_up_to_f_members_with_k_parity_slots_of_others():
    lane = lane_of(5, 2, *[9] * 5)
    others = {1, 2, 3, 4}
    assert lane.gives_back(0, others, others) and lane.gives_back(0, {1, 2, 3}, {1, 2, 3})
    assert lane.gives_back(0, {1, 2, 3}, {0, 2, 3, 4}), "the parity of member 4 is there, its slot is not"
    assert not lane.gives_back(0, {1, 2}, set(range(5))), "three lost slots"
    assert not lane.gives_back(0, others, {0, 1, 2}), "its own parity says nothing of it"


def test_lanes_survive_what_was_asked_for_where_they_are_wide_enough():
    def survived(D: int, tolerate: int | None) -> int:
        return lane_of(D, tolerate, *[9] * D).f

    assert [survived(D, None) for D in (2, 5, 6, 16)] == [1, 1, 2, 2]
    assert [survived(2, 3), survived(3, 3), survived(4, 3), survived(6, 1)] == [1, 2, 3, 1]
