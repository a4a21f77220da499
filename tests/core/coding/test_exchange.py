"""The exchange's lanes: who guards whom, what is sent and kept, and which losses are made good."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.coding.erasure import code_for, make_program, run_columns
from reft.core.coding.exchange import GUARD_WIDTH_MAX, RANGE_MAX, GuardLane, guard_lanes
from reft.core.coding.two_level import fold_piece
from tests.support.two_level import expected_parity

CHUNK = 4096
SIZES = st.sampled_from([0, 1, 64, 4095, 4096, 4097, 20_000, 100_000])
# One (domain, size of the section) for each rank.
JOBS = st.lists(st.tuples(st.integers(0, 20), SIZES), max_size=40)


def lane_of(*sizes: int, chunk_bytes: int = CHUNK) -> GuardLane:
    """Returns the lane of ranks on nodes of their own; at least one section has bytes."""
    [lane] = guard_lanes([size or 1 for size in sizes], range(len(sizes)), chunk_bytes)
    return replace(lane, sizes=sizes)


def sections(lane: GuardLane, order: random.Random) -> list[np.ndarray]:
    """Returns random bytes for each member's section."""
    return [np.frombuffer(order.randbytes(size), np.uint8) for size in lane.sizes]


def received(lane: GuardLane, source: int, holder: int, section: np.ndarray) -> np.ndarray:
    """Returns a piece as its holder puts the piece together from the ranges of its requests."""
    piece = np.zeros(lane.piece_bytes, np.uint8)
    for offset, at, length in lane.requests(source, holder, CHUNK):
        piece[at : at + length] = section[offset : offset + length]
    return piece


def decoded(lane: GuardLane, lost: int, columns: list[list[np.ndarray]], parity: list[np.ndarray]) -> np.ndarray:
    """Returns the section of a lost member, from the columns and the parity of all others."""
    section = np.zeros((lane.D - 1) * lane.piece_bytes, np.uint8)
    for holder in range(lane.D):
        if holder == lost:
            continue
        sources = lane.sources_of(holder)
        shard = sources.index(lost)
        read = [each for each in range(lane.code.k + 1) if each != shard]
        program = make_program(lane.code, read, [shard])
        inputs = [
            parity[holder] if each == lane.code.k else columns[holder][sources[each]] for each, _ in program.inputs
        ]
        begin = lane.piece_of(lost, holder) * lane.piece_bytes
        run_columns(program, inputs, [section[begin : begin + lane.piece_bytes]])
    return section[: lane.sizes[lost]]


@pytest.mark.parametrize("D", range(2, 7))
@pytest.mark.parametrize("shortest", [0, 1, 4096, 30_001, 50_000])
def test_any_lost_member_is_decoded(D, shortest):
    order = random.Random(D)
    lane = lane_of(*(50_000 if each % 2 else shortest for each in range(D)))
    data = sections(lane, order)
    columns = [
        [received(lane, source, holder, data[source]) for source in range(D)] for holder in range(D)
    ]  # [holder][source]; a holder has no piece of its own section
    parity = [np.zeros(lane.parity_bytes, np.uint8) for _ in range(D)]
    for holder in range(D):
        for source in order.sample(lane.sources_of(holder), D - 1):
            parity[holder] ^= columns[holder][source]
    for lost in range(D):
        assert np.array_equal(decoded(lane, lost, columns, parity), data[lost])


@pytest.mark.parametrize("D", [2, 3, 4, 8, 16])
def test_a_turn_sends_and_keeps_what_the_formulas_say(D):
    size = 12 * 5 * 7 * CHUNK  # a multiple of all these D - 1
    lane = lane_of(*[size] * D)
    f, k = lane.code.f, D - lane.code.f
    assert (f, lane.code) == (1, code_for(D - 1, 1))
    sent = Counter(dict.fromkeys(range(D), 0))
    for holder in range(D):
        for source in lane.sources_of(holder):
            sent[source] += sum(length for *_, length in lane.requests(source, holder, CHUNK))
    assert set(sent.values()) == {(D - 1) * size // k} == {lane.sent_bytes(source) for source in range(D)}
    assert lane.buffers_bytes == 2 * lane.parity_bytes == 2 * f * size // k


def test_zeros_behind_a_shorter_section_are_not_sent():
    lane = lane_of(100_000, 10_000, 0, 50_000)
    sent = [
        sum(length for holder in range(4) if holder != source for *_, length in lane.requests(source, holder, CHUNK))
        for source in range(4)
    ]
    assert sent == [100_000, 10_000, 0, 50_000] == [lane.sent_bytes(source) for source in range(4)]
    assert lane.piece_bytes == 9 * CHUNK, "the longest section, in three pieces"


def test_each_holder_begins_with_another_source():
    lane = lane_of(*[9] * 5)
    assert lane.sources_of(3) == [4, 0, 1, 2]
    assert sorted(lane.sources_of(holder)[0] for holder in range(5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("size", "chunk_bytes", "piece_bytes"),
    [
        (1, 1 << 18, 4096), (3 * 4096, 1 << 18, 4096), (3 * 4096 + 1, 1 << 18, 8192),
        (3 << 18, 1 << 18, 1 << 18), ((3 << 18) + 1, 1 << 18, 2 << 18), (30 << 18, 1 << 18, 10 << 18),
    ],
)  # fmt: skip
def test_a_piece_is_a_multiple_of_chunks_or_of_pages(size, chunk_bytes, piece_bytes):
    assert lane_of(*[size] * 4, chunk_bytes=chunk_bytes).piece_bytes == piece_bytes


@given(
    st.lists(st.integers(0, 40 << 20), min_size=2, max_size=6).filter(any),
    st.sampled_from([4096, 1 << 18, 3 << 18, 6 << 20]),
)
@settings(deadline=None)
def test_requests_cover_a_piece_and_end_at_borders_of_chunks(sizes, chunk_bytes):
    lane = lane_of(*sizes, chunk_bytes=chunk_bytes)
    for holder in range(lane.D):
        for source in lane.sources_of(holder):
            begin, end = lane.piece_range(source, lane.piece_of(source, holder))
            at = begin
            for offset, in_piece, length in lane.requests(source, holder, chunk_bytes):
                assert (offset, in_piece) == (at, at - begin) and 0 < length <= RANGE_MAX
                at += length
                assert at == end or at % chunk_bytes == 0 or chunk_bytes > RANGE_MAX
            assert at == end


@given(JOBS)
@settings(max_examples=300, deadline=None)
def test_each_rank_is_in_one_lane_or_has_no_partner(job):
    domains, sizes = [domain for domain, _ in job], [size for _, size in job]
    lanes = guard_lanes(sizes, domains, CHUNK)
    members = [rank for lane in lanes for rank in lane.members]
    owners = [rank for rank, size in enumerate(sizes) if size]
    assert len(members) == len(set(members)) and set(members) <= set(owners)
    for lane in lanes:
        assert len({domains[rank] for rank in lane.members}) == lane.D >= 2
        assert lane.sizes == tuple(sizes[rank] for rank in lane.members) and lane.D <= GUARD_WIDTH_MAX
    assert not lanes or max(lane.D for lane in lanes) <= min(lane.D for lane in lanes) + 1
    most = max(Counter(domains[rank] for rank in owners).values(), default=0)
    assert len(owners) - len(members) == max(0, 2 * most - len(owners)), "no other rank is left alone"


@given(JOBS, st.permutations(range(21)))
@settings(deadline=None)
def test_the_numbers_of_the_domains_do_not_matter(job, numbers):
    sizes = [size for _, size in job]
    lanes = guard_lanes(sizes, [domain for domain, _ in job], CHUNK)
    again = guard_lanes(sizes, [numbers[domain] for domain, _ in job], CHUNK)
    assert lanes == again and [lane.digest for lane in lanes] == [lane.digest for lane in again]


def test_ranks_of_like_size_share_a_lane():
    stages = [size for size in (10, 40, 20, 30) for _ in range(16)]  # four stages on 16 nodes each
    assert [set(lane.sizes) for lane in guard_lanes(stages, range(64), CHUNK)] == [{40}, {30}, {20}, {10}]
    ranks = [size for _ in range(4) for size in (5, 9, 7)]  # each node has one rank of each size
    assert [set(lane.sizes) for lane in guard_lanes(ranks, [i // 3 for i in range(12)], CHUNK)] == [{9}, {7}, {5}]


def test_wide_jobs_are_split_evenly():
    assert [lane.D for lane in guard_lanes([9] * 17, range(17), CHUNK)] == [9, 8]
    assert [lane.D for lane in guard_lanes([9] * 7, [0, 0, 0, 0, 1, 2, 3], CHUNK)] == [2, 2, 2], (
        "one rank is left alone"
    )


def test_a_digest_names_all_that_decides_the_parity():
    lane = lane_of(90_000, 80_000, 70_000)
    changes = [
        {"members": (0, 1, 3)}, {"sizes": (90_000, 80_000, 70_001)}, {"piece_bytes": 1 << 20}, {"code": code_for(2, 2)}
    ]  # fmt: skip
    digests = [replace(lane, **change).digest for change in changes]
    assert len({lane.digest, *digests}) == 5 and all(len(digest) == 16 for digest in digests)
    assert lane_of(90_000, 80_000, 70_000).digest == lane.digest


def test_thousands_of_ranks_are_dealt_into_full_lanes():
    lanes = guard_lanes([1000 + rank % 7 for rank in range(16_384)], [rank // 8 for rank in range(16_384)], CHUNK)
    assert len(lanes) == 1024 and {lane.D for lane in lanes} == {16}


# Copy lanes


def copies_of(f: int, *sizes: int) -> GuardLane:
    """Returns the copy lane of ranks on nodes of their own."""
    [lane] = guard_lanes([size or 1 for size in sizes], range(len(sizes)), CHUNK, f, copies=True)
    return replace(lane, sizes=sizes)


@pytest.mark.parametrize(("D", "f"), [(D, f) for D in range(2, 7) for f in (1, 2) if f < D])
def test_a_copy_lane_keeps_whole_sections_of_the_next_members_end_to_end(D, f, monkeypatch):
    monkeypatch.setattr("reft.core.coding.exchange.RANGE_MAX", 2 * CHUNK)
    order = random.Random(f"{D} {f}")
    lane = copies_of(f, *(order.choice([0, 1, CHUNK, 5 * CHUNK + 77]) for _ in range(D - 1)), 5 * CHUNK + 77)
    sections = [order.randbytes(size) for size in lane.sizes]
    sent = [0] * D
    assert (lane.is_copies, lane.f, lane.k, lane.piece_bytes, lane.parity_bytes) == (
        True, f, 1, 6 * CHUNK, f * 6 * CHUNK,
    )  # fmt: skip
    for holder in range(D):
        kept = np.zeros(lane.parity_bytes, np.uint8)
        assert lane.copied_members(holder) == [(holder + 1 + n) % D for n in range(f)]
        ranges = [(s, *each) for s in lane.sources_of(holder) for each in lane.requests(s, holder, CHUNK)]
        for source, begin, at, length in order.sample(ranges, len(ranges)):
            assert (begin + length) % CHUNK == 0 or begin + length == lane.sizes[source]
            frame = np.frombuffer(sections[source][begin : begin + length], np.uint8)
            fold_piece(code_for(*lane.fold_code), lane.column_of(source, holder), frame, kept, at, lane.block_bytes)
            sent[source] += length
        assert kept.tobytes() == expected_parity(lane, sections, holder)
    assert sent == [f * size for size in lane.sizes] == [lane.sent_bytes(source) for source in range(D)]


@pytest.mark.parametrize(("D", "f"), [(D, f) for D in range(2, 6) for f in (1, 2) if f < D])
def test_a_copy_lane_gives_a_section_back_if_one_copy_is_at_hand(D, f):
    """Of all sets of parity slots, also where more than f members are lost."""
    lane = copies_of(f, *[9] * D)
    for count in range(D + 1):
        for parity in map(set, itertools.combinations(range(D), count)):
            for lost in range(D):
                copies = {(lost - 1 - n) % D for n in range(f)}
                assert lane.gives_back(lost, set(), parity) == bool(copies & parity)
                assert lane.holders_of(lost) == [(lost - 1 - n) % D for n in range(f)]


def test_a_copy_lane_has_a_digest_of_its_own():
    """Of two members with f = 1, parity is a copy; and yet no lane takes the other one's."""
    assert lane_of(9, 9).digest != copies_of(1, 9, 9).digest
    assert len({copies_of(f, *[9] * 4).digest for f in (1, 2)} | {copies_of(1, 9, 9, 9, 8).digest}) == 3
    assert lane_of(9, 9, 9).copied_members(0) == [], "parity is no copy"
