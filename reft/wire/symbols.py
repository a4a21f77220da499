"""Symbolic tables as bytes, and the layouts of a manifest, written down one by one when somebody asks for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import overload

from google.protobuf.message import DecodeError

from reft.core.layout.layout import Layout
from reft.core.layout.symbolic import WHOLE, Cut, Pattern, Symbolic, Table, expand
from reft.errors import FormatError
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb

BYTES_MAX = 1 << 62  # of a leaf: sums of them are 64-bit integers


def table_to(table: Table) -> bytes:
    """The table's bytes, always the same for the same table."""
    return pb.SymbolicTable(
        leaves=[_leaf_to(pattern) for pattern in table.patterns], axes=table.axes
    ).SerializeToString(deterministic=True)


def table_from(data: bytes) -> Table:
    """The table that the bytes describe.

    Raises:
        FormatError: the bytes are no symbolic table, or a leaf names an axis or a dimension that is not there.
    """
    try:
        table = pb.SymbolicTable.FromString(data)
    except DecodeError as error:
        raise FormatError(f"the symbolic table can't be read: {error}.") from error
    return Table(tuple(_leaf_from(leaf, table.axes) for leaf in table.leaves), tuple(table.axes))


def _leaf_to(pattern: Pattern) -> pb.SymbolicLeaf:
    if pattern.literal is not None:
        return pb.SymbolicLeaf(literal=messages.leaf_to(pattern.literal))
    axes = [axis + 1 for axis in pattern.axes] if any(axis != WHOLE for axis in pattern.axes) else ()
    return pb.SymbolicLeaf(
        name=pattern.name,
        dtype=pattern.dtype,
        staged=pattern.staged,
        item_bytes=pattern.item_bytes,
        global_shape=pattern.global_shape,
        axes=axes,
        order=pattern.order,
    )


def _leaf_from(leaf: pb.SymbolicLeaf, axes: Sequence[int]) -> Pattern:
    if leaf.HasField("literal"):
        found = messages.leaf_from(leaf.literal)
        _check_bytes(found.name, found.nbytes)
        return Pattern(found.name, found.dtype, found.staged, 0, found.global_shape, (), (), found)
    shape, numbers, order = tuple(leaf.global_shape), tuple(leaf.axes), tuple(leaf.order)
    if (
        len(numbers) not in (0, len(shape))
        or (order and sorted(order) != list(range(len(shape))))
        or any(number and (number > len(axes) or axes[number - 1] != shape[dim]) for dim, number in enumerate(numbers))
    ):
        raise FormatError(f"leaf {leaf.name!r} of shape {list(shape)} can't have axes {numbers} in order {order}.")
    _check_bytes(leaf.name, leaf.item_bytes * math.prod(shape))
    kept = tuple(number - 1 for number in numbers) or (WHOLE,) * len(shape)
    return Pattern(leaf.name, leaf.dtype, leaf.staged, leaf.item_bytes, shape, kept, order)


def _check_bytes(name: str, nbytes: int) -> None:
    if nbytes > BYTES_MAX:
        raise FormatError(f"leaf {name!r} has {nbytes} bytes; the limit is {BYTES_MAX}.")


class Layouts(Sequence[Layout]):
    """The distinct layouts of a manifest. Each is written down, and its digest compared, whenever it is asked for.

    Attributes:
        digests: of each layout.

    Raises:
        FormatError: a table can't be read, or a layout does not fit its table.
    """

    def __init__(self, manifest: pb.Manifest) -> None:
        self._tables = [table_from(table) for table in manifest.tables]
        self._cuts: list[tuple[int, tuple[Cut, ...]]] = []
        for each in manifest.layouts:
            cuts = tuple(Cut(*pair) for pair in zip(each.cuts[::2], each.cuts[1::2], strict=False))
            axes = self._tables[each.table].axes if each.table < len(self._tables) else ()
            fits = each.table < len(self._tables) and 2 * len(axes) == len(each.cuts)
            if not fits or any(cut.begin + cut.size > axis for cut, axis in zip(cuts, axes, strict=True)):
                raise FormatError(f"the manifest of job {manifest.job} cuts the axes of a table {axes} by {cuts}.")
            self._cuts.append((each.table, cuts))
        self.digests = [each.digest for each in manifest.layouts]
        if len(set(self.digests)) != len(self.digests):
            raise FormatError(f"the manifest of job {manifest.job} has the same layout twice.")

    @cached_property
    def symbolic(self) -> list[Symbolic]:
        """Each layout in its symbolic form."""
        return [Symbolic(self._tables[table], cuts) for table, cuts in self._cuts]

    @cached_property
    def names(self) -> set[str]:
        """Names of all leaves."""
        return {name for names in self._table_names for name in names}

    def names_of(self, index: int) -> frozenset[str]:
        """Names of one layout's leaves, without writing it down."""
        return self._table_names[self._cuts[index][0]]

    @cached_property
    def _table_names(self) -> list[frozenset[str]]:
        return [frozenset(pattern.name for pattern in table.patterns) for table in self._tables]

    def __len__(self) -> int:
        return len(self.digests)

    @overload
    def __getitem__(self, index: int) -> Layout: ...

    @overload
    def __getitem__(self, index: slice) -> list[Layout]: ...

    def __getitem__(self, index: int | slice) -> Layout | list[Layout]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        layout = expand(self.symbolic[index])
        if layout.digest != self.digests[index]:
            raise FormatError(f"layout {index} of the manifest is not what it says: digest {layout.digest.hex()}.")
        return layout
