"""Symbolic layouts: one table for all ranks whose leaves differ only in which piece of each whole they hold.

    rank 5 of 8     w  [64, 16] rows 40…47      table   axes    A: 64 elements      B: 10 elements
                    m  [64, 16] rows 40…47              leaves  w [A, 16]   m [A, 16]   b [B]   norm [16]
                    b  [10]     elements 10…9    rank 5  cuts    A: 40 + 8           B: 10 + 0
                    norm [16]   whole

An axis is a way in which a dimension of so many elements is cut among the ranks; a rank's cuts say which run of each axis
is its own. Nothing is guessed of meshes or of rules of sharding: a rank calls two dimensions one axis if they are equally
long and it has the same run of both. So even and uneven shards, empty ones, strided ones and ranges of flat buffers are
all written alike, and what a rank wrote always expands to exactly what it has: a leaf for which that is not so is written
down in full.

Invariants
  1. expand(of(leaves)) == pack(leaves), for any leaves.
  2. Ranks of one mesh share a table, but for the few whose runs of two axes happen to be the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reft.core.layout.layout import Layout, Leaf, pack, strides_of

WHOLE = -1  # instead of an axis: the dimension is not cut


class AxisCut(NamedTuple):
    """A rank's run of an axis, in elements."""

    begin: int
    size: int


@dataclass(frozen=True)
class LeafPattern:
    """A leaf without what differs by rank.

    Attributes:
        name: of the leaf.
        dtype: of the leaf.
        staged: of the leaf.
        item_bytes: size of an element.
        global_shape: of the leaf.
        axes: for each dimension the index of its axis in the table, or WHOLE.
        order: the dimensions from the outermost in memory to the innermost; empty means as they stand.
        literal: the leaf itself, if no pattern gives it; then it is the same for every rank of the table.
    """

    name: str
    dtype: str
    staged: bool
    item_bytes: int
    global_shape: tuple[int, ...]
    axes: tuple[int, ...]
    order: tuple[int, ...] = ()
    literal: Leaf | None = None

    def placed(self, place: LocalPiece) -> Leaf:
        """The leaf at a place of its kind."""
        nbytes = place.elements * self.item_bytes
        return Leaf(
            self.name, self.dtype, place.shape, place.stride, nbytes, self.staged, self.global_shape, place.offset
        )


class LocalPiece(NamedTuple):
    """Shape, offset, strides and number of elements of a rank's piece: the same for all leaves that are cut alike."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    stride: tuple[int, ...]
    elements: int


def _place(pattern: LeafPattern, cuts: Sequence[AxisCut]) -> LocalPiece:
    shape, offset = pattern.global_shape, (0,) * len(pattern.global_shape)
    if any(axis != WHOLE for axis in pattern.axes):
        pairs = list(zip(pattern.axes, pattern.global_shape, strict=True))
        shape = tuple(size if axis == WHOLE else cuts[axis].size for axis, size in pairs)
        offset = tuple(0 if axis == WHOLE else cuts[axis].begin for axis, _ in pairs)
    return LocalPiece(shape, offset, strides_of(shape, pattern.order), math.prod(shape))


@dataclass(frozen=True)
class PatternTable:
    """What ranks share.

    Attributes:
        patterns: in the order in which the leaves were found.
        axes: length of each axis, in elements.
    """

    patterns: tuple[LeafPattern, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class SymbolicLayout:
    """One layout: a table, and a cut for each of its axes."""

    table: PatternTable
    cuts: tuple[AxisCut, ...]

    def leaves(self) -> list[Leaf]:
        """All leaves, in the order in which they were found."""
        return leaves_of(self.table.patterns, self.cuts)


def leaves_of(patterns: Iterable[LeafPattern], cuts: Sequence[AxisCut]) -> list[Leaf]:
    """The leaves of a rank that has these cuts, in the order of their patterns."""
    places: dict[object, LocalPiece] = {}  # a model has thousands of leaves, and few ways in which they are cut
    found = []
    for pattern in patterns:
        key = pattern.global_shape, pattern.axes, pattern.order
        if pattern.literal is None and key not in places:
            places[key] = _place(pattern, cuts)
        found.append(pattern.literal or pattern.placed(places[key]))
    return found


def of(leaves: Iterable[Leaf]) -> SymbolicLayout:
    """The symbolic form of a rank's leaves."""
    axes: dict[tuple[int, AxisCut], int] = {}
    patterns = [_pattern(leaf, axes) for leaf in leaves]
    return SymbolicLayout(
        PatternTable(tuple(patterns), tuple(length for length, _ in axes)), tuple(cut for _, cut in axes)
    )


def expand(symbolic: SymbolicLayout) -> Layout:
    """The layout itself.

    Raises:
        ValueError: see `pack`.
    """
    return pack(symbolic.leaves())


def _pattern(leaf: Leaf, axes: dict[tuple[int, AxisCut], int]) -> LeafPattern:
    """The leaf's pattern; axes that are new are added."""
    dims = len(leaf.global_shape)
    literal = LeafPattern(leaf.name, leaf.dtype, leaf.staged, 0, leaf.global_shape, (), (), leaf)
    if not dims == len(leaf.shape) == len(leaf.stride) == len(leaf.global_offset):
        return literal
    cuts = [
        None if (begin, size) == (0, length) else (length, AxisCut(begin, size))
        for length, begin, size in zip(leaf.global_shape, leaf.global_offset, leaf.shape, strict=True)
    ]
    new = {cut: len(axes) + i for i, cut in enumerate(dict.fromkeys(cut for cut in cuts if cut and cut not in axes))}
    number = tuple(WHOLE if cut is None else new[cut] if cut in new else axes[cut] for cut in cuts)
    count = math.prod(leaf.shape)
    item_bytes = leaf.nbytes // count if count else _item_bytes(leaf.dtype)
    found = LeafPattern(leaf.name, leaf.dtype, leaf.staged, item_bytes, leaf.global_shape, number, _order(leaf))
    if found.placed(_place(found, [cut for _, cut in (*axes, *new)])) != leaf:
        return literal
    axes.update(new)
    return found


def _order(leaf: Leaf) -> tuple[int, ...]:
    """The order of the dimensions in memory, as far as the strides tell."""
    if strides_of(leaf.shape, ()) == leaf.stride:
        return ()
    return tuple(sorted(range(len(leaf.stride)), key=lambda dim: -leaf.stride[dim]))


def _item_bytes(dtype: str) -> int:
    """Size of an element by its dtype's name: of a leaf without elements, whose bytes do not tell."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1
