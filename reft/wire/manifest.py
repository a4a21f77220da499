"""Reads a manifest into reft.core: topology, layouts, and the placement that follows from them.

Layouts travel as symbolic tables. Each layout is expanded only when it is read.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TypeAlias, get_args, overload

from google.protobuf.message import DecodeError

from reft.core.coding.placement import Placement, Scheme, place
from reft.core.layout.cells import INLINE_BYTES_MAX, Division, divide
from reft.core.layout.layout import Layout
from reft.core.layout.symbolic import WHOLE, AxisCut, LeafPattern, PatternTable, SymbolicLayout, expand
from reft.errors import FormatError
from reft.wire import messages
from reft.wire.capsule_format import NameTable
from reft.wire.v1 import daemon_pb2 as pb

# The distinct layouts of a manifest, and the index of each rank's layout.
LayoutsByRank: TypeAlias = "tuple[ManifestLayouts, list[int]]"


def layouts_of(manifest: pb.Manifest) -> LayoutsByRank:
    """Returns the distinct layouts predicted at attach.

    The second value is the index of each rank's layout.

    Raises:
        FormatError: a table can't be read, or a rank has none.
    """
    layouts = ManifestLayouts(manifest)
    index = list(manifest.layout_of)
    if len(index) != manifest.world or any(i >= len(layouts) for i in index):
        raise FormatError(f"the manifest of job {manifest.job} names no layout for some of its {manifest.world} ranks.")
    return layouts, index


def holders_of_mismatched(manifest: pb.Manifest) -> list[tuple[str, list[int]]]:
    """Returns mismatched leaves and the ranks that have them.

    Each of these ranks keeps its own copy.
    """
    layouts, index = layouts_of(manifest)
    mismatched = set(manifest.mismatched)
    holders: dict[str, list[int]] = {name: [] for name in sorted(mismatched)}
    for rank, at in enumerate(index if mismatched else ()):
        for name in mismatched & layouts.names_of(at):
            holders[name].append(rank)
    return list(holders.items())


def domains_of(manifest: pb.Manifest) -> list[int]:
    """Returns the failure domain of every rank. Numbers begin at 0, in the order of the nodes.

    Raises:
        FormatError: a rank lies on no node, or on two.
    """
    numbers = node_domains(manifest.nodes)
    domain_of = {rank: numbers[i] for i, node in enumerate(manifest.nodes) for rank in node.ranks}
    count = sum(len(node.ranks) for node in manifest.nodes)
    if sorted(domain_of) != list(range(manifest.world)) or count != manifest.world:
        raise FormatError(f"the manifest of job {manifest.job} does not give each of {manifest.world} ranks one node.")
    return [domain_of[rank] for rank in range(manifest.world)]


def node_domains(nodes: Sequence[pb.Node]) -> list[int]:
    """Returns the number of each node's failure domain; nodes with the same label share one."""
    labels: dict[str, int] = {}
    return [labels.setdefault(node.domain or f"node {node.id}", len(labels)) for node in nodes]


def division_of(layouts_by_rank: LayoutsByRank, inline_bytes_max: int, own: Collection[str]) -> Division:
    """Returns a manifest's layouts, divided into cells.

    Args:
        layouts_by_rank: from `layouts_of`.
        inline_bytes_max: see `divide`.
        own: names of leaves that each rank keeps for itself.
    """
    layouts, index = layouts_by_rank
    digests = layouts.digests
    return divide(dict(zip(digests, layouts.symbolic, strict=True)), [digests[i] for i in index], own, inline_bytes_max)


def placement_of(
    manifest: pb.Manifest, known_division: Division | None = None, known_layouts: LayoutsByRank | None = None
) -> Placement:
    """Returns where every byte of every rank's state lies.

    The placement is the same for all holders of the manifest. With protect "none" every rank keeps
    all its leaves, also leaves that other ranks have too.

    Args:
        manifest: the manifest.
        known_division: the division for no mismatched leaves, if known; computing it takes a second
            for thousands of ranks.
        known_layouts: from `layouts_of`, if known; reading them takes time for thousands of leaves.

    Raises:
        FormatError: the manifest contradicts itself.
    """
    scheme = next((each for each in get_args(Scheme) if each == manifest.protect), None)
    if scheme is None:
        raise FormatError(
            f"the manifest of job {manifest.job} asks for protect={manifest.protect!r}, which is not known."
        )
    domains = domains_of(manifest)
    if known_division is not None and scheme != "none" and not manifest.mismatched:
        division = known_division
    else:
        layouts = known_layouts or layouts_of(manifest)
        own = layouts[0].names if scheme == "none" else set(manifest.mismatched)
        division = division_of(layouts, inline_bytes_max(domains), own)
    tolerate = None if manifest.tolerate < 0 else manifest.tolerate
    return place(division, domains, scheme, tolerate, manifest.chunk_bytes, manifest.slots)


def inline_bytes_max(domains: Sequence[int]) -> int:
    """Returns the most bytes of inline leaves; 0 if all ranks are in one domain.

    A capsule has no other domain to go to then.
    """
    return INLINE_BYTES_MAX if len(set(domains)) > 1 else 0


def placing(manifest: pb.Manifest) -> tuple[object, ...]:
    """Returns the parts of a manifest that decide where bytes lie."""
    nodes = tuple((node.id, node.domain, tuple(node.ranks)) for node in manifest.nodes)
    layouts = tuple(manifest.layouts[i].digest for i in manifest.layout_of)
    return nodes, manifest.protect, manifest.tolerate, manifest.chunk_bytes, manifest.slots, layouts


BYTES_MAX = 1 << 62  # of one leaf, so that sums fit into 64-bit integers
# Bytes of a table before compression: a million leaves. Names of leaves shrink to a twentieth.
TABLE_MAX = 128 << 20


def table_to(table: PatternTable) -> bytes:
    """Returns the table's bytes, compressed."""
    message = pb.SymbolicTable(leaves=[_leaf_to(pattern) for pattern in table.patterns], axes=table.axes)
    return zlib.compress(message.SerializeToString(deterministic=True), level=1)


def table_from(data: bytes) -> PatternTable:
    """Returns the table that the compressed bytes describe.

    Raises:
        FormatError: the bytes are no symbolic table, or a leaf names a missing axis or dimension.
    """
    reader = zlib.decompressobj()
    try:
        unpacked = reader.decompress(data, TABLE_MAX)
    except zlib.error as error:
        raise FormatError(f"the symbolic table can't be decompressed: {error}.") from error
    if not reader.eof:
        raise FormatError(f"the symbolic table is cut short, or has more than {TABLE_MAX} bytes.")
    return _plain_table_from(unpacked)


def _plain_table_from(data: bytes) -> PatternTable:
    """Returns the table that the bytes describe, without compression as up to protocol 7."""
    try:
        table = pb.SymbolicTable.FromString(data)
    except DecodeError as error:
        raise FormatError(f"the symbolic table can't be read: {error}.") from error
    return PatternTable(tuple(_leaf_from(leaf, table.axes) for leaf in table.leaves), tuple(table.axes))


def _leaf_to(pattern: LeafPattern) -> pb.SymbolicLeaf:
    if pattern.literal is not None:
        return pb.SymbolicLeaf(literal=messages.leaf_to(pattern.literal))
    axes = [axis + 1 for axis in pattern.axes] if any(axis != WHOLE for axis in pattern.axes) else ()
    return pb.SymbolicLeaf(
        name=pattern.name, dtype=pattern.dtype, staged=pattern.staged, item_bytes=pattern.item_bytes,
        global_shape=pattern.global_shape, axes=axes, order=pattern.order, form=pattern.form,
    )  # fmt: skip


def _leaf_from(leaf: pb.SymbolicLeaf, axes: Sequence[int]) -> LeafPattern:
    if leaf.HasField("literal"):
        leaf_literal = messages.leaf_from(leaf.literal)
        _check_bytes(leaf_literal.name, leaf_literal.nbytes)
        return LeafPattern(
            leaf_literal.name,
            leaf_literal.dtype,
            leaf_literal.staged,
            0,
            leaf_literal.global_shape,
            (),
            (),
            leaf_literal,
        )
    shape, numbers, order = tuple(leaf.global_shape), tuple(leaf.axes), tuple(leaf.order)
    if (
        len(numbers) not in (0, len(shape))
        or (order and sorted(order) != list(range(len(shape))))
        or any(number and (number > len(axes) or axes[number - 1] != shape[dim]) for dim, number in enumerate(numbers))
    ):
        raise FormatError(f"leaf {leaf.name!r} of shape {list(shape)} can't have axes {numbers} in order {order}.")
    _check_bytes(leaf.name, leaf.item_bytes * math.prod(shape))
    axis_numbers = tuple(number - 1 for number in numbers) or (WHOLE,) * len(shape)
    return LeafPattern(leaf.name, leaf.dtype, leaf.staged, leaf.item_bytes, shape, axis_numbers, order, form=leaf.form)


def _check_bytes(name: str, nbytes: int) -> None:
    if nbytes > BYTES_MAX:
        raise FormatError(f"leaf {name!r} has {nbytes} bytes; the limit is {BYTES_MAX}.")


class ManifestLayouts(Sequence[Layout]):
    """The distinct layouts of a manifest.

    Each access expands a layout and compares its digest.

    Attributes:
        digests: of each layout.

    Raises:
        FormatError: a table can't be read, or a layout does not fit its table.
    """

    def __init__(self, manifest: pb.Manifest) -> None:
        plain = [_plain_table_from(table) for table in manifest.tables]
        self._tables = plain or [table_from(table) for table in manifest.packed_tables]
        self._cuts: list[tuple[int, tuple[AxisCut, ...]]] = []
        for each in manifest.layouts:
            cuts = tuple(AxisCut(*pair) for pair in zip(each.cuts[::2], each.cuts[1::2], strict=False))
            axes = self._tables[each.table].axes if each.table < len(self._tables) else ()
            is_valid = each.table < len(self._tables) and 2 * len(axes) == len(each.cuts)
            if not is_valid or any(cut.begin + cut.size > axis for cut, axis in zip(cuts, axes, strict=True)):
                raise FormatError(f"the manifest of job {manifest.job} cuts the axes of a table {axes} by {cuts}.")
            self._cuts.append((each.table, cuts))
        self.digests = [each.digest for each in manifest.layouts]
        if len(set(self.digests)) != len(self.digests):
            raise FormatError(f"the manifest of job {manifest.job} has the same layout twice.")

    @cached_property
    def symbolic(self) -> list[SymbolicLayout]:
        """Returns each layout in its symbolic form."""
        return [SymbolicLayout(self._tables[table], cuts) for table, cuts in self._cuts]

    @cached_property
    def names(self) -> set[str]:
        """Returns the names of all leaves."""
        return {name for names in self._table_names for name in names}

    def names_of(self, index: int) -> frozenset[str]:
        """Returns the names of one layout's leaves, without expanding it."""
        return self._table_names[self._cuts[index][0]]

    def name_table(self, index: int) -> NameTable:
        """Returns the names that capsules of ranks with this layout refer to by number."""
        return self._name_tables[self._cuts[index][0]]

    @cached_property
    def _name_tables(self) -> list[NameTable]:
        return [NameTable(tuple(pattern.name for pattern in table.patterns)) for table in self._tables]

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
            raise FormatError(f"layout {index} of the manifest has another digest than stated: {layout.digest.hex()}.")
        return layout
