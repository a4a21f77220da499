"""Which leaves of symbolic layouts are the same, without writing down the leaves of every layout.

    names that lie alike in their tables ──► family: one look at the cuts decides for all of them
    family × the runs of its axes        ──► who has them: several layouts ─► shared │ one ─► that layout's own

Two leaves are the same if all that describes them is: name, dtype, shape, strides, size and place in the whole. A sharded
model has thousands of leaves and thousands of ranks, but a handful of families: leaves are made only where they are shared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reft.core.layout.layout import SMALL_BYTES, Leaf
from reft.core.layout.symbolic import WHOLE, LeafPattern, PatternTable, SymbolicLayout, leaves_of


@dataclass(frozen=True, eq=False)
class PatternFamily:
    """Patterns of one table that lie alike; every layout that has them names this one object, and compares it by identity.

    Attributes:
        indices: of the patterns.
    """

    indices: tuple[int, ...]


@dataclass(frozen=True)
class Sharing:
    """Who has what; layouts are called by their index.

    Attributes:
        groups: the layouts that have the same leaves → these leaves.
        own: for each layout the leaves that it shares with no other layout.
    """

    groups: dict[tuple[int, ...], list[Leaf]]
    own: tuple[OwnLeaves, ...]


@dataclass(frozen=True)
class OwnLeaves:
    """Leaves of one layout, made on demand.

    Attributes:
        families: of the layout's table.
    """

    layout: SymbolicLayout
    sizes: LeafSizes
    families: tuple[PatternFamily, ...]

    def leaves(self) -> list[Leaf]:
        """The leaves."""
        patterns = self.layout.table.patterns
        return leaves_of([patterns[i] for family in self.families for i in family.indices], self.layout.cuts)

    def unreplicated_bytes(self, room: int) -> int:
        """Bytes of what is left when the small and the staged leaves ride, smallest first, while there is room for them."""
        return self.sizes.unreplicated_bytes(tuple(cut.size for cut in self.layout.cuts), self.families, room)


class LeafSizes:
    """Sizes of a table's leaves under any cuts, all at once."""

    def __init__(self, table: PatternTable) -> None:
        dims = max((len(pattern.axes) for pattern in table.patterns), default=0)
        count = len(table.patterns)
        self._whole = np.array([_whole_bytes(pattern) for pattern in table.patterns], np.int64)
        self._axes = np.full((count, dims), len(table.axes), np.int64)  # one past the last axis: a size of 1
        for i, pattern in enumerate(table.patterns):
            for dim, axis in enumerate(pattern.axes):
                if axis != WHOLE:
                    self._axes[i, dim] = axis
        self._staged = np.array([pattern.staged for pattern in table.patterns], np.bool_)
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, sizes: Sequence[int]) -> NDArray[np.int64]:
        """Bytes of each leaf, int64 [leaves], if the axes' runs have these sizes, in elements."""
        found: NDArray[np.int64] = self._whole * np.array([*sizes, 1], np.int64)[self._axes].prod(1)
        return found

    def unreplicated_bytes(self, sizes: tuple[int, ...], families: tuple[PatternFamily, ...], room: int) -> int:
        """See `OwnLeaves.kept_bytes`. Ranks whose shards are equally large have one answer."""
        key = (sizes, families, room)
        if key not in self._known:
            chosen = np.array([i for family in families for i in family.indices], np.int64)
            nbytes = self.of(sizes)[chosen]
            riding = np.sort(nbytes[self._staged[chosen] | (nbytes < SMALL_BYTES)]).cumsum()
            self._known[key] = int(nbytes.sum()) - int(riding[riding <= room].max(initial=0))
        return self._known[key]


def sharing(layouts: Sequence[SymbolicLayout], ranks: Sequence[int], mismatched: Collection[str]) -> Sharing:
    """Finds which layouts have which leaves.

    A leaf that is staged in one layout is shared by none: where one rank's forward writes it, others' copies prove nothing.

    Args:
        layouts: no two alike.
        ranks: how many ranks have each layout; a leaf is shared if two ranks or more have it.
        mismatched: names of leaves that are shared by none.
    """
    numbers: dict[PatternTable, int] = {}
    number_of: dict[int, int] = {}  # by identity: tables are large, and layouts share them
    users: list[list[int]] = []
    for index, layout in enumerate(layouts):
        if id(layout.table) not in number_of:
            number_of[id(layout.table)] = numbers.setdefault(layout.table, len(numbers))
        if number_of[id(layout.table)] == len(users):
            users.append([])
        users[number_of[id(layout.table)]].append(index)
    groups: dict[tuple[int, ...], list[Leaf]] = {}
    own: list[list[PatternFamily]] = [[] for _ in layouts]
    for members in _families(list(numbers), frozenset(mismatched)):
        for index, family in _divide(members, layouts, ranks, users, groups):
            own[index].append(family)
    sizes = [LeafSizes(table) for table in numbers]
    return Sharing(
        groups,
        tuple(
            OwnLeaves(layout, sizes[number_of[id(layout.table)]], tuple(families))
            for layout, families in zip(layouts, own, strict=True)
        ),
    )


@dataclass(frozen=True)
class _Member:
    """The patterns of one table that belong to a family, in the order of their names.

    Attributes:
        table: its number.
        axes: the same for all of them.
        kind: equal among members whose leaves are the same if their cuts are.
        never_shared: whether they are staged, without elements, or called unequal.
    """

    table: int
    axes: tuple[int, ...]
    kind: int
    never_shared: bool
    patterns: tuple[LeafPattern, ...]
    family: PatternFamily


def _families(tables: Sequence[PatternTable], mismatched: frozenset[str]) -> list[list[_Member]]:
    """The names of all tables, together where they lie alike: in the same tables, along the same axes."""
    places: dict[str, list[tuple[int, int, LeafPattern]]] = {}
    for number, table in enumerate(tables):
        for index, pattern in enumerate(table.patterns):
            places.setdefault(pattern.name, []).append((number, index, pattern))
    alike: dict[tuple[tuple[int, tuple[int, ...], int, bool], ...], list[list[tuple[int, int, LeafPattern]]]] = {}
    for name, found in places.items():
        kinds: dict[object, int] = {}
        key = tuple(
            (
                number,
                pattern.axes,
                kinds.setdefault(_kind(pattern), len(kinds)),
                pattern.staged or name in mismatched or not _whole_bytes(pattern),
            )
            for number, _, pattern in found
        )
        alike.setdefault(key, []).append(found)
    return [
        [
            _Member(*place, tuple(found[i][2] for found in names), PatternFamily(tuple(found[i][1] for found in names)))
            for i, place in enumerate(key)
        ]
        for key, names in alike.items()
    ]


def _divide(
    members: Sequence[_Member],
    layouts: Sequence[SymbolicLayout],
    ranks: Sequence[int],
    users: Sequence[Sequence[int]],
    groups: dict[tuple[int, ...], list[Leaf]],
) -> Iterator[tuple[int, PatternFamily]]:
    """One family: adds its leaves to the groups that share them; yields the layouts that have them alone."""
    holders: dict[object, list[tuple[int, _Member]]] = {}
    unshared: set[object] = set()
    for member in members:
        used = [axis for axis in member.axes if axis != WHOLE]
        kind = member.kind, tuple(axis == WHOLE for axis in member.axes)  # rows and columns may be cut alike
        for index in users[member.table]:
            cuts = layouts[index].cuts
            runs = [cuts[axis] for axis in used]
            run = (kind, *runs)
            holders.setdefault(run, []).append((index, member))
            if member.never_shared or not all(size for _, size in runs):
                unshared.add(run)
    for each, found in holders.items():
        index, member = found[0]
        if each in unshared or (len(found) == 1 and ranks[index] == 1):
            yield from ((index, member.family) for index, member in found)
        else:
            group = groups.setdefault(tuple(sorted(number for number, _ in found)), [])
            group += leaves_of(member.patterns, layouts[index].cuts)


def _kind(pattern: LeafPattern) -> object:
    """What must be equal for two leaves to be the same, beside names and cuts."""
    if pattern.literal is not None:
        leaf = pattern.literal
        return leaf.shape, leaf.stride, leaf.nbytes, leaf.global_offset, leaf.dtype, leaf.global_shape
    return pattern.dtype, pattern.item_bytes, pattern.global_shape, pattern.order


def _whole_bytes(pattern: LeafPattern) -> int:
    """Bytes of the dimensions that are not cut; of a literal leaf, all."""
    if pattern.literal is not None:
        return pattern.literal.nbytes
    nbytes = pattern.item_bytes
    for length, axis in zip(pattern.global_shape, pattern.axes, strict=True):
        nbytes *= length if axis == WHOLE else 1
    return nbytes
