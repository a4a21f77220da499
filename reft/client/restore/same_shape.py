"""Decides what goes where in a restore into the same shape: each byte to its earlier place.

cells, from all ranks' shards     one plan for all ranks; lost shards are decoded in live memory
unreplicated leaves, slot lost    the same plan: decoded from the rank's guard lane
unreplicated and inline leaves    a plan of each rank for itself, from its own slot and capsule
host state                        from its own capsule
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter

from reft.client.restore.opened import OldRank, RestoreContext, RestoreMatch
from reft.core.coding.placement import Placement
from reft.core.layout.layout import Layout, Leaf, align
from reft.core.layout.regions import RegionCopy
from reft.core.recovery.plan import (
    SlotReaders,
    TransferPlan,
    TransferSizes,
    cell_name,
    cells_near,
    same_shape_needs,
)
from reft.core.recovery.shard_matching import PieceLocation, PieceSource, PieceTransfer
from reft.wire.v1 import daemon_pb2 as pb

# (offset in the slot, leaf) of unreplicated leaves, ascending
Section = Sequence[tuple[int, Leaf]]
SECTION = "unreplicated leaves"  # target name of their need


def match_same_shape(
    context: RestoreContext, predicted: Sequence[Leaf], opened: Mapping[int, OldRank], sizes: TransferSizes
) -> RestoreMatch:
    """Returns which bytes go where; asks no other rank.

    Args:
        context: what every step needs.
        predicted: the leaves that this rank had when the base's epoch began. Missing leaves are
            created in their order, so optimizers get their state in the order of its creation.
        opened: what this rank opened.
        sizes: of messages and buffers.
    """
    rank, placement, readers, own = context.rank, context.placement, context.readers, opened[context.rank]
    order, absent = {leaf.name: i for i, leaf in enumerate(predicted)}, set(own.tree["absent"])
    elsewhere = absent | {name for name, place in own.places.items() if place == pb.UNREPLICATED}
    leaves = own.layout.leaves if own.slot else [leaf for leaf in predicted if leaf.name not in absent]
    needs = same_shape_needs(placement, cells_near(placement, readers, rank), sizes)
    is_decoded = rank in context.plan.sections
    section = foreseen_section(placement, rank, absent) if is_decoded else stored_section(own)
    section_needs = needs_of_section(rank, section)
    inline_needs = needs_of_inline_leaves(rank, own, {leaf.name: leaf.nbytes for leaf in leaves})
    inline = {need.name for need in inline_needs}
    layout, offsets = _live_layout(
        placement, rank, elsewhere, section, [leaf for leaf in leaves if leaf.name in inline]
    )
    return RestoreMatch(
        opened,
        sorted(leaves, key=lambda leaf: order.get(leaf.name, len(order))),
        (
            TransferPlan(
                [*needs, *section_needs] if is_decoded else needs,
                placement,
                readers,
                context.lost,
                has_live_cells=True,
                sizes=sizes,
                sections=context.plan.sections,
                stored=context.stored,
            ),
            plan_for_itself(
                inline_needs if is_decoded else [*section_needs, *inline_needs], placement, rank, readers, sizes
            ),
        ),
        layout,
        offsets,
        own.tree,
    )


def stored_section(own: OldRank) -> Section:
    """Returns the unreplicated leaves in a rank's slot."""
    placed = zip(own.layout.offsets, own.layout.leaves, strict=True)
    stored = [(at, leaf) for at, leaf in placed if leaf.nbytes and own.places[leaf.name] == pb.UNREPLICATED]
    return sorted(stored, key=itemgetter(0))


def foreseen_section(placement: Placement, rank: int, absent: Collection[str]) -> Section:
    """Returns the unreplicated leaves of a rank that lost its slot.

    Args:
        placement: the placement that the base was written with.
        rank: the rank.
        absent: names of leaves that did not exist.
    """
    part = placement.rank_placement(rank)
    return [
        (part.unreplicated_offset + at, leaf)
        for at, leaf in zip(part.unreplicated.offsets, part.unreplicated.leaves, strict=True)
        if leaf.nbytes and leaf.name not in absent
    ]


def needs_of_section(rank: int, section: Section) -> list[PieceTransfer]:
    """Returns one need for all unreplicated leaves: they keep their distances in live memory."""
    if not section:
        return []
    begin, (last, leaf) = section[0][0], section[-1]
    return [_own_need(SECTION, last + leaf.nbytes - begin, PieceLocation(PieceSource.SLOT, rank, begin))]


def needs_of_inline_leaves(rank: int, own: OldRank, nbytes_of: Mapping[str, int]) -> list[PieceTransfer]:
    """Returns the needs of a rank's inline leaves: end to end in the capsule.

    Args:
        rank: the rank.
        own: its capsule.
        nbytes_of: name → size of the leaf.
    """
    names = list(own.tree["riders"])
    ends = accumulate((nbytes_of[name] for name in names), initial=0)
    return [
        _own_need(name, nbytes_of[name], PieceLocation(PieceSource.CAPSULE, rank, at))
        for name, at in zip(names, ends, strict=False)
        if nbytes_of[name]
    ]


def _own_need(name: str, nbytes: int, location: PieceLocation) -> PieceTransfer:
    return PieceTransfer(name, nbytes, location, RegionCopy(0, 0, nbytes), (location.owner,))


def plan_for_itself(
    needs: Sequence[PieceTransfer], placement: Placement, rank: int, readers: SlotReaders, sizes: TransferSizes
) -> TransferPlan:
    """Returns the plan of a rank that reads its own slot and capsule."""
    itself = SlotReaders({rank: rank}, {rank: rank}, {rank: ""}, readers.node_of_rank)
    return TransferPlan(needs, placement, itself, sizes=sizes)


def _live_layout(
    placement: Placement, rank: int, elsewhere: Collection[str], section: Section, inline: Sequence[Leaf]
) -> tuple[Layout, dict[str, int]]:
    """Returns a rank's live memory: its cells, then the leaves that only it has; and all targets.

    Args:
        placement: the placement that the base was written with.
        rank: the rank.
        elsewhere: leaves without bytes in a cell: they did not exist yet, or were stored
            unreplicated.
        section: the rank's unreplicated leaves.
        inline: the rank's inline leaves.
    """
    leaves, at, offsets, end = list[Leaf](), list[int](), dict[str, int](), 0
    for number in placement.division.cells_of[placement.division.layout_of[rank]]:
        cell = placement.division.cells[number]
        offsets[cell_name(number)] = end
        for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
            if leaf.name not in elsewhere:
                leaves.append(leaf)
                at.append(end + offset)
        end = align(end + cell.nbytes)
    offsets[SECTION] = begin = end
    for offset, leaf in section:
        leaves.append(leaf)
        at.append(begin + offset - section[0][0])
        end = align(at[-1] + leaf.nbytes)
    for leaf in inline:
        offsets[leaf.name] = end
        leaves.append(leaf)
        at.append(end)
        end = align(end + leaf.nbytes)
    return Layout(tuple(leaves), tuple(at), end), offsets
