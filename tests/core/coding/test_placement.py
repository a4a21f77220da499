"""Where each byte lies, what each rank stores, and which losses the state survives."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.coding.placement import (
    WIDTH_MAX,
    Placement,
    capsule_holders,
    exchange_cost,
    exposures,
    holders_among,
    place,
    ranges,
)
from reft.core.layout.cells import Cell, Division, divide
from reft.core.layout.layout import SMALL_BYTES, Layout, Leaf, pack

CHUNK = 4096
NO_KEPT = Layout((), (), 0)


def leaf(name: str, nbytes: int, dtype: str = "uint8", staged: bool = False) -> Leaf:
    return Leaf(name, dtype, (nbytes,), (1,), nbytes, staged, (nbytes,), (0,))


def cell_of(nbytes: int, *counts: int) -> tuple[Division, list[int]]:
    """Returns one cell that all ranks hold, and each rank's domain.

    Domain i has counts[i] ranks.
    """
    domains = [domain for domain, count in enumerate(counts) for _ in range(count)]
    cell = Cell((), nbytes, tuple(range(len(domains))))
    return Division((cell,), (b"",) * len(domains), {b"": (0,)}, {b"": ()}, {b"": NO_KEPT}, {b"": 0}, {b"": 0}), domains


def placed(nbytes: int, counts, scheme="auto", tolerate=None) -> Placement:
    return place(*cell_of(nbytes, *counts), scheme, tolerate, CHUNK)


# Jobs at random: uneven domains whose ranks are numbered in any order, kinds of ranks either by
# their place in the node (as tensor parallelism has them) or by chance, leaves of all sizes and
# dtypes that any set of kinds has.

COUNTS = st.one_of(
    st.lists(st.integers(1, 4), min_size=1, max_size=9),
    st.lists(st.integers(1, 4), min_size=40, max_size=64),
)
SIZES = st.one_of(
    st.integers(0, 300), st.integers(SMALL_BYTES - 2, SMALL_BYTES + 2), st.integers(0, 1 << 22), st.just(10**9 + 7)
)
LEAVES = st.lists(
    st.tuples(
        SIZES,
        st.sampled_from(["bfloat16", "float8_e4m3fn", "int8", "bool", "float32"]),
        st.integers(0, 9).map(lambda roll: roll == 0),
        st.integers(0, 15),
    ),
    min_size=1,
    max_size=12,
)
SETTINGS = st.tuples(st.sampled_from(["auto", "aec", "arc", "none"]), st.sampled_from([None, 0, 1, 2, 3]))


def job_of(counts, rows, by_chance: bool, order: random.Random) -> tuple[Division, list[int]]:
    ranks = [(domain, place_in_node) for domain, count in enumerate(counts) for place_in_node in range(count)]
    order.shuffle(ranks)
    kinds = [order.randrange(4) if by_chance else place_in_node for _, place_in_node in ranks]
    leaves = [leaf(f"leaf{i:02}", size, dtype, staged) for i, (size, dtype, staged, _) in enumerate(rows)]
    layouts = [
        pack([leaf(f"kind{kind}", 8), *(each for each, row in zip(leaves, rows, strict=True) if row[3] >> kind & 1)])
        for kind in range(4)
    ]
    division = divide({each.digest: each for each in layouts}, [layouts[kind].digest for kind in kinds])
    return division, [domain for domain, _ in ranks]


@st.composite
def placements(draw) -> Placement:
    order = draw(st.randoms(use_true_random=False))
    division, domains = job_of(draw(COUNTS), draw(LEAVES), draw(st.booleans()), order)
    return place(division, domains, *draw(SETTINGS), CHUNK)


def f_of(placement: Placement, D: int) -> int:
    asked = {True: 0 if D == 1 else 1 if D <= 5 else 2, False: placement.tolerate}[placement.tolerate is None]
    return 0 if placement.scheme == "none" else min(asked, D - 1)


@given(placements())
@settings(max_examples=40, deadline=None)
def test_every_byte_lies_in_exactly_one_data_shard_of_one_lane(placement):
    ends = dict.fromkeys(range(len(placement.division.cells)), 0)
    for lane in placement.lanes:
        assert lane.begin == ends[lane.cell] and lane.begin % 64 == 0 and lane.nbytes > 0
        ends[lane.cell] += lane.nbytes
        end, zeros = lane.begin, 0
        for stripe in range(lane.D):
            for shard in range(lane.code.k):
                span = ranges(lane, stripe, shard)
                assert span.begin == end and span.begin <= span.end
                assert span.end - span.begin + span.zeros == lane.shard_bytes
                assert not zeros or span.begin == span.end  # padding is only at the end of the lane
                end, zeros = span.end, zeros + span.zeros
        assert end == lane.begin + lane.nbytes and lane.D * lane.code.k * lane.shard_bytes == lane.nbytes + zeros
        assert zeros < lane.D * lane.code.k * lane.code.w * 8
    assert ends == {index: cell.nbytes for index, cell in enumerate(placement.division.cells)}


@given(placements())
@settings(max_examples=40, deadline=None)
def test_shards_of_a_stripe_lie_in_distinct_domains(placement):
    for lane in placement.lanes:
        holders = placement.division.cells[lane.cell].holders
        domains = [placement.domains[rank] for rank in lane.members]
        assert set(lane.members) <= set(holders)
        assert len(set(domains)) == lane.D and set(domains) == {placement.domains[rank] for rank in holders}
        assert lane.code.f == f_of(placement, lane.D) and lane.code.k + lane.code.f <= min(lane.D, WIDTH_MAX)
        for stripe in range(lane.D):
            stored = [lane.member_of(stripe, shard) for shard in range(lane.code.k + lane.code.f)]
            assert len(set(stored)) == len(stored) and 0 <= min(stored) <= max(stored) < lane.D


@given(placements())
@settings(max_examples=40, deadline=None)
def test_all_members_store_the_same_number_of_bytes_and_no_code_stores_less(placement):
    stored: Counter[tuple[int, int]] = Counter()  # by lane and rank
    shards: Counter[tuple[int, int, int]] = Counter()  # by lane, stripe and shard
    for rank in range(len(placement.domains)):
        for block in placement.rank_placement(rank).blocks:
            lane = placement.lanes[block.lane]
            assert lane.members[lane.member_of(block.stripe, block.shard)] == rank
            assert block.nbytes == lane.shard_bytes == lane.code.w * lane.packet_bytes and lane.packet_bytes % 8 == 0
            stored[block.lane, rank] += block.nbytes
            shards[block.lane, block.stripe, block.shard] += 1
    for number, lane in enumerate(placement.lanes):
        k, f = lane.code.k, lane.code.f
        for rank in lane.members:
            assert stored.pop((number, rank)) * lane.D * k == (k + f) * lane.D * lane.code.k * lane.shard_bytes
        for stripe in range(lane.D):
            assert [shards.pop((number, stripe, shard)) for shard in range(k + f)] == [1] * (k + f)
    assert not stored and not shards


@given(placements())
@settings(max_examples=40, deadline=None)
def test_blocks_of_a_rank_do_not_overlap_and_sections_begin_at_chunks(placement):
    for rank in range(len(placement.domains)):
        part = placement.rank_placement(rank)
        data, parity = part.blocks[: part.data_blocks], part.blocks[part.data_blocks :]
        end = 0
        for block in data:
            assert block.offset == end and block.shard < placement.lanes[block.lane].code.k
            end += block.nbytes
        assert part.parity_offset % CHUNK == 0 and end <= part.parity_offset < end + CHUNK
        end = part.parity_offset
        for block in parity:
            assert block.offset == end and block.shard >= placement.lanes[block.lane].code.k
            end += block.nbytes
        assert part.unreplicated_offset % CHUNK == 0 and end <= part.unreplicated_offset < end + CHUNK
        assert part.unreplicated == placement.division.unreplicated[placement.division.layout_of[rank]]
        assert part.data_bytes == part.unreplicated_offset + part.unreplicated.data_bytes
        begins = [(block.lane, *placement.lanes[block.lane].data_range(block.stripe, block.shard)) for block in data]
        assert begins == sorted(begins)  # a rank reads its cells from front to back


def left(placement: Placement, lost: set[int]) -> int:
    """Returns the spare shards of the weakest stripe after the loss of these domains.

    Negative: the stripe is lost.
    """
    spare = WIDTH_MAX
    for lane in placement.lanes:
        gone = [placement.domains[rank] in lost for rank in lane.members]
        for stripe in range(lane.D):
            n = lane.code.k + lane.code.f
            spare = min(spare, lane.code.f - sum(gone[lane.member_of(stripe, shard)] for shard in range(n)))
    return spare


@given(placements(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_any_f_lost_domains_leave_k_shards_of_each_stripe(placement, order):
    domains = sorted(set(placement.domains))
    f = min((lane.code.f for lane in placement.lanes), default=0)
    patterns = combinations(domains, f) if len(domains) < 7 else (order.sample(domains, f) for _ in range(5))
    for lost in patterns:
        assert left(placement, set(lost)) >= 0
    for lane in placement.lanes[:1]:
        assert left(placement, {placement.domains[rank] for rank in lane.members[: lane.code.f + 1]}) < 0


@given(COUNTS, LEAVES, st.booleans(), SETTINGS, st.integers(0, 99), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_names_of_domains_do_not_matter(counts, rows, by_chance, options, seed, order):
    division, domains = job_of(counts, rows, by_chance, random.Random(seed))
    names = order.sample(range(1000), len(counts))
    one = place(division, domains, *options, CHUNK)
    renamed = place(division, [names[domain] for domain in domains], *options, CHUNK)
    assert renamed.lanes == one.lanes
    assert replace(renamed, domains=one.domains) == one
    assert place(division, domains, *options, CHUNK) == one


@pytest.mark.parametrize("D", [1, 2, 3, 4, 5, 6, 7, 8, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("f", [0, 1, 2, 3])
def test_f_losses_are_survived_and_f_plus_one_are_not(D, f):
    placement = placed(1 << 20, [1] * D, tolerate=f)
    [lane] = placement.lanes
    f = min(f, D - 1)
    assert lane.code.f == f
    some = list(combinations(range(D), f)) if D < 9 else [tuple(range(i, i + f)) for i in range(0, D - f, 7)]
    assert all(left(placement, set(lost)) >= 0 for lost in some)
    assert left(placement, set(range(f + 1))) == -1


@pytest.mark.parametrize(
    ("D", "scheme", "tolerate", "code"),
    [
        (1, "auto", None, ("copy", 1, 0)), (1, "aec", 3, ("copy", 1, 0)), (2, "auto", None, ("copy", 1, 1)),
        (5, "auto", None, ("xor", 4, 1)), (6, "auto", None, ("evenodd", 4, 2)), (6, "arc", None, ("copy", 1, 2)),
        (6, "none", 2, ("copy", 1, 0)), (6, "aec", 0, ("copy", 1, 0)), (8, "auto", 3, ("star", 5, 3)),
        (3, "aec", 2, ("copy", 1, 2)), (3, "auto", 7, ("copy", 1, 2)), (64, "auto", None, ("evenodd", 62, 2)),
        (65, "auto", None, ("evenodd", 62, 2)), (64, "auto", 1, ("xor", 63, 1)), (12, "auto", 4, ("cauchy", 8, 4)),
    ],
)  # fmt: skip
def test_the_code_follows_from_domains_and_settings(D, scheme, tolerate, code):
    [lane] = placed(1 << 28, [1] * D, scheme, tolerate).lanes
    assert (lane.code.kind, lane.code.k, lane.code.f) == code


def test_a_lane_is_copied_where_padding_would_cost_more_than_a_sixteenth():
    """D = 8, f = 2 gives k = w = 6: lanes are padded to multiples of 8 x 6 x 6 x 8 = 2304 bytes."""
    kinds = {nbytes: placed(nbytes, [1] * 8).lanes[0].code.kind for nbytes in (64, 2160, 2168, 2304, 2368, 40000)}
    assert kinds == {64: "copy", 2160: "copy", 2168: "copy", 2304: "evenodd", 2368: "copy", 40000: "evenodd"}
    assert placed(2169, [1] * 8).lanes[0].code.kind == "evenodd"  # padding of 135, a sixteenth is 135.6
    assert placed(64, [1] * 8, scheme="aec").lanes[0].code.kind == "evenodd"


def test_ranks_of_a_node_share_its_portion():
    lanes = placed(64 * 8 + 1, [1, 2, 3]).lanes
    assert [(lane.begin, lane.nbytes) for lane in lanes] == [(0, 192), (192, 192), (384, 129)]
    assert [lane.members for lane in lanes] == [(0, 1, 3), (0, 2, 4), (0, 1, 5)]
    one = placed(1000, [4])
    assert [lane.members for lane in one.lanes] == [(0,), (1,), (2,), (3,)]
    assert sum(block.nbytes for rank in range(4) for block in one.rank_placement(rank).blocks) == 1000
    # A cell with fewer cache lines than ranks has fewer lanes.
    assert [(lane.begin, lane.nbytes) for lane in placed(70, [4, 4]).lanes] == [(0, 64), (64, 6)]


def test_members_are_one_object_where_they_are_the_same():
    """The first lane of the norms has the same members as the first tensor-parallel piece."""
    norm = leaf("norm", 4096)
    layouts = [pack([norm, leaf(f"w{kind}", 4096)]) for kind in range(2)]
    division = divide({each.digest: each for each in layouts}, [each.digest for each in layouts] * 3)
    lanes = place(division, [0, 0, 1, 1, 2, 2], "auto", None, CHUNK).lanes
    assert [(division.cells[lane.cell].leaves[0].name, lane.members) for lane in lanes] == [
        ("norm", (0, 2, 4)), ("norm", (1, 3, 5)), ("w0", (0, 2, 4)), ("w1", (1, 3, 5)),
    ]  # fmt: skip
    assert lanes[0].members is lanes[2].members and lanes[1].members is lanes[3].members


def test_the_drawing_in_the_module_is_correct():
    [lane] = placed(4096, [1] * 4, tolerate=2).lanes
    rows = [[-1] * 4 for _ in range(4)]
    for member in range(4):
        for stripe, shard in lane.shards_of(member):
            rows[stripe][member] = shard
    assert rows == [[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"domains": [0]}, "1 domains for 2 ranks"), ({"scheme": "raid"}, "scheme 'raid'"),
        ({"tolerate": -1}, "tolerate -1"), ({"tolerate": WIDTH_MAX}, "tolerate 64; it must be 0 to 63"),
        ({"chunk_bytes": 0}, "chunk_bytes 0"), ({"chunk_bytes": 100}, "chunk_bytes 100"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes, message):
    division, domains = cell_of(100, 1, 1)
    arguments = {"domains": domains, "scheme": "auto", "tolerate": None, "chunk_bytes": CHUNK, **changes}
    with pytest.raises(ValueError, match=message):
        place(division, **arguments)


def reasons(placement: Placement) -> list[tuple[str, tuple[int, ...], int]]:
    assert all(str(each.nbytes) in each.what and each.what.endswith(".") for each in exposures(placement))
    return [(each.reason, each.ranks, each.nbytes) for each in exposures(placement)]


def test_exposed_state_is_reported_with_its_reason():
    assert reasons(placed(500, [1, 1])) == [] == reasons(placed(500, [1, 1, 1, 2], tolerate=3))
    assert reasons(placed(500, [2])) == [("one domain", (0, 1), 500)] == reasons(placed(500, [2], tolerate=2))
    assert reasons(placed(500, [1, 1], tolerate=2)) == [("few domains", (0, 1), 500)]
    assert reasons(placed(500, [1, 1], scheme="none")) == [("settings", (0, 1), 500)]
    assert reasons(placed(500, [2], tolerate=0)) == [("settings", (0, 1), 500)]
    [entry] = exposures(placed(500, [1, 1, 1], tolerate=9))
    assert entry.what == "500 B survive 2 lost domains and not 9: their holders lie in 3 domains."


def test_unreplicated_leaves_are_exposed_and_inline_leaves_are_not():
    large = SMALL_BYTES + 10
    layouts = [pack([leaf("w", 64), leaf("small", 7, staged=True), leaf(f"big{rank}", large)]) for rank in (0, 1)]
    division = divide({each.digest: each for each in layouts}, [each.digest for each in layouts])
    [entry] = exposures(place(division, [0, 1], "auto", None, CHUNK))
    assert (entry.reason, entry.ranks, entry.nbytes) == ("kept", (0, 1), 2 * large)
    part = place(division, [0, 1], "auto", None, CHUNK).rank_placement(0)
    assert [each.name for each in part.unreplicated.leaves] == ["big0"] and part.unreplicated.offsets == (0,)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, 4), st.randoms(use_true_random=False))
def test_capsules_go_to_distinct_other_domains_and_load_is_even(counts, f, order):
    domains = [domain for domain, count in enumerate(counts) for _ in range(count)]
    order.shuffle(domains)
    load: Counter[int] = Counter()
    for node in range(len(domains)):
        holders = capsule_holders(node, domains, f)
        assert len({domains[node], *(domains[each] for each in holders)}) == 1 + len(holders)
        assert len(holders) == min(f, len(counts) - 1)
        load.update(holders)
    if max(counts) * (f + 1) <= len(domains):
        assert all(load[node] == f for node in range(len(domains)))


def test_with_one_node_per_domain_capsules_go_to_the_next_nodes():
    assert [capsule_holders(node, [5, 3, 9, 1], 2) for node in range(4)] == [(1, 2), (2, 3), (3, 0), (0, 1)]
    assert capsule_holders(0, [0], 3) == ()


def stages(count: int, replicas: int, tolerate: int | None = None) -> tuple[Placement, list[set[int]]]:
    """Returns a pipeline whose stages share no leaf, and the ranks of each node.

    Each node has one rank. The replicas of a stage have consecutive ranks.
    """
    layouts = [pack([leaf(f"stage{i}", 1 << 20)]) for i in range(count)]
    world = count * replicas
    division = divide({each.digest: each for each in layouts}, [layouts[i // replicas].digest for i in range(world)])
    return place(division, range(world), "auto", tolerate, CHUNK), [{rank} for rank in range(world)]


def test_capsules_stay_among_the_nodes_that_share_a_lane():
    placement, nodes = stages(count=2, replicas=2)
    assert [holders_among(placement, nodes, range(4), node) for node in range(4)] == [(1,), (0,), (3,), (2,)]
    alone, nodes = stages(count=3, replicas=1)
    assert [holders_among(alone, nodes, range(3), node) for node in range(3)] == [()] * 3


@pytest.mark.parametrize(
    ("count", "scheme", "tolerate", "expected"),
    [(3, "auto", None, 1), (6, "auto", None, 2), (3, "auto", 2, 2), (2, "aec", 5, 1), (3, "auto", 0, 0),
     (3, "none", None, 0), (1, "auto", None, 0)],
)  # fmt: skip
def test_capsules_that_hold_all_state_go_to_as_many_nodes_as_requested(count, scheme, tolerate, expected):
    """Small shards of a job without replicas: all are inline leaves, and there is no lane."""
    layouts = [pack([leaf(f"shard{i}", 1 << 10)]) for i in range(count)]
    division = divide({each.digest: each for each in layouts}, [each.digest for each in layouts])
    placement = place(division, range(count), scheme, tolerate, CHUNK)
    assert not placement.all_lanes and not any(division.unreplicated_bytes.values())
    nodes = [{rank} for rank in range(count)]
    holders = [holders_among(placement, nodes, range(count), node) for node in range(count)]
    assert [len(each) for each in holders] == [expected] * count


@st.composite
def exchanging(draw) -> Placement:
    """Returns a job in which some ranks share a leaf, and some have a leaf of their own."""
    ranks = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans()), min_size=2, max_size=14))
    layouts = [
        pack([leaf(f"own{rank}", SMALL_BYTES if has_own else 8), *([leaf(f"kind{kind}", 1 << 20)] if kind else [])])
        for rank, (_, kind, has_own) in enumerate(ranks)
    ]
    division = divide({each.digest: each for each in layouts}, [each.digest for each in layouts])
    scheme, tolerate = draw(st.sampled_from(["auto", "aor"])), draw(st.sampled_from([None, 1, 2]))
    return place(division, [domain for domain, *_ in ranks], scheme, tolerate, CHUNK, 4)


@given(st.one_of(placements(), exchanging()))
@settings(max_examples=120, deadline=None)
def test_capsules_survive_what_all_lanes_survive(placement):
    """After any loss of two or three domains, decodable lanes imply a surviving capsule."""
    lanes = placement.all_lanes
    domains = sorted(set(placement.domains))[:7]
    nodes = [{rank for rank, each in enumerate(placement.domains) if each == domain} for domain in domains]
    labels = {domain: index for index, domain in enumerate(domains)}
    if len(labels) < len(set(placement.domains)):
        return
    if not lanes and not any(placement.division.unreplicated_bytes.values()):
        return  # capsules hold all state: see the test above
    f = max((lane.code.f for lane in lanes), default=0)
    holders = [holders_among(placement, nodes, range(len(nodes)), node) for node in range(len(nodes))]
    assert all(len({i, *each}) == 1 + len(each) >= 1 + min(f, len(nodes) - 1) for i, each in enumerate(holders))
    assert placement.scheme == "aor" or all(len(each) == min(f, len(nodes) - 1) for each in holders)
    for count in (2, 3):
        for lost in map(set, itertools.combinations(range(len(nodes)), count)):
            gone = [sum(labels[placement.domains[rank]] in lost for rank in lane.members) for lane in lanes]
            if any(n > lane.code.f for n, lane in zip(gone, lanes, strict=True)):
                continue
            for node in lost:
                shares = any(lane.code.f and not lane.is_without(nodes[node]) for lane in lanes)
                assert not shares or not lost.issuperset(holders[node]), (lost, node, holders)


def test_thousands_of_ranks():
    """2,048 nodes of 8 ranks, 128 coordinates in 128 nodes each, 64 cells per coordinate."""
    coordinates = range(128)
    leaves = {(a, b): leaf(f"{a}.{b}", (1 << 20) + 8 * b) for a in coordinates for b in range(64)}
    layouts = [
        pack([leaves[a, b] for b in range(64)] + [leaves[(a - b) % 128, b] for b in range(1, 64)]) for a in coordinates
    ]
    digests = [each.digest for each in layouts]
    layout_of = [digests[node % 16 * 8 + place_in_node] for node in range(2048) for place_in_node in range(8)]
    division = divide(dict(zip(digests, layouts, strict=True)), layout_of)
    placement = place(division, [rank // 8 for rank in range(16384)], "auto", 2, 64 << 10)
    assert len(division.cells) == 128 * 64
    assert Counter(lane.D for lane in placement.lanes).keys() == {128, 256}
    part = placement.rank_placement(12345)
    assert len(division.cells_of[layout_of[12345]]) == 127
    assert part.data_bytes == part.unreplicated_offset == -(-part.data_bytes // CHUNK) * CHUNK > 0


# Unreplicated leaves, which daemons exchange


def sharded(sizes, domains, scheme="auto", tolerate=None, slots=4) -> Placement:
    """Returns a job in which each rank has a leaf of its own, of so many bytes; 0: none."""
    layouts = [
        pack([leaf(f"common{rank}", 8), *([leaf(f"shard{rank}", size)] if size else [])])
        for rank, size in enumerate(sizes)
    ]
    division = divide({each.digest: each for each in layouts}, [each.digest for each in layouts])
    return place(division, domains, scheme, tolerate, CHUNK, slots)


def guarded(placement: Placement) -> list[tuple[int, ...]]:
    return [lane.members for lane in placement.guard_lanes]


def test_ranks_with_unreplicated_leaves_are_in_guard_lanes():
    placement = sharded([100_001, 200_000, 100_001, 200_000, 0], [7, 7, 3, 3, 1])
    assert guarded(placement) == [(1, 3), (0, 2)]
    assert [placement.guard_lane_of(rank) for rank in range(5)] == [(1, 0), (0, 0), (1, 1), (0, 1), None]
    for lane in placement.guard_lanes:
        parts = [placement.rank_placement(rank) for rank in lane.members]
        assert list(lane.sizes) == [part.data_bytes - part.unreplicated_offset for part in parts], "with padding"
        assert all(0 <= part.unplanned_offset - part.data_bytes < CHUNK for part in parts)
        assert all(part.unplanned_offset % CHUNK == 0 for part in parts)
    node = {0, 1}
    assert placement.parity_buffers_bytes(node) == sum(lane.buffers_bytes for lane in placement.guard_lanes)
    assert placement.parity_buffers_bytes([4]) == 0


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, True), ({"slots": 3}, True), ({"slots": 0}, True), ({"scheme": "none"}, False), ({"tolerate": 0}, False),
        ({"domains": [5, 5, 5]}, False), ({"sizes": [0, 100_000, 0]}, False),
    ],
)  # fmt: skip
def test_nothing_is_exchanged_without_need_or_slots(changes, needs):
    arguments = {"sizes": [100_000] * 3, "domains": range(3), **changes}
    placement = sharded(**arguments)
    assert placement.needs_exchange == needs
    assert guarded(placement) == ([] if changes else [(0, 1, 2)])


def test_exchanged_leaves_are_exposed_only_to_more_losses_than_their_lane_survives():
    for domains, tolerate in ((3, None), (3, 2), (6, None), (4, 3), (6, 1)):
        assert exposures(sharded([100_000] * domains, range(domains), tolerate=tolerate)) == ()
    [entry] = exposures(sharded([100_000] * 3, range(3), tolerate=3))
    assert (entry.reason, entry.ranks, entry.nbytes) == ("exchange", (0, 1, 2), 300_000)
    assert entry.what == (
        "293.0 KiB have only one holder and are exchanged between nodes: they survive 2 lost domains and not 3."
    )


def test_lanes_survive_the_losses_that_are_tolerated():
    def survived(ranks: int, tolerate: int | None) -> set[int]:
        return {lane.f for lane in sharded([100_000] * ranks, range(ranks), tolerate=tolerate).guard_lanes}

    assert [survived(ranks, None) for ranks in (2, 5, 6, 8)] == [{1}, {1}, {2}, {2}]
    assert [survived(6, f) for f in (0, 1, 2, 3, 9)] == [set(), {1}, {2}, {3}, {5}]


def test_a_rank_without_a_guard_lane_is_exposed_by_name():
    [entry] = exposures(sharded([100_000] * 4, [0, 0, 0, 1]))
    assert (entry.reason, entry.ranks) == ("kept", (1, 2)) and entry.nbytes == 200_000
    [entry] = exposures(sharded([100_000] * 3, range(3), slots=3))
    assert (entry.reason, entry.ranks) == ("slots", (0, 1, 2))
    assert entry.what.endswith("lost with its node. Ranks with fewer than 4 slots exchange nothing.")
    for changes in ({"slots": 0}, {"scheme": "none", "slots": 3}, {"domains": [0, 0, 0], "slots": 3}):
        arguments = {"sizes": [100_000] * 3, "domains": range(3), **changes}
        assert [each.reason for each in exposures(sharded(**arguments))] == ["kept"]


def test_capsules_of_exchanged_ranks_stay_in_their_lane():
    """Without any cell: a job with SGD and FSDP has none."""
    placement = sharded([100_000] * 4, range(4))
    assert not placement.lanes
    nodes = [{rank} for rank in range(4)]
    assert [holders_among(placement, nodes, range(4), node) for node in range(4)] == [(1,), (2,), (3,), (0,)]
    two_lanes = sharded([200_000] * 16 + [100_000] * 16, range(32))
    nodes = [{rank} for rank in range(32)]
    holders = [holders_among(two_lanes, nodes, range(32), node) for node in range(32)]
    assert {lane.f for lane in two_lanes.guard_lanes} == {2}
    assert all(len(each) == 2 for each in holders)
    assert all((holder < 16) == (node < 16) for node, each in enumerate(holders) for holder in each)
    fewer_slots = replace(placement, slots=3)
    assert [holders_among(fewer_slots, nodes[:4], range(4), node) for node in range(4)] == [()] * 4


# Copies of unreplicated leaves


def test_aor_keeps_copies_of_unreplicated_leaves_and_codes_cells_as_auto_does():
    plain, aor = (sharded([200_000, 100_000, 200_000], range(3), scheme) for scheme in ("auto", "aor"))
    assert [lane.is_copies for lane in plain.guard_lanes] == [False]
    assert [(lane.is_copies, lane.members, lane.f) for lane in aor.guard_lanes] == [(True, (0, 1, 2), 1)]
    assert aor.lanes == plain.lanes and exposures(aor) == ()
    longest = aor.guard_lanes[0].piece_bytes
    assert [aor.parity_buffers_bytes([rank]) for rank in range(3)] == [2 * longest] * 3
    cost = exchange_cost(aor, [[0], [1], [2]])
    assert (cost.turn_bytes, cost.parity_bytes) == (aor.guard_lanes[0].sizes[0], 2 * longest)
    assert (
        placed(1 << 20, [1] * 4, "aor").lanes == placed(1 << 20, [1] * 4).lanes != placed(1 << 20, [1] * 4, "arc").lanes
    )


@pytest.mark.parametrize(("D", "f"), [(D, f) for D in range(2, 7) for f in (1, 2) if f < D])
def test_the_nodes_that_copy_a_section_hold_its_capsules(D, f):
    placement = sharded([100_000] * D, range(D), "aor", f)
    nodes = [{rank} for rank in range(D)]
    holders = [holders_among(placement, nodes, range(D), node) for node in range(D)]
    assert holders == [tuple((node - 1 - n) % D for n in range(f)) for node in range(D)]


def test_every_node_that_copies_a_rank_of_a_node_holds_the_nodes_capsules():
    """The lanes of one node's ranks have other neighbours, so the node has more holders than f."""
    placement = sharded([5 << 20, 1 << 20, 5 << 20, 5 << 20, 0, 1 << 20], [0, 0, 1, 2, 3, 3], "aor", 1)
    assert guarded(placement) == [(0, 2, 3), (1, 5)]
    nodes = [{0, 1}, {2}, {3}, {4, 5}]
    assert holders_among(placement, nodes, range(4), 0) == (2, 3)
    assert [holders_among(placement, nodes, range(4), node) for node in (1, 2, 3)] == [(0,), (1,), (0,)]
