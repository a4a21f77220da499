"""Cells: which bytes are held more than once, and by whom. What nobody else holds is each rank's own.

    leaf, by identity ──► held by ≥ 2 ranks ──► cell: the leaves with the same holders, end to end
                     └──► by one rank, or may differ by rank ──► rider (small, or staged) │ kept leaf (the rest)

Invariants
  1. A leaf with bytes lies in exactly one cell, or is rider or kept on every rank that has it.
  2. All holders of a cell have the same bytes at its mark, so each may write any part of it for the others.
  3. The cells depend on what the layouts say, not on the order of their leaves nor on their digests.

The work grows with the leaves of the tables, the shared leaves, and the sum of the cells' holders, not with ranks × leaves:
layouts are given once per digest, `sharing` looks at families of leaves, and what a rank has alone is written down when
somebody asks for that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TypeVar

from reft.core.layout.layout import SMALL_BYTES, Layout, Leaf, pack
from reft.core.layout.sharing import OwnLeaves, sharing
from reft.core.layout.symbolic import SymbolicLayout, of

T = TypeVar("T")
SEATS_MAX = 16  # layouts whose own leaves are remembered: those of the ranks of one node
RIDERS_MAX = 256 << 10  # bytes of riders of one rank: they travel with every snapshot, and a capsule holds 1 MiB


@dataclass(frozen=True)
class Cell:
    """Leaves with the same holders, laid end to end; the bytes between two leaves and after the last are zeros.

    Attributes:
        leaves: small ones first, then by name.
        offsets: offset of each leaf in the cell, in bytes; multiples of layout.ALIGNMENT.
        nbytes: size of the cell, at least 1.
        holders: ranks that hold all of it, ascending, at least two.
    """

    leaves: tuple[Leaf, ...]
    offsets: tuple[int, ...]
    nbytes: int
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Division:
    """The state of all ranks, divided. Layouts are named by their digests.

    Attributes:
        cells: in the order of their holders.
        layout_of: digest of each rank's layout.
        cells_of: digest → the indices of the cells that its ranks hold, ascending.
        inline_leaves: digest → names of the leaves that travel in the capsule, sorted.
        unreplicated: digest → leaves that only the rank's own slot holds, at their offsets in its kept section.
        unreplicated_bytes: digest → bytes of these leaves without padding, without writing them down.
    """

    cells: tuple[Cell, ...]
    layout_of: tuple[bytes, ...]
    cells_of: Mapping[bytes, tuple[int, ...]]
    inline_leaves: Mapping[bytes, tuple[str, ...]]
    unreplicated: Mapping[bytes, Layout]
    unreplicated_bytes: Mapping[bytes, int]


def divide(
    layouts: Mapping[bytes, Layout | SymbolicLayout],
    layout_of: Sequence[bytes],
    mismatched: Collection[str] = (),
    inline_bytes_max: int = RIDERS_MAX,
) -> Division:
    """Divides the state of a job into cells, riders and kept leaves.

    Two leaves are the same if all that describes them is: name, dtype, shape, strides, size and place in the whole.

    Args:
        layouts: digest → layout, once per distinct layout, written down or symbolic.
        layout_of: rank → digest.
        mismatched: names of leaves whose bytes may differ between their holders.
        inline_bytes_max: the most bytes of riders that a rank may have; 0 where capsules stay on their node.

    Raises:
        ValueError: a rank names a layout that is not given.
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(layout_of):
        ranks_of.setdefault(digest, []).append(rank)
    missing = [ranks[0] for digest, ranks in ranks_of.items() if digest not in layouts]
    if missing:
        raise ValueError(f"rank {missing[0]} names a layout that is not among the {len(layouts)} given")

    digests = list(ranks_of)
    forms = [form if isinstance(form := layouts[digest], SymbolicLayout) else of(form.leaves) for digest in digests]
    shared = sharing(forms, [len(ranks_of[digest]) for digest in digests], mismatched)
    found: list[tuple[Cell, tuple[int, ...]]] = []
    for indices, leaves in shared.groups.items():
        holders = tuple(sorted(chain.from_iterable(ranks_of[digests[index]] for index in indices)))
        packed = pack(_by_name(leaves))
        found.append((Cell(packed.leaves, packed.offsets, packed.data_bytes, holders), indices))
    found.sort(key=lambda pair: pair[0].holders)

    cells_of: dict[bytes, list[int]] = {digest: [] for digest in digests}
    for number, (_, indices) in enumerate(found):
        for index in indices:
            cells_of[digests[index]].append(number)
    own = dict(zip(digests, shared.own, strict=True))
    seat = lru_cache(maxsize=SEATS_MAX)(lambda digest: _seat(own[digest], inline_bytes_max))
    return Division(
        cells=tuple(cell for cell, _ in found),
        layout_of=tuple(layout_of),
        cells_of={digest: tuple(numbers) for digest, numbers in cells_of.items()},
        inline_leaves=_OnDemand(own, lambda digest: seat(digest)[0]),
        unreplicated=_OnDemand(own, lambda digest: seat(digest)[1]),
        unreplicated_bytes=_OnDemand(own, lambda digest: own[digest].unreplicated_bytes(inline_bytes_max)),
    )


@dataclass(frozen=True)
class _OnDemand(Mapping[bytes, T]):
    """A mapping whose values are made when they are asked for."""

    keys_of: Mapping[bytes, object]
    make: Callable[[bytes], T]

    def __getitem__(self, key: bytes) -> T:
        return self.make(key)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.keys_of)

    def __len__(self) -> int:
        return len(self.keys_of)


def _seat(own: OwnLeaves, room: int) -> tuple[tuple[str, ...], Layout]:
    """Which of a rank's own leaves ride in the capsule, smallest first while there is room, and the layout of the rest."""
    inline_leaves: list[str] = []
    kept: list[Leaf] = []
    for leaf in sorted(own.leaves(), key=lambda leaf: (leaf.nbytes, leaf.name)):
        if (leaf.staged or leaf.nbytes < SMALL_BYTES) and leaf.nbytes <= room:
            inline_leaves.append(leaf.name)
            room -= leaf.nbytes
        else:
            kept.append(leaf)
    return tuple(sorted(inline_leaves)), pack(_by_name(kept))


def _by_name(leaves: Iterable[Leaf]) -> list[Leaf]:
    return sorted(leaves, key=lambda leaf: leaf.name)
