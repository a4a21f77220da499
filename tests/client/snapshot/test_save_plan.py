"""Save plans, without an engine: every byte of the slot once, and sizes as the formula says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.client.snapshot.save_plan import UNIT, ParityTiling, SavePlan, plan_save
from reft.client.state.tensors import TensorIndex
from reft.core.coding.placement import Placement, place
from reft.core.layout.cells import INLINE_BYTES_MAX, divide
from reft.core.layout.layout import ALIGNMENT, Leaf, align, pack
from reft.errors import ConfigError
from reft.wire.messages import places_from, table_from
from reft.wire.v1 import daemon_pb2 as pb

CHUNK = 4096


def leaf(name: str, nbytes: int, staged: bool = False) -> Leaf:
    return Leaf(name, "uint8", (nbytes,), (1,), nbytes, staged, (nbytes,), (0,))


def placed(leaves: list[Leaf], D: int, f: int, each: int = 1, scheme: str = "aec", mismatched=()) -> Placement:
    layout = pack(leaves)
    division = divide({layout.digest: layout}, [layout.digest] * (D * each), mismatched)
    return place(division, [rank // each for rank in range(D * each)], scheme, f, CHUNK)


def save_plan(placement: Placement, rank: int, leaves: list[Leaf], tiling: ParityTiling | None = None) -> SavePlan:
    return plan_save(placement, rank, leaves, {}, tiling or ParityTiling())


LEAVES = [leaf("a", 5), leaf("b", 70000), leaf("c", 300000), leaf("d", 64), leaf("s", 40, staged=True)]


def cover(plan: SavePlan) -> np.ndarray:
    """Returns how often each byte of the slot's data is written."""
    times = np.zeros(plan.data_bytes, int)
    for run in plan.runs:
        times[run.at : run.at + run.nbytes] += 1
    for offset, nbytes in plan.zeros:
        times[offset : offset + nbytes] += 1
    for column in plan.columns:
        for offset in column.outputs:
            times[offset : offset + column.nbytes] += 1
    return times


SIZES = st.lists(st.integers(0, 200_000), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    SIZES, st.integers(1, 6), st.integers(1, 2), st.integers(0, 3), st.sampled_from(["aec", "arc", "none"]), st.data()
)
def test_every_byte_of_the_slot_is_written_once(sizes, D, each, f, scheme, data):
    leaves = [leaf(f"leaf{i}", size, staged=i == 3) for i, size in enumerate(sizes)]
    rank = data.draw(st.integers(0, D * each - 1))
    existing = [each for each in leaves if data.draw(st.booleans())] + [leaf("extra", 5000)]
    plan = save_plan(placed(leaves, D, f, each, scheme), rank, existing, ParityTiling(2048, 4096, 1 << 20))
    assert (cover(plan) == 1).all()
    assert set(plan.absent) == {each.name for each in leaves} - {each.name for each in existing}
    assert sum(nbytes for _, nbytes in plan.zeros) + plan.written_bytes == plan.data_bytes


@pytest.mark.parametrize(("D", "f"), [(2, 1), (3, 1), (4, 2), (5, 2), (6, 3)])
def test_a_rank_writes_as_many_bytes_as_the_formula_says(D, f):
    """|P| (k + f) / (D k): no code that survives f lost ranks writes less."""
    nbytes = D * (D - f) * 4096 * 120  # no padding, whatever the number of packets
    leaves = [leaf("w", nbytes)]
    placement = placed(leaves, D, f)
    k = placement.lanes[0].code.k
    assert k == D - f
    for rank in range(D):
        plan = save_plan(placement, rank, leaves)
        assert plan.written_bytes == plan.data_bytes == nbytes * (k + f) // (D * k)


def test_a_single_process_stores_each_leaf_as_one_run():
    plan = save_plan(placed(LEAVES, 1, 0), 0, LEAVES)
    assert not plan.columns and not plan.parity_chunks and plan.unplanned == plan.absent == ()
    assert sorted(plan.leaves[run.leaf].name for run in plan.runs) == ["b", "c"]
    assert [run.begin for run in plan.runs] == [0, 0]
    assert sorted(plan.leaves[i].name for i in plan.inline_leaves) == ["a", "d", "s"]
    assert plan.written_bytes == 370000


@pytest.mark.parametrize("D", [1, 3])
def test_the_table_says_where_each_leaf_lies(D):
    leaves = [*LEAVES, leaf("u", 100_000)]
    placement = placed(leaves, D, D - 1, mismatched=["u"])
    plan = save_plan(placement, 1 % D, [*leaves[1:], leaf("new", 9)])
    table = table_from(plan.table)
    shared = pb.UNREPLICATED if D == 1 else pb.CELL
    places = {
        "b": shared,
        "c": shared,
        "d": pb.INLINE if D == 1 else pb.CELL,
        "s": pb.INLINE,
        "u": pb.UNREPLICATED,
        "new": pb.UNREPLICATED,
    }
    assert places_from(plan.table) == places
    assert {each.name for each in table.leaves} == set(places) and table.data_bytes == plan.data_bytes
    for each, offset in zip(table.leaves, table.offsets, strict=True):
        if places[each.name] == pb.UNREPLICATED:
            assert any(run == (plan.leaves.index(each), 0, each.nbytes, offset) for run in plan.runs)


def test_columns_keep_to_the_tiling():
    placement = placed([leaf("w", 1 << 20)], 4, 2)
    for tiling in (ParityTiling(), ParityTiling(4096, 8192, 1 << 20), ParityTiling(256, 64, 1 << 20)):
        columns = save_plan(placement, 0, [leaf("w", 1 << 20)], tiling).columns
        assert max(column.nbytes for column in columns) <= tiling.register
        assert max(column.nbytes * column.rows for column in columns) <= tiling.scratch


def test_columns_are_narrow_where_many_small_leaves_lie():
    leaves = [leaf(f"leaf{i}", 100) for i in range(3_000)]
    placement = placed(leaves, 4, 2)
    plan = save_plan(placement, 0, leaves, ParityTiling(1 << 20, 1 << 20, 64 << 10))
    assert max(column.nbytes * column.rows for column in plan.columns) <= 64 << 10
    assert (cover(plan) == 1).all()


def test_too_little_scratch_memory_is_an_error_with_numbers():
    leaves = [leaf(f"leaf{i}", 100) for i in range(200)]
    with pytest.raises(
        ConfigError, match=r"(?s)a column of \d+ registers needs \d+ bytes of scratch memory; the limit is 100.*Fix"
    ):
        save_plan(placed(leaves, 4, 2), 0, leaves, ParityTiling(4096, 4096, 100))


def test_columns_begin_at_cache_lines():
    for column in save_plan(
        placed([leaf("w", 3 << 20)], 3, 1), 1, [leaf("w", 3 << 20)], ParityTiling(100_000, 200_000)
    ).columns[:-1]:
        assert column.nbytes % UNIT == 0


# What a save plan depends on


def test_the_digest_depends_on_where_bytes_lie():
    placement = placed(LEAVES, 4, 1)
    first = save_plan(placement, 0, LEAVES)
    assert first.digest == save_plan(placement, 0, LEAVES[::-1]).digest, "the order of discovery says nothing"
    others = [
        save_plan(placement, 1, LEAVES), save_plan(placement, 0, LEAVES[1:]), save_plan(placed(LEAVES, 4, 2), 0, LEAVES),
        save_plan(placed(LEAVES, 4, 1, scheme="arc"), 0, LEAVES), save_plan(placement, 0, [*LEAVES, leaf("new", 1)]),
    ]  # fmt: skip
    assert len({first.digest, *(other.digest for other in others)}) == len(others) + 1
    assert first.table == others[0].table, "it is not the table alone"


def test_a_leaf_of_another_kind_than_predicted_is_unplanned_and_its_cell_has_zeros():
    placement = placed(LEAVES, 3, 1)
    plan = save_plan(placement, 0, [*LEAVES[:2], leaf("c", 4000), *LEAVES[3:]])
    assert plan.unplanned == ("c",) and plan.absent == () and (cover(plan) == 1).all()
    staged = save_plan(placement, 0, [*LEAVES[:2], leaf("c", 300000, staged=True), *LEAVES[3:]])
    assert staged.unplanned == ("c",), "forward mutates it, so no rank may code it for another"


def test_inline_leaves_larger_than_predicted_are_unplanned():
    small = [leaf(f"r{i}", 10, staged=True) for i in range(3)]
    placement = placed(small, 2, 1)
    plan = save_plan(
        placement, 0, [leaf("r0", INLINE_BYTES_MAX + 1, True), leaf("r1", INLINE_BYTES_MAX - 10, True), small[2]]
    )
    assert [plan.leaves[i].name for i in plan.inline_leaves] == ["r1", "r2"] and plan.unplanned == ("r0",)


def test_the_same_leaves_in_other_memory_reuse_the_save_plan():
    tensors = {"w": torch.zeros(100_000), "b": torch.zeros(5)}
    leaves = TensorIndex(tensors, set()).layout().leaves
    placement = placed(list(leaves), 3, 1)
    expected = plan_save(placement, 0, leaves, {}, ParityTiling())
    moved = expected.with_tensors(leaves[::-1], tensors)
    assert moved is not None and moved.columns is expected.columns and moved.tensors is tensors
    assert expected.with_tensors(leaves[:1], tensors) is None


@pytest.mark.parametrize("slots", [3, 4])
def test_an_unplanned_leaf_has_a_chunk_of_its_own_behind_exchanged_leaves(slots):
    leaves = [*LEAVES, leaf("u", 100_001)]
    placement = replace(placed(leaves, 3, 1, mismatched=["u"]), slots=slots)
    plan = save_plan(placement, 1, [*leaves, leaf("new", 9)])
    (begin,) = (run.at for run in plan.runs if plan.leaves[run.leaf].name == "new")
    end = placement.rank_placement(1).data_bytes
    assert begin == align(end, CHUNK if slots == 4 else ALIGNMENT) > end - ALIGNMENT and (cover(plan) == 1).all()
