"""Common bytes of two pieces of one tensor, compared element by element."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from reft.core.layout.layout import Leaf
from reft.core.layout.regions import RegionCopy, RegionIndex, overlap


def leaf(whole, offset, shape, order, item):
    """Returns a piece whose dimensions lie in memory in the given order."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    nbytes = math.prod(shape) * item
    return Leaf("x", "any", tuple(shape), tuple(stride), nbytes, False, tuple(whole), tuple(offset))


def random_piece(rng: random.Random, whole, item):
    offset, shape = [], []
    for length in whole:
        begin = rng.randint(0, length // 2)
        offset.append(begin)
        shape.append(rng.randint((length + begin) // 2, length) - begin)
    return leaf(whole, offset, shape, rng.sample(range(len(whole)), len(whole)), item)


def elements(piece: Leaf, item: int) -> dict[tuple[int, ...], int]:
    """Returns global index of each element → its byte in the piece."""
    return {
        tuple(i + o for i, o in zip(index, piece.global_offset, strict=True)): item
        * sum(i * s for i, s in zip(index, piece.stride, strict=True))
        for index in itertools.product(*(range(n) for n in piece.shape))
    }


@pytest.mark.parametrize("seed", range(8))
def test_every_common_element_is_copied_once_and_no_other(seed):
    rng = random.Random(seed)
    nests = set()
    for _ in range(200):
        item = rng.choice((1, 2, 4, 8, 16))
        whole = [rng.randint(1, 6) for _ in range(rng.choice((0, 1, 2, 3, 3, 4)))]
        old, new = random_piece(rng, whole, item), random_piece(rng, whole, item)
        a, b = elements(old, item), elements(new, item)
        expected = {a[index] + i: b[index] + i for index in a.keys() & b.keys() for i in range(item)}
        copy = overlap(old, new)
        if copy is None:
            assert not expected
            continue
        nests.add(len(copy.counts))
        assert copy.nbytes == len(expected)
        cuts = [0, *sorted(rng.randint(0, old.nbytes) for _ in range(3)), old.nbytes]
        found: dict[int, int] = {}
        for begin, end in itertools.pairwise(cuts):
            runs = copy.within(begin, end)
            assert copy.bytes_within(begin, end) == runs.nbytes.sum()
            for at, to, nbytes in zip(*runs, strict=True):
                assert begin <= at and at + nbytes <= end and nbytes > 0
                for i in range(nbytes):
                    assert found.setdefault(at + i, to + i) == to + i
        assert found == expected
    assert nests >= {0, 1, 2}, "boxes that touch, in nests of several dimensions"


def test_rows_are_one_run_and_columns_as_many_as_rows():
    whole = (1000, 64)
    piece = leaf(whole, (0, 0), whole, (0, 1), 4)
    assert overlap(piece, leaf(whole, (500, 0), (500, 64), (0, 1), 4)) == RegionCopy(500 * 256, 0, 500 * 256)
    columns = overlap(piece, leaf(whole, (0, 32), (1000, 32), (0, 1), 4))
    assert columns == RegionCopy(128, 0, 128, (1000,), (256,), (128,))


@pytest.mark.parametrize(
    "sizes, counts, steps",
    [
        ((6, 6), (24,), ((8,), (8,))),
        ((6, 3), (4, 3), ((48, 8), (24, 8))),
        ((3, 6), (4, 3), ((24, 8), (48, 8))),
    ],
)
def test_dimensions_merge_only_if_contiguous_in_both_pieces(sizes, counts, steps):
    """Columns 4 to 8 of both pieces. `sizes` has the rows of a plane of each piece."""
    whole = (4, 6, 12)
    old, new = (leaf(whole, (0, 0, at), (4, rows, 8), (0, 1, 2), 1) for rows, at in zip(sizes, (0, 4), strict=True))
    assert overlap(old, new) == RegionCopy(4, 0, 4, counts, *steps)


def test_the_work_for_a_range_grows_only_with_its_runs():
    """Of a billion runs, only a few are visited."""
    whole = (1 << 15, 1 << 15, 2)
    copy = overlap(leaf(whole, (0, 0, 0), whole, (0, 1, 2), 4), leaf(whole, (0, 0, 1), (*whole[:2], 1), (0, 1, 2), 4))
    assert copy is not None and math.prod(copy.counts) == 1 << 30
    runs = copy.within(1 << 30, (1 << 30) + 64)
    assert runs.old.tolist() == [(1 << 30) + 4 + 8 * i for i in range(8)]
    assert np.array_equal(runs.new * 2 + 4, runs.old)
    assert copy.bytes_within(0, 1 << 33) == copy.nbytes == 1 << 32


@pytest.mark.parametrize("seed", range(4))
def test_the_index_finds_exactly_the_overlapping_pieces(seed):
    """Pieces that overlap in any way, also empty pieces and scalars."""
    rng = random.Random(seed)
    for _ in range(100):
        whole = [rng.randint(1, 6) for _ in range(rng.choice((0, 1, 2, 2, 3)))]
        pieces = [random_piece(rng, whole, 4) for _ in range(rng.randint(0, 12))]
        wanted = random_piece(rng, whole, 4)
        touching = [i for i, piece in enumerate(pieces) if overlap(piece, wanted)]
        assert RegionIndex(dict(enumerate(pieces))).overlapping(wanted) == touching
    empty = leaf((6,), (6,), (0,), (0,), 4)
    assert RegionIndex({0: empty}).overlapping(leaf((6,), (0,), (6,), (0,), 4)) == []
    assert RegionIndex({0: leaf((6,), (0,), (6,), (0,), 4)}).overlapping(empty) == []
