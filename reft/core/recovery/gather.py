"""Gathering: from which slots each lane's bytes come back, and who reads which slot.

    a lane, D = 5, k = 2, f = 1     slots at hand: all but member 3's

      member      0    1    2   (3)   4         stripe 0 takes data 0 and 1, decodes nothing
      stripe 0    0    1    P    .    .         stripe 1 lost its parity only
      stripe 1    .    0    1   [P]   .         stripe 2 lost data 1: it takes data 0 and the parity
      stripe 2    .    .    0   [1]   P         stripe 3 lost data 0: it takes data 1 and the parity
      stripe 3    P    .    .   [0]   1         a stripe that lost more than f shards is lost, and its lane with it
      stripe 4    1    P    .    .    0

Invariants
  1. A lane can be decoded exactly if no stripe lost more than f of its k + f shards: any k shards give the rest.
  2. A surviving data shard is never replaced by parity, so what nobody lost is read and never computed.
  3. The same slots give the same reads and the same readers on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reft.core.coding.placement import Lane, Placement


@dataclass(frozen=True)
class StripeRead:
    """What one stripe needs.

    Attributes:
        lane: index in the placement.
        stripe: index in the lane.
        shards: k shards to take, ascending: the data shards at hand, then the lowest parity shards (from k on) at hand.
        lost: the data shards to decode from them, ascending.
    """

    lane: int
    stripe: int
    shards: tuple[int, ...]
    lost: tuple[int, ...]


def stripe_reads(placement: Placement, lane: int, have: Collection[int]) -> list[StripeRead]:
    """What to read for every stripe of a lane, by stripe.

    Args:
        placement: where everything lies.
        lane: index of the lane.
        have: ranks whose slot is at hand.

    Raises:
        ValueError: a stripe can't be decoded from these slots.
    """
    it = placement.lanes[lane]
    k, width = it.code.k, it.code.k + it.code.f
    at_hand = [member in have for member in it.members]
    reads = []
    for stripe in range(it.D):
        found = tuple(shard for shard in range(width) if at_hand[it.member_of(stripe, shard)])[:k]
        if len(found) < k:
            raise ValueError(
                f"lane {lane}, stripe {stripe}: {len(found)} of {width} shards are at hand; it takes {k}. "
                "Bring back the slots of more of its members."
            )
        reads.append(StripeRead(lane, stripe, found, tuple(shard for shard in range(k) if shard not in found)))
    return reads


def assign_readers(sources: Mapping[int, str], nodes: Mapping[str, Sequence[int]]) -> dict[int, int]:
    """Who reads each slot, so that every slot is read where it lies if anyone runs there.

    Args:
        sources: old rank → id of the node that has its slot.
        nodes: id of each node → the ranks that run there now.

    Returns:
        Old rank → new rank: the same number if that rank runs on the slot's node; else the rank of that node with the
        fewest slots to read, the lowest of them; else the same number, which then reads from afar.
    """
    found = {rank: rank for rank, node in sources.items() if node not in nodes or rank in nodes[node]}
    load: dict[str, dict[int, int]] = {node: dict.fromkeys(sorted(ranks), 0) for node, ranks in nodes.items()}
    for rank in found:
        if sources[rank] in load:
            load[sources[rank]][rank] += 1
    for rank in sorted(sources.keys() - found.keys()):
        loads = load[sources[rank]]
        # min takes the first of equals, and ranks stand in their order
        found[rank] = min(loads, key=loads.__getitem__, default=rank)
        if found[rank] in loads:
            loads[found[rank]] += 1
    return dict(sorted(found.items()))


class LaneGroup(NamedTuple):
    """Lanes that differ in nothing but who their members are.

    Attributes:
        D: how many members, and stripes.
        width: shards of a stripe, k + f.
        f: how many of them it may lose.
        lanes: int64 [n], indices in the placement, ascending.
        members: int32 [m, D], ranks, no row twice.
        row: int64 [n], which row of `members` each lane has.
    """

    D: int
    width: int
    f: int
    lanes: NDArray[np.int64]
    members: NDArray[np.int32]
    row: NDArray[np.int64]


def alike(lanes: Sequence[Lane]) -> list[LaneGroup]:
    """All lanes as a few arrays, so that thousands of them are judged at once."""
    shapes: dict[tuple[int, int, int], list[int]] = {}
    for index, lane in enumerate(lanes):
        shapes.setdefault((lane.D, lane.code.k + lane.code.f, lane.code.f), []).append(index)
    found = []
    for shape, indices in sorted(shapes.items()):
        rows: dict[tuple[int, ...], int] = {}
        row = [rows.setdefault(lanes[index].members, len(rows)) for index in indices]
        members = np.array(list(rows), np.int32).reshape(len(rows), shape[0])
        found.append(LaneGroup(*shape, np.array(indices, np.int64), members, np.array(row, np.int64)))
    return found


def lost_shards(lost: NDArray[np.bool_], width: int) -> NDArray[np.int32]:
    """How many shards each stripe lost.

    Args:
        lost: bool [..., D], which members' slots are gone.
        width: shards of a stripe; stripe t has its shards with the members t … t + width - 1, around the circle.

    Returns:
        int32 [..., D], by stripe.
    """
    circle = np.concatenate([np.zeros_like(lost[..., :1]), lost, lost[..., : width - 1]], -1)
    sums = np.cumsum(circle, -1, dtype=np.int32)
    return sums[..., width:] - sums[..., :-width]


def undecodable(groups: Sequence[LaneGroup], have: NDArray[np.bool_]) -> tuple[int, ...]:
    """The lanes that can't be decoded, ascending.

    Args:
        groups: the lanes, from `alike`.
        have: bool [world], the ranks whose slot is at hand.
    """
    found: list[int] = []
    for group in groups:
        lost = ~have[group.members]
        touched = lost.any(1)
        failed = np.zeros(len(lost), np.bool_)
        failed[touched] = (lost_shards(lost[touched], group.width) > group.f).any(1)
        found += group.lanes[failed[group.row]].tolist()
    return tuple(sorted(found))
