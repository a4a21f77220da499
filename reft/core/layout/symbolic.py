"""Symbolic layouts: one table for all ranks whose leaves differ only in the rank's piece.

    rank 5 of 8                      table    axes    A: 64 elements      B: 10 elements
    w  [64, 16]  rows 40…47                   leaves  w [A, 16]   m [A, 16]   b [B]   norm [16]
    m  [64, 16]  rows 40…47          rank 5   cuts    A: 40 + 8           B: 10 + 0
    b  [10]      elements 10…9
    norm [16]    whole

An axis is a dimension of a given length that is cut among ranks. A rank's cuts name the rank's run
of each axis. No mesh and no sharding rule is assumed: two dimensions belong to one axis if they
have the same length and the rank has the same run of both. So one form covers even, uneven, empty
and strided shards, and ranges of flat buffers. The symbolic form always expands to exactly the
rank's leaves. A leaf that no pattern can express is stored in full.

Invariants
  1. expand(of(leaves)) == pack(leaves), for any leaves.
  2. Ranks of one mesh share a table, except the few ranks whose runs of two axes happen to be
     equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reft.core.layout.layout import Layout, Leaf, pack, strides_of

WHOLE = -1  # in place of an axis: the dimension is not cut


class AxisCut(NamedTuple):
    """A rank's run of an axis, in elements."""

    begin: int
    size: int


@dataclass(frozen=True)
class LeafPattern:
    """A leaf without the properties that differ by rank.

    Attributes:
        name: name of the leaf.
        dtype: dtype of the leaf.
        staged: whether forward may mutate the leaf.
        item_bytes: bytes of one element.
        global_shape: shape of the whole tensor.
        axes: for each dimension the index of its axis in the table, or WHOLE.
        order: the dimensions from the outermost in memory to the innermost; empty: in the order of
            the shape.
        literal: the leaf itself, if no pattern can express the leaf; the same for every rank of the
            table. Else None.
        form: form of the leaf.
    """

    name: str
    dtype: str
    staged: bool
    item_bytes: int
    global_shape: tuple[int, ...]
    axes: tuple[int, ...]
    order: tuple[int, ...] = ()
    literal: Leaf | None = None
    form: str = ""

    def placed(self, piece: LocalPiece) -> Leaf:
        """Returns the leaf for one piece."""
        nbytes = piece.elements * self.item_bytes
        return Leaf(
            self.name, self.dtype, piece.shape, piece.stride, nbytes, self.staged, self.global_shape, piece.offset,
            self.form,
        )  # fmt: skip


class LocalPiece(NamedTuple):
    """One rank's piece of a tensor.

    All leaves with the same global shape, axes and order have equal pieces.

    Attributes:
        shape: shape of the piece.
        offset: offset of the piece in the whole tensor.
        stride: strides of the piece, in elements.
        elements: number of elements.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    stride: tuple[int, ...]
    elements: int


def _piece(pattern: LeafPattern, cuts: Sequence[AxisCut]) -> LocalPiece:
    shape, offset = pattern.global_shape, (0,) * len(pattern.global_shape)
    if any(axis != WHOLE for axis in pattern.axes):
        pairs = list(zip(pattern.axes, pattern.global_shape, strict=True))
        shape = tuple(size if axis == WHOLE else cuts[axis].size for axis, size in pairs)
        offset = tuple(0 if axis == WHOLE else cuts[axis].begin for axis, _ in pairs)
    return LocalPiece(shape, offset, strides_of(shape, pattern.order), math.prod(shape))


@dataclass(frozen=True)
class PatternTable:
    """The part of a symbolic layout that many ranks share.

    Attributes:
        patterns: in the order of the rank's leaves.
        axes: length of each axis, in elements.
    """

    patterns: tuple[LeafPattern, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class SymbolicLayout:
    """One layout: a table, and one cut for each axis of the table."""

    table: PatternTable
    cuts: tuple[AxisCut, ...]

    def leaves(self) -> list[Leaf]:
        """Returns all leaves, in the order of the table's patterns."""
        return leaves_of(self.table.patterns, self.cuts)


def leaves_of(patterns: Iterable[LeafPattern], cuts: Sequence[AxisCut]) -> list[Leaf]:
    """Returns the leaves of a rank with these cuts, in the order of the patterns."""
    pieces: dict[object, LocalPiece] = {}  # a cache: thousands of leaves have only a few distinct pieces
    leaves = []
    for pattern in patterns:
        key = pattern.global_shape, pattern.axes, pattern.order
        if pattern.literal is None and key not in pieces:
            pieces[key] = _piece(pattern, cuts)
        leaves.append(pattern.literal or pattern.placed(pieces[key]))
    return leaves


def symbolic_form(leaves: Iterable[Leaf]) -> SymbolicLayout:
    """Returns the symbolic form of a rank's leaves."""
    axes: dict[tuple[int, AxisCut], int] = {}
    patterns = [_pattern(leaf, axes) for leaf in leaves]
    return SymbolicLayout(
        PatternTable(tuple(patterns), tuple(length for length, _ in axes)), tuple(cut for _, cut in axes)
    )


def expand(symbolic: SymbolicLayout) -> Layout:
    """Returns the layout in full.

    Raises:
        ValueError: see `pack`.
    """
    return pack(symbolic.leaves())


def _pattern(leaf: Leaf, axes: dict[tuple[int, AxisCut], int]) -> LeafPattern:
    """Returns the leaf's pattern, and adds new axes to `axes`."""
    dims = len(leaf.global_shape)
    literal = LeafPattern(leaf.name, leaf.dtype, leaf.staged, 0, leaf.global_shape, (), (), leaf)
    if not dims == len(leaf.shape) == len(leaf.stride) == len(leaf.global_offset):
        return literal
    cuts = [
        None if (begin, size) == (0, length) else (length, AxisCut(begin, size))
        for length, begin, size in zip(leaf.global_shape, leaf.global_offset, leaf.shape, strict=True)
    ]
    new = {cut: len(axes) + i for i, cut in enumerate(dict.fromkeys(cut for cut in cuts if cut and cut not in axes))}
    axes_of_dims = tuple(WHOLE if cut is None else new[cut] if cut in new else axes[cut] for cut in cuts)
    count = math.prod(leaf.shape)
    item_bytes = leaf.nbytes // count if count else _item_bytes(leaf.dtype)
    pattern = LeafPattern(
        leaf.name, leaf.dtype, leaf.staged, item_bytes, leaf.global_shape, axes_of_dims, _order(leaf), form=leaf.form
    )
    if pattern.placed(_piece(pattern, [cut for _, cut in (*axes, *new)])) != leaf:
        return literal
    axes.update(new)
    return pattern


def _order(leaf: Leaf) -> tuple[int, ...]:
    """Returns the order of the dimensions in memory, derived from the strides."""
    if strides_of(leaf.shape, ()) == leaf.stride:
        return ()
    return tuple(sorted(range(len(leaf.stride)), key=lambda dim: -leaf.stride[dim]))


def _item_bytes(dtype: str) -> int:
    """Returns the bytes of an element by the name of its dtype.

    For leaves without elements: their size does not tell.
    """
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1
