"""What travels while cells are loaded: every rank makes the same list, and takes its part in each entry in this order.

    cell ─► lanes × stripes, in turn ─► groups ─► pieces of at most Sizes.piece bytes
    stripe without loss    a group is the n-th piece of each of its k data shards
    stripe with loss       a group is a band of columns: of every packet of the k shards that are read, bytes begin..end.
                           All packets of a band are there ─► the band of the lost shards is decoded.

        shard      | packet 0          | packet 1          |      a band is as wide as its parity fits into Sizes.group
        band              |██|                |██|

Invariants
  1. The list is a function of placement, slots at hand and readers, so the n-th piece of a cell is the same on all ranks.
  2. A rank that takes its part in a piece has done so, or is doing so, for all pieces before it. The first piece of all that is
     not done can therefore always be done: nobody waits in a circle.
  3. Each byte of a cell comes to each of its holders once, from memory at hand if it is there, else from one sender.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import NamedTuple

from reft.core.coding.placement import Lane, Placement
from reft.core.recovery.gather import StripeRead, stripe_reads

ALIGNMENT = 64  # bytes that the columns of a band are multiples of, so that XOR works on whole words


@dataclass(frozen=True)
class LoadSizes:
    """How much is on its way at a time, in bytes; the same on all ranks.

    Attributes:
        piece: of a message; smaller ones cost wake-ups.
        group: of the parity that is decoded at a time.
        groups: how many of those are in memory.
        window: of messages under way.
        ahead: of what is read and checked before it is due: little enough to stay in the cache until it is sent.
    """

    piece: int = 4 << 20
    group: int = 16 << 20
    groups: int = 3
    window: int = 32 << 20
    ahead: int = 8 << 20

    @property
    def memory_max(self) -> int:
        """The most that a load holds beside slots and tensors: parity, messages that had to be copied, room to decode in."""
        return self.groups * self.group + self.window + (16 << 20)


@dataclass(frozen=True)
class ShardStream:
    """One shard on its way to the holders of its cell.

    Attributes:
        lane: index in the placement.
        stripe: in the lane.
        shard: what it is: a data shard, or parity from k on. The copies of a code with k = 1 all are data shard 0.
        at_hand: new rank → (old rank whose slot it reads, shard there).
        sender: the new rank that sends it.
        receivers: the new ranks that it is sent to.
    """

    lane: int
    stripe: int
    shard: int
    at_hand: Mapping[int, tuple[int, int]]
    sender: int
    receivers: tuple[int, ...]


class ShardRange(NamedTuple):
    """Bytes begin..end of a stream's shard. Of a data shard, only what the lane has: padding does not travel."""

    stream: ShardStream
    begin: int
    end: int


@dataclass(frozen=True)
class StripeSlice:
    """Pieces that follow one another; `read.lost` is decoded once they are there, columns begin..end of each packet."""

    lane: int
    pieces: Sequence[ShardRange]
    read: StripeRead
    begin: int
    end: int

    @property
    def is_coded(self) -> bool:
        """Whether something must be decoded."""
        return bool(self.read.lost)


@dataclass(frozen=True)
class LoadPlan:
    """Makes the list for one placement.

    Args:
        placement: under which the slots were written.
        have: old ranks whose slots are at hand.
        reader_of: old rank → new rank that reads its slot.
        sizes: of pieces and groups.
    """

    placement: Placement
    have: Collection[int]
    reader_of: Mapping[int, int]
    sizes: LoadSizes

    def groups(self, cell: int) -> Iterator[StripeSlice]:
        """The groups of one cell, lanes and stripes in turn, so that all members send at the same time.

        Raises:
            ValueError: a stripe can't be decoded.
        """
        borders = self._borders(cell)
        turns = [
            _Stripe(self, number, read, borders).groups()
            for number in self.placement.lanes_of(cell)
            for read in stripe_reads(self.placement, number, self.have)
        ]
        for row in zip_longest(*turns):
            yield from (group for group in row if group is not None)

    def cells(self, rank: int) -> list[int]:
        """The cells that a new rank has a part in: it holds them, or reads slots of others that do."""
        division = self.placement.division
        ranks = {rank, *(old for old, reader in self.reader_of.items() if reader == rank and old in self.have)}
        return sorted({cell for each in ranks for cell in division.cells_of[division.layout_of[each]]})

    def _borders(self, cell: int) -> list[int]:
        """Where large leaves begin and end: a piece of one leaf can arrive in its tensor, without a copy."""
        leaves = self.placement.division.cells[cell]
        large = [
            (offset, offset + leaf.nbytes)
            for leaf, offset in zip(leaves.leaves, leaves.offsets, strict=True)
            if leaf.nbytes >= self.sizes.piece // 4
        ]
        return sorted(set(chain.from_iterable(large)))


@dataclass(frozen=True)
class _Stripe:
    whole: LoadPlan
    number: int
    read: StripeRead
    borders: Sequence[int]

    @cached_property
    def lane(self) -> Lane:
        return self.whole.placement.lanes[self.number]

    def groups(self) -> Iterator[StripeSlice]:
        lane = self.lane
        # Copies are data: with k = 1 there is nothing to decode.
        plain = StripeRead(self.number, self.read.stripe, self.read.shards, ())
        if not self.read.lost or lane.code.k == 1:
            for row in zip_longest(*(list(self._cut(stream, 0, lane.shard_bytes)) for stream in self._streams)):
                yield StripeSlice(self.number, [piece for piece in row if piece is not None], plain, 0, 0)
            return
        rows = len(self.read.lost) * lane.code.w
        sizes = self.whole.sizes
        width = max(min(sizes.piece, sizes.group // rows) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
        for begin in range(0, lane.packet_bytes, width):
            end = min(begin + width, lane.packet_bytes)
            yield StripeSlice(self.number, list(self._band(begin, end)), self.read, begin, end)

    def _band(self, begin: int, end: int) -> Iterator[ShardRange]:
        lane = self.lane
        if end - begin == lane.packet_bytes:  # packets one after the other are one run
            runs = [(0, lane.shard_bytes)]
        else:
            runs = [(r * lane.packet_bytes + begin, r * lane.packet_bytes + end) for r in range(lane.code.w)]
        for first, last in runs:
            for row in zip_longest(*(list(self._cut(stream, first, last)) for stream in self._streams)):
                yield from (piece for piece in row if piece is not None)

    def _cut(self, stream: ShardStream, begin: int, end: int) -> Iterator[ShardRange]:
        """Pieces of begin..end of the shard: at most Sizes.piece each, none across the border of a large leaf."""
        lane, first = self.lane, 0
        if stream.shard < lane.code.k:
            first = lane.data_range(stream.stripe, stream.shard)[0]
            end = min(end, lane.begin + lane.nbytes - first)
        while begin < end:
            stop = min(end, begin + self.whole.sizes.piece)
            if stream.shard < lane.code.k:
                at = bisect_right(self.borders, first + begin)
                if at < len(self.borders):
                    stop = min(stop, self.borders[at] - first)
            yield ShardRange(stream, begin, stop)
            begin = stop

    @cached_property
    def _streams(self) -> list[ShardStream]:
        lane, stripe = self.lane, self.read.stripe
        holders = self.whole.placement.division.cells[lane.cell].holders
        found = []
        for shard in self.read.shards:
            sender, _ = self._reader(shard)
            meaning, nearest = shard, [shard]
            if lane.code.k == 1:
                meaning, nearest = 0, [*self._copies(), shard]
            at_hand = {reader: (old, each) for each in nearest for reader, old in [self._reader(each)]}
            receivers = tuple(rank for rank in holders if rank not in at_hand)
            found.append(ShardStream(self.number, stripe, meaning, at_hand, sender, receivers))
        return found

    def _copies(self) -> list[int]:
        """The copies of this stripe that are at hand."""
        lane = self.lane
        shards = range(lane.code.k + lane.code.f)
        return [shard for shard in shards if lane.members[lane.member_of(self.read.stripe, shard)] in self.whole.have]

    def _reader(self, shard: int) -> tuple[int, int]:
        """The new rank that reads a shard, and the old rank whose slot has it."""
        old = self.lane.members[self.lane.member_of(self.read.stripe, shard)]
        return self.whole.reader_of[old], old
