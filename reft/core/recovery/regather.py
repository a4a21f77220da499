"""Lists the transfers that bring a job's state into another shape.

Each rank makes its own part of the list.

    slot of old rank q   | shard | shard | … | parity | unreplicated |
      window             ├──────────────┤     at most TransferSizes.piece bytes; all slots in turn
        message          ▓▓  ▓▓▓   ▓          from the slot's reader to each set of ranks:
                                              the bytes that they need, packed
    capsule of q         | inline leaf | inline leaf |    the same, of leaves laid end to end
    lost slot of q       slices: columns of the shards that decode the slot ─► a rebuilder

A rebuilder has the bytes of q one slice at a time. It compares them with the digests of q, and
sends messages of them.

Invariants
  1. The list follows from needs, placement, slots at hand and readers: it is the same on all ranks.
     Its order is that of windows, then of old ranks. So a rank can leave out the entries of others
     without counting them.
  2. A rank that works on an entry has finished or begun all its entries before that one. So the
     first unfinished entry can always be finished: ranks never wait in a circle.
  3. Each needed byte reaches each rank that needs it once. It comes from memory that the rank reads
     itself if the byte lies there, else from one sender.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import merge
from itertools import chain, islice, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from reft.core.coding.placement import Lane, Placement, ShardBlock, ranges
from reft.core.layout.layout import ALIGNMENT
from reft.core.recovery.gather import StripeRead, assign_readers, stripe_reads
from reft.core.recovery.shard_matching import PieceSource, PieceTransfer


@dataclass(frozen=True)
class TransferSizes:
    """How many bytes are in transfer at a time; the same on all ranks.

    Attributes:
        piece: bytes read, packed and sent at a time.
        band: bytes of all shards that one slice of a lost shard is decoded from.
        window: bytes of messages under way.
    """

    piece: int = 4 << 20
    band: int = 16 << 20
    window: int = 32 << 20


class NeededRange(NamedTuple):
    """Bytes begin..end of a piece that one need takes. They lie from `at` on in the source."""

    need: PieceTransfer
    at: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Returns how many bytes the need takes."""
        return self.need.copy.bytes_within(self.begin, self.end)


@dataclass(frozen=True)
class TransferMessage:
    """The bytes that one rank gives to one set of ranks, which may include itself.

    Attributes:
        where: the source. SLOT: the slot of old rank `owner`, by `at`. CAPSULE: its inline leaves,
            end to end. CELL: the decoded bytes of its slot.
        owner: the old rank.
        begin: where reading begins in the source.
        end: where reading ends in the source.
        parts: in the order of the source.
        sender: new rank.
        receivers: new ranks, ascending.
        nbytes: sum over all parts.
    """

    where: PieceSource
    owner: int
    begin: int
    end: int
    parts: tuple[NeededRange, ...]
    sender: int
    receivers: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class LostShardSlice:
    """Columns begin..end of every packet of one lost shard, and the rank that decodes them.

    Attributes:
        owner: the old rank that lost the shard.
        block: the block of its slot.
        lane: the lane of the block.
        read: the shards that are read, and the shards that are decoded from them.
        begin: first column.
        end: column behind the last.
        inputs: for each of read.shards: the old rank whose slot has it, and its offset there.
        rebuilder: new rank.
        messages: messages with the decoded bytes.
    """

    owner: int
    block: ShardBlock
    lane: Lane
    read: StripeRead
    begin: int
    end: int
    inputs: tuple[tuple[int, int], ...]
    rebuilder: int
    messages: tuple[TransferMessage, ...]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Returns the slice as byte ranges of the shard, ascending."""
        return column_ranges(self.lane, self.begin, self.end)


class SourceExtent(NamedTuple):
    """Bytes begin..end of a source, which are the bytes of a piece from `first` on.

    `takes` says which new ranks take the bytes from here.
    """

    begin: int
    end: int
    first: int
    needs: Sequence[PieceTransfer]
    takes: Callable[[int], bool]


def _any_rank(rank: int) -> bool:
    return True


def column_ranges(lane: Lane, begin: int, end: int) -> list[tuple[int, int]]:
    """Returns columns begin..end of every packet of a shard, as byte ranges of the shard."""
    if (begin, end) == (0, lane.packet_bytes):
        return [(0, lane.shard_bytes)]  # whole packets in sequence form one range
    return [(r * lane.packet_bytes + begin, r * lane.packet_bytes + end) for r in range(lane.code.w)]


def readers_of(sources: Mapping[int, str], nodes: Mapping[str, Sequence[int]], world: int) -> dict[int, int]:
    """Assigns one reading rank to each slot.

    The new job may have fewer ranks than the old one. Works like `gather.assign_readers`. Slots on
    a node where no rank runs are shared out among all ranks.

    Args:
        sources: old rank → id of the node that has its slot.
        nodes: id of each node → the ranks that run there now.
        world: how many ranks there are now.

    Returns:
        Old rank → new rank.
    """
    near = assign_readers({rank: node for rank, node in sources.items() if node in nodes}, nodes)
    load = dict.fromkeys(range(world), 0)
    for reader in near.values():
        load[reader] += 1
    for rank in sorted(sources.keys() - near.keys()):
        near[rank] = min(load, key=lambda each: (load[each], each != rank, each))
        load[near[rank]] += 1
    return dict(sorted(near.items()))


@dataclass(frozen=True)
class _Wanted:
    """Needs, grouped by source, in the order of their offsets there.

    Attributes:
        cells: cell → offset in the cell → the needs of the piece there.
        offsets: cell → these offsets.
        unreplicated: old rank → offset in its slot → the needs of the unreplicated piece there.
        inline: old rank → name → the needs of that inline leaf.
    """

    cells: Mapping[int, Mapping[int, Sequence[PieceTransfer]]]
    offsets: Mapping[int, Sequence[int]]
    unreplicated: Mapping[int, Mapping[int, Sequence[PieceTransfer]]]
    inline: Mapping[int, Mapping[str, Sequence[PieceTransfer]]]

    @classmethod
    def of(cls, needs: Iterable[PieceTransfer]) -> _Wanted:
        by_source: dict[PieceSource, dict[int, dict[Any, list[PieceTransfer]]]] = {where: {} for where in PieceSource}
        for need in needs:
            where, owner, offset = need.location
            key = need.piece.name if where is PieceSource.CAPSULE else offset
            by_source[where].setdefault(owner, {}).setdefault(key, []).append(need)
        cells, unreplicated, inline = (
            {owner: dict(sorted(by_source[where][owner].items())) for owner in sorted(by_source[where])}
            for where in (PieceSource.CELL, PieceSource.SLOT, PieceSource.CAPSULE)
        )
        return cls(cells, {cell: list(places) for cell, places in cells.items()}, unreplicated, inline)


@dataclass(frozen=True)
class ReshardPlan:
    """Makes the list of transfers.

    Args:
        needs: which bytes go to which leaves.
        placement: under which the slots were written.
        reader_of: old rank → new rank that reads its slot, for all slots at hand.
        keeper_of: old rank → new rank that has its capsule, and decodes its slot if the slot is
            lost.
        node_of: for each new rank the name of its node.
        sizes: of pieces and slices.
    """

    needs: Sequence[PieceTransfer]
    placement: Placement
    reader_of: Mapping[int, int]
    keeper_of: Mapping[int, int]
    node_of: Sequence[str]
    sizes: TransferSizes
    _reads: dict[int, list[StripeRead]] = field(default_factory=dict)
    _block_offsets: dict[int, dict[tuple[int, int, int], int]] = field(default_factory=dict)

    def entries(self, rank: int) -> Iterator[TransferMessage | LostShardSlice]:
        """Yields the entries that a new rank takes part in, in list order. It may yield a few more.

        Raises:
            ValueError: a stripe can't be decoded from the slots at hand.
        """
        own_needs = _Wanted.of(need for need in self.needs if rank in need.receivers)
        slots = [self._slot(old, self._all_needs if new == rank else own_needs) for old, new in self.reader_of.items()]
        inline_leaves = []
        for old in self._all_needs.inline:
            keeper = self.keeper_of[old]
            extents = self.inline_leaves(old, self._all_needs if keeper == rank else own_needs)
            inline_leaves.append(self._windows(PieceSource.CAPSULE, old, extents, keeper))
        for turn in (slots, inline_leaves):
            yield from (message for _, message in merge(*turn, key=itemgetter(0)))
        lost = [old for old in range(len(self.placement.domains)) if old not in self.reader_of]
        for row in zip_longest(
            *(self._lost(old, self._all_needs if self.keeper_of[old] == rank else own_needs) for old in lost)
        ):
            yield from (shard_slice for shard_slice in row if shard_slice is not None)

    def inline_leaves(self, owner: int, wanted: _Wanted | None = None) -> list[SourceExtent]:
        """Returns the needed inline leaves of an old rank, end to end.

        They are in the order of their names.

        Args:
            owner: the old rank.
            wanted: returns only leaves with a need in it; None: all.
        """
        extents, at = [], 0
        wanted_needs = (wanted or self._all_needs).inline.get(owner, {})
        for name, needs in self._all_needs.inline[owner].items():
            nbytes = needs[0].piece.nbytes
            if name in wanted_needs:
                extents.append(SourceExtent(at, at + nbytes, 0, wanted_needs[name], _any_rank))
            at += nbytes
        return extents

    def is_rebuilt(self, owner: int) -> bool:
        """Returns whether an old rank's slot is lost and must be decoded.

        That is not so if other slots have copies of all its cell data.
        """
        part = self.placement.rank_placement(owner)
        lanes = [self.placement.lanes[block.lane] for block in part.blocks[: part.data_blocks]]
        return owner not in self.reader_of and any(lane.code.k > 1 for lane in lanes)

    @cached_property
    def _all_needs(self) -> _Wanted:
        return _Wanted.of(self.needs)

    # Slots at hand

    def _slot(self, owner: int, wanted: _Wanted) -> Iterator[tuple[int, TransferMessage]]:
        part = self.placement.rank_placement(owner)
        blocks = [self._block(block, self._takes(block, owner), wanted) for block in part.blocks[: part.data_blocks]]
        unreplicated = (
            SourceExtent(at, at + needs[0].piece.nbytes, 0, needs, _any_rank)
            for at, needs in wanted.unreplicated.get(owner, {}).items()
        )
        # With k = 1, parity blocks are copies of the data. Their reader takes the data without a
        # message.
        copies = [
            self._block(block, self._takes(block, owner), wanted)
            for block in part.blocks[part.data_blocks :]
            if self.placement.lanes[block.lane].code.k == 1
        ]
        extents = chain(chain.from_iterable(blocks), chain.from_iterable(copies), unreplicated)
        yield from self._windows(PieceSource.SLOT, owner, extents, self.reader_of[owner])

    def _block(self, block: ShardBlock, takes: Callable[[int], bool], wanted: _Wanted) -> Iterator[SourceExtent]:
        """Yields the extents of a data block that some rank needs.

        They are in the order of its bytes.
        """
        lane = self.placement.lanes[block.lane]
        if lane.cell not in wanted.cells:
            return
        shard = block.shard if lane.code.k > 1 else 0
        begin, end, _ = ranges(lane, block.stripe, shard)
        offsets, needs = wanted.offsets[lane.cell], wanted.cells[lane.cell]
        for offset in islice(offsets, max(bisect_right(offsets, begin) - 1, 0), None):
            if offset >= end:
                break
            first, last = max(begin, offset), min(end, offset + needs[offset][0].piece.nbytes)
            if first < last:
                at = block.offset + first - begin
                yield SourceExtent(at, at + last - first, first - offset, needs[offset], takes)

    def _takes(self, block: ShardBlock, owner: int) -> Callable[[int], bool]:
        """Returns which new ranks take a block from this slot.

        If several slots have a copy, a rank takes the copy that it reads itself. Second choice is a
        copy on its node, third the first copy.
        """
        lane = self.placement.lanes[block.lane]
        if lane.code.k > 1 or not lane.code.f:
            return _any_rank
        holders = [lane.members[lane.member_of(block.stripe, shard)] for shard in range(lane.code.f + 1)]
        at_hand = [old for old in holders if old in self.reader_of]
        by_rank: dict[int, int] = {}
        by_node: dict[str, int] = {}
        for old in at_hand:
            by_rank.setdefault(self.reader_of[old], old)
            by_node.setdefault(self.node_of[self.reader_of[old]], old)
        return lambda rank: by_rank.get(rank, by_node.get(self.node_of[rank], at_hand[0])) == owner

    # Messages

    def _windows(
        self, where: PieceSource, owner: int, extents: Iterable[SourceExtent], sender: int
    ) -> Iterator[tuple[int, TransferMessage]]:
        """Cuts extents at window boundaries; yields each message with its window number."""
        window, parts = -1, dict[tuple[int, ...], list[NeededRange]]()
        for extent in extents:
            at = extent.begin
            while at < extent.end:
                number = at // self.sizes.piece
                if number != window:
                    yield from ((window, message) for message in self._messages(where, owner, parts, sender))
                    window, parts = number, {}
                end = min(extent.end, (number + 1) * self.sizes.piece)
                self._split(extent, at, end, parts)
                at = end
        yield from ((window, message) for message in self._messages(where, owner, parts, sender))

    def _split(self, extent: SourceExtent, at: int, end: int, parts: dict[tuple[int, ...], list[NeededRange]]) -> None:
        """Adds the needed ranges of bytes at..end of the source, grouped by receivers."""
        begin = extent.first + at - extent.begin
        for need in extent.needs:
            receivers = need.receivers
            if extent.takes is not _any_rank:
                receivers = tuple(rank for rank in receivers if extent.takes(rank))
            part = NeededRange(need, at, begin, begin + end - at)
            if receivers and part.nbytes:
                parts.setdefault(receivers, []).append(part)

    def _messages(
        self, where: PieceSource, owner: int, parts: Mapping[tuple[int, ...], Sequence[NeededRange]], sender: int
    ) -> Iterator[TransferMessage]:
        for receivers, group in parts.items():
            begin, end = group[0].at, max(part.at + part.end - part.begin for part in group)
            nbytes = sum(part.nbytes for part in group)
            yield TransferMessage(where, owner, begin, end, tuple(group), sender, receivers, nbytes)

    # Lost slots

    def _lost(self, owner: int, wanted: _Wanted) -> Iterator[LostShardSlice]:
        """Yields the slices of a lost slot's data shards.

        There are none if all of them have copies.
        """
        if not self.is_rebuilt(owner):
            return
        part = self.placement.rank_placement(owner)
        blocks = part.blocks[: part.data_blocks]
        for block in blocks:
            lane, read = self.placement.lanes[block.lane], self._read(block)
            inputs = tuple(self._input(block, shard) for shard in read.shards)
            # The columns of all packets that are read fit into TransferSizes.band.
            width = self.sizes.band // ((lane.code.k + len(read.lost)) * lane.code.w)
            width = max(min(width, self.sizes.piece // lane.code.w) // ALIGNMENT, 1) * ALIGNMENT
            for begin in range(0, lane.packet_bytes, width):
                end = min(begin + width, lane.packet_bytes)
                shard_slice = LostShardSlice(owner, block, lane, read, begin, end, inputs, self.keeper_of[owner], ())
                yield replace(shard_slice, messages=tuple(self._decoded(shard_slice, wanted)))

    def _decoded(self, shard_slice: LostShardSlice, wanted: _Wanted) -> Iterator[TransferMessage]:
        """Yields the messages with the needed bytes of a slice."""
        if shard_slice.lane.code.k == 1:
            # The reader of another copy sends these bytes. Here they are only compared with the
            # digests.
            return
        extents = list(self._block(shard_slice.block, _any_rank, wanted))
        clipped = []
        for begin, end in shard_slice.ranges:
            at, upto = shard_slice.block.offset + begin, shard_slice.block.offset + end
            for extent in extents:
                if extent.begin < upto and at < extent.end:
                    first = extent.first + max(at - extent.begin, 0)
                    clipped.append(extent._replace(begin=max(extent.begin, at), end=min(extent.end, upto), first=first))
        yield from (
            message for _, message in self._windows(PieceSource.CELL, shard_slice.owner, clipped, shard_slice.rebuilder)
        )

    def _read(self, block: ShardBlock) -> StripeRead:
        if block.lane not in self._reads:
            self._reads[block.lane] = stripe_reads(self.placement, block.lane, self.reader_of)
        return self._reads[block.lane][block.stripe]

    def _input(self, block: ShardBlock, shard: int) -> tuple[int, int]:
        """Returns the old rank that has this shard of the stripe.

        The second value is the offset in its slot.
        """
        lane = self.placement.lanes[block.lane]
        old = lane.members[lane.member_of(block.stripe, shard)]
        if old not in self._block_offsets:
            self._block_offsets[old] = {
                (b.lane, b.stripe, b.shard): b.offset for b in self.placement.rank_placement(old).blocks
            }
        return old, self._block_offsets[old][block.lane, block.stripe, shard]
