"""Stripes of lost slots: which shards are read, which are made, slice by slice.

    a cell's lane       | stripe 0 | stripe 1 | …    k of its k + f shards are read, others are made
    a guard lane        one stripe for each holder j, D = 4, member 2 is lost:

      stripe 0    piece 2 of 1   piece 1 of 2   piece 0 of 3   parity of 0    its shards are the
      stripe 1    piece 2 of 2   piece 1 of 3   piece 0 of 0   parity of 1    pieces of which the
      stripe 3    piece 2 of 0   piece 1 of 1   piece 0 of 2   parity of 3    holder keeps parity

    slice               | columns begin..end of all packets of a stripe |

Invariants
  1. A shard that is shorter than the others of its stripe is followed by zeros, which nobody reads.
  2. Only bytes that the lost slot had are made, no zeros behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from reft.core.coding.erasure import XorProgram, make_program
from reft.core.coding.exchange import GuardLane
from reft.core.coding.placement import Lane, Placement

NO_CELL = -1  # the cell of a guard lane's stripes


def parity_number(placement: Placement, rank: int) -> int:
    """Returns the number that stands for a rank's parity slot among old ranks."""
    return len(placement.domains) + rank


def slot_name(number: int, world: int) -> str:
    """Returns the name of a slot or a parity slot for people.

    Args:
        number: an old rank, or a `parity_number`.
        world: the number of old ranks.
    """
    return f"rank {number}" if number < world else f"the parity of rank {number - world}"


class ShardSource(NamedTuple):
    """A shard that is read: `nbytes` from `offset` on in the slot of `owner`. Zeros follow them.

    `owner` is an old rank, or a `parity_number`.
    """

    owner: int
    offset: int
    nbytes: int


class MadeShard(NamedTuple):
    """A shard to make again, at an offset of its owner's slot."""

    shard: int
    owner: int
    offset: int


@dataclass(frozen=True, eq=False)
class StripeSlice:
    """Columns begin..end of a stripe's packets, and the shards made from them.

    Attributes:
        lane: the lane of the stripe. That of a guard lane's stripe has the cell NO_CELL.
        number: index of the lane in the placement, among the lanes of its kind.
        stripe: index in the lane.
        shards: the k shards that are read, ascending.
        inputs: where each of `shards` lies.
        begin: first column.
        end: column behind the last.
        made: the shards to make, ascending.
        live: those of `shards` whose bytes are in the keeper's live memory.
        keeper: new rank.
    """

    lane: Lane
    number: int
    stripe: int
    shards: tuple[int, ...]
    inputs: tuple[ShardSource, ...]
    begin: int
    end: int
    made: tuple[MadeShard, ...]
    live: tuple[int, ...]
    keeper: int

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.end - self.begin

    @property
    def program(self) -> XorProgram:
        """Makes the shards; its outputs are the packets of `made_packets`."""
        return make_program(self.lane.code, self.shards, [made.shard for made in self.made])

    @property
    def registers(self) -> int:
        """The number of packets that are read and made."""
        return (len(self.shards) + len(self.made)) * self.lane.code.w

    @property
    def zeros(self) -> Iterator[tuple[int, int]]:
        """Yields begin and end of bytes in the read packets that no slot has.

        Only shards of one packet can be shorter than the others.
        """
        for row, each in enumerate(self.inputs):
            if (begin := max(each.nbytes, self.begin)) < self.end and self.lane.code.w == 1:
                yield row * self.width + begin - self.begin, (row + 1) * self.width

    def made_packets(self) -> Iterator[tuple[int, int]]:
        """Yields each made packet's owner, and where its columns begin in that slot."""
        for made in self.made:
            for packet in range(self.lane.code.w):
                yield made.owner, made.offset + packet * self.lane.packet_bytes + self.begin

    def cell_range(self, shard: int, packet: int) -> tuple[int, int]:
        """Returns the byte range of a packet's columns in the cell, without padding."""
        # With k = 1 every shard has the same bytes.
        begin, _ = self.lane.data_range(self.stripe, shard if self.lane.code.k > 1 else 0)
        begin += packet * self.lane.packet_bytes + self.begin
        limit = self.lane.begin + self.lane.nbytes
        return min(begin, limit), min(begin + self.width, limit)

    def row(self, shard: int) -> int:
        """Returns the index of a read shard's first packet among the packets of this slice."""
        return self.shards.index(shard) * self.lane.code.w


@dataclass(frozen=True)
class SectionPiece:
    """A piece of a lost unreplicated section, and the stripe that gives it back.

    Attributes:
        lane: the guard lane, in the form of a cell's lane.
        number: index of the guard lane in the placement.
        holder: index in the lane of the member that keeps parity of the piece: the stripe.
        inputs: the stripe's shards at hand, ascending → where they lie.
        made: the piece, as the lost shard.
        nbytes: size of the piece, without the zeros behind it.
    """

    lane: Lane
    number: int
    holder: int
    inputs: dict[int, ShardSource]
    made: MadeShard
    nbytes: int

    def columns(self, begin: int, end: int, keeper: int) -> StripeSlice:
        """Returns the slice of these columns, which the keeper makes."""
        inputs = tuple(self.inputs.values())
        return StripeSlice(
            self.lane, self.number, self.holder, tuple(self.inputs), inputs, begin, end, (self.made,), (), keeper
        )


def section_pieces(placement: Placement, old: int) -> list[SectionPiece]:
    """Returns the pieces of a lost rank's unreplicated section that are not empty.

    Raises:
        ValueError: the rank is in no guard lane.
    """
    where = placement.guard_lane_of(old)
    if where is None:
        raise ValueError(f"the unreplicated leaves of old rank {old} are in no guard lane.")
    number, member = where
    guard = placement.guard_lanes[number]
    sections = [placement.rank_placement(rank).unreplicated_offset for rank in guard.members]
    pieces = []
    for holder in range(guard.D):
        begin, end = guard.piece_range(member, guard.piece_of(member, holder))
        if holder != member and begin < end:
            sources = guard.sources_of(holder)
            inputs = {
                shard: _input(guard, source, holder, sections[source])
                for shard, source in enumerate(sources)
                if source != member
            }
            parity = ShardSource(parity_number(placement, guard.members[holder]), 0, guard.piece_bytes)
            made = MadeShard(sources.index(member), old, sections[member] + begin)
            pieces.append(
                SectionPiece(_lane(guard), number, holder, inputs | {guard.code.k: parity}, made, end - begin)
            )
    return pieces


def _input(guard: GuardLane, source: int, holder: int, section: int) -> ShardSource:
    """Returns where the piece of a source lies that a holder keeps parity of."""
    begin, end = guard.piece_range(source, guard.piece_of(source, holder))
    return ShardSource(guard.members[source], section + begin, end - begin)


def _lane(guard: GuardLane) -> Lane:
    return Lane(NO_CELL, 0, guard.D * guard.code.k * guard.piece_bytes, guard.members, guard.code, guard.piece_bytes)
