"""Stripes of lost slots: which shards are read, which are made, slice by slice.

    a cell's lane       | stripe 0 | stripe 1 | …    k of its k + f shards are read, others are made
    a guard lane        one stripe for each holder j, D = 4, member 2 is lost:

      stripe 0    piece 2 of 1   piece 1 of 2   piece 0 of 3   parity of 0    its shards are the
      stripe 1    piece 2 of 2   piece 1 of 3   piece 0 of 0   parity of 1    pieces of which the
      stripe 3    piece 2 of 0   piece 1 of 1   piece 0 of 2   parity of 3    holder keeps parity

        a guard lane with f > 1     one stripe for each block of its pieces (coding/two_level.py):

      stripe b    block b of all pieces and all parity at hand ─► block b of all lost pieces

        a copy lane                 one stripe for each lost member: a copy at hand, or what a
                                    replay has made ─► its section

slice               | columns begin..end of all packets of a stripe |

Invariants
  1. A shard that is shorter than the others of its stripe is followed by zeros, which nobody reads.
  2. Only bytes that the lost slot had are made, no zeros behind them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from reft.core.coding.erasure import Bytes, ErasureCode, XorProgram, make_program, run_columns
from reft.core.coding.exchange import GuardLane
from reft.core.coding.placement import Lane, Placement
from reft.core.coding.two_level import parity_shard, piece_shard, section_program, units

NO_CELL = -1  # the cell of a guard lane's stripes


def parity_number(placement: Placement, rank: int) -> int:
    """Returns the number that stands for a rank's parity slot among old ranks."""
    return len(placement.domains) + rank


def replay_number(placement: Placement, rank: int) -> int:
    """Returns the number that stands for a lost rank's replayed section among old ranks."""
    return 2 * len(placement.domains) + rank


def slot_name(number: int, world: int) -> str:
    """Returns the name of a slot or a parity slot for people.

    Args:
        number: an old rank, a `parity_number`, or a `replay_number`.
        world: the number of old ranks.
    """
    kind, rank = divmod(number, world)
    return ("", "the parity of ", "the replay of ")[kind] + f"rank {rank}"


class ShardSource(NamedTuple):
    """A shard that is read: `nbytes` from `offset` on in the slot of `owner`. Zeros follow them.

    `owner` is an old rank, a `parity_number`, or a `replay_number`.
    """

    owner: int
    offset: int
    nbytes: int


class MadeShard(NamedTuple):
    """A shard to make again, at an offset of its owner's slot.

    Zeros behind `nbytes` are not kept.
    """

    shard: int
    owner: int
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Stripe:
    """Shards of one stripe: those that are read, and those that are made from them.

    Attributes:
        lane: the lane of the stripe. That of a guard lane's stripe has the cell NO_CELL.
        number: index of the lane in the placement, among the lanes of its kind.
        index: index in the lane. In a guard lane: the member that keeps the parity; with f > 1, the
            block of all pieces; in a copy lane, the lost member.
        inputs: the shards that are read, ascending → where they lie.
        made: the shards to make, ascending.
        nbytes: how many columns of each packet are made.
        live: those of `inputs` whose bytes are in the keeper's live memory.
        section_program: makes the shards, if the lane's code does not. Then a slice is a whole
            stripe.
    """

    lane: Lane
    number: int
    index: int
    inputs: dict[int, ShardSource]
    made: tuple[MadeShard, ...]
    nbytes: int
    live: tuple[int, ...] = ()
    section_program: XorProgram | None = None

    @property
    def program(self) -> XorProgram:
        """Makes the shards; its outputs are the packets of `StripeSlice.made_packets`."""
        return self.section_program or make_program(
            self.lane.code, tuple(self.inputs), [made.shard for made in self.made]
        )

    @property
    def place(self) -> tuple[int, int]:
        """Offset and owner of the first lost shard; sections are made in this order."""
        return self.made[0].offset, self.made[0].owner

    def slices(self, width: int, keeper: int) -> Iterator[StripeSlice]:
        """Yields slices of at most so many columns, which the keeper makes."""
        step = width if self.section_program is None else self.nbytes
        for begin in range(0, self.nbytes, step):
            yield StripeSlice(self, begin, min(begin + step, self.nbytes), keeper)


@dataclass(frozen=True, eq=False)
class StripeSlice:
    """Columns begin..end of a stripe's packets.

    Attributes:
        stripe: the stripe.
        begin: first column.
        end: column behind the last.
        keeper: the new rank that makes the shards.
    """

    stripe: Stripe
    begin: int
    end: int
    keeper: int

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.end - self.begin

    def empty_rows(self) -> Bytes:
        """Returns memory for the read packets, uint8 [packets x width].

        Zeros that no slot has are written there. Only shards of one packet, or of a slice of whole
        packets, can be shorter than the others.
        """
        rows = np.empty((len(self.stripe.inputs), self.stripe.lane.code.w * self.width), np.uint8)
        for row, each in zip(rows, self.stripe.inputs.values(), strict=True):
            row[max(each.nbytes - self.begin, 0) :] = 0
        return rows.reshape(-1)

    def packets(self, rows: Bytes) -> dict[int, Bytes]:
        """Returns read shard → its packets in the slice's rows, uint8 [packets, width]."""
        return dict(zip(self.stripe.inputs, rows.reshape(-1, self.stripe.lane.code.w, self.width), strict=True))

    def decode(self, rows: Bytes) -> Bytes:
        """Returns the made packets, uint8 [packets, width]; all columns have come into the rows."""
        program, packets = self.stripe.program, self.packets(rows)
        made = np.empty((len(program.outputs), self.width), np.uint8)
        run_columns(program, [packets[shard][packet] for shard, packet in program.inputs], list(made))
        return made

    def made_parts(self, made: Bytes) -> Iterator[tuple[int, int, Bytes]]:
        """Yields owner, offset in its slot, and bytes of each made packet, without zeros behind."""
        for (owner, begin, end), packet in zip(self.made_packets(), made, strict=True):
            yield owner, begin, packet[: end - begin]

    def made_packets(self) -> Iterator[tuple[int, int, int]]:
        """Yields each made packet's owner, and begin and end of its columns in that slot."""
        for made in self.stripe.made:
            for packet in range(self.stripe.lane.code.w):
                yield (made.owner, *self.slot_range(made, packet))

    def slot_range(self, made: MadeShard, packet: int) -> tuple[int, int]:
        """Returns the byte range of a made packet's columns in its slot, without zeros behind."""
        begin, limit = packet * self.stripe.lane.packet_bytes + self.begin, made.nbytes
        return made.offset + min(begin, limit), made.offset + min(begin + self.width, limit)

    @property
    def made_bytes(self) -> int:
        """The bytes that are made, without zeros behind them."""
        return sum(end - begin for _, begin, end in self.made_packets())

    def cell_range(self, shard: int, packet: int) -> tuple[int, int]:
        """Returns the byte range of a packet's columns in the cell, without padding."""
        # With k = 1 every shard has the same bytes.
        lane = self.stripe.lane
        begin, _ = lane.data_range(self.stripe.index, shard if lane.code.k > 1 else 0)
        begin += packet * lane.packet_bytes + self.begin
        limit = lane.begin + lane.nbytes
        return min(begin, limit), min(begin + self.width, limit)


def section_stripes(placement: Placement, olds: Collection[int], have: Collection[int]) -> Iterator[Stripe]:
    """Yields the stripes that give back lost ranks' unreplicated sections, in order of `place`.

    Args:
        placement: under which the slots were written.
        olds: the lost ranks.
        have: old ranks and parity numbers whose slots are at hand.

    Raises:
        ValueError: a rank is in no guard lane, or its lane lost too much.
    """
    streams = _lane_streams(placement, olds, have)
    return merge(*streams, key=attrgetter("place"))


def _lane_streams(placement: Placement, olds: Collection[int], have: Collection[int]) -> list[Iterator[Stripe]]:
    """Returns the stripes of each guard lane of `section_stripes`, lane by lane."""
    members_of: dict[int, list[int]] = {}
    for old in sorted(olds):
        where = placement.guard_lane_of(old)
        if where is None:
            raise ValueError(f"the unreplicated leaves of old rank {old} are in no guard lane.")
        members_of.setdefault(where[0], []).append(where[1])
    streams: list[Iterator[Stripe]] = []
    for number, members in members_of.items():
        if placement.guard_lanes[number].is_copies:
            streams.append(iter(sorted((_copy(placement, number, m, have) for m in members), key=attrgetter("place"))))
        elif placement.guard_lanes[number].f > 1:
            streams.append(_blocks(placement, number, members, have))
        else:
            pieces = (piece for member in members for piece in _pieces(placement, number, member))
            streams.append(iter(sorted(pieces, key=attrgetter("place"))))
    return streams


def section_sources(placement: Placement, olds: Collection[int], have: Collection[int]) -> set[int]:
    """Returns the old ranks and parity numbers that `section_stripes` reads.

    The work does not grow with the bytes.
    """
    owners = set[int]()
    for stripes in _lane_streams(placement, olds, have):
        for stripe in stripes:
            owners.update(each.owner for each in stripe.inputs.values())
            if stripe.section_program is not None:
                break  # all blocks of a lane have the same sources
    return owners


def _section_offsets(placement: Placement, guard: GuardLane) -> list[int]:
    return [placement.rank_placement(rank).unreplicated_offset for rank in guard.members]


def _pieces(placement: Placement, number: int, member: int) -> Iterator[Stripe]:
    """Yields the stripes of a lost member's pieces, if f = 1; no empty ones."""
    guard = placement.guard_lanes[number]
    sections, old = _section_offsets(placement, guard), guard.members[member]
    form = guard.D * guard.k * guard.piece_bytes, guard.members, guard.code, guard.piece_bytes
    for holder in range(guard.D):
        begin, end = guard.piece_range(member, guard.piece_of(member, holder))
        if holder != member and begin < end:
            sources = guard.sources_of(holder)
            inputs = {
                shard: _input(guard, source, holder, sections[source])
                for shard, source in enumerate(sources)
                if source != member
            }
            inputs[guard.code.k] = ShardSource(parity_number(placement, guard.members[holder]), 0, guard.piece_bytes)
            made = MadeShard(sources.index(member), old, sections[member] + begin, end - begin)
            yield Stripe(Lane(NO_CELL, 0, *form), number, holder, inputs, (made,), end - begin)


def _input(guard: GuardLane, source: int, holder: int, section: int) -> ShardSource:
    """Returns where the piece of a source lies that a holder keeps parity of."""
    begin, end = guard.piece_range(source, guard.piece_of(source, holder))
    return ShardSource(guard.members[source], section + begin, end - begin)


def _copy(placement: Placement, number: int, member: int, have: Collection[int]) -> Stripe:
    """Returns the stripe that reads a lost member's section: replayed, or a copy.

    Raises:
        ValueError: no copy is at hand.
    """
    guard = placement.guard_lanes[number]
    size, section = guard.sizes[member], _section_offsets(placement, guard)[member]
    sources = [(replay_number(placement, guard.members[member]), 0)]
    sources += [
        (parity_number(placement, guard.members[holder]), i) for i, holder in enumerate(guard.holders_of(member))
    ]
    for owner, column in sources:
        if owner in have:
            lane = Lane(NO_CELL, 0, guard.piece_bytes, guard.members, guard.code, guard.piece_bytes)
            inputs = {1 + column: ShardSource(owner, column * guard.piece_bytes, size)}
            made = MadeShard(0, guard.members[member], section, size)
            return Stripe(lane, number, member, inputs, (made,), size)
    raise ValueError(f"no copy of the unreplicated leaves of old rank {guard.members[member]} is at hand.")


def _blocks(placement: Placement, number: int, members: Collection[int], have: Collection[int]) -> Iterator[Stripe]:
    """Yields a stripe for each block of lost members' pieces, if f > 1."""
    guard = placement.guard_lanes[number]
    D, f, w, size = guard.D, guard.f, units(guard.D, guard.f), guard.block_bytes
    sections = _section_offsets(placement, guard)
    lost = tuple(member for member, rank in enumerate(guard.members) if rank not in have)
    holders = tuple(member for member, rank in enumerate(guard.members) if parity_number(placement, rank) in have)
    made = [(m, piece) for m in members for piece in range(guard.k) if piece * guard.piece_bytes < guard.sizes[m]]
    if not made:
        return
    program = section_program(D, f, lost, holders, tuple(made))
    read = {shard for shard, _ in program.inputs}
    code = ErasureCode("two-level", D * (D - 1), D * f, w, (), ())  # only its counts: the program codes
    lane = Lane(NO_CELL, 0, D * guard.k * guard.piece_bytes, guard.members, code, size // w)

    # of each shard: its number, where it lies in block 0, and where the bytes of its owner end
    pieces = [
        (
            shard,
            guard.members[member],
            sections[member] + piece * guard.piece_bytes,
            sections[member] + guard.sizes[member],
        )
        for member in range(D)
        for piece in range(guard.k)
        if (shard := piece_shard(D, member, piece)) in read
    ]
    pieces += [
        (shard, parity_number(placement, guard.members[j]), i * guard.piece_bytes, f * guard.piece_bytes)
        for j in holders
        for i in range(f)
        if (shard := parity_shard(D, f, j, i)) in read
    ]
    missing = [
        (piece_shard(D, m, p), guard.members[m], sections[m] + p * guard.piece_bytes, sections[m] + guard.sizes[m])
        for m, p in made
    ]
    for block in range(guard.blocks):
        behind = block * size
        lost_shards = [MadeShard(s, o, at + behind, min(max(end - at - behind, 0), size)) for s, o, at, end in missing]
        inputs = {s: ShardSource(o, at + behind, min(max(end - at - behind, 0), size)) for s, o, at, end in pieces}
        if any(each.nbytes for each in lost_shards):
            yield Stripe(lane, number, block, inputs, tuple(lost_shards), size // w, section_program=program)
