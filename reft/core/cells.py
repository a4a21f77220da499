"""Cells: which bytes are held more than once, and by whom. What nobody else holds is each rank's own.

    leaf, by identity ──► held by ≥ 2 ranks ──► cell: the leaves with the same holders, end to end
                     └──► by one rank, or may differ by rank ──► rider (small, or staged) │ kept leaf (the rest)

Invariants
  1. A leaf with bytes lies in exactly one cell, or is rider or kept on every rank that has it.
  2. All holders of a cell have the same bytes at its mark, so each may write any part of it for the others.
  3. The cells depend on what the layouts say, not on the order of their leaves nor on their digests.

The work grows with the leaves of the distinct layouts and the sum of the cells' holders, not with ranks × leaves: layouts
are given once per digest, and leaves meet by the digests that have them before any rank is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from reft.core.layout import SMALL_BYTES, Layout, Leaf, pack

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
        riders: digest → names of the leaves that travel in the capsule, sorted.
        kept: digest → leaves that only the rank's own slot holds, at their offsets in its kept section.
    """

    cells: tuple[Cell, ...]
    layout_of: tuple[bytes, ...]
    cells_of: Mapping[bytes, tuple[int, ...]]
    riders: Mapping[bytes, tuple[str, ...]]
    kept: Mapping[bytes, Layout]


def divide(
    layouts: Mapping[bytes, Layout],
    layout_of: Sequence[bytes],
    unequal: Collection[str] = (),
    riders_max: int = RIDERS_MAX,
) -> Division:
    """Divides the state of a job into cells, riders and kept leaves.

    Two leaves are the same if all that describes them is: name, dtype, shape, strides, size and place in the whole.

    Args:
        layouts: digest → layout, once per distinct layout.
        layout_of: rank → digest.
        unequal: names of leaves whose bytes may differ between their holders.
        riders_max: the most bytes of riders that a rank may have; 0 where capsules stay on their node.

    Raises:
        ValueError: a rank names a layout that is not given.
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(layout_of):
        ranks_of.setdefault(digest, []).append(rank)
    missing = [ranks[0] for digest, ranks in ranks_of.items() if digest not in layouts]
    if missing:
        raise ValueError(f"rank {missing[0]} names a layout that is not among the {len(layouts)} given")

    groups, alone = _by_digests({digest: layouts[digest] for digest in ranks_of}, frozenset(unequal))
    found: list[tuple[Cell, tuple[bytes, ...]]] = []
    for digests, leaves in groups.items():
        holders = tuple(sorted(chain.from_iterable(ranks_of[digest] for digest in digests)))
        if len(holders) < 2:
            alone[digests[0]] += leaves
            continue
        packed = pack(_by_name(leaves))
        found.append((Cell(packed.leaves, packed.offsets, packed.data_bytes, holders), digests))
    found.sort(key=lambda pair: pair[0].holders)

    cells_of: dict[bytes, list[int]] = {digest: [] for digest in ranks_of}
    for index, (_, digests) in enumerate(found):
        for digest in digests:
            cells_of[digest].append(index)
    seats = {digest: _seat(leaves, riders_max) for digest, leaves in alone.items()}
    return Division(
        cells=tuple(cell for cell, _ in found),
        layout_of=tuple(layout_of),
        cells_of={digest: tuple(indices) for digest, indices in cells_of.items()},
        riders={digest: riders for digest, (riders, _) in seats.items()},
        kept={digest: kept for digest, (_, kept) in seats.items()},
    )


def _by_digests(
    layouts: Mapping[bytes, Layout], unequal: frozenset[str]
) -> tuple[dict[tuple[bytes, ...], list[Leaf]], dict[bytes, list[Leaf]]]:
    """Leaves by the layouts that share them, and by layout those that are never shared.

    A leaf that is staged in one layout is shared by none: where one rank's forward writes it, others' copies prove nothing.
    """
    staged = {replace(leaf, staged=False) for layout in layouts.values() for leaf in layout.leaves if leaf.staged}
    sharing: dict[Leaf, list[bytes]] = {}
    alone: dict[bytes, list[Leaf]] = {digest: [] for digest in layouts}
    for digest, layout in layouts.items():
        for leaf in layout.leaves:
            if leaf.nbytes and not leaf.staged and leaf not in staged and leaf.name not in unequal:
                sharing.setdefault(leaf, []).append(digest)
            else:
                alone[digest].append(leaf)
    groups: dict[tuple[bytes, ...], list[Leaf]] = {}
    for leaf, digests in sharing.items():
        groups.setdefault(tuple(digests), []).append(leaf)
    return groups, alone


def _seat(leaves: Iterable[Leaf], room: int) -> tuple[tuple[str, ...], Layout]:
    """Which of a rank's own leaves ride in the capsule, smallest first while there is room, and the layout of the rest."""
    riders: list[str] = []
    kept: list[Leaf] = []
    for leaf in sorted(leaves, key=lambda leaf: (leaf.nbytes, leaf.name)):
        if (leaf.staged or leaf.nbytes < SMALL_BYTES) and leaf.nbytes <= room:
            riders.append(leaf.name)
            room -= leaf.nbytes
        else:
            kept.append(leaf)
    return tuple(sorted(riders)), pack(_by_name(kept))


def _by_name(leaves: Iterable[Leaf]) -> list[Leaf]:
    return sorted(leaves, key=lambda leaf: leaf.name)
