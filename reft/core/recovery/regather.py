"""What travels while the state is brought into another shape: one list, of which every rank makes what it has a part in.

    slot of old rank q     | shard | shard | … | parity | kept |     windows of at most Sizes.piece bytes, of all slots in turn
      window               ├──────────────┤                          its reader sends to each set of ranks one parcel:
        parcel             ▓▓  ▓▓▓   ▓                               the bytes that they need, packed
    capsule of q           | rider | rider |                         the same, of bytes laid end to end
    lost slot of q         bands: columns of the shards that decode it ─► a rebuilder, which has q's bytes then, a band at a
                           time, compares them with q's digests, and sends parcels of them

Invariants
  1. The list is a function of needs, placement, slots at hand and readers: the same for all ranks. Its order is that of windows,
     then of old ranks; so a rank leaves out what concerns others without knowing how much that is.
  2. A rank that takes its part in an entry has done so, or is doing so, for all entries before it. The first entry that is not
     done can therefore always be done: nobody waits in a circle.
  3. Each needed byte comes to each rank that needs it once: from memory that it reads itself if it lies there, else from one
     sender.
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
    """How much is on its way at a time, in bytes; the same on all ranks.

    Attributes:
        piece: of what is read, packed and sent at a time.
        band: of all shards that a lost one is decoded from.
        window: of messages under way.
    """

    piece: int = 4 << 20
    band: int = 16 << 20
    window: int = 32 << 20


class NeededRange(NamedTuple):
    """Bytes begin..end of a piece, which lie from `at` on in the source, as far as a need wants them."""

    need: PieceTransfer
    at: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many bytes are wanted."""
        return self.need.copy.bytes_within(self.begin, self.end)


@dataclass(frozen=True)
class TransferMessage:
    """What one rank gives to one set of ranks, itself perhaps among them.

    Attributes:
        where: SLOT: the slot of old rank `owner`, by `at`; CAPSULE: its riders, end to end; CELL: what was decoded of its slot.
        begin, end: what is read of the source.
        parts: in the order of the source.
        sender: new rank.
        receivers: new ranks, ascending.
        nbytes: of all parts.
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
    """Columns begin..end of every packet of one lost shard, and where they are decoded.

    Attributes:
        owner: the old rank that lost it.
        block: of its slot.
        lane: of the block.
        read: which shards are taken, and which are decoded from them.
        inputs: for each of read.shards: the old rank whose slot has it, and its offset there.
        rebuilder: new rank.
        parcels: of what was decoded.
    """

    owner: int
    block: ShardBlock
    lane: Lane
    read: StripeRead
    begin: int
    end: int
    inputs: tuple[tuple[int, int], ...]
    rebuilder: int
    parcels: tuple[TransferMessage, ...]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The band in the shard, in the order of its bytes."""
        return bands(self.lane, self.begin, self.end)


class SourceExtent(NamedTuple):
    """Bytes begin..end of a source: bytes of a piece from `first` on. `takes` says which new ranks take it from here."""

    begin: int
    end: int
    first: int
    needs: Sequence[PieceTransfer]
    takes: Callable[[int], bool]


def _all(rank: int) -> bool:
    return True


def bands(lane: Lane, begin: int, end: int) -> list[tuple[int, int]]:
    """Columns begin..end of every packet of a shard, as ranges of its bytes."""
    if (begin, end) == (0, lane.packet_bytes):
        return [(0, lane.shard_bytes)]  # packets one after the other are one range
    return [(r * lane.packet_bytes + begin, r * lane.packet_bytes + end) for r in range(lane.code.w)]


def readers_of(sources: Mapping[int, str], nodes: Mapping[str, Sequence[int]], world: int) -> dict[int, int]:
    """Who reads each slot, where the new job may have fewer ranks than the old: old rank → new rank.

    As `gather.readers`; what lies on a node that nobody runs on is shared out among all ranks.

    Args:
        sources: old rank → id of the node that has its slot.
        nodes: id of each node → the ranks that run there now.
        world: how many ranks there are now.
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
    """Needs, by where they are taken from, in the order of their places there.

    Attributes:
        cells: cell → offset in it → the needs of the piece there.
        offsets: cell → these offsets.
        kept: old rank → offset in its slot → the needs of the kept piece there.
        riding: old rank → name → the needs of that rider.
    """

    cells: Mapping[int, Mapping[int, Sequence[PieceTransfer]]]
    offsets: Mapping[int, Sequence[int]]
    kept: Mapping[int, Mapping[int, Sequence[PieceTransfer]]]
    riding: Mapping[int, Mapping[str, Sequence[PieceTransfer]]]

    @classmethod
    def of(cls, needs: Iterable[PieceTransfer]) -> _Wanted:
        found: dict[PieceSource, dict[int, dict[Any, list[PieceTransfer]]]] = {where: {} for where in PieceSource}
        for need in needs:
            where, owner, offset = need.seat
            key = need.piece.name if where is PieceSource.CAPSULE else offset
            found[where].setdefault(owner, {}).setdefault(key, []).append(need)
        cells, kept, riding = (
            {owner: dict(sorted(found[where][owner].items())) for owner in sorted(found[where])}
            for where in (PieceSource.CELL, PieceSource.SLOT, PieceSource.CAPSULE)
        )
        return cls(cells, {cell: list(places) for cell, places in cells.items()}, kept, riding)


@dataclass(frozen=True)
class ReshardPlan:
    """Makes the list.

    Args:
        needs: what goes where.
        placement: under which the slots were written.
        reader_of: old rank → new rank that reads its slot, for all slots at hand.
        keeper_of: old rank → new rank that has its capsule, and decodes its slot if that is lost.
        node_of: for each new rank what its node is called.
        sizes: of pieces and bands.
    """

    needs: Sequence[PieceTransfer]
    placement: Placement
    reader_of: Mapping[int, int]
    keeper_of: Mapping[int, int]
    node_of: Sequence[str]
    sizes: TransferSizes
    _reads: dict[int, list[StripeRead]] = field(default_factory=dict)
    _places: dict[int, dict[tuple[int, int, int], int]] = field(default_factory=dict)

    def entries(self, rank: int) -> Iterator[TransferMessage | LostShardSlice]:
        """What a new rank has a part in, in the order of the list; perhaps a few entries more.

        Raises:
            ValueError: a stripe can't be decoded from the slots at hand.
        """
        taken = _Wanted.of(need for need in self.needs if rank in need.receivers)
        slots = [self._slot(old, self._whole if new == rank else taken) for old, new in self.reader_of.items()]
        inline_leaves = []
        for old in self._whole.riding:
            keeper = self.keeper_of[old]
            extents = self.inline_leaves(old, self._whole if keeper == rank else taken)
            inline_leaves.append(self._windows(PieceSource.CAPSULE, old, extents, keeper))
        for turn in (slots, inline_leaves):
            yield from (parcel for _, parcel in merge(*turn, key=itemgetter(0)))
        lost = [old for old in range(len(self.placement.domains)) if old not in self.reader_of]
        for row in zip_longest(
            *(self._lost(old, self._whole if self.keeper_of[old] == rank else taken) for old in lost)
        ):
            yield from (band for band in row if band is not None)

    def inline_leaves(self, owner: int, wanted: _Wanted | None = None) -> list[SourceExtent]:
        """The riders of an old rank that somebody needs, end to end in the order of their names, and who needs them.

        Args:
            wanted: only the needs that are in it; None: all.
        """
        found, at = [], 0
        some = (wanted or self._whole).riding.get(owner, {})
        for name, needs in self._whole.riding[owner].items():
            nbytes = needs[0].piece.nbytes
            if name in some:
                found.append(SourceExtent(at, at + nbytes, 0, some[name], _all))
            at += nbytes
        return found

    def is_rebuilt(self, owner: int) -> bool:
        """Whether an old rank's slot is lost, and there are not copies of all that it held of the cells."""
        part = self.placement.part(owner)
        lanes = [self.placement.lanes[block.lane] for block in part.blocks[: part.data_blocks]]
        return owner not in self.reader_of and any(lane.code.k > 1 for lane in lanes)

    @cached_property
    def _whole(self) -> _Wanted:
        return _Wanted.of(self.needs)

    # Slots at hand

    def _slot(self, owner: int, wanted: _Wanted) -> Iterator[tuple[int, TransferMessage]]:
        part = self.placement.part(owner)
        blocks = [self._block(block, self._takes(block, owner), wanted) for block in part.blocks[: part.data_blocks]]
        kept = (
            SourceExtent(at, at + needs[0].piece.nbytes, 0, needs, _all)
            for at, needs in wanted.kept.get(owner, {}).items()
        )
        # Copies that are numbered as parity hold data too: their reader needs no message for it.
        copies = [
            self._block(block, self._takes(block, owner), wanted)
            for block in part.blocks[part.data_blocks :]
            if self.placement.lanes[block.lane].code.k == 1
        ]
        extents = chain(chain.from_iterable(blocks), chain.from_iterable(copies), kept)
        yield from self._windows(PieceSource.SLOT, owner, extents, self.reader_of[owner])

    def _block(self, block: ShardBlock, takes: Callable[[int], bool], wanted: _Wanted) -> Iterator[SourceExtent]:
        """What somebody needs of a block of data, in the order of its bytes."""
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
        """Which new ranks take a block from this slot: of copies each takes its own, else one of its node, else the first."""
        lane = self.placement.lanes[block.lane]
        if lane.code.k > 1 or not lane.code.f:
            return _all
        holders = [lane.members[lane.member_of(block.stripe, shard)] for shard in range(lane.code.f + 1)]
        at_hand = [old for old in holders if old in self.reader_of]
        by_rank: dict[int, int] = {}
        by_node: dict[str, int] = {}
        for old in at_hand:
            by_rank.setdefault(self.reader_of[old], old)
            by_node.setdefault(self.node_of[self.reader_of[old]], old)
        return lambda rank: by_rank.get(rank, by_node.get(self.node_of[rank], at_hand[0])) == owner

    # Parcels

    def _windows(
        self, where: PieceSource, owner: int, extents: Iterable[SourceExtent], sender: int
    ) -> Iterator[tuple[int, TransferMessage]]:
        """Extents in their order, as parcels of what lies within each window, with its number."""
        window, parts = -1, dict[tuple[int, ...], list[NeededRange]]()
        for extent in extents:
            at = extent.begin
            while at < extent.end:
                number = at // self.sizes.piece
                if number != window:
                    yield from ((window, parcel) for parcel in self._parcels(where, owner, parts, sender))
                    window, parts = number, {}
                end = min(extent.end, (number + 1) * self.sizes.piece)
                self._cut(extent, at, end, parts)
                at = end
        yield from ((window, parcel) for parcel in self._parcels(where, owner, parts, sender))

    def _cut(self, extent: SourceExtent, at: int, end: int, parts: dict[tuple[int, ...], list[NeededRange]]) -> None:
        """Adds what is needed of bytes at..end of the source, by who needs it."""
        begin = extent.first + at - extent.begin
        for need in extent.needs:
            receivers = need.receivers
            if extent.takes is not _all:
                receivers = tuple(rank for rank in receivers if extent.takes(rank))
            part = NeededRange(need, at, begin, begin + end - at)
            if receivers and part.nbytes:
                parts.setdefault(receivers, []).append(part)

    def _parcels(
        self, where: PieceSource, owner: int, parts: Mapping[tuple[int, ...], Sequence[NeededRange]], sender: int
    ) -> Iterator[TransferMessage]:
        for receivers, found in parts.items():
            begin, end = found[0].at, max(part.at + part.end - part.begin for part in found)
            nbytes = sum(part.nbytes for part in found)
            yield TransferMessage(where, owner, begin, end, tuple(found), sender, receivers, nbytes)

    # Lost slots

    def _lost(self, owner: int, wanted: _Wanted) -> Iterator[LostShardSlice]:
        """The data shards of a lost slot; nothing if there are copies of them all."""
        if not self.is_rebuilt(owner):
            return
        part = self.placement.part(owner)
        blocks = part.blocks[: part.data_blocks]
        for block in blocks:
            lane, read = self.placement.lanes[block.lane], self._read(block)
            inputs = tuple(self._input(block, shard) for shard in read.shards)
            # One after the other, so that the columns of all packets that are read fit into Sizes.band.
            width = self.sizes.band // ((lane.code.k + len(read.lost)) * lane.code.w)
            width = max(min(width, self.sizes.piece // lane.code.w) // ALIGNMENT, 1) * ALIGNMENT
            for begin in range(0, lane.packet_bytes, width):
                end = min(begin + width, lane.packet_bytes)
                band = LostShardSlice(owner, block, lane, read, begin, end, inputs, self.keeper_of[owner], ())
                yield replace(band, parcels=tuple(self._decoded(band, wanted)))

    def _decoded(self, band: LostShardSlice, wanted: _Wanted) -> Iterator[TransferMessage]:
        """What somebody needs of a band."""
        if band.lane.code.k == 1:  # a copy, which its reader sends: here it is only compared with its digests
            return
        extents = list(self._block(band.block, _all, wanted))
        cut = []
        for begin, end in band.ranges:
            at, upto = band.block.offset + begin, band.block.offset + end
            for extent in extents:
                if extent.begin < upto and at < extent.end:
                    first = extent.first + max(at - extent.begin, 0)
                    cut.append(extent._replace(begin=max(extent.begin, at), end=min(extent.end, upto), first=first))
        yield from (parcel for _, parcel in self._windows(PieceSource.CELL, band.owner, cut, band.rebuilder))

    def _read(self, block: ShardBlock) -> StripeRead:
        if block.lane not in self._reads:
            self._reads[block.lane] = stripe_reads(self.placement, block.lane, self.reader_of)
        return self._reads[block.lane][block.stripe]

    def _input(self, block: ShardBlock, shard: int) -> tuple[int, int]:
        """The old rank that has another shard of the block's stripe, and its offset in the slot."""
        lane = self.placement.lanes[block.lane]
        old = lane.members[lane.member_of(block.stripe, shard)]
        if old not in self._places:
            self._places[old] = {(b.lane, b.stripe, b.shard): b.offset for b in self.placement.part(old).blocks}
        return old, self._places[old][block.lane, block.stripe, shard]
