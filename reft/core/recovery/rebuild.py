"""Rebuilds the slots of lost ranks, shard by shard, from the slots that are left.

    stripe of a lane, k = 2, f = 2, slot of member 1 lost      columns a..b of each packet:

      member      0    (1)    2     3                       read  data 0 ─┐
      shard     data 0 [data 1] P0   [P1 elsewhere]         read  P0     ─┴─ decode ─► data 1
                                                            made: member 1's shard of this stripe,
                                                                  data or parity, in the new slot

Invariants
  1. Every block of a lost rank is rebuilt from k surviving shards of its stripe. Nothing else is
     read.
  2. Data at hand is never decoded. Parity is computed from data, which was read or decoded.
  3. Memory is bounded by the slice: all registers of one slice take about SLICE_BYTES, whatever the
     shard size.
  4. The rebuilt bytes equal the lost ones. Padding and absent leaves are zeros in the surviving
     shards too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reft.core.coding.erasure import Packet, XorProgram, decode_program, encode_program, run
from reft.core.coding.placement import Lane, Placement, RankPlacement
from reft.core.recovery.gather import stripe_reads

SLICE_BYTES = 128 << 20  # all registers of a slice
RANGE_MAX = 2 << 20  # bytes of one packet in a slice: more would not be faster
RANGE_UNIT = 64  # bytes: a cache line
CACHE_BYTES = 512 << 10  # registers in use: half of a core's second-level cache
COLUMNS_MIN = 8 << 10  # below this the calls cost more than the XOR

Bytes = npt.NDArray[np.uint8]


class StripeShard(NamedTuple):
    """One shard of a stripe. Its offset counts bytes in the data of its rank's slot."""

    shard: int
    rank: int
    offset: int


@dataclass(frozen=True)
class StripeRebuild:
    """The shards that one stripe reads and rebuilds.

    Attributes:
        lane: index in the placement.
        stripe: index in the lane.
        read: k shards, ascending.
        lost: the data shards to decode, ascending.
        made: the shards that the new slots get, ascending.
    """

    lane: int
    stripe: int
    read: tuple[StripeShard, ...]
    lost: tuple[int, ...]
    made: tuple[StripeShard, ...]


class RebuildSlice(NamedTuple):
    """Columns begin..end of every packet of a stripe."""

    stripe: StripeRebuild
    begin: int
    end: int


@dataclass
class RebuildCost:
    """The bytes read and computed to rebuild some ranks' parts of a cell.

    Attributes:
        cell: index of the cell in the division.
        read: rank → bytes read of its slot.
        copied: bytes of data that another slot holds too.
        decoded: bytes of data that is computed.
        parity: bytes of parity that is computed.
    """

    cell: int
    read: dict[int, int] = field(default_factory=dict)
    copied: int = 0
    decoded: int = 0
    parity: int = 0


def stripes(placement: Placement, have: Collection[int], lost: Collection[int]) -> Iterator[StripeRebuild]:
    """Yields the stripes of which lost ranks had a shard.

    Args:
        placement: of the epoch that wrote the version.
        have: ranks whose slot is at hand.
        lost: ranks whose slots are rebuilt; none of them in `have`.

    Raises:
        ValueError: a stripe can't be decoded from these slots.
    """
    offsets: dict[int, dict[tuple[int, int, int], int]] = {}

    def piece(lane: int, stripe: int, shard: int) -> StripeShard:
        lane_layout = placement.lanes[lane]
        rank = lane_layout.members[lane_layout.member_of(stripe, shard)]
        if rank not in offsets:
            blocks = placement.rank_placement(rank).blocks
            offsets[rank] = {(block.lane, block.stripe, block.shard): block.offset for block in blocks}
        return StripeShard(shard, rank, offsets[rank][lane, stripe, shard])

    for lane in _lanes_of(placement, lost):
        lane_layout = placement.lanes[lane]
        for read in stripe_reads(placement, lane, have):
            lost_shards = [
                shard
                for shard in range(lane_layout.code.k + lane_layout.code.f)
                if lane_layout.members[lane_layout.member_of(read.stripe, shard)] in lost
            ]
            if lost_shards:
                shards_read = tuple(piece(lane, read.stripe, shard) for shard in read.shards)
                made = tuple(piece(lane, read.stripe, shard) for shard in lost_shards)
                yield StripeRebuild(lane, read.stripe, shards_read, read.lost, made)


def _lanes_of(placement: Placement, ranks: Collection[int]) -> list[int]:
    division = placement.division
    cells = {cell for rank in ranks for cell in division.cells_of[division.layout_of[rank]]}
    lanes = (lane for cell in cells for lane in placement.lanes_of(cell))
    return sorted(lane for lane in lanes if not set(ranks).isdisjoint(placement.lanes[lane].members))


def costs(placement: Placement, have: Collection[int], lost: Collection[int]) -> list[RebuildCost]:
    """Returns the cost to rebuild the slots of `lost`, one entry a cell, ascending.

    Arguments and errors are those of `stripes`.
    """
    by_cell: dict[int, RebuildCost] = {}
    for each in stripes(placement, have, lost):
        lane = placement.lanes[each.lane]
        cost = by_cell.setdefault(lane.cell, RebuildCost(lane.cell))
        for piece in each.read:
            cost.read[piece.rank] = cost.read.get(piece.rank, 0) + lane.shard_bytes
        for piece in each.made:
            if lane.code.k == 1:
                cost.copied += lane.shard_bytes
            elif piece.shard < lane.code.k:
                cost.decoded += lane.shard_bytes
            else:
                cost.parity += lane.shard_bytes
    return [by_cell[cell] for cell in sorted(by_cell)]


def rebuild_slices(placement: Placement, stripe: StripeRebuild, limit: int = SLICE_BYTES) -> Iterator[RebuildSlice]:
    """Cuts a stripe into slices whose registers take at most `limit` bytes.

    A slice is never narrower than RANGE_UNIT.
    """
    lane = placement.lanes[stripe.lane]
    shards = len(stripe.read) + len({*stripe.lost, *(piece.shard for piece in stripe.made)}) + 1
    width = min(limit // (shards * lane.code.w), RANGE_MAX) // RANGE_UNIT * RANGE_UNIT
    width = max(width, RANGE_UNIT)
    for begin in range(0, lane.packet_bytes, width):
        yield RebuildSlice(stripe, begin, min(begin + width, lane.packet_bytes))


@dataclass
class ShardRebuilder:
    """Computes slices of lost shards and caches the XOR programs; several threads may use it.

    Args:
        placement: of the epoch that wrote the version.
    """

    placement: Placement
    _programs: dict[tuple[object, ...], XorProgram] = field(default_factory=dict)

    def make(self, shard_slice: RebuildSlice, read: Mapping[Packet, Bytes], made: Mapping[Packet, Bytes]) -> None:
        """Fills one slice of the shards that are rebuilt.

        Args:
            shard_slice: the slice.
            read: (shard, packet) → the columns that were read, for all of `stripe.read`.
            made: (shard, packet) → where the rebuilt columns belong, for all of `stripe.made`.
        """
        stripe = shard_slice.stripe
        lane = self.placement.lanes[stripe.lane]
        registers = dict(read)
        width = shard_slice.end - shard_slice.begin
        if stripe.lost:
            parities = tuple(piece.shard - lane.code.k for piece in stripe.read if piece.shard >= lane.code.k)
            self._run(self._decoding(lane, stripe.lost, parities), registers, made, width)
        for piece in stripe.made:
            if piece.shard >= lane.code.k:
                self._run(self._encoding(lane, piece.shard - lane.code.k), registers, made, width)

    def _run(
        self, program: XorProgram, registers: dict[Packet, Bytes], made: Mapping[Packet, Bytes], width: int
    ) -> None:
        for packet in program.outputs:
            registers[packet] = made[packet] if packet in made else np.empty(width, np.uint8)
        count = len(program.inputs) + len(program.outputs) + program.scratch
        step = max(CACHE_BYTES // count, COLUMNS_MIN)
        scratch = np.empty((program.scratch, min(step, width)), np.uint8)
        for first in range(0, width, step):
            last = min(first + step, width)
            run(
                program,
                [registers[packet][first:last] for packet in program.inputs],
                [registers[packet][first:last] for packet in program.outputs],
                [row[: last - first] for row in scratch],
            )

    def _decoding(self, lane: Lane, lost: tuple[int, ...], parities: tuple[int, ...]) -> XorProgram:
        return self._cached(lane, (lost, parities), lambda: decode_program(lane.code, lost, parities))

    def _encoding(self, lane: Lane, parity: int) -> XorProgram:
        return self._cached(lane, (parity,), lambda: encode_program(lane.code, parity))

    def _cached(self, lane: Lane, what: tuple[object, ...], make: Any) -> XorProgram:
        # The key has no ErasureCode: hashing its tables means hashing thousands of entries.
        key = (lane.code.kind, lane.code.k, lane.code.f, lane.code.w, *what)
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]


def lane_at(part: RankPlacement, offset: int) -> int | None:
    """Returns the lane whose shard lies at an offset of a slot's data.

    If none lies there, it is the lane of the first shard after it.

    Returns None behind the last shard.
    """
    return next((block.lane for block in part.blocks if offset < block.offset + block.nbytes), None)
