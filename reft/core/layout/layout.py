"""The layout: which leaves a rank's state has, and where each lies in the data of a slot.

Leaves are packed in three groups, each leaf at a multiple of ALIGNMENT:

    | staged: forward mutates them | small: below SMALL_BYTES | large leaves                     |
    0                                                                                   data_bytes

Staged leaves lie together because they are copied at the mark, before the window. Small leaves lie
together because 2,000 tiny leaves must not cost 2,000 copies. A leaf consists of its storage bytes,
in the order of its strides. reft never interprets these bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ALIGNMENT = 64  # bytes: a cache line, and at least the size of any dtype
SMALL_BYTES = 64 << 10  # below this size, the call of a copy costs more than the copy itself
LEAVES_MAX = 1 << 20


@dataclass(frozen=True)
class Leaf:
    """One local tensor, as any job of the same model identifies it.

    Attributes:
        name: without the prefixes of wrappers, e.g. "model.0.weight" or
            "optimizer.0.exp_avg.0.weight".
        dtype: torch's name without the prefix, e.g. "bfloat16".
        shape: shape of the local piece.
        stride: strides of the local piece, in elements; see `plain_strides`.
        nbytes: size in bytes.
        staged: whether forward may mutate the tensor, so that it is copied at the mark.
        global_shape: shape of the whole tensor.
        global_offset: offset of the local piece in the whole tensor.
        form: how a restore makes the tensor again if the optimizer has not made it yet; empty: a
            plain tensor, or one placed like its parameter. The text of the client's
            state/extract/state_forms.py; of a model's leaf, that of model_form.py. The form says
            nothing of the bytes, so leaves of different forms can be equal.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int
    staged: bool
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    form: str = field(default="", compare=False, repr=False)

    def describe(self) -> str:
        """Returns the leaf's dtype and shape as text, e.g. "float32 [4, 8]"."""
        text = f"{self.dtype} {list(self.shape)}"
        if self.global_shape != self.shape:
            text += f" at {list(self.global_offset)} of {list(self.global_shape)}"
        if self._order != tuple(sorted(self._order, reverse=True)):
            text += f" strides {list(self.stride)}"
        return text

    @property
    def _order(self) -> tuple[int, ...]:
        """Strides of the dimensions larger than 1. Only these decide the order of the elements."""
        return tuple(stride for stride, size in zip(self.stride, self.shape, strict=True) if size > 1)


@dataclass(frozen=True)
class Layout:
    """Leaves, and the offset of each leaf in the data of a slot.

    Attributes:
        leaves: in the order of their offsets.
        offsets: offset of each leaf, in bytes.
        data_bytes: size of the data that holds all leaves.
    """

    leaves: tuple[Leaf, ...]
    offsets: tuple[int, ...]
    data_bytes: int

    @property
    def digest(self) -> bytes:
        """A hash of the layout, 16 bytes: equal only for equal layouts."""
        lines = (repr((leaf, offset)) for leaf, offset in zip(self.leaves, self.offsets, strict=True))
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()

    @property
    def payload_bytes(self) -> int:
        """Bytes of the leaves without padding."""
        return sum(leaf.nbytes for leaf in self.leaves)


def strides_of(shape: Sequence[int], order: Sequence[int] = ()) -> tuple[int, ...]:
    """Returns the strides of a dense tensor, in elements.

    Args:
        shape: shape of the tensor.
        order: the dimensions from the outermost in memory to the innermost; empty: in the order of
            the shape.
    """
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def plain_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Returns the normal form of strides: one form for each memory order of dense elements.

    A dimension of size 1 may have any stride, so two ranks may have different strides for the same
    memory order. The normal form is row-major if this is the same order: strides of torch's
    contiguous tensors do not change.
    """
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    order = sorted(dims, key=lambda dim: -stride[dim])
    if order == dims or not all(shape):
        return strides_of(shape)
    return strides_of(shape, [*(dim for dim, size in enumerate(shape) if size == 1), *order])


def align(offset: int, to: int = ALIGNMENT) -> int:
    """Returns the smallest multiple of `to` at or above `offset`."""
    return -(-offset // to) * to


def pack(leaves: Iterable[Leaf]) -> Layout:
    """Returns the layout of the leaves.

    The same leaves in the same order always get the same layout.

    Raises:
        ValueError: two leaves have the same name, or there are more than LEAVES_MAX leaves.
    """
    ordered = sorted(leaves, key=lambda leaf: (not leaf.staged, leaf.nbytes >= SMALL_BYTES))
    names = {leaf.name for leaf in ordered}
    if len(names) != len(ordered):
        raise ValueError("two leaves have the same name")
    if len(ordered) > LEAVES_MAX:
        raise ValueError(f"{len(ordered)} leaves; the limit is {LEAVES_MAX}")
    offsets = []
    end = 0
    for leaf in ordered:
        offsets.append(align(end))
        end = offsets[-1] + leaf.nbytes
    return Layout(tuple(ordered), tuple(offsets), align(end))


def differences(held: Sequence[Leaf], live: Sequence[Leaf], limit: int = 8) -> list[str]:
    """Returns the differences between two lists of leaves, one line each.

    Args:
        held: the leaves of the snapshot.
        live: the leaves of the model.
        limit: the most lines to return; one more line counts the rest.
    """
    old = {leaf.name: leaf for leaf in held}
    new = {leaf.name: leaf for leaf in live}
    lines = [f"{name}: held {old[name].describe()}, not in the model" for name in old if name not in new]
    lines += [f"{name}: not held, {new[name].describe()} in the model" for name in new if name not in old]
    lines += [
        f"{name}: held {old[name].describe()}, {new[name].describe()} in the model"
        for name in old
        if name in new and old[name] != new[name] and old[name].describe() != new[name].describe()
    ]
    lines.sort()
    rest = len(lines) - limit
    return lines if rest <= 0 else [*lines[:limit], f"and {rest} more"]
