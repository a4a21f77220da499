"""Which leaves form cells, which are inline, and which are unreplicated."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.core.layout.cells import INLINE_BYTES_MAX, divide
from reft.core.layout.layout import ALIGNMENT, SMALL_BYTES, Leaf, pack

LARGE = SMALL_BYTES + 3


def leaf(name: str, nbytes: int = 128, dtype: str = "uint8", staged: bool = False, **changes: object) -> Leaf:
    facts = {"shape": (nbytes,), "stride": (1,), "global_shape": (nbytes,), "global_offset": (0,), **changes}
    return Leaf(name, dtype, nbytes=nbytes, staged=staged, **facts)


def job(*ranks: list[Leaf], mismatched=()):
    """Returns the division of ranks that have these leaves."""
    layouts = [pack(leaves) for leaves in ranks]
    return divide({each.digest: each for each in layouts}, [each.digest for each in layouts], mismatched)


def shared(division) -> dict[tuple[int, ...], list[str]]:
    assert len({cell.holders for cell in division.cells}) == len(division.cells)
    return {cell.holders: [each.name for each in cell.leaves] for cell in division.cells}


def own(division, rank: int) -> tuple[tuple[str, ...], list[str]]:
    """Returns a rank's inline and unreplicated leaves."""
    digest = division.layout_of[rank]
    return division.inline_leaves[digest], [each.name for each in division.unreplicated[digest].leaves]


def test_leaves_with_the_same_holders_form_a_cell():
    """Two tensor-parallel pieces, two replicas; all ranks hold the norm, one holds an expert."""
    first = [leaf("weight", global_shape=(256,)), leaf("norm")]
    second = [leaf("norm"), leaf("weight", global_shape=(256,), global_offset=(128,))]
    division = job(first, second, first, [*second, leaf("expert", LARGE)])
    assert shared(division) == {(0, 1, 2, 3): ["norm"], (0, 2): ["weight"], (1, 3): ["weight"]}
    assert [cell.holders for cell in division.cells] == [(0, 1, 2, 3), (0, 2), (1, 3)]
    assert [division.cells_of[digest] for digest in division.layout_of] == [(0, 1), (0, 2), (0, 1), (0, 2)]
    assert [own(division, rank) for rank in range(4)] == [((), []), ((), []), ((), []), ((), ["expert"])]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "v"}, {"dtype": "int8"}, {"shape": (64, 2)}, {"stride": (2,)}, {"nbytes": 127},
        {"global_shape": (256,)}, {"global_offset": (128,)},
    ],
)  # fmt: skip
def test_leaves_that_differ_in_anything_are_not_the_same(changes):
    facts = {"name": "w", "nbytes": 128, "shape": (128,), "global_shape": (128,)}
    assert shared(job([leaf(**facts)], [leaf(**facts)])) == {(0, 1): ["w"]}
    assert shared(job([leaf(**facts)], [leaf(**{**facts, **changes})])) == {}


def test_a_cell_is_packed_small_leaves_first_and_by_name():
    leaves = [leaf("z", 5), leaf("a", LARGE), leaf("b", 70), leaf("y", LARGE)]
    [cell] = job(leaves, leaves).cells
    assert [each.name for each in cell.leaves] == ["b", "z", "a", "y"]
    assert cell.offsets == (0, 128, 192, 192 + SMALL_BYTES + ALIGNMENT)
    assert cell.nbytes == 192 + 2 * (SMALL_BYTES + ALIGNMENT)


def test_mismatched_leaves_are_in_no_cell():
    leaves = [leaf("w"), leaf("staged", staged=True), leaf("big", LARGE), leaf("unequal", LARGE), leaf("empty", 0)]
    division = job(leaves, leaves, mismatched=["unequal", "never seen"])
    assert shared(division) == {(0, 1): ["w", "big"]}
    assert own(division, 0) == (("empty", "staged"), ["unequal"])


def test_a_leaf_staged_on_one_rank_is_never_shared():
    division = job([leaf("w", LARGE)], [leaf("w", LARGE)], [leaf("w", LARGE, staged=True)])
    assert shared(division) == {}
    assert [own(division, rank) for rank in range(3)] == [((), ["w"]), ((), ["w"]), (("w",), [])]


def test_a_job_of_one_rank_shares_nothing():
    division = job([leaf("w"), leaf("big", LARGE)])
    assert division.cells == () and own(division, 0) == (("w",), ["big"])


def test_nothing_divides_to_nothing():
    assert divide({}, []).cells == ()
    assert own(job([], []), 1) == ((), [])


def test_inline_leaves_are_the_smallest_and_stay_within_their_limit():
    """A staged leaf of any size may be inline. A large leaf that is not staged never is."""
    names = [f"r{i}" for i in range(8)]
    leaves = [leaf(name, SMALL_BYTES // 2) for name in names]
    assert own(job(leaves), 0) == (tuple(names), [])
    assert own(job([*leaves, leaf("one byte", 1)]), 0) == (("one byte", *names[:7]), ["r7"])
    staged = leaf("staged", INLINE_BYTES_MAX, staged=True)
    assert own(job([staged, leaf("big", LARGE)]), 0) == (("staged",), ["big"])
    assert own(job([leaf("staged", INLINE_BYTES_MAX + 1, staged=True), leaf("w")]), 0) == (("w",), ["staged"])


def test_a_missing_layout_is_refused():
    known = pack([leaf("w")])
    with pytest.raises(ValueError, match="rank 1 names a layout that is not among the 1 given"):
        divide({known.digest: known}, [known.digest, b"other"])


POOL = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 300), st.integers(SMALL_BYTES - 2, SMALL_BYTES + 2), st.just(INLINE_BYTES_MAX)),
        st.sampled_from(["bfloat16", "float8_e4m3fn", "int8", "bool", "float32"]),
        st.integers(0, 9).map(lambda roll: roll == 0),  # staged
        st.integers(0, 15),  # which kinds of rank have it
    ),
    max_size=30,
)
KINDS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


def divided(pool, kinds, order: random.Random):
    """Returns the layouts of each kind, and the division of the ranks.

    The leaves are in any order.
    """
    leaves = [leaf(f"leaf{i:02}", size, dtype, staged) for i, (size, dtype, staged, _) in enumerate(pool)]
    layouts = []
    for kind in range(4):
        mine = [each for each, row in zip(leaves, pool, strict=True) if row[3] >> kind & 1]
        order.shuffle(mine)
        layouts.append(pack([*mine, leaf(f"kind{kind}")]))
    given = [(each.digest, each) for each in layouts]
    order.shuffle(given)
    return layouts, divide(dict(given), [layouts[kind].digest for kind in kinds], ["leaf00", "leaf07"])


@given(POOL, KINDS, st.randoms(use_true_random=False))
def test_each_leaf_of_each_rank_is_in_a_cell_or_inline_or_unreplicated(pool, kinds, order):
    layouts, division = divided(pool, kinds, order)
    for rank, kind in enumerate(kinds):
        inline_leaves, kept = own(division, rank)
        cells = [division.cells[index] for index in division.cells_of[layouts[kind].digest]]
        assert cells == [cell for cell in division.cells if rank in cell.holders]
        names = [*inline_leaves, *kept, *(each.name for cell in cells for each in cell.leaves)]
        assert sorted(names) == sorted(each.name for each in layouts[kind].leaves)
        sizes = {each.name: each.nbytes for each in layouts[kind].leaves}
        assert sum(sizes[name] for name in inline_leaves) <= INLINE_BYTES_MAX
    for cell in division.cells:
        assert len(cell.holders) >= 2 and list(cell.holders) == sorted(set(cell.holders))
        assert not any(each.staged or each.name in ("leaf00", "leaf07") or not each.nbytes for each in cell.leaves)
        for each in cell.leaves:
            assert cell.holders == tuple(rank for rank, kind in enumerate(kinds) if each in layouts[kind].leaves)
        end = 0
        for each, offset in zip(cell.leaves, cell.offsets, strict=True):
            assert offset % ALIGNMENT == 0 and end <= offset < end + ALIGNMENT
            end = offset + each.nbytes
        assert end <= cell.nbytes < end + ALIGNMENT


@given(POOL, KINDS, st.randoms(use_true_random=False))
def test_the_order_of_leaves_and_layouts_does_not_matter(pool, kinds, order):
    one_layouts, one = divided(pool, kinds, order)
    other_layouts, other = divided(pool, kinds, order)
    contents = [[(c.holders, c.nbytes, c.leaves, c.offsets) for c in each.cells] for each in (one, other)]
    assert contents[0] == contents[1]
    for kind in set(kinds):
        here, there = one_layouts[kind].digest, other_layouts[kind].digest
        assert one.cells_of[here] == other.cells_of[there]
        assert (
            one.inline_leaves[here] == other.inline_leaves[there]
            and one.unreplicated[here] == other.unreplicated[there]
        )
