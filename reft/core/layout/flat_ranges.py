"""Names runs of elements of flattened tensors.

Some optimizers flatten parameters into a buffer and divide the buffer evenly. Each rank then holds
a run of elements of each parameter.

    w (4 × 3), rank 1 of 2 has rows 2–3     piece: shape (2, 3) at (2, 0)    flattened: run 6–11
    elements 1–3 of the flattened piece     run 7–9 of the 12 of w, for any number of ranks

    v (4 × 6), rank 1 of 2 has columns 3–5  piece: shape (4, 3) at (0, 3)    flattened: four runs
    elements 1–3 of the flattened piece     run 1–3 of the 12 of this piece; the tag names the piece

Invariants
  1. Two runs have the same identity (tag, whole, first) and length only if they are the same
     elements of the same tensor.
  2. If the piece is one run of the whole tensor, or the whole tensor, then the identity does not
     name a piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class FlatRange(NamedTuple):
    """The identity of a run of elements: where the run lies in its tensor.

    Attributes:
        tag: suffix for the name of the tensor; empty if the run is a run of the whole tensor.
        whole: number of elements of the whole tensor or, with a tag, of the piece.
        first: index of the run's first element among these.
    """

    tag: str
    whole: int
    first: int


def flat_range(piece: Sequence[int], whole: Sequence[int], offset: Sequence[int], first: int) -> FlatRange:
    """Returns the identity of the run that begins at element `first` of a piece.

    Args:
        piece: shape of the piece.
        whole: shape of the whole tensor.
        offset: index of the piece's first element in the whole tensor, one number for each
            dimension.
        first: index into the piece, flattened in row-major order.
    """
    begin = beginning(piece, whole, offset)
    if begin is None:
        return FlatRange(piece_tag(piece, offset), math.prod(piece), first)
    return FlatRange("", math.prod(whole), begin + first)


def beginning(piece: Sequence[int], whole: Sequence[int], offset: Sequence[int]) -> int | None:
    """Returns the flat index of a piece's first element in the whole tensor.

    None if the piece is not one run of the flattened whole tensor.
    """
    split = next((d for d, size in enumerate(piece) if size != 1), len(piece))
    if any(size != full for size, full in zip(piece[split + 1 :], whole[split + 1 :], strict=True)):
        return None
    index = 0
    for begin, full in zip(offset, whole, strict=True):
        index = index * full + begin
    return index


def piece_tag(piece: Sequence[int], offset: Sequence[int]) -> str:
    """Returns the tag that names a piece, such as "[of 0:4,3:6]"."""
    return "[of " + ",".join(f"{first}:{first + size}" for first, size in zip(offset, piece, strict=True)) + "]"


def split_numbering_axes(
    key: str, prepended: int, whole: Sequence[int], offset: Sequence[int]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Splits off the leading axes that only number tensors: returns name, whole shape and offset.

    A framework may present experts, or layers, as slices of one tensor. Each slice is a tensor of
    its own in training, so the name gets its number: "[3 of 8]".

    Args:
        key: the common name of the slices.
        prepended: how many leading axes only number tensors.
        whole: shape of the whole tensor, with these axes.
        offset: offset of the piece, with these axes.
    """
    numbers = "".join(f"[{index} of {full}]" for index, full in zip(offset[:prepended], whole[:prepended], strict=True))
    return key + numbers, tuple(whole[prepended:]), tuple(offset[prepended:])
