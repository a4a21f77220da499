"""Runs of flattened tensors: what an optimizer that shares a buffer's elements out evenly holds of each parameter.

    w (4 × 3), rank 1 of 2 has rows 2–3     piece: shape (2, 3) at (2, 0)     flattened: elements 6–11 of 12, one run
    its elements 1–3, flattened             run 7–9 of 12: the same whatever number of ranks holds w

    v (4 × 6), rank 1 of 2 has columns 3–5  piece: shape (4, 3) at (0, 3)     flattened: four runs
    its elements 1–3, flattened             run 1–3 of the 12 of this piece, and the name says of which piece

Invariants
  1. Two runs get one identity (tag, whole, first) and length only if they are the same elements of the same tensor.
  2. Where the piece is one run of the whole, or the whole itself, the identity says nothing of pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class FlatRange(NamedTuple):
    """Where a run of elements lies.

    Attributes:
        tag: what is added to the name of the tensor; empty if the run is one of the whole tensor.
        whole: number of elements of what it is a run of.
        first: its first element there.
    """

    tag: str
    whole: int
    first: int


def flat_range(piece: Sequence[int], whole: Sequence[int], offset: Sequence[int], first: int) -> FlatRange:
    """The identity of the elements of a piece from `first` on.

    Args:
        piece: shape of the piece.
        whole: shape of the tensor that it is a piece of.
        offset: of the piece's first element in that, one number a dimension.
        first: index into the piece, flattened in row-major order.
    """
    begin = beginning(piece, whole, offset)
    if begin is None:
        return FlatRange(cut(piece, offset), math.prod(piece), first)
    return FlatRange("", math.prod(whole), begin + first)


def beginning(piece: Sequence[int], whole: Sequence[int], offset: Sequence[int]) -> int | None:
    """The index of a piece's first element in the flattened whole, if the piece is one run of it; else None."""
    split = next((d for d, size in enumerate(piece) if size != 1), len(piece))
    if any(size != full for size, full in zip(piece[split + 1 :], whole[split + 1 :], strict=True)):
        return None
    index = 0
    for at, full in zip(offset, whole, strict=True):
        index = index * full + at
    return index


def cut(piece: Sequence[int], offset: Sequence[int]) -> str:
    """A piece in a name."""
    return "[of " + ",".join(f"{first}:{first + size}" for first, size in zip(offset, piece, strict=True)) + "]"


def placed(
    key: str, prepended: int, whole: Sequence[int], offset: Sequence[int]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The name, the whole shape and the offset of a piece whose first axes only count tensors of one kind.

    Experts, or layers, that are told as slices of one tensor are tensors of their own to the ranks that train them: "[3 of 8]".

    Args:
        key: what all of them are called.
        prepended: how many axes count.
        whole, offset: with these axes.
    """
    counted = "".join(f"[{at} of {full}]" for at, full in zip(offset[:prepended], whole[:prepended], strict=True))
    return key + counted, tuple(whole[prepended:]), tuple(offset[prepended:])
