"""Tests which old pieces go to which new leaves, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reft.core.layout.layout import Leaf
from reft.core.recovery.shard_matching import (
    PieceLocation,
    PieceSource,
    TensorPiece,
    UnforeseenLeaves,
    is_same,
    match,
    pieces_of,
    wanted_leaves,
)
from tests.support.instruction_count import instructions
from tests.support.shapes import placement_for


def rows(name: str, begin: int, count: int, whole: int = 8, width: int = 4, dtype: str = "float32") -> Leaf:
    """Returns rows of a matrix."""
    return Leaf(name, dtype, (count, width), (width, 1), 4 * count * width, False, (whole, width), (begin, 0))


def at(leaf: Leaf, *ranks: int) -> TensorPiece:
    return TensorPiece(leaf, tuple(PieceLocation(PieceSource.SLOT, rank, 64) for rank in ranks))


def in_cell(leaf: Leaf) -> TensorPiece:
    return TensorPiece(leaf, (PieceLocation(PieceSource.CELL, 0, 0),))


def test_rows_of_four_ranks_become_rows_of_three():
    pieces = [at(rows("w", 2 * rank, 2), rank) for rank in range(4)]
    wanted = [[rows("w", 0, 3)], [rows("w", 3, 3)], [rows("w", 6, 2)]]
    shard_match = match(pieces, wanted)
    assert not shard_match.problems and not shard_match.own
    assert {(need.name, need.nbytes) for need in shard_match.needs} == {("w", 32)}, (
        "the target, and the old piece's size"
    )
    assert [(need.location.owner, need.receivers, need.copy[:3]) for need in shard_match.needs] == [
        (0, (0,), (0, 0, 32)), (1, (0,), (0, 32, 16)), (1, (1,), (16, 0, 16)), (2, (1,), (0, 16, 32)), (3, (2,), (0, 0, 32)),
    ]  # fmt: skip


def test_replicas_of_a_cell_come_from_the_cell():
    shard_match = match([in_cell(rows("w", 0, 8))], [[rows("w", 0, 8)]] * 3)
    assert [(need.location.where, need.receivers) for need in shard_match.needs] == [(PieceSource.CELL, (0, 1, 2))]


def test_each_rank_takes_its_own_copy_and_a_new_rank_takes_the_lowest():
    shard_match = match([at(rows("w", 0, 8), 2, 1, 4)], [[rows("w", 0, 8)]] * 4)
    assert {need.receivers: need.location.owner for need in shard_match.needs} == {(0, 1, 3): 1, (2,): 2}
    assert shard_match.own == ["w"]


@pytest.mark.parametrize(
    ("pieces", "wanted", "said"),
    [
        ([], [[rows("w", 0, 8)]], "w: the old job held none, the new job has float32 [8, 4]"),
        ([in_cell(rows("w", 0, 8))], [[]], "w: the old job held float32 [8, 4], the new job has none"),
        ([in_cell(rows("w", 0, 4))], [[rows("w", 0, 8)]], "w: 64 of the 128 bytes of float32 [8, 4] were not held"),
        ([in_cell(rows("w", 0, 8))], [[rows("w", 0, 4)]], "w: no new rank wants 64 bytes of the old float32 [8, 4]"),
        ([in_cell(rows("w", 0, 8, dtype="int32"))], [[rows("w", 0, 8)]],
         "w: the old job held int32 [8, 4], the new job has float32 [8, 4]"),
        ([in_cell(rows("w", 0, 9, 9))], [[rows("w", 0, 8)]],
         "w: the old job held float32 [9, 4], the new job has float32 [8, 4]"),
        ([at(rows("w", 0, 5), 0), at(rows("w", 4, 4), 1)], [[rows("w", 0, 8)]], "w: the old job held it in pieces that overlap"),
        ([at(rows("w", 0, 3), 0), at(rows("w", 2, 3), 1)], [[rows("w", 0, 8)]], "w: the old job held it in pieces that overlap"),
    ],
)  # fmt: skip
def test_leaves_that_do_not_fit_are_named(pieces, wanted, said):
    assert match(pieces, wanted).problems == [said]


def test_mismatched_leaves_are_refused_in_another_shape():
    shard_match = match([at(rows("w", 0, 8), 0, 1)], [[rows("w", 0, 8)]], mismatched=["w"])
    assert "different bytes" in shard_match.problems[0]
    assert not match([at(rows("w", 0, 8), 0)], [[rows("w", 0, 8)]], mismatched=["w"]).problems, "only one had it"


def test_the_same_piece_in_other_strides_counts_once():
    turned = replace(rows("w", 0, 8), stride=(1, 8))
    shard_match = match([at(turned, 1), in_cell(rows("w", 0, 8))], [[rows("w", 0, 8)]])
    assert not shard_match.problems and [need.location.where for need in shard_match.needs] == [PieceSource.CELL]


def test_empty_pieces_need_no_bytes_and_leave_none_missing():
    pieces = [at(rows("w", 0, 8), 0)]
    assert not match(pieces, [[rows("w", 0, 8)], [rows("w", 8, 0)]]).problems
    assert not match([], [[rows("w", 8, 0)]]).problems


def test_optimizer_state_that_was_never_made_is_not_wanted():
    leaves = [rows("model.w", 0, 8), rows("optimizer.0.m.model.w", 0, 8)]
    assert wanted_leaves([leaves], [in_cell(leaves[0])]) == [(leaves[0],)]
    assert wanted_leaves([leaves], [in_cell(leaf) for leaf in leaves]) == [tuple(leaves)]


def test_a_new_layer_is_reported():
    """Otherwise the layer would silently train on from random values."""
    leaves, held = [rows("model.w", 0, 8), rows("model.new", 0, 8)], [in_cell(rows("model.w", 0, 8))]
    wanted = wanted_leaves([leaves], held)
    assert wanted == [tuple(leaves)]
    assert match(held, wanted).problems == ["model.new: the old job held none, the new job has float32 [8, 4]"]


def test_another_shape_is_recognised():
    four = [[rows("w", 2 * rank, 2)] for rank in range(4)]
    assert is_same(four, four)
    assert not is_same(four, four[:3])
    assert not is_same(four, [four[1], four[0], *four[2:]]), "ranks that change their places in the mesh"
    assert is_same(four, [[*each, rows("optimizer.0.m.w", 0, 8)] for each in four]), (
        "state that appears is no other shape"
    )
    other = [[rows("w", 3 * rank, 3, 12)] for rank in range(4)]
    assert is_same(four, other), "another model: refused elsewhere, by name"


def grid(rows: int, columns: int) -> list[Leaf]:
    """Returns the blocks of a matrix, one for each rank."""
    whole = (840, 840)
    high, wide = whole[0] // rows, whole[1] // columns
    return [
        Leaf("w", "float32", (high, wide), (wide, 1), 4 * high * wide, False, whole, (i * high, j * wide))
        for i in range(rows) for j in range(columns)
    ]  # fmt: skip


@pytest.mark.parametrize("shapes", [((60, 1), (84, 1)), ((6, 10), (7, 12)), ((1, 60), (1, 84))])
def test_the_work_grows_linearly_with_the_ranks(shapes):
    """Twice the ranks take twice the work: not each piece is compared with each leaf."""

    def work(factor: int) -> int:
        (rows, columns), (more, others) = shapes
        pieces = [at(leaf, rank) for rank, leaf in enumerate(grid(factor * rows, columns))]
        wanted = [[leaf] for leaf in grid(factor * more, others)]
        shard_match = match(pieces, wanted)
        assert not shard_match.problems and len(shard_match.needs) >= len(pieces)
        return instructions(lambda: match(pieces, wanted))

    assert work(2) < 2.4 * work(1)


# Differences from the manifest


def test_leaves_at_other_places_than_foreseen_are_found():
    leaves = [[rows("a", 0, 8), rows("b", 0, 8), rows(f"own{rank}", 0, 8)] for rank in range(2)]
    placement = placement_for(leaves, [0, 0], "none", None, 4096)
    tables = [{leaf.name: leaf for leaf in each} for each in leaves]
    late = rows("late", 0, 8)
    owns = {
        0: UnforeseenLeaves(frozenset({"b"}), ((late, 8192),)),
        1: UnforeseenLeaves(frozenset({"b", "own1"}), ((late, None),)),
    }
    pieces, problems = pieces_of(placement, lambda rank: tables[rank], owns)
    assert not problems
    locations = {piece.leaf.name: [seat[:2] for seat in piece.locations] for piece in pieces}
    assert locations == {
        "a": [(PieceSource.CELL, 0)], "own0": [(PieceSource.SLOT, 0)], "late": [(PieceSource.SLOT, 0), (PieceSource.CAPSULE, 1)],
    }  # fmt: skip


def test_inline_leaves_that_did_not_exist_are_in_no_capsule():
    leaves = [[rows("a", 0, 8), rows(f"own{rank}", 0, 8), rows(f"more{rank}", 0, 8)] for rank in range(2)]
    placement = placement_for(leaves, [0, 1], "none", None, 4096)
    tables = [{leaf.name: leaf for leaf in each} for each in leaves]
    owns = {0: UnforeseenLeaves(frozenset({"own0"})), 1: UnforeseenLeaves()}
    pieces, _ = pieces_of(placement, lambda rank: tables[rank], owns)
    capsules = {piece.leaf.name for piece in pieces if piece.locations[0].where is PieceSource.CAPSULE}
    assert capsules == {"more0", "own1", "more1"}


def test_state_of_a_tensor_without_elements_is_held_and_wanted():
    """Its optimizer's next step expects the empty moment beside the counter."""
    empty = [rows("model.z", 0, 0, whole=0), rows("optimizer.0.m.model.z", 0, 0, whole=0)]
    leaves = [[*empty, rows("model.w", 0, 8), rows("optimizer.0.m.model.w", 4 * rank, 0)] for rank in range(2)]
    placement = placement_for(leaves, [0, 1], "none", None, 4096)
    tables = [{leaf.name: leaf for leaf in each} for each in leaves]
    owns = {0: UnforeseenLeaves(), 1: UnforeseenLeaves()}
    pieces, problems = pieces_of(placement, lambda rank: tables[rank], owns)
    assert not problems and {piece.leaf.name for piece in pieces} == {*(leaf.name for leaf in empty), "model.w"}
    wanted = wanted_leaves([leaves[0]], pieces)
    assert wanted == [tuple(leaves[0][:3])]
    assert not match(pieces, wanted).problems


def test_a_replica_that_some_holders_lack_is_reported():
    leaves = [[rows("a", 0, 8)]] * 2
    placement = placement_for(leaves, [0, 1], "none", None, 4096)
    _, problems = pieces_of(placement, lambda rank: {}, {0: UnforeseenLeaves(frozenset({"a"})), 1: UnforeseenLeaves()})
    assert problems == ["a: some of its ranks did not have it"]
