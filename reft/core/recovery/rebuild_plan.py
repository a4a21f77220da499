"""Plans how one daemon makes the slots of lost ranks, and says what that costs.

plan.py's list for one reader, which is near to all slots at hand, and keeps all lost ranks:

  read    columns of k shards of a stripe ─► rows of a slice
  decode  all shards that lost ranks had in the stripe, data or parity ─► their new slots;
          the same for their unreplicated leaves, from slots and parity of their guard lanes
  emit    nothing: no other rank needs these bytes
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from reft.core.coding.placement import Placement
from reft.core.recovery.plan import DecodeOperation, ReadOperation, SlotReaders, TransferPlan, TransferSizes
from reft.core.recovery.stripes import NO_CELL

DAEMON = 0  # the only reader of the plan
# At most four bands are in memory. Wider runs make fewer calls; wider than this is not faster.
SIZES = TransferSizes(piece=16 << 20, band=64 << 20, ahead=64 << 20)
WHOLE_SHARDS = TransferSizes(piece=1 << 62, band=1 << 62)


@dataclass
class RebuildCost:
    """The bytes read and computed to rebuild some ranks' parts of a cell.

    Attributes:
        cell: index of the cell in the division; NO_CELL: the ranks' unreplicated leaves.
        read: rank, or parity number → bytes read of its slot.
        copied: bytes of data that another slot holds too.
        decoded: bytes of data that is computed.
        parity: bytes of parity that is computed.
    """

    cell: int
    read: dict[int, int] = field(default_factory=dict)
    copied: int = 0
    decoded: int = 0
    parity: int = 0


def rebuild_plan(
    placement: Placement,
    have: Collection[int],
    lost: Collection[int],
    sizes: TransferSizes = SIZES,
    sections: Collection[int] = (),
) -> TransferPlan:
    """Returns the plan by which one daemon makes lost slots; DAEMON is its only rank.

    Args:
        placement: of the epoch that wrote the version.
        have: old ranks, and parity numbers, whose slots are at hand.
        lost: ranks whose slots are made; none of them in `have`.
        sizes: of reads and slices.
        sections: those of `lost` whose unreplicated leaves are made, too.
    """
    readers = SlotReaders(dict.fromkeys(have, DAEMON), dict.fromkeys(lost, DAEMON), dict.fromkeys(have, ""), [""])
    return TransferPlan((), placement, readers, lost, makes_parity=True, sizes=sizes, sections=sections)


def costs(
    placement: Placement, have: Collection[int], lost: Collection[int], sections: Collection[int] = ()
) -> list[RebuildCost]:
    """Returns the cost to rebuild the slots of `lost`, one entry a cell, ascending.

    Args:
        placement: of the epoch that wrote the version.
        have: old ranks, and parity numbers, whose slots are at hand.
        lost: ranks whose slots are rebuilt; none of them in `have`.
        sections: as of `rebuild_plan`.

    Raises:
        ValueError: a stripe or a section can't be decoded from these slots.
    """
    by_cell: dict[int, RebuildCost] = {}
    for operation in rebuild_plan(placement, have, lost, WHOLE_SHARDS, sections).operations(DAEMON):
        if not isinstance(operation, (ReadOperation, DecodeOperation)) or operation.slice is None:
            continue
        lane = operation.slice.stripe.lane
        cost = by_cell.setdefault(lane.cell, RebuildCost(lane.cell))
        if isinstance(operation, ReadOperation):
            cost.read[operation.owner] = cost.read.get(operation.owner, 0) + operation.nbytes
            continue
        for made in operation.slice.stripe.made:
            ranges = (operation.slice.slot_range(made, packet) for packet in range(lane.code.w))
            computed = sum(end - begin for begin, end in ranges)
            if lane.code.k == 1:
                cost.copied += computed
            elif made.shard < lane.code.k:
                cost.decoded += computed
            else:
                cost.parity += computed
    return [by_cell[cell] for cell in sorted(by_cell)]


def chunk_sources(plan: TransferPlan, owner: int, chunk: int) -> tuple[list[int], list[int]]:
    """Returns the lanes of a made chunk, and the slots that it is made from.

    A chunk of unreplicated leaves is in no cell's lane. Of its slots, some are parity numbers.

    Args:
        plan: from `rebuild_plan`.
        owner: the lost rank.
        chunk: index of the chunk in its slot.
    """
    lanes, ranks = set[int](), set[int]()
    begin, end = chunk * plan.placement.chunk_bytes, (chunk + 1) * plan.placement.chunk_bytes
    for operation in plan.operations(DAEMON):
        if isinstance(operation, DecodeOperation):
            stripe = operation.slice.stripe
            made = [each for each in stripe.made if each.owner == owner]
            if any(each.offset < end and begin < each.offset + each.nbytes for each in made):
                ranks |= {each.owner for each in stripe.inputs.values()}
                lanes |= {stripe.number} if stripe.lane.cell != NO_CELL else set()
    return sorted(lanes), sorted(ranks)
