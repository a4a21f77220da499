"""Boxes: which bytes two pieces of one tensor have in common, when each is cut and laid out in its own way.

    the whole tensor            old piece, rows 2-5            in common: a nest of runs of equal length
    ┌───────────────┐           ┌───────────────┐
    │   │new│       │           │   │▓▓▓│       │ ▓▓▓ one run    old byte = old + Σ index × old_step      index < count,
    │ ──┼───┼── old │           │   │▓▓▓│       │               new byte = new + Σ index × new_step      outermost first
    │   │   │       │           └───────────────┘

Invariants
  1. Runs are numbered in the order of their old bytes and never overlap there, nor in the new piece.
  2. Pieces lie densely in memory, in any order of their dimensions; so nothing here depends on row-major order.
  3. The work to look at one range of a piece is that of the runs within it, however many the piece has.
  4. The work to find which of n pieces touch a box is that of the pieces found, and log n: a job has as many pieces as ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reft.core.layout.layout import Leaf


class ByteRuns(NamedTuple):
    """Runs of bytes: int64 [n] each. Run i is `nbytes[i]` bytes from `old[i]` of the one piece, at `new[i]` of the other."""

    old: NDArray[np.int64]
    new: NDArray[np.int64]
    nbytes: NDArray[np.int64]


class RegionCopy(NamedTuple):
    """What an old piece has of a new one; all numbers in bytes but the counts.

    Attributes:
        old: where the first run begins in the old piece.
        new: where it goes in the new one.
        run: length of every run.
        counts: how many runs along each dimension of the nest, outermost first.
        old_steps: from one run to the next in the old piece, for each dimension, descending.
        new_steps: the same in the new piece.
    """

    old: int
    new: int
    run: int
    counts: tuple[int, ...] = ()
    old_steps: tuple[int, ...] = ()
    new_steps: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of all runs."""
        return self.run * math.prod(self.counts)

    def bytes_within(self, begin: int, end: int) -> int:
        """How many of the bytes begin..end of the old piece are copied."""
        return self._before(end) - self._before(begin)

    def within(self, begin: int, end: int) -> ByteRuns:
        """The runs, cut, that lie in bytes begin..end of the old piece."""
        first = self._below(begin - self.run + 1)
        last = max(first, self._below(end)) if begin < end else first
        numbers = np.unravel_index(np.arange(first, last), self.counts) if self.counts else ()
        old = np.full(last - first, self.old, np.int64)
        new = np.full(last - first, self.new, np.int64)
        for index, old_step, new_step in zip(numbers, self.old_steps, self.new_steps, strict=True):
            old += index * old_step
            new += index * new_step
        front = np.maximum(begin - old, 0)
        nbytes = np.minimum(old + self.run, end) - old - front
        return ByteRuns(old + front, new + front, nbytes)

    def _below(self, limit: int) -> int:
        """How many runs begin before `limit` of the old piece."""
        rest, found, inner = limit - self.old, 0, math.prod(self.counts)
        if rest <= 0:
            return 0
        for count, step in zip(self.counts, self.old_steps, strict=True):
            inner //= count
            index = (rest - 1) // step
            if index >= count:
                return found + count * inner
            found += index * inner
            rest -= index * step
        return found + 1

    def _before(self, limit: int) -> int:
        """How many bytes are copied from before `limit` of the old piece."""
        begun = self._below(limit)
        if not begun:
            return 0
        last = self.old
        rest = begun - 1
        for i, step in enumerate(self.old_steps):
            inner = math.prod(self.counts[i + 1 :])
            last += rest // inner * step
            rest %= inner
        return (begun - 1) * self.run + min(self.run, limit - last)


class RegionIndex:
    """Pieces of one tensor, to be searched by place: along one dimension after the other, by their distinct runs of it.

    A mesh cuts a dimension into runs that are equal or disjoint, so a search looks at nothing in vain. Runs that overlap
    otherwise are found too, after a look at all between the first and the last that touch.

    Args:
        pieces: number → piece; those without elements touch nothing.
        dim: along which this shelf is sorted; shelves of the next dimension stand below it.
    """

    def __init__(self, pieces: Mapping[int, Leaf], dim: int = 0) -> None:
        self._dim = dim
        self._numbers: list[int] = []  # no dimension is left to tell these apart
        below: dict[tuple[int, int], dict[int, Leaf]] = {}
        for number, leaf in pieces.items():
            if not math.prod(leaf.shape):
                continue
            if dim == len(leaf.shape):
                self._numbers.append(number)
            else:
                begin = leaf.global_offset[dim]
                below.setdefault((begin, begin + leaf.shape[dim]), {})[number] = leaf
        runs = sorted(below)
        self._begins = [begin for begin, _ in runs]
        self._ends = [end for _, end in runs]
        self._latest = list(accumulate(self._ends, max))  # ascending, which the ends themselves need not be
        self._below = [RegionIndex(below[run], dim + 1) for run in runs]

    def touching(self, leaf: Leaf) -> list[int]:
        """The numbers of the pieces that have elements in common with a leaf, ascending."""
        return sorted(self._touching(leaf)) if math.prod(leaf.shape) else []

    def _touching(self, leaf: Leaf) -> list[int]:
        if not self._begins:
            return self._numbers
        begin = leaf.global_offset[self._dim]
        end = begin + leaf.shape[self._dim]
        found: list[int] = []
        for i in range(bisect_right(self._latest, begin), bisect_left(self._begins, end)):
            if self._ends[i] > begin:
                found += self._below[i]._touching(leaf)
        return found


def itemsize(leaf: Leaf) -> int:
    """Bytes of an element; 0 if there are none."""
    count = math.prod(leaf.shape)
    return leaf.nbytes // count if count else 0


def overlap(old: Leaf, new: Leaf) -> RegionCopy | None:
    """What an old piece has of a new piece of the same tensor; None if nothing.

    Args:
        old, new: of the same global shape and dtype.
    """
    item = itemsize(old)
    begins = [max(a, b) for a, b in zip(old.global_offset, new.global_offset, strict=True)]
    ends = [min(a, b) for a, b in zip(_ends(old), _ends(new), strict=True)]
    if not item or any(end <= begin for begin, end in zip(begins, ends, strict=True)):
        return None
    dims = sorted(
        (
            (item * old_stride, item * new_stride, end - begin)
            for begin, end, old_stride, new_stride in zip(begins, ends, old.stride, new.stride, strict=True)
            if end - begin > 1
        ),
        reverse=True,
    )
    run = item
    while dims and dims[-1][0] == run and dims[-1][1] == run:
        run *= dims.pop()[2]
    nest: list[tuple[int, int, int]] = []
    for old_step, new_step, count in dims:
        # Two dimensions that follow one another in both pieces are one.
        if nest and nest[-1][0] == old_step * count and nest[-1][1] == new_step * count:
            count *= nest.pop()[2]
        nest.append((old_step, new_step, count))
    return RegionCopy(
        _at(begins, old) * item,
        _at(begins, new) * item,
        run,
        tuple(count for _, _, count in nest),
        tuple(step for step, _, _ in nest),
        tuple(step for _, step, _ in nest),
    )


def _ends(leaf: Leaf) -> list[int]:
    return [begin + size for begin, size in zip(leaf.global_offset, leaf.shape, strict=True)]


def _at(begins: Sequence[int], leaf: Leaf) -> int:
    """The element of the piece that lies at these global indices."""
    return sum(
        (begin - offset) * stride for begin, offset, stride in zip(begins, leaf.global_offset, leaf.stride, strict=True)
    )
