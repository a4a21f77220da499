"""Finds the leaves that symbolic layouts share, without listing the leaves of every layout.

    names with the same tables and axes ──► family: cuts are compared once for all its names
    family × the runs of its axes       ──► in several layouts ─► shared │ in one ─► own leaves

Two leaves are the same if name, dtype, shape, strides, size, global shape and global offset are
equal. A sharded model has thousands of leaves and thousands of ranks, but only a few families.
Leaves are listed only where they are shared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reft.core.layout.layout import ALIGNMENT, SMALL_BYTES, Leaf
from reft.core.layout.symbolic import WHOLE, AxisCut, LeafPattern, PatternTable, SymbolicLayout, leaves_of

# Layouts × families of their leaves. A manifest of 16 MiB could ask for billions; jobs of a hundred
# thousand ranks have a few families, or few layouts.
COMBINATIONS_MAX = 4 << 20


@dataclass(frozen=True, eq=False)
class PatternFamily:
    """Patterns of one table that are cut along the same axes.

    All layouts that have these patterns refer to one object, which is compared by identity.

    Attributes:
        indices: indices of the patterns in the table.
    """

    indices: tuple[int, ...]


@dataclass(frozen=True)
class Sharing:
    """Which layouts have which leaves. A layout is named by its index.

    Attributes:
        groups: layouts that share leaves → the shared leaves, family by family.
        own: for each layout, the leaves that no other layout has.
    """

    groups: dict[tuple[int, ...], list[SharedLeaves]]
    own: tuple[OwnLeaves, ...]


@dataclass(frozen=True)
class SharedLeaves:
    """The leaves of one family that several ranks have, listed on demand.

    Attributes:
        patterns: of the leaves.
        cuts: of the axes of their table.
        nbytes: of all leaves, with padding.
    """

    patterns: tuple[LeafPattern, ...]
    cuts: tuple[AxisCut, ...]
    nbytes: int

    def leaves(self) -> list[Leaf]:
        """Returns the leaves."""
        return leaves_of(self.patterns, self.cuts)


@dataclass(frozen=True)
class OwnLeaves:
    """The leaves that only one layout has, listed on demand.

    Attributes:
        layout: the layout.
        sizes: sizes of the leaves of its table.
        families: the families of its table that no other layout shares.
    """

    layout: SymbolicLayout
    sizes: LeafSizes
    families: tuple[PatternFamily, ...]

    def leaves(self) -> list[Leaf]:
        """Returns the leaves."""
        patterns = self.layout.table.patterns
        return leaves_of([patterns[i] for family in self.families for i in family.indices], self.layout.cuts)

    def unreplicated_bytes(self, inline_bytes_max: int) -> tuple[int, int]:
        """Returns the bytes of the leaves that are not inline, without and with padding.

        Small and staged leaves are inline, the smallest first, up to `inline_bytes_max` in total.
        The second number is the size of the section that has these leaves.
        """
        axis_sizes = tuple(cut.size for cut in self.layout.cuts)
        return self.sizes.unreplicated_bytes(axis_sizes, self.families, inline_bytes_max)


class LeafSizes:
    """Computes the sizes of all leaves of a table at once, for any cuts."""

    def __init__(self, table: PatternTable) -> None:
        dims = max((len(pattern.axes) for pattern in table.patterns), default=0)
        count = len(table.patterns)
        self._whole = np.array([_whole_bytes(pattern) for pattern in table.patterns], np.int64)
        # The index one past the last axis stands for a size of 1.
        self._axes = np.full((count, dims), len(table.axes), np.int64)
        for i, pattern in enumerate(table.patterns):
            for dim, axis in enumerate(pattern.axes):
                if axis != WHOLE:
                    self._axes[i, dim] = axis
        self._staged = np.array([pattern.staged for pattern in table.patterns], np.bool_)
        self._cache: dict[tuple[object, ...], tuple[int, int]] = {}
        self._padded: dict[tuple[PatternFamily, tuple[int, ...]], int] = {}

    def of(self, sizes: Sequence[int]) -> NDArray[np.int64]:
        """Returns the bytes of each leaf, int64 [leaves].

        Args:
            sizes: size of the rank's run of each axis, in elements.
        """
        nbytes: NDArray[np.int64] = self._whole * np.array([*sizes, 1], np.int64)[self._axes].prod(1)
        return nbytes

    def padded_bytes(self, sizes: tuple[int, ...], family: PatternFamily) -> int:
        """Returns the bytes of a family's leaves, each with its padding.

        The result is cached: it is the same for all ranks whose runs have these sizes.
        """
        key = (family, sizes)
        if key not in self._padded:
            nbytes = self.of(sizes)[list(family.indices)]
            self._padded[key] = int((-(-nbytes // ALIGNMENT) * ALIGNMENT).sum())
        return self._padded[key]

    def unreplicated_bytes(
        self, sizes: tuple[int, ...], families: tuple[PatternFamily, ...], inline_bytes_max: int
    ) -> tuple[int, int]:
        """Returns what `OwnLeaves.unreplicated_bytes` does.

        The result is cached: it is the same for all ranks whose runs have these sizes.
        """
        key = (sizes, families, inline_bytes_max)
        if key not in self._cache:
            indices = np.array([i for family in families for i in family.indices], np.int64)
            nbytes = self.of(sizes)[indices]
            padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
            inline = np.sort(nbytes[self._staged[indices] | (nbytes < SMALL_BYTES)])
            inline = inline[inline.cumsum() <= inline_bytes_max]
            inline_padded = -(-inline // ALIGNMENT) * ALIGNMENT
            self._cache[key] = int(nbytes.sum() - inline.sum()), int(padded.sum() - inline_padded.sum())
        return self._cache[key]


def sharing(layouts: Sequence[SymbolicLayout], ranks: Sequence[int], mismatched: Collection[str]) -> Sharing:
    """Finds which layouts have which leaves.

    A leaf that is staged in one layout is never shared. If forward writes the leaf on one rank, the
    copies of other ranks are no evidence for its bytes.

    Args:
        layouts: distinct layouts.
        ranks: number of ranks that have each layout. A leaf is shared if at least two ranks have
            it.
        mismatched: names of leaves that are never shared.

    Raises:
        ValueError: a table names two leaves alike, or there are more than COMBINATIONS_MAX layouts
            and families to compare.
    """
    numbers: dict[PatternTable, int] = {}
    number_of: dict[int, int] = {}  # by id(table): tables are large to hash, and layouts share them
    users: list[list[int]] = []
    for index, layout in enumerate(layouts):
        if id(layout.table) not in number_of:
            number_of[id(layout.table)] = numbers.setdefault(layout.table, len(numbers))
        if number_of[id(layout.table)] == len(users):
            users.append([])
        users[number_of[id(layout.table)]].append(index)
    groups: dict[tuple[int, ...], list[SharedLeaves]] = {}
    own: list[list[PatternFamily]] = [[] for _ in layouts]
    sizes = [LeafSizes(table) for table in numbers]
    families = _families(list(numbers), frozenset(mismatched))
    combinations = sum(len(users[member.table]) for members in families for member in members)
    if combinations > COMBINATIONS_MAX:
        raise ValueError(f"{combinations} layouts and families of leaves to compare; the limit is {COMBINATIONS_MAX}")
    for members in families:
        for index, family in _divide(members, layouts, ranks, users, sizes, groups):
            own[index].append(family)
    return Sharing(
        groups,
        tuple(
            OwnLeaves(layout, sizes[number_of[id(layout.table)]], tuple(own_families))
            for layout, own_families in zip(layouts, own, strict=True)
        ),
    )


@dataclass(frozen=True)
class _Member:
    """The patterns of one table that belong to a family. They are in the order of their names.

    Attributes:
        table: number of the table.
        axes: the axes of all these patterns.
        kind: equal for members whose leaves are the same if their cuts are equal.
        never_shared: whether the leaves are staged, without elements, or mismatched.
        patterns: the patterns.
        family: refers to them by their indices.
    """

    table: int
    axes: tuple[int, ...]
    kind: int
    never_shared: bool
    patterns: tuple[LeafPattern, ...]
    family: PatternFamily


def _families(tables: Sequence[PatternTable], mismatched: frozenset[str]) -> list[list[_Member]]:
    """Groups the names of all tables into families: names in the same tables, along the same axes.

    Returns:
        For each family, one member for each table that has its names.

    Raises:
        ValueError: a table names two leaves alike.
    """
    if any(len({pattern.name for pattern in table.patterns}) != len(table.patterns) for table in tables):
        raise ValueError("two leaves have the same name")
    # name → (number of the table, index of the pattern in it, pattern)
    occurrences: dict[str, list[tuple[int, int, LeafPattern]]] = {}
    for number, table in enumerate(tables):
        for index, pattern in enumerate(table.patterns):
            occurrences.setdefault(pattern.name, []).append((number, index, pattern))
    families: dict[tuple[tuple[int, tuple[int, ...], int, bool], ...], list[list[tuple[int, int, LeafPattern]]]] = {}
    for name, entries in occurrences.items():
        kinds: dict[object, int] = {}
        key = tuple(
            (
                number,
                pattern.axes,
                kinds.setdefault(_kind(pattern), len(kinds)),
                pattern.staged or name in mismatched or not _whole_bytes(pattern),
            )
            for number, _, pattern in entries
        )
        families.setdefault(key, []).append(entries)
    return [
        [
            _Member(
                *properties,
                tuple(entries[i][2] for entries in names),
                PatternFamily(tuple(entries[i][1] for entries in names)),
            )
            for i, properties in enumerate(key)
        ]
        for key, names in families.items()
    ]


def _divide(
    members: Sequence[_Member],
    layouts: Sequence[SymbolicLayout],
    ranks: Sequence[int],
    users: Sequence[Sequence[int]],
    sizes: Sequence[LeafSizes],
    groups: dict[tuple[int, ...], list[SharedLeaves]],
) -> Iterator[tuple[int, PatternFamily]]:
    """Adds the shared leaves of one family to their groups; yields the unshared ones.

    Args:
        members: the family, one member for each table.
        layouts: all layouts.
        ranks: number of ranks that have each layout.
        users: for each table, the indices of its layouts.
        sizes: for each table, the sizes of its leaves.
        groups: layouts that share leaves → the shared leaves; extended here.

    Yields:
        The index of a layout, and the family of leaves that no other layout has.
    """
    holders: dict[object, list[tuple[int, _Member]]] = {}
    unshared: set[object] = set()
    for member in members:
        used = [axis for axis in member.axes if axis != WHOLE]
        # Without the positions of the axes, a cut of rows would equal the same cut of columns.
        kind = member.kind, tuple(axis == WHOLE for axis in member.axes)
        for index in users[member.table]:
            cuts = layouts[index].cuts
            runs = [cuts[axis] for axis in used]
            identity = (kind, *runs)
            holders.setdefault(identity, []).append((index, member))
            if member.never_shared or not all(size for _, size in runs):
                unshared.add(identity)
    for key, entries in holders.items():
        index, member = entries[0]
        if key in unshared or (len(entries) == 1 and ranks[index] == 1):
            yield from ((index, member.family) for index, member in entries)
        else:
            cuts = layouts[index].cuts
            nbytes = sizes[member.table].padded_bytes(tuple(cut.size for cut in cuts), member.family)
            group = groups.setdefault(tuple(sorted(number for number, _ in entries)), [])
            group.append(SharedLeaves(member.patterns, cuts, nbytes))


def _kind(pattern: LeafPattern) -> object:
    """Returns the traits that patterns of equal leaves share, beside name and cuts."""
    if pattern.literal is not None:
        leaf = pattern.literal
        return leaf.shape, leaf.stride, leaf.nbytes, leaf.global_offset, leaf.dtype, leaf.global_shape
    return pattern.dtype, pattern.item_bytes, pattern.global_shape, pattern.order


def _whole_bytes(pattern: LeafPattern) -> int:
    """Returns the bytes that the uncut dimensions span; for a literal leaf, all its bytes."""
    if pattern.literal is not None:
        return pattern.literal.nbytes
    nbytes = pattern.item_bytes
    for length, axis in zip(pattern.global_shape, pattern.axes, strict=True):
        nbytes *= length if axis == WHOLE else 1
    return nbytes
