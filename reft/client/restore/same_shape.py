"""Decides what goes where in a restore into the same shape: each byte to its earlier place.

cells, from all ranks' shards     one plan for all ranks; lost shards are decoded in live memory
unreplicated leaves, slot lost    the same plan: decoded from the rank's guard lane
unreplicated and inline leaves    a plan of each rank for itself, from its own slot and capsule
host state                        from its own capsule
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

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
    own_needs = needs_of_own_leaves(rank, own, {leaf.name: leaf.nbytes for leaf in leaves})
    lost_needs = needs_of_section(placement, rank, absent) if rank in context.plan.sections else []
    kept = {need.name for need in (*own_needs, *lost_needs)}
    layout, offsets = _live_layout(placement, rank, elsewhere, [leaf for leaf in leaves if leaf.name in kept])
    return RestoreMatch(
        opened,
        sorted(leaves, key=lambda leaf: order.get(leaf.name, len(order))),
        (
            TransferPlan(
                (*needs, *lost_needs),
                placement,
                readers,
                context.lost,
                has_live_cells=True,
                sizes=sizes,
                sections=context.plan.sections,
            ),
            plan_for_itself(own_needs, placement, rank, readers, sizes),
        ),
        layout,
        offsets,
        own.tree,
    )


def needs_of_own_leaves(rank: int, own: OldRank, nbytes_of: Mapping[str, int]) -> list[PieceTransfer]:
    """Returns the needs of a rank's unreplicated and inline leaves, which no other rank has.

    Args:
        rank: the rank.
        own: its slot or capsule.
        nbytes_of: name → size of the leaf.
    """
    placed = [
        (leaf.name, PieceSource.SLOT, at)
        for leaf, at in zip(own.layout.leaves, own.layout.offsets, strict=True)
        if own.places[leaf.name] == pb.UNREPLICATED
    ]
    riders = list(own.tree["riders"])
    ends = accumulate((nbytes_of[name] for name in riders), initial=0)
    placed += [(name, PieceSource.CAPSULE, at) for name, at in zip(riders, ends, strict=False)]
    return [
        _own_need(name, nbytes_of[name], PieceLocation(where, rank, at))
        for name, where, at in placed
        if nbytes_of[name]
    ]


def needs_of_section(placement: Placement, rank: int, absent: Collection[str]) -> list[PieceTransfer]:
    """Returns the needs of the unreplicated leaves of a rank that lost its slot.

    Args:
        placement: the placement that the base was written with.
        rank: the rank.
        absent: names of leaves that did not exist.
    """
    part = placement.rank_placement(rank)
    return [
        _own_need(leaf.name, leaf.nbytes, PieceLocation(PieceSource.SLOT, rank, part.unreplicated_offset + at))
        for leaf, at in zip(part.unreplicated.leaves, part.unreplicated.offsets, strict=True)
        if leaf.nbytes and leaf.name not in absent
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
    placement: Placement, rank: int, elsewhere: Collection[str], own: Sequence[Leaf]
) -> tuple[Layout, dict[str, int]]:
    """Returns a rank's live memory: its cells, then the leaves that only it has; and all targets.

    Args:
        placement: the placement that the base was written with.
        rank: the rank.
        elsewhere: leaves without bytes in a cell: they did not exist yet, or were stored
            unreplicated.
        own: the leaves that only this rank has.
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
    for leaf in own:
        offsets[leaf.name] = end
        leaves.append(leaf)
        at.append(end)
        end = align(end + leaf.nbytes)
    return Layout(tuple(leaves), tuple(at), end), offsets
