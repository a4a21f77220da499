"""Runs of flattened pieces, compared with the elements: all pieces of small tensors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from reft.core.layout.flat_ranges import flat_range, split_numbering_axes

WHOLES = [(), (1,), (6,), (2, 3), (3, 1), (1, 3), (4, 1, 2), (2, 3, 2), (1, 2, 3), (2, 1, 3)]


def pieces(whole):
    """Returns (shape, offset) of each non-empty box of a tensor."""
    spans = [[(first, stop) for first in range(n) for stop in range(first + 1, n + 1)] for n in whole]
    for box in itertools.product(*spans):
        yield tuple(stop - first for first, stop in box), tuple(first for first, _ in box)


def elements(whole, piece, offset):
    """Returns the flat indices of a piece's elements in the whole tensor.

    They are in the piece's order.
    """
    grid = np.arange(math.prod(whole)).reshape(whole)
    return grid[tuple(slice(o, o + n) for o, n in zip(offset, piece, strict=True))].reshape(-1).tolist()


@pytest.mark.parametrize("whole", WHOLES)
def test_equal_identities_mean_equal_elements(whole):
    seen = {}
    for piece, offset in pieces(whole):
        own = elements(whole, piece, offset)
        is_run = own == list(range(own[0], own[0] + len(own)))
        for first, stop in itertools.combinations(range(len(own) + 1), 2):
            found = flat_range(piece, whole, offset, first)
            assert (found.tag == "") == is_run
            if is_run:
                assert found.whole == math.prod(whole)
                assert list(range(found.first, found.first + stop - first)) == own[first:stop]
            else:
                assert (found.whole, found.first) == (len(own), first)
            assert seen.setdefault((found, stop - first), own[first:stop]) == own[first:stop]


def test_the_same_elements_have_one_identity_for_any_number_of_ranks():
    """Rows over 1, 2 and 4 tensor-parallel ranks; elements over data-parallel ranks."""
    whole, found = (8, 3), set()
    for tp in (1, 2, 4):
        rows = 8 // tp
        element = {flat_range((rows, 3), whole, (rows * r, 0), i) for r in range(tp) for i in range(rows * 3)}
        found.add(frozenset(element))
    assert found == {frozenset(("", 24, i) for i in range(24))}


def test_runs_of_columns_name_their_piece():
    assert flat_range((4, 3), (4, 6), (0, 3), 1) == ("[of 0:4,3:6]", 12, 1)
    assert flat_range((4, 3), (4, 6), (0, 0), 1) == ("[of 0:4,0:3]", 12, 1)


def test_axes_that_number_tensors_become_part_of_the_name():
    assert split_numbering_axes("experts.w", 2, (4, 8, 6, 2), (1, 3, 3, 0)) == (
        "experts.w[1 of 4][3 of 8]",
        (6, 2),
        (3, 0),
    )
    assert split_numbering_axes("w", 0, (6, 2), (3, 0)) == ("w", (6, 2), (3, 0))
