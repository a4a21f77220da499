"""Cells: the bytes that several ranks hold. All other leaves are inline or unreplicated.

    leaf, by identity ──► held by ≥ 2 ranks ──► cell: all leaves with the same holders, end to end
                     └──► held by one rank, or may differ by rank ─┬► inline leaf: small, or staged
                                                                  └► unreplicated leaf: all others

Invariants
  1. A leaf with bytes lies in exactly one cell, or it is inline or unreplicated on every rank that
     has it.
  2. All holders of a cell have the same bytes at the mark. So each holder may write any part of the
     cell for the others.
  3. The cells depend on the content of the layouts, not on the order of their leaves or on their
     digests.

The work grows with the leaves of the tables, the shared leaves, and the sum of the cells' holders,
not with ranks × leaves: each distinct layout is passed once, `sharing` works on families of leaves,
and the leaves that only one rank has are listed on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import TypeVar

from reft.core.layout.layout import SMALL_BYTES, Layout, Leaf, pack
from reft.core.layout.sharing import OwnLeaves, SharedLeaves, sharing
from reft.core.layout.symbolic import SymbolicLayout, symbolic_form

T = TypeVar("T")
OWN_LEAVES_CACHE = 16  # layouts whose own leaves are cached: enough for the ranks of one node
# Bytes of one rank's inline leaves. They travel with every snapshot, and a capsule holds 1 MiB.
INLINE_BYTES_MAX = 256 << 10
HOLDERS_MAX = 8 << 20  # of all cells together, and of all their lanes: a placement lists them


@dataclass(frozen=True)
class Cell:
    """Leaves with the same holders, end to end. Padding between and after leaves is zeros.

    The leaves are listed on demand: a job has up to as many cells as ranks, and a rank has few.

    Attributes:
        shared: the leaves, in any order.
        nbytes: size of the cell in bytes, at least 1.
        holders: ranks that hold the whole cell, ascending, at least two.
    """

    shared: tuple[SharedLeaves, ...]
    nbytes: int
    holders: tuple[int, ...]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves: small ones first, then by name."""
        return self._packed.leaves

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each leaf in the cell, in bytes; multiples of layout.ALIGNMENT."""
        return self._packed.offsets

    @cached_property
    def _packed(self) -> Layout:
        return pack(_by_name(chain.from_iterable(shared.leaves() for shared in self.shared)))


@dataclass(frozen=True)
class Division:
    """The state of all ranks, divided into cells, inline and unreplicated leaves.

    A layout is named by its digest.

    Attributes:
        cells: sorted by their holders.
        layout_of: digest of each rank's layout.
        cells_of: digest → the indices of the cells that its ranks hold, ascending.
        inline_leaves: digest → names of the leaves that travel in the capsule, sorted.
        unreplicated: digest → leaves that only the rank's own slot holds, at their offsets in its
            unreplicated section.
        unreplicated_bytes: digest → bytes of the unreplicated leaves without padding. Computed
            without listing the leaves.
        section_bytes: digest → size of the unreplicated section, with padding. Computed without
            listing the leaves.
    """

    cells: tuple[Cell, ...]
    layout_of: tuple[bytes, ...]
    cells_of: Mapping[bytes, tuple[int, ...]]
    inline_leaves: Mapping[bytes, tuple[str, ...]]
    unreplicated: Mapping[bytes, Layout]
    unreplicated_bytes: Mapping[bytes, int]
    section_bytes: Mapping[bytes, int]


def divide(
    layouts: Mapping[bytes, Layout | SymbolicLayout],
    layout_of: Sequence[bytes],
    mismatched: Collection[str] = (),
    inline_bytes_max: int = INLINE_BYTES_MAX,
) -> Division:
    """Divides the state of a job into cells, inline leaves and unreplicated leaves.

    Two leaves are the same if name, dtype, shape, strides, size, global shape and global offset are
    equal.

    Args:
        layouts: digest → layout, once per distinct layout, in full or symbolic.
        layout_of: rank → digest.
        mismatched: names of leaves whose bytes may differ between their holders.
        inline_bytes_max: the most bytes of inline leaves that a rank may have; 0 if capsules stay
            on their node.

    Raises:
        ValueError: `layouts` lacks the layout of a rank, or the cells have more than HOLDERS_MAX
            holders.
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(layout_of):
        ranks_of.setdefault(digest, []).append(rank)
    missing = [ranks[0] for digest, ranks in ranks_of.items() if digest not in layouts]
    if missing:
        raise ValueError(f"rank {missing[0]} names a layout that is not among the {len(layouts)} given")

    digests = list(ranks_of)
    forms = [
        form if isinstance(form := layouts[digest], SymbolicLayout) else symbolic_form(form.leaves)
        for digest in digests
    ]
    shared = sharing(forms, [len(ranks_of[digest]) for digest in digests], mismatched)
    count = sum(len(ranks_of[digests[index]]) for indices in shared.groups for index in indices)
    if count > HOLDERS_MAX:
        raise ValueError(f"{count} holders of {len(shared.groups)} cells; the limit is {HOLDERS_MAX}")
    cells: list[tuple[Cell, tuple[int, ...]]] = []  # with the indices of the layouts that have the cell
    for indices, families in shared.groups.items():
        holders = tuple(sorted(chain.from_iterable(ranks_of[digests[index]] for index in indices)))
        nbytes = sum(family.nbytes for family in families)
        cells.append((Cell(tuple(families), nbytes, holders), indices))
    cells.sort(key=lambda pair: pair[0].holders)

    cells_of: dict[bytes, list[int]] = {digest: [] for digest in digests}
    for number, (_, indices) in enumerate(cells):
        for index in indices:
            cells_of[digests[index]].append(number)
    own = dict(zip(digests, shared.own, strict=True))
    divided = lru_cache(maxsize=OWN_LEAVES_CACHE)(lambda digest: _divide_own(own[digest], inline_bytes_max))
    return Division(
        cells=tuple(cell for cell, _ in cells),
        layout_of=tuple(layout_of),
        cells_of={digest: tuple(numbers) for digest, numbers in cells_of.items()},
        inline_leaves=_OnDemand(own, lambda digest: divided(digest)[0]),
        unreplicated=_OnDemand(own, lambda digest: divided(digest)[1]),
        unreplicated_bytes=_OnDemand(own, lambda digest: own[digest].unreplicated_bytes(inline_bytes_max)[0]),
        section_bytes=_OnDemand(own, lambda digest: own[digest].unreplicated_bytes(inline_bytes_max)[1]),
    )


@dataclass(frozen=True)
class _OnDemand(Mapping[bytes, T]):
    """A mapping that computes a value at each access."""

    keys_of: Mapping[bytes, object]
    make: Callable[[bytes], T]

    def __getitem__(self, key: bytes) -> T:
        return self.make(key)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.keys_of)

    def __len__(self) -> int:
        return len(self.keys_of)


def _divide_own(own: OwnLeaves, free_bytes: int) -> tuple[tuple[str, ...], Layout]:
    """Returns the names of a rank's inline leaves, and the layout of its unreplicated leaves.

    Small and staged leaves are inline, the smallest first, up to `free_bytes` in total.
    """
    inline_leaves: list[str] = []
    unreplicated: list[Leaf] = []
    for leaf in sorted(own.leaves(), key=lambda leaf: (leaf.nbytes, leaf.name)):
        if (leaf.staged or leaf.nbytes < SMALL_BYTES) and leaf.nbytes <= free_bytes:
            inline_leaves.append(leaf.name)
            free_bytes -= leaf.nbytes
        else:
            unreplicated.append(leaf)
    return tuple(sorted(inline_leaves)), pack(_by_name(unreplicated))


def _by_name(leaves: Iterable[Leaf]) -> list[Leaf]:
    return sorted(leaves, key=lambda leaf: leaf.name)
