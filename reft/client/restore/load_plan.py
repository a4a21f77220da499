"""The list of transfers that load cells.

Every rank computes the same list and follows the list's order.

    cell ─► lanes × stripes, in turn ─► slices ─► ranges of at most LoadSizes.piece bytes
    stripe without loss    a slice is the n-th range of each of its k data shards
    stripe with loss       a slice is a set of columns: bytes begin..end of every packet of
                           the k shards that are read; when all packets of a slice have
                           arrived, the slice of the lost shards is decoded

        shard      | packet 0          | packet 1          |   a slice is as wide as its
        slice             |██|                |██|             parity fits in LoadSizes.group

Invariants
  1. The list is a function of placement, available slots and readers. So the n-th range of a cell
     is the same on all ranks.
  2. A rank handles the ranges in order. So the first unfinished range of all can always proceed,
     and ranks never deadlock.
  3. Each holder of a cell gets each byte once: from a local slot if possible, else from one sender.
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

# A slice's width in bytes is a multiple of this, so that XOR works on whole words.
ALIGNMENT = 64


@dataclass(frozen=True)
class LoadSizes:
    """How much is under way at a time, in bytes; the same on all ranks.

    Attributes:
        piece: largest range, which is one message; smaller messages cost more wake-ups.
        group: parity of one slice to decode.
        groups: how many such parity buffers exist.
        window: messages under way.
        ahead: bytes read and verified in advance; small enough to stay in the cache until sent.
    """

    piece: int = 4 << 20
    group: int = 16 << 20
    groups: int = 3
    window: int = 32 << 20
    ahead: int = 8 << 20

    @property
    def memory_max(self) -> int:
        """The most memory of a load beside slots and tensors.

        Contains parity, messages that must be copied, and memory to decode in.
        """
        return self.groups * self.group + self.window + (16 << 20)


@dataclass(frozen=True)
class ShardStream:
    """One shard on its way to the holders of its cell.

    Attributes:
        lane: index in the placement.
        stripe: index in the lane.
        shard: index in the stripe: a data shard, or parity from k on. For a code with k = 1 all
            copies are data shard 0.
        at_hand: new rank → (old rank whose slot it reads, shard in that slot).
        sender: the new rank that sends the shard.
        receivers: the new ranks that receive the shard.
    """

    lane: int
    stripe: int
    shard: int
    at_hand: Mapping[int, tuple[int, int]]
    sender: int
    receivers: tuple[int, ...]


class ShardRange(NamedTuple):
    """Bytes begin..end of a stream's shard. The padding of data shards is left out."""

    stream: ShardStream
    begin: int
    end: int


@dataclass(frozen=True)
class StripeSlice:
    """Ranges that follow one another, and the columns begin..end that they allow to decode.

    `read.lost` is decoded after all ranges have arrived, in columns begin..end of each packet.
    """

    lane: int
    ranges: Sequence[ShardRange]
    read: StripeRead
    begin: int
    end: int

    @property
    def has_lost_shards(self) -> bool:
        """Whether the slice has a lost shard to decode."""
        return bool(self.read.lost)


@dataclass(frozen=True)
class LoadPlan:
    """Computes the list of transfers for one placement.

    Args:
        placement: the placement that the slots were written with.
        have: old ranks whose slots are readable.
        reader_of: old rank → new rank that reads its slot.
        sizes: sizes of ranges and slices.
    """

    placement: Placement
    have: Collection[int]
    reader_of: Mapping[int, int]
    sizes: LoadSizes

    def slices(self, cell: int) -> Iterator[StripeSlice]:
        """Yields the slices of one cell.

        Lanes and stripes take turns, so that all members send at the same time.

        Raises:
            ValueError: a stripe cannot be decoded.
        """
        leaf_borders = self._leaf_borders(cell)
        by_stripe = [
            _StripeTransfers(self, number, read, leaf_borders).groups()
            for number in self.placement.lanes_of(cell)
            for read in stripe_reads(self.placement, number, self.have)
        ]
        for row in zip_longest(*by_stripe):
            yield from (each for each in row if each is not None)

    def cells(self, rank: int) -> list[int]:
        """Returns the cells that a new rank takes part in.

        The rank holds these cells, or reads slots of old ranks that hold them.
        """
        division = self.placement.division
        ranks = {rank, *(old for old, reader in self.reader_of.items() if reader == rank and old in self.have)}
        return sorted({cell for each in ranks for cell in division.cells_of[division.layout_of[each]]})

    def _leaf_borders(self, cell: int) -> list[int]:
        """Returns the borders of large leaves.

        A range within one leaf can arrive in the leaf's tensor, without a copy.
        """
        leaves = self.placement.division.cells[cell]
        large = [
            (offset, offset + leaf.nbytes)
            for leaf, offset in zip(leaves.leaves, leaves.offsets, strict=True)
            if leaf.nbytes >= self.sizes.piece // 4
        ]
        return sorted(set(chain.from_iterable(large)))


@dataclass(frozen=True)
class _StripeTransfers:
    load_plan: LoadPlan
    number: int
    read: StripeRead
    leaf_borders: Sequence[int]

    @cached_property
    def lane(self) -> Lane:
        return self.load_plan.placement.lanes[self.number]

    def groups(self) -> Iterator[StripeSlice]:
        lane = self.lane
        # With k = 1 the parities are copies of the data, so there is nothing to decode.
        plain = StripeRead(self.number, self.read.stripe, self.read.shards, ())
        if not self.read.lost or lane.code.k == 1:
            for row in zip_longest(*(list(self._ranges(stream, 0, lane.shard_bytes)) for stream in self._streams)):
                yield StripeSlice(self.number, [piece for piece in row if piece is not None], plain, 0, 0)
            return
        rows = len(self.read.lost) * lane.code.w
        sizes = self.load_plan.sizes
        width = max(min(sizes.piece, sizes.group // rows) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
        for begin in range(0, lane.packet_bytes, width):
            end = min(begin + width, lane.packet_bytes)
            yield StripeSlice(self.number, list(self._slice_ranges(begin, end)), self.read, begin, end)

    def _slice_ranges(self, begin: int, end: int) -> Iterator[ShardRange]:
        lane = self.lane
        if end - begin == lane.packet_bytes:  # consecutive packets are one run
            runs = [(0, lane.shard_bytes)]
        else:
            runs = [(r * lane.packet_bytes + begin, r * lane.packet_bytes + end) for r in range(lane.code.w)]
        for first, last in runs:
            for row in zip_longest(*(list(self._ranges(stream, first, last)) for stream in self._streams)):
                yield from (piece for piece in row if piece is not None)

    def _ranges(self, stream: ShardStream, begin: int, end: int) -> Iterator[ShardRange]:
        """Yields ranges of begin..end of the shard.

        A range has at most LoadSizes.piece bytes and does not cross the border of a large leaf.
        """
        lane, first = self.lane, 0
        if stream.shard < lane.code.k:
            first = lane.data_range(stream.stripe, stream.shard)[0]
            end = min(end, lane.begin + lane.nbytes - first)
        while begin < end:
            stop = min(end, begin + self.load_plan.sizes.piece)
            if stream.shard < lane.code.k:
                at = bisect_right(self.leaf_borders, first + begin)
                if at < len(self.leaf_borders):
                    stop = min(stop, self.leaf_borders[at] - first)
            yield ShardRange(stream, begin, stop)
            begin = stop

    @cached_property
    def _streams(self) -> list[ShardStream]:
        lane, stripe = self.lane, self.read.stripe
        holders = self.load_plan.placement.division.cells[lane.cell].holders
        streams = []
        for shard in self.read.shards:
            sender, _ = self._reader(shard)
            content, preferred = shard, [shard]
            if lane.code.k == 1:
                content, preferred = 0, [*self._copies(), shard]
            at_hand = {reader: (old, each) for each in preferred for reader, old in [self._reader(each)]}
            receivers = tuple(rank for rank in holders if rank not in at_hand)
            streams.append(ShardStream(self.number, stripe, content, at_hand, sender, receivers))
        return streams

    def _copies(self) -> list[int]:
        """Returns the readable copies of this stripe."""
        lane = self.lane
        shards = range(lane.code.k + lane.code.f)
        return [
            shard for shard in shards if lane.members[lane.member_of(self.read.stripe, shard)] in self.load_plan.have
        ]

    def _reader(self, shard: int) -> tuple[int, int]:
        """Returns the new rank that reads a shard, and the old rank of the slot."""
        old = self.lane.members[self.lane.member_of(self.read.stripe, shard)]
        return self.load_plan.reader_of[old], old
