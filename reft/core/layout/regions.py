"""Regions: the bytes that two pieces of one tensor have in common.

Each piece has its own cut and its own memory order.

    the whole tensor       old piece, rows 2-5  in common: nested loops over runs of equal length
    ┌───────────────┐      ┌───────────────┐
    │   │new│       │      │   │▓▓▓│       │    ▓▓▓ = one run
    │ ──┼───┼── old │      │   │▓▓▓│       │    old byte = old + Σ index × old_step, index < count,
    │   │   │       │      └───────────────┘    new byte = new + Σ index × new_step, outermost first

Invariants
  1. Runs are numbered in the order of their old bytes. They overlap neither in the old piece nor in
     the new one.
  2. Pieces are dense in memory, in any order of their dimensions. Nothing here depends on row-major
     order.
  3. The work for one byte range of a piece grows with the runs in this range, not with all runs of
     the piece.
  4. The work to find the pieces, out of n, that overlap a box grows with the pieces found and with
     log n. A job has as many pieces as ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reft.core.layout.layout import Leaf

LONG_BYTES = 2048  # from this length on, one copy is cheaper than an index
UNIT_MAX = 8  # bytes


class ByteRuns(NamedTuple):
    """Runs of bytes, as three arrays int64 [n].

    Run i has `nbytes[i]` bytes: from `old[i]` in the old piece, at `new[i]` in the new piece.
    """

    old: NDArray[np.int64]
    new: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def rows(self) -> list[tuple[int, int, int]]:
        """Returns (old, new, nbytes) of each run."""
        return list(zip(self.old.tolist(), self.new.tolist(), self.nbytes.tolist(), strict=True))


class RegionCopy(NamedTuple):
    """The bytes of a new piece that an old piece contains.

    They are nested loops over runs. All numbers but `counts` are in bytes.

    Attributes:
        old: begin of the first run in the old piece.
        new: begin of the first run in the new piece.
        run: length of every run.
        counts: number of runs along each loop, outermost first.
        old_steps: distance of consecutive runs in the old piece, for each loop, descending.
        new_steps: the same distance in the new piece.
    """

    old: int
    new: int
    run: int
    counts: tuple[int, ...] = ()
    old_steps: tuple[int, ...] = ()
    new_steps: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of all runs together, in bytes."""
        return self.run * math.prod(self.counts)

    def bytes_within(self, begin: int, end: int) -> int:
        """Returns how many of the bytes begin..end of the old piece are in runs."""
        return self._before(end) - self._before(begin)

    def within(self, begin: int, end: int) -> ByteRuns:
        """Returns the runs in bytes begin..end of the old piece, clipped to this range."""
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
        """Returns how many runs begin before byte `limit` of the old piece."""
        rest, runs, inner = limit - self.old, 0, math.prod(self.counts)
        if rest <= 0:
            return 0
        for count, step in zip(self.counts, self.old_steps, strict=True):
            inner //= count
            index = (rest - 1) // step
            if index >= count:
                return runs + count * inner
            runs += index * inner
            rest -= index * step
        return runs + 1

    def _before(self, limit: int) -> int:
        """Returns how many bytes before byte `limit` of the old piece are in runs."""
        runs = self._below(limit)
        if not runs:
            return 0
        last = self.old  # where the last of these runs begins
        rest = runs - 1
        for i, step in enumerate(self.old_steps):
            inner = math.prod(self.counts[i + 1 :])
            last += rest // inner * step
            rest %= inner
        return (runs - 1) * self.run + min(self.run, limit - last)


class RegionIndex:
    """Finds the pieces of one tensor that overlap a box.

    A tree with one level for each dimension. A level is sorted by the distinct runs of its
    dimension. A mesh cuts a dimension into runs that are equal or disjoint, so a search visits only
    pieces that overlap. Runs that overlap partly are found, too; then a search visits all runs
    between the first and the last that overlap.

    Args:
        pieces: number → piece. Pieces without elements are never found.
        dim: the dimension of this level.
    """

    def __init__(self, pieces: Mapping[int, Leaf], dim: int = 0) -> None:
        self._dim = dim
        self._numbers: list[int] = []  # below the last dimension: pieces with the same box
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
        self._latest = list(accumulate(self._ends, max))  # running maximum: sorted, even if the ends are not
        self._below = [RegionIndex(below[run], dim + 1) for run in runs]

    def overlapping(self, leaf: Leaf) -> list[int]:
        """Returns the numbers of the pieces that share elements with a leaf, ascending."""
        return sorted(self._touching(leaf)) if math.prod(leaf.shape) else []

    def _touching(self, leaf: Leaf) -> list[int]:
        if not self._begins:
            return self._numbers
        begin = leaf.global_offset[self._dim]
        end = begin + leaf.shape[self._dim]
        numbers: list[int] = []
        for i in range(bisect_right(self._latest, begin), bisect_left(self._begins, end)):
            if self._ends[i] > begin:
                numbers += self._below[i]._touching(leaf)
        return numbers


def itemsize(leaf: Leaf) -> int:
    """Returns the bytes of one element; 0 for a leaf without elements."""
    count = math.prod(leaf.shape)
    return leaf.nbytes // count if count else 0


def overlap(old: Leaf, new: Leaf) -> RegionCopy | None:
    """Returns the bytes that two pieces of one tensor have in common; None if none.

    Args:
        old: the piece to copy from.
        new: the piece to copy to. Its global shape and dtype are those of `old`.
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
        # Two loops that continue each other in both pieces become one loop.
        if nest and nest[-1][0] == old_step * count and nest[-1][1] == new_step * count:
            count *= nest.pop()[2]
        nest.append((old_step, new_step, count))
    return RegionCopy(
        _element_index(begins, old) * item,
        _element_index(begins, new) * item,
        run,
        tuple(count for _, _, count in nest),
        tuple(step for step, _, _ in nest),
        tuple(step for _, step, _ in nest),
    )


def _ends(leaf: Leaf) -> list[int]:
    return [begin + size for begin, size in zip(leaf.global_offset, leaf.shape, strict=True)]


def _element_index(begins: Sequence[int], leaf: Leaf) -> int:
    """Returns the position in the piece's memory of the element at these global indices."""
    return sum(
        (begin - offset) * stride for begin, offset, stride in zip(begins, leaf.global_offset, leaf.stride, strict=True)
    )


def equal_runs(nbytes: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Returns (first, last, length) of runs of equal length.

    Few groups result: only the first and the last run of a range may be cut.
    """
    if not len(nbytes):
        return []
    borders = [0, *(np.flatnonzero(np.diff(nbytes)) + 1).tolist(), len(nbytes)]
    return [(a, b, int(nbytes[a])) for a, b in pairwise(borders)]


def copy_runs(source: NDArray[np.uint8], target: NDArray[np.uint8], runs: ByteRuns) -> None:
    """Copies runs of one array into another.

    Long runs are copied one by one, short runs of one length with one index.
    """
    for first, last, run in equal_runs(runs.nbytes):
        olds, news = runs.old[first:last], runs.new[first:last]
        if run >= LONG_BYTES or last - first == 1:
            for old, new in zip(olds.tolist(), news.tolist(), strict=True):
                target[new : new + run] = source[old : old + run]
            continue
        bits = run | int(np.bitwise_or.reduce(olds)) | int(np.bitwise_or.reduce(news))
        unit = min(bits & -bits, UNIT_MAX)
        steps = np.arange(run // unit)
        target_units, source_units = (each[: each.nbytes // unit * unit].view(f"<u{unit}") for each in (target, source))
        target_units[news[:, None] // unit + steps] = source_units[olds[:, None] // unit + steps]
