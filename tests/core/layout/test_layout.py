"""Offsets of leaves in a slot, digests of layouts, and the text of differences."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.core.layout import layout
from reft.core.layout.layout import ALIGNMENT, SMALL_BYTES, Leaf, align, differences, pack, plain_strides, strides_of


def leaf(name: str = "w", **changes: object) -> Leaf:
    facts: dict = {
        "dtype": "float32", "shape": (4, 8), "stride": (8, 1), "nbytes": 128, "staged": False, "global_shape": (4, 8),
        "global_offset": (0, 0),
    }  # fmt: skip
    return Leaf(name, **{**facts, **changes})


SIZES = st.one_of(st.integers(0, 300), st.integers(SMALL_BYTES - 2, SMALL_BYTES + 2), st.integers(0, 1 << 40))
LEAVES = st.lists(st.tuples(SIZES, st.booleans()), max_size=40).map(
    lambda rows: [leaf(f"leaf{i}", nbytes=size, staged=staged) for i, (size, staged) in enumerate(rows)]
)


def run_of(each: Leaf) -> int:
    """Returns the group: 0 staged, 1 small, 2 large. Small staged leaves precede large ones."""
    return (0 if each.staged else 2) + (each.nbytes >= SMALL_BYTES)


@given(LEAVES)
def test_leaves_are_aligned_disjoint_and_in_their_runs(leaves):
    packed = pack(leaves)
    assert sorted(each.name for each in packed.leaves) == sorted(each.name for each in leaves)
    end = 0
    for each, offset in zip(packed.leaves, packed.offsets, strict=True):
        assert offset % ALIGNMENT == 0
        assert end <= offset < end + ALIGNMENT
        end = offset + each.nbytes
    assert end <= packed.data_bytes < end + ALIGNMENT and packed.data_bytes % ALIGNMENT == 0
    runs = [run_of(each) for each in packed.leaves]
    assert runs == sorted(runs)
    assert packed.payload_bytes == sum(each.nbytes for each in leaves)


@given(LEAVES)
def test_the_same_leaves_get_the_same_layout(leaves):
    assert pack(leaves) == pack(iter(leaves))
    assert pack(leaves).digest == pack(leaves).digest


def test_within_a_run_the_order_is_the_callers():
    names = [f"leaf{i}" for i in range(50)]
    random.Random(1).shuffle(names)
    assert [each.name for each in pack([leaf(name) for name in names]).leaves] == names


def test_nothing_packs_to_nothing():
    assert pack([]).data_bytes == 0 and len(pack([]).digest) == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "v"}, {"dtype": "int32"}, {"shape": (8, 4)}, {"stride": (1, 4)}, {"nbytes": 127}, {"staged": True},
        {"global_shape": (8, 8)}, {"global_offset": (4, 0)},
    ],
)  # fmt: skip
def test_the_digest_differs_when_anything_differs(changes):
    assert len(changes) == 1
    assert pack([leaf()]).digest != pack([dataclasses.replace(leaf(), **changes)]).digest


def test_every_field_of_a_leaf_but_its_form_is_in_the_digest():
    assert [field.name for field in dataclasses.fields(Leaf)] == [
        "name", "dtype", "shape", "stride", "nbytes", "staged", "global_shape", "global_offset", "form",
    ]  # fmt: skip
    other = dataclasses.replace(leaf(), form="other")
    assert other == leaf() and pack([other]).digest == pack([leaf()]).digest, "a form says nothing of the bytes"


def test_the_digest_depends_on_order_and_names_can_not_forge_it():
    a, b = leaf("a"), leaf("b")
    assert pack([a, b]).digest != pack([b, a]).digest
    crafted = leaf(f"a', 0)\n({b!r}, 128")
    assert pack([crafted]).digest != pack([a, b]).digest


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match="same name"):
        pack([leaf("a"), leaf("b"), leaf("a", nbytes=4)])


def test_too_many_leaves_are_refused(monkeypatch):
    monkeypatch.setattr(layout, "LEAVES_MAX", 3)
    assert len(pack([leaf(str(i)) for i in range(3)]).leaves) == 3
    with pytest.raises(ValueError, match="4 leaves; the limit is 3"):
        pack([leaf(str(i)) for i in range(4)])


@given(st.integers(0, 1 << 62), st.sampled_from([1, 64, 4096]))
def test_align(offset, to):
    assert align(offset, to) % to == 0 and 0 <= align(offset, to) - offset < to


def test_differences_name_each_leaf_and_both_kinds():
    held = [leaf("gone"), leaf("same"), leaf("other")]
    live = [leaf("new", dtype="bfloat16"), leaf("same"), leaf("other", shape=(8, 8), global_shape=(8, 8))]
    assert differences(held, live) == [
        "gone: held float32 [4, 8], not in the model",
        "new: not held, bfloat16 [4, 8] in the model",
        "other: held float32 [4, 8], float32 [8, 8] in the model",
    ]
    assert differences(held, list(reversed(held))) == []


def test_bytes_in_another_order_are_a_difference():
    """The shape is the same, but a restore would write the bytes into other elements."""
    assert differences([leaf()], [leaf(stride=(1, 4))]) == [
        "w: held float32 [4, 8], float32 [4, 8] strides [1, 4] in the model"
    ]
    # The stride of a dimension of size 1 has no effect on the position of an element.
    one = {"shape": (4, 1), "global_shape": (4, 1)}
    assert differences([leaf(stride=(1, 1), **one)], [leaf(stride=(1, 4), **one)]) == []


def test_another_piece_of_the_tensor_is_a_difference():
    first = leaf(global_shape=(8, 8))
    second = leaf(global_shape=(8, 8), global_offset=(4, 0))
    assert differences([first], [second]) == [
        "w: held float32 [4, 8] at [0, 0] of [8, 8], float32 [4, 8] at [4, 0] of [8, 8] in the model"
    ]


def test_long_lists_of_differences_are_cut_and_counted():
    held = [leaf(f"leaf{i:02}") for i in range(11)]
    lines = differences(held, [])
    assert len(lines) == 9 and lines[-1] == "and 3 more" and lines[0].startswith("leaf00")
    assert len(differences(held[:8], [])) == 8


@given(st.lists(st.integers(0, 3), max_size=4), st.randoms(use_true_random=False))
def test_strides_of_the_same_order_have_one_normal_form(shape, rng):
    order = rng.sample(range(len(shape)), len(shape))
    dense = strides_of(shape, order)
    wild = tuple(rng.randrange(99) if size == 1 else stride for size, stride in zip(shape, dense, strict=True))
    plain = plain_strides(shape, wild)
    assert plain == plain_strides(shape, dense) == plain_strides(shape, plain)
    if all(shape):
        assert all(a == b for a, b, size in zip(plain, dense, shape, strict=True) if size > 1)
    assert plain_strides(shape, strides_of(shape)) == strides_of(shape), "contiguous tensors are written as they are"
