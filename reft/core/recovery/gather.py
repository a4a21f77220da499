"""Decides which slots each lane is read from, and which rank reads which slot.

    a lane, D = 5, k = 2, f = 1     all slots are at hand except that of member 3

      member      0    1    2   (3)   4         stripe 0 takes data 0 and 1, decodes nothing
      stripe 0    0    1    P    .    .         stripe 1 lost parity only
      stripe 1    .    0    1   [P]   .         stripe 2 lost data 1: takes data 0 and parity
      stripe 2    .    .    0   [1]   P         stripe 3 lost data 0: takes data 1 and parity
      stripe 3    P    .    .   [0]   1         a stripe that loses more than f loses its lane
      stripe 4    1    P    .    .    0

Invariants
  1. A lane can be decoded exactly if no stripe lost more than f of its k + f shards. Any k shards
     give the rest.
  2. A surviving data shard is never replaced by parity. So data that was not lost is read, never
     computed.
  3. The same slots give the same reads and the same readers on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reft.core.coding.placement import Lane, Placement


def stripe_reads(placement: Placement, lane: int, have: Collection[int]) -> list[tuple[int, ...]]:
    """Returns the k shards that each stripe of a lane reads, ascending.

    These are the data shards at hand, then the lowest parity shards at hand. Parity shards are
    numbered from k on. All other shards of the stripe can be computed from them.

    Args:
        placement: where all bytes lie.
        lane: index of the lane.
        have: ranks whose slot is at hand.

    Raises:
        ValueError: a stripe can't be decoded from these slots.
    """
    lane_layout = placement.lanes[lane]
    k, width = lane_layout.code.k, lane_layout.code.k + lane_layout.code.f
    at_hand = [member in have for member in lane_layout.members]
    reads = []
    for stripe in range(lane_layout.D):
        shards = tuple(shard for shard in range(width) if at_hand[lane_layout.member_of(stripe, shard)])[:k]
        if len(shards) < k:
            raise ValueError(
                f"lane {lane}, stripe {stripe}: {len(shards)} of {width} shards are at hand; it takes {k}. "
                "Bring back the slots of more of its members."
            )
        reads.append(shards)
    return reads


def assign_readers(sources: Mapping[int, str], nodes: Mapping[str, Sequence[int]]) -> dict[int, int]:
    """Assigns one reading rank to each slot.

    The reader runs on the slot's own node if any rank does. The new job may have another number of
    ranks than the old one.

    Args:
        sources: old rank → id of the node that has its slot.
        nodes: id of each node → the ranks that run there now; every rank runs on one node.

    Returns:
        Old rank → new rank. First choice: the rank of the same number, if that rank runs on the
        slot's node. Second: the rank of that node with the fewest slots to read; of equals, the
        lowest. If no rank runs on that node: the rank with the fewest slots to read of all; of
        equals, the rank of the same number, then the lowest.
    """
    load = dict.fromkeys(sorted(rank for ranks in nodes.values() for rank in ranks), 0)
    reader_of = {rank: rank for rank, node in sources.items() if rank in nodes.get(node, ())}
    for rank in reader_of:
        load[rank] += 1
    rest = sorted((not nodes.get(sources[rank]), rank) for rank in sources.keys() - reader_of.keys())
    for _, rank in rest:
        near = nodes.get(sources[rank]) or load
        reader_of[rank] = min(near, key=lambda each: (load[each], each != rank, each))
        load[reader_of[rank]] += 1
    return dict(sorted(reader_of.items()))


class LaneGroup(NamedTuple):
    """Lanes of the same shape, which differ only in their members.

    Attributes:
        D: number of members, and of stripes.
        width: shards of a stripe, k + f.
        f: how many shards a stripe may lose.
        lanes: int64 [n], indices in the placement, ascending.
        members: int32 [m, D], ranks; no row occurs twice.
        row: int64 [n], for each lane its row of `members`.
    """

    D: int
    width: int
    f: int
    lanes: NDArray[np.int64]
    members: NDArray[np.int32]
    row: NDArray[np.int64]


def group_lanes(lanes: Sequence[Lane]) -> list[LaneGroup]:
    """Groups lanes by shape into a few arrays, so that thousands are judged at once."""
    shapes: dict[tuple[int, int, int], list[int]] = {}
    for index, lane in enumerate(lanes):
        shapes.setdefault((lane.D, lane.code.k + lane.code.f, lane.code.f), []).append(index)
    groups = []
    for shape, indices in sorted(shapes.items()):
        rows: dict[tuple[int, ...], int] = {}
        row = [rows.setdefault(lanes[index].members, len(rows)) for index in indices]
        members = np.array(list(rows), np.int32).reshape(len(rows), shape[0])
        groups.append(LaneGroup(*shape, np.array(indices, np.int64), members, np.array(row, np.int64)))
    return groups


def lost_shards(lost: NDArray[np.bool_], width: int) -> NDArray[np.int32]:
    """Returns how many shards each stripe lost.

    Args:
        lost: bool [..., D], True where the slot of a member is lost.
        width: shards of a stripe. Stripe t has its shards on members t … t + width - 1, around the
            circle.

    Returns:
        int32 [..., D], by stripe.
    """
    circle = np.concatenate([np.zeros_like(lost[..., :1]), lost, lost[..., : width - 1]], -1)
    running_sums = np.cumsum(circle, -1, dtype=np.int32)
    return running_sums[..., width:] - running_sums[..., :-width]


def undecodable(groups: Sequence[LaneGroup], have: NDArray[np.bool_]) -> tuple[int, ...]:
    """Returns the lanes that can't be decoded, ascending.

    Args:
        groups: the lanes, from `group_lanes`.
        have: bool [world], True for the ranks whose slot is at hand.
    """
    lanes: list[int] = []
    for group in groups:
        lost = ~have[group.members]
        has_loss = lost.any(1)
        is_lost = np.zeros(len(lost), np.bool_)
        is_lost[has_loss] = (lost_shards(lost[has_loss], group.width) > group.f).any(1)
        lanes += group.lanes[is_lost[group.row]].tolist()
    return tuple(sorted(lanes))
