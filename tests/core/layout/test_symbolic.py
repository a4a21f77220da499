"""Symbolic layouts: exact expansion, shared tables, and shared leaves found without listing."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.layout.cells import INLINE_BYTES_MAX, divide
from reft.core.layout.layout import SMALL_BYTES, Leaf, pack
from reft.core.layout.symbolic import WHOLE, AxisCut, expand, symbolic_form

U64 = st.integers(0, (1 << 64) - 1)
NUMBERS = st.lists(U64, max_size=3).map(tuple)
WILD = st.lists(
    st.builds(Leaf, st.text(), st.text(), NUMBERS, NUMBERS, st.integers(0, 1 << 40), st.booleans(), NUMBERS, NUMBERS),
    max_size=6,
    unique_by=lambda leaf: leaf.name,
)


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Returns begin and size of one part, cut like torch.chunk and DTensor.

    The last part may be smaller, or empty.
    """
    step = -(-length // parts)
    begin = min(index * step, length)
    return begin, min(step, length - begin)


def piece(
    name: str, shape: tuple[int, ...], dim: int, parts: int, index: int, dtype: str = "float32", **changes
) -> Leaf:
    """Returns a row-major float32 leaf, cut along one dimension; dim -1: not cut."""
    local, offset = list(shape), [0] * len(shape)
    if dim >= 0:
        offset[dim], local[dim] = chunk(shape[dim], parts, index)
    stride, step = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        stride[i], step = step, step * max(local[i], 1)
    nbytes = 4
    for size in local:
        nbytes *= size
    facts = {"staged": False, **changes}
    return Leaf(
        name, dtype, tuple(local), tuple(stride), nbytes, global_shape=shape, global_offset=tuple(offset), **facts
    )


@settings(deadline=None, max_examples=60)
@given(WILD)
def test_any_leaves_expand_to_themselves(leaves):
    assert symbolic_form(leaves).leaves() == leaves
    assert expand(symbolic_form(leaves)) == pack(leaves)


def test_ranks_that_differ_in_their_pieces_only_share_a_table():
    """Even and uneven shards, more ranks than rows, moments beside parameters, an uncut norm."""

    def rank(i: int) -> list[Leaf]:
        return [
            piece("embed", (1000, 64), 0, 16, i), piece("moment.embed", (1000, 64), 0, 16, i),
            piece("w", (64, 96), 1, 16, i), piece("bias", (10,), 0, 16, i), piece("norm", (64,), -1, 1, 0),
        ]  # fmt: skip

    forms = [symbolic_form(rank(i)) for i in range(16)]
    assert len({form.table for form in forms}) == 1
    assert forms[0].table.axes == (1000, 96, 10)
    assert forms[3].cuts == (AxisCut(189, 63), AxisCut(18, 6), AxisCut(3, 1)) and forms[15].cuts[2] == AxisCut(10, 0)
    assert [pattern.axes for pattern in forms[0].table.patterns] == [
        (0, WHOLE), (0, WHOLE), (WHOLE, 1), (2,), (WHOLE,),
    ]  # fmt: skip
    assert all(expand(form) == pack(rank(i)) for i, form in enumerate(forms))
    small = [[leaf.name for leaf in expand(form).leaves] for form in (forms[0], forms[15])]
    assert sorted(small[0]) == sorted(small[1])


def test_the_memory_order_is_preserved():
    by_columns = piece("w", (8, 6), 0, 2, 0)
    by_columns = replace(by_columns, stride=(1, 4))
    other = replace(by_columns, shape=(3, 6), stride=(1, 3), nbytes=72, global_offset=(4, 0))
    forms = [symbolic_form([by_columns]), symbolic_form([other])]
    assert forms[0].table == forms[1].table and forms[0].table.patterns[0].order == (1, 0)
    assert [form.leaves() for form in forms] == [[by_columns], [other]]


def test_leaves_that_are_cut_alike_may_lie_in_another_order():
    by_rows = piece("v", (8, 8), 0, 2, 0)
    leaves = [by_rows, replace(by_rows, name="w", stride=(1, 4)), replace(by_rows, name="x")]
    assert symbolic_form(leaves).leaves() == leaves


def test_equal_cuts_of_rows_and_columns_are_not_the_same_leaf():
    ranks = [[piece("w", (8, 8), dim, 2, 0), piece("norm", (8,), -1, 1, 0)] for dim in (0, 1)]
    digests = [pack(leaves).digest for leaves in ranks]
    division = divide(
        {digest: symbolic_form(leaves) for digest, leaves in zip(digests, ranks, strict=True)}, digests, (), 0
    )
    assert [[leaf.name for leaf in cell.leaves] for cell in division.cells] == [["norm"]]
    assert [division.unreplicated[digest].leaves for digest in digests] == [(ranks[0][0],), (ranks[1][0],)]


@pytest.mark.parametrize(
    "changes", [{"stride": (7, 1)}, {"nbytes": 5}, {"shape": (2,)}, {"global_offset": (0,)}, {"stride": ()}]
)
def test_leaves_without_a_pattern_are_stored_in_full(changes):
    odd = replace(piece("w", (8, 6), 0, 2, 1), **changes)
    form = symbolic_form([odd, piece("v", (8, 6), 0, 2, 1)])
    assert form.table.patterns[0].literal == odd and form.table.patterns[1].literal is None
    assert form.leaves()[0] == odd and form.table.axes == (8,), "a leaf that is written down makes no axes"


MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(
    lambda mesh: len(list(itertools.product(*map(range, mesh)))) <= 16
)
LEAVES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.lists(st.integers(-1, 2), min_size=3, max_size=3),  # the dimension that each dimension of the mesh cuts
        st.sampled_from(["float32", "bfloat16", "int8"]),
        st.integers(0, 7).map(lambda roll: roll == 0),  # staged
        st.integers(0, 4).map(lambda roll: [1, 1, 1, 1, SMALL_BYTES][roll]),  # makes it large
        st.integers(0, 3),  # 0: only ranks whose first coordinate is odd have it
    ),
    max_size=12,
)


def ranks_of(mesh: list[int], rows) -> list[list[Leaf]]:
    """Returns the leaves of each rank. Each mesh dimension cuts the pieces of the previous one."""
    ranks = []
    for place in itertools.product(*map(range, mesh)):
        leaves = []
        for number, (shape, cutting, dtype, staged, large, who) in enumerate(rows):
            if who == 0 and place[0] % 2 == 0:
                continue
            begin, size = [0] * len(shape), list(shape)
            for at, parts, dim in zip(place, mesh, cutting, strict=False):
                if 0 <= dim < len(shape):
                    more, size[dim] = chunk(size[dim], parts, at)
                    begin[dim] += more
            whole, local, offset = (*shape, large), (*size, large), (*begin, 0)
            leaf = piece(f"leaf{number:02}", local, -1, 1, 0, dtype, staged=staged)
            leaves.append(replace(leaf, global_shape=whole, global_offset=offset))
        ranks.append(leaves)
    return ranks


def by_leaves(ranks: list[list[Leaf]], mismatched: set[str]) -> tuple[dict[tuple[int, ...], set[str]], list[set[str]]]:
    """Returns the expected division, by leaves: names by holders, and each rank's own names."""
    plain = [{leaf.name: replace(leaf, staged=False) for leaf in leaves} for leaves in ranks]
    staged = {plain[rank][leaf.name] for rank, leaves in enumerate(ranks) for leaf in leaves if leaf.staged}
    holders = defaultdict(list)
    for rank, leaves in enumerate(plain):
        for leaf in leaves.values():
            holders[leaf].append(rank)
    cells: dict[tuple[int, ...], set[str]] = defaultdict(set)
    own: list[set[str]] = [set() for _ in ranks]
    for leaf, found in holders.items():
        if len(found) > 1 and leaf.nbytes and leaf not in staged and leaf.name not in mismatched:
            cells[tuple(found)].add(leaf.name)
        else:
            for rank in found:
                own[rank].add(leaf.name)
    return cells, own


@settings(deadline=None, max_examples=60)
@given(MESHES, LEAVES, st.sampled_from([0, 100, INLINE_BYTES_MAX]))
def test_the_division_equals_that_of_the_listed_leaves(mesh, rows, inline_bytes_max):
    ranks = ranks_of(mesh, rows)
    mismatched = {"leaf03"}
    layouts = {pack(leaves).digest: symbolic_form(leaves) for leaves in ranks}
    division = divide(layouts, [pack(leaves).digest for leaves in ranks], mismatched, inline_bytes_max)
    cells, own = by_leaves(ranks, mismatched)
    assert {cell.holders: {leaf.name for leaf in cell.leaves} for cell in division.cells} == cells
    for rank, digest in enumerate(division.layout_of):
        kept = division.unreplicated[digest]
        assert {*division.inline_leaves[digest], *(leaf.name for leaf in kept.leaves)} == own[rank]
        assert division.unreplicated_bytes[digest] == kept.payload_bytes
        assert division.section_bytes[digest] == kept.data_bytes
        held = [leaf for index in division.cells_of[digest] for leaf in division.cells[index].leaves]
        assert all(leaf in ranks[rank] for leaf in (*held, *kept.leaves))


@pytest.mark.parametrize(("mesh", "tables"), [([16], 1), ([4, 4], 2), ([2, 2, 4], 2)])
def test_a_mesh_needs_few_tables(mesh, tables):
    """Only ranks on the diagonal of a square mesh need another table: both runs are equal."""
    shapes = [(48, 48), (48, 7), (5,), (33, 4)]
    rows = [(shape, [0, 1, -1], "float32", False, 1, 1) for shape in shapes]
    forms = [symbolic_form(leaves) for leaves in ranks_of(mesh, rows)]
    assert len({form.table for form in forms}) == tables
