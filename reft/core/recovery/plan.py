"""Plans how the bytes of a version reach their places: the operations of each rank, in order.

    slot of old rank q   | shard | shard | … | parity | unreplicated |
      window             ├──────────────┤   at most TransferSizes.piece bytes; all slots in turn
      read               a rank on the slot's node reads the bytes that it needs, and places them
      send, receive      the slot's reader sends to each set of ranks on other nodes what they need
    capsule of q         | inline leaf | inline leaf |      the same, of leaves laid end to end
    lost slot of q       its keeper collects columns of k shards of a stripe, decodes them, and
                         compares them with the digests of q; then it is the reader of q
    lost section of q    its unreplicated leaves: the same, from the stripes of q's guard lane; with
                         f > 1 all lost sections of a lane and a keeper at once, block by block

        holder j of the lane     | piece of each member but j, from their sections | parity of j |
        is stripe j                the shorter ones are followed by zeros, which nobody reads

    same shape     a need is a part of a cell, for all holders of the cell. The keeper holds the
                   cell, so it decodes from its live memory, and only parity is sent to it.
    another shape  a need is a region of a leaf, from `shard_matching`.
    recover        nothing is needed but the lost slots themselves, with their parity.

Invariants
  1. The list follows from needs, placement, slots at hand and readers: it is the same on all ranks.
     Its order is that of windows, then of old ranks. So a rank can leave out the operations of
     others without counting them, and each pair of ranks posts its messages in the same order.
  2. A rank that works on an operation has finished or begun all its operations before that one. So
     the first unfinished operation can always be finished: ranks never wait in a circle.
  3. Each needed byte reaches each rank that needs it once: from a slot on the rank's own node if
     the byte lies there, else in a message from one sender.
  4. A stripe is decoded from k shards at hand. A data shard at hand is never decoded.
  5. An emission follows the columns of the next slice, so that messages and decoding overlap. At
     most two slices of a keeper wait for columns or for their emission.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import merge
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from reft.core.coding.placement import Lane, Placement, ranges
from reft.core.layout.cells import Cell
from reft.core.layout.layout import ALIGNMENT, align
from reft.core.layout.regions import ByteRuns, RegionCopy
from reft.core.recovery.gather import assign_readers, stripe_reads
from reft.core.recovery.shard_matching import PieceLocation, PieceSource, PieceTransfer
from reft.core.recovery.stripes import (
    NO_CELL,
    MadeShard,
    ShardSource,
    Stripe,
    StripeSlice,
    section_sources,
    section_stripes,
    slot_name,
)

EVERYTHING = 1 << 62  # bytes; more than any source has


@dataclass(frozen=True)
class TransferSizes:
    """How many bytes are in transfer at a time; the same on all ranks.

    Attributes:
        piece: bytes read, packed and sent at a time.
        band: bytes of all registers of one decoded slice; a slice of a guard lane with f > 1 is one
            block of each piece, and may be larger.
        window: bytes of messages under way.
        ahead: bytes read and verified in advance; small enough to stay in the cache until sent.
    """

    piece: int = 4 << 20
    band: int = 16 << 20
    window: int = 32 << 20
    ahead: int = 8 << 20


@dataclass(frozen=True)
class SlotReaders:
    """Which new ranks read which slot.

    An old rank stands for its slot, and a `parity_number` for a parity slot.

    Attributes:
        reader_of: old rank → new rank that reads its slot for ranks on other nodes, for all slots
            at hand.
        keeper_of: old rank → new rank that has its capsule, and makes its slot if that is lost.
        node_of_slot: old rank → node that has its slot, for all slots at hand.
        node_of_rank: for each new rank its node.
    """

    reader_of: Mapping[int, int]
    keeper_of: Mapping[int, int]
    node_of_slot: Mapping[int, str]
    node_of_rank: Sequence[str]

    def is_near(self, old: int, rank: int) -> bool:
        """Whether a new rank reads an old rank's slot itself."""
        return self.reader_of[old] == rank or self.node_of_slot[old] == self.node_of_rank[rank]

    @classmethod
    def of(cls, sources: Mapping[int, str], nodes: Mapping[str, Sequence[int]], old_world: int) -> SlotReaders:
        """Returns the readers of a job.

        Args:
            sources: old rank → node that has its slot, for all slots at hand.
            nodes: node → the ranks that run there now.
            old_world: the number of old ranks.
        """
        node_of = {rank: node for node, ranks in nodes.items() for rank in ranks}
        reader_of, world = assign_readers(sources, nodes), len(node_of)
        keeper_of = {old: reader_of.get(old, old % world) for old in range(old_world)}
        return cls(reader_of, keeper_of, sources, [node_of[rank] for rank in range(world)])


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

    @property
    def runs(self) -> ByteRuns:
        """Returns the runs of these bytes: `old` counts in the source, `new` in the target."""
        old, new, nbytes = self.need.copy.within(self.begin, self.end)
        return ByteRuns(old + (self.at - self.begin), new, nbytes)


class OutgoingMessage(NamedTuple):
    """Bytes that this rank sends to some ranks, packed in the order of `parts`."""

    parts: tuple[NeededRange, ...]
    receivers: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, eq=False)
class ReadOperation:
    """Reads bytes of a slot or a capsule, verifies them, places them and sends them.

    Attributes:
        source: SLOT, or CAPSULE: the inline leaves of the capsule, end to end.
        owner: the old rank.
        begin: where the needed bytes begin in the source.
        end: where they end.
        parts: the parts that this rank needs itself, in the order of the source.
        messages: what goes to ranks on other nodes.
        slice: the slice whose packets, end to end, are the target; None: live memory.
    """

    source: PieceSource
    owner: int
    begin: int
    end: int
    parts: tuple[NeededRange, ...]
    messages: tuple[OutgoingMessage, ...]
    slice: StripeSlice | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that are placed and packed."""
        return sum(part.nbytes for part in self.parts) + sum(message.nbytes for message in self.messages)


@dataclass(frozen=True, eq=False)
class ReceiveOperation:
    """Receives a message, verifies it, and places its parts.

    Attributes:
        owner: the old rank whose bytes these are.
        sender: new rank.
        parts: in the order of the message.
        nbytes: size of the message.
        slice: see `ReadOperation`.
    """

    owner: int
    sender: int
    parts: tuple[NeededRange, ...]
    nbytes: int
    slice: StripeSlice | None = None


@dataclass(frozen=True, eq=False)
class DecodeOperation:
    """Makes the shards of a slice; all operations before it must have finished."""

    slice: StripeSlice


@dataclass(frozen=True, eq=False)
class EmitOperation:
    """Verifies the made shards of a slice, places them and sends them.

    The source is the made packets, end to end: shard after shard, each packet with the columns of
    the slice.

    Attributes:
        slice: the slice; its decode operation comes earlier in the list.
        parts: the parts that this rank needs itself.
        messages: what goes to other ranks.
    """

    slice: StripeSlice
    parts: tuple[NeededRange, ...]
    messages: tuple[OutgoingMessage, ...]

    @property
    def owner(self) -> int:
        """The old rank whose bytes these are."""
        return self.slice.stripe.made[0].owner


TransferOperation = ReadOperation | ReceiveOperation | DecodeOperation | EmitOperation
_Keyed = tuple[tuple[int, int, int], TransferOperation]


# Needs


def cell_name(number: int) -> str:
    """Returns the target name of the needs of a whole cell."""
    return f"cell {number}"


def same_shape_needs(placement: Placement, cells: Iterable[int], sizes: TransferSizes) -> list[PieceTransfer]:
    """Returns the needs of these cells: every holder needs every byte, at its place in the cell.

    A cell is cut where a large leaf begins or ends, so that a message may arrive in the leaf.
    """
    needs = []
    for number in cells:
        cell = placement.division.cells[number]
        borders = _leaf_borders(cell, sizes.piece // 4)
        for begin, end in pairwise(borders):
            location = PieceLocation(PieceSource.CELL, number, begin)
            copy = RegionCopy(0, begin, end - begin)
            needs.append(PieceTransfer(cell_name(number), end - begin, location, copy, cell.holders))
    return needs


def _leaf_borders(cell: Cell, least: int) -> list[int]:
    borders = {0, cell.nbytes}
    for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
        if leaf.nbytes >= least:
            borders |= {offset, offset + leaf.nbytes}
    return sorted(borders)


def cells_near(placement: Placement, readers: SlotReaders, rank: int) -> list[int]:
    """Returns the cells of a new rank, and of the slots that it reads."""
    division = placement.division
    world = len(division.layout_of)
    ranks = {rank, *(old for old, reader in readers.reader_of.items() if reader == rank and old < world)}
    return sorted({cell for each in ranks for cell in division.cells_of[division.layout_of[each]]})


def is_made(placement: Placement, owner: int) -> bool:
    """Returns whether an old rank's lost slot must be decoded: some of its data has no copy."""
    part = placement.rank_placement(owner)
    return any(placement.lanes[block.lane].code.k > 1 for block in part.blocks[: part.data_blocks])


class _Extent(NamedTuple):
    """Bytes begin..end of a source, which are the bytes of a piece from `first` on.

    Attributes:
        needs: of the piece.
        copies: old ranks whose slots have a copy of these bytes; empty if only this source has.
    """

    begin: int
    end: int
    first: int
    needs: Sequence[PieceTransfer]
    copies: tuple[int, ...] = ()


class _NeededPieces(NamedTuple):
    """The needed pieces of one cell, slot or capsule: their offsets there, and who needs them."""

    offsets: Sequence[int]
    needs: Sequence[Sequence[PieceTransfer]]

    def extents(self, begin: int, end: int, at: int, copies: tuple[int, ...] = ()) -> Iterator[_Extent]:
        """Yields the extents of bytes begin..end, which a source has from `at` on."""
        for i in range(max(bisect_right(self.offsets, begin) - 1, 0), len(self.offsets)):
            offset = self.offsets[i]
            if offset >= end:
                break
            first, last = max(begin, offset), min(end, offset + self.needs[i][0].nbytes)
            if first < last:
                yield _Extent(at + first - begin, at + last - begin, first - offset, self.needs[i], copies)


_Source = tuple[PieceSource, int]  # the kind of place, and the number of the cell or of the old rank
_Needs = Mapping[_Source, _NeededPieces]


def _by_source(needs: Iterable[PieceTransfer]) -> _Needs:
    """Returns the needs by the cells, slots and capsules in which their pieces lie."""
    grouped: dict[_Source, dict[int, list[PieceTransfer]]] = {}
    for need in needs:
        grouped.setdefault(need.location[:2], {}).setdefault(need.location.offset, []).append(need)
    return {
        source: _NeededPieces(sorted(pieces), [pieces[at] for at in sorted(pieces)])
        for source, pieces in grouped.items()
    }


# The plan


@dataclass(frozen=True)
class TransferPlan:
    """Lists the operations of each new rank.

    Args:
        needs: which bytes go to which targets. In the same shape only those of `cells_near`.
        placement: under which the slots were written.
        readers: who reads which slot.
        lost: old ranks whose slots are made again by their keepers.
        has_live_cells: whether every keeper's live memory has the cells of its lost slots, as
            in a restore of the same shape.
        makes_parity: whether parity shards are made again, too.
        sizes: of pieces and slices.
        sections: lost old ranks whose unreplicated sections their keepers decode from guard lanes.
            The readers have the parity slots of all other members of these lanes.
        stored: old ranks whose slots are files of a checkpoint. These have no parity shards.
    """

    needs: Sequence[PieceTransfer]
    placement: Placement
    readers: SlotReaders
    lost: Collection[int] = ()
    has_live_cells: bool = False
    makes_parity: bool = False
    sizes: TransferSizes = TransferSizes()
    sections: Collection[int] = ()
    stored: Collection[int] = ()
    _reads: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    _lane_ends: dict[int, int] = field(default_factory=dict)
    _offsets: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    _takers: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)

    def operations(self, rank: int) -> Iterator[TransferOperation]:
        """Yields the operations of a new rank, in list order.

        Raises:
            ValueError: needed bytes are in no slot at hand, and can't be decoded.
        """
        self._refuse_lost_bytes()
        own = _by_source(need for need in self.needs if rank in need.receivers)
        sources = [(PieceSource.SLOT, old) for old in self.owners if old in self.readers.reader_of]
        sources += [source for source in self._all_needs if source[0] is PieceSource.CAPSULE]
        streams = []
        for source in sources:
            needs = self._all_needs if self._reader_of(source) == rank else own
            streams.append(self._windows(source, self._extents(source, needs), rank))
        for keeper in self._keepers(self.made):
            streams.append(self._slices(keeper, rank, own, self._cell_slices(keeper)))
        for keeper in self._keepers(self.sections):
            if not self._takes_part(keeper, rank, own):
                continue
            streams.append(self._slices(keeper, rank, own, self._section_slices(keeper)))
        yield from (operation for _, operation in merge(*streams, key=itemgetter(0)))

    @cached_property
    def _all_needs(self) -> _Needs:
        return _by_source(self.needs)

    @cached_property
    def owners(self) -> list[int]:
        """The old ranks whose slots have needed bytes, ascending."""
        cells, owners = self.placement.division.cells, set[int]()
        for where, number in self._all_needs:
            if where is not PieceSource.CAPSULE:
                owners.update(cells[number].holders if where is PieceSource.CELL else (number,))
        return sorted(owners)

    @cached_property
    def slots_read(self) -> list[int]:
        """The slots with needed bytes, and those from which sections are decoded, ascending.

        Old ranks, also of lost slots, and parity numbers.
        """
        return sorted({*self.owners, *section_sources(self.placement, self.sections, self.readers.reader_of)})

    def _refuse_lost_bytes(self) -> None:
        """Raises ValueError if needed bytes are in no slot at hand, and can't be decoded."""
        at_hand = self.readers.reader_of
        for old in self.sections:
            absent = section_sources(self.placement, [old], at_hand) - at_hand.keys()
            if absent:
                name = slot_name(min(absent), len(self.placement.domains))
                raise ValueError(
                    f"the unreplicated leaves of old rank {old} can't be decoded without {name}, which is lost."
                )
        missing = set(self.owners).difference(self.readers.reader_of)
        for where, number in self._all_needs if missing else ():
            if where is PieceSource.SLOT and number in missing and number not in self.sections:
                raise ValueError(f"only the slot of old rank {number} has some of the needed bytes, and it is lost.")
            for lane in self.placement.lanes_of(number) if where is PieceSource.CELL else ():
                if not missing.isdisjoint(self.placement.lanes[lane].members):
                    self._stripe_read(lane, 0)

    # Slots at hand

    def _extents(self, source: _Source, needs: _Needs) -> Iterator[_Extent]:
        """Yields the extents of a source that `needs` take, in their order there."""
        where, owner = source
        lanes = self._lane_offsets(owner) if where is PieceSource.SLOT else {}
        for is_parity in (False, True):
            for number, offsets in lanes.items():
                lane = self.placement.lanes[number]
                # With k = 1, parity shards are copies of the data.
                if (PieceSource.CELL, lane.cell) in needs and (lane.code.k == 1 or not is_parity):
                    yield from self._lane_extents(number, owner, offsets[is_parity], is_parity, needs)
        if source in needs:
            yield from needs[source].extents(0, EVERYTHING, 0)

    def _lane_extents(self, number: int, owner: int, offset: int, is_parity: bool, needs: _Needs) -> Iterator[_Extent]:
        """Yields the needed extents of an owner's shards of a lane, from an offset on."""
        lane = self.placement.lanes[number]
        member, size = lane.members.index(owner), lane.shard_bytes
        for run in lane.stripe_runs(member, is_parity):
            stripes = run
            if self.has_live_cells and lane.code.k > 1 and size * 4 < self.sizes.piece:
                yield from self._run_extents(lane, owner, member, run, offset)
                full = self._full_shards(lane, member, run)
                offset, stripes = offset + full * size, run[full:]
            for stripe in stripes:
                shard = (member - stripe) % lane.D
                begin, end, _ = ranges(lane, stripe, shard if lane.code.k > 1 else 0)
                copies = self._copies(lane, stripe)
                yield from needs[PieceSource.CELL, lane.cell].extents(begin, end, offset, copies)
                offset += size

    def _run_extents(self, lane: Lane, owner: int, member: int, run: range, offset: int) -> Iterator[_Extent]:
        """Yields one extent for many small shards: their places in the cell are evenly spaced."""
        count, size, step = self._full_shards(lane, member, run), lane.shard_bytes, (lane.code.k - 1) * lane.shard_bytes
        if count:
            begin, _ = lane.data_range(run[0], (member - run[0]) % lane.D)
            copy = RegionCopy(0, begin, size, (count,), (size,), (step,))
            location = PieceLocation(PieceSource.SLOT, owner, offset)
            holders = self.placement.division.cells[lane.cell].holders
            need = PieceTransfer(cell_name(lane.cell), count * size, location, copy, holders)
            yield _Extent(offset, offset + count * size, 0, (need,))

    def _full_shards(self, lane: Lane, member: int, run: range) -> int:
        """Returns how many data shards at the begin of a run have no padding."""
        _, end = lane.data_range(run[0], (member - run[0]) % lane.D)
        step = (lane.code.k - 1) * lane.shard_bytes
        return min(max((lane.begin + lane.nbytes - end) // step + 1, 0), len(run))

    def _copies(self, lane: Lane, stripe: int) -> tuple[int, ...]:
        """Returns old ranks with a slot at hand that copies a stripe's only data shard."""
        if lane.code.k > 1 or not lane.code.f:
            return ()
        holders = [lane.members[lane.member_of(stripe, shard)] for shard in range(lane.code.f + 1)]
        have = [old for old in holders if old in self.readers.reader_of]
        return tuple(old for old in have if old == holders[0] or old not in self.stored)

    def _takers_of(self, owner: int, extent: _Extent, receivers: tuple[int, ...]) -> tuple[int, ...]:
        """Returns those of `receivers` that take an extent from this owner's slot.

        If several slots have a copy, a rank takes one that it reads itself, else the first.
        """
        if not extent.copies:
            return receivers
        key = (owner, extent.copies, receivers)
        if key not in self._takers:
            near = self.readers.is_near
            self._takers[key] = tuple(
                rank
                for rank in receivers
                if next((old for old in extent.copies if near(old, rank)), extent.copies[0]) == owner
            )
        return self._takers[key]

    def _reader_of(self, source: _Source) -> int:
        where, owner = source
        return (self.readers.keeper_of if where is PieceSource.CAPSULE else self.readers.reader_of)[owner]

    def _is_near(self, source: _Source, rank: int) -> bool:
        """Whether a rank reads a source itself; only its keeper reads a capsule."""
        return (
            self._reader_of(source) == rank
            if source[0] is PieceSource.CAPSULE
            else self.readers.is_near(source[1], rank)
        )

    def _far_of(self, source: _Source, receivers: tuple[int, ...]) -> tuple[int, ...]:
        """Returns those of `receivers` that can't read a source themselves."""
        key = (source, receivers)
        if key not in self._takers:
            self._takers[key] = tuple(rank for rank in receivers if not self._is_near(source, rank))
        return self._takers[key]

    # Windows and messages

    @property
    def _window_bytes(self) -> int:
        """Bytes of a window: whole chunks, so that a rank reads and verifies each chunk once."""
        return align(self.sizes.piece, self.placement.chunk_bytes)

    def _windows(self, source: _Source, extents: Iterable[_Extent], rank: int) -> Iterator[_Keyed]:
        """Cuts extents at window boundaries; yields the operations of each window."""
        size = self._window_bytes
        number, parts = -1, list[tuple[NeededRange, tuple[int, ...]]]()
        for extent in extents:
            at = extent.begin
            while at < extent.end:
                if at // size != number:
                    yield from self._window(source, number, parts, rank)
                    number, parts = at // size, []
                end = min(extent.end, (number + 1) * size)
                parts += self._parts(source[1], extent, at, end)
                at = end
        yield from self._window(source, number, parts, rank)

    def _parts(self, owner: int, extent: _Extent, at: int, end: int) -> Iterator[tuple[NeededRange, tuple[int, ...]]]:
        """Yields the needed ranges of bytes at..end of a source, each with its receivers."""
        begin = extent.first + at - extent.begin
        for need in extent.needs:
            receivers = self._takers_of(owner, extent, need.receivers)
            part = NeededRange(need, at, begin, begin + end - at)
            if receivers and part.nbytes:
                yield part, receivers

    def _window(
        self,
        source: _Source,
        number: int,
        parts: Sequence[tuple[NeededRange, tuple[int, ...]]],
        rank: int,
    ) -> Iterator[_Keyed]:
        if not parts:
            return
        where, owner = source
        key = (number, 0, owner)
        far = [(part, self._far_of(source, receivers)) for part, receivers in parts]
        sender = self._reader_of(source)
        if not self._is_near(source, rank):
            for message in self._messages(far):
                if rank in message.receivers:
                    yield key, ReceiveOperation(owner, sender, message.parts, message.nbytes)
            return
        own = tuple(part for part, receivers in parts if rank in receivers)
        messages = tuple(self._messages(far)) if sender == rank else ()
        spans = [*own, *(part for message in messages for part in message.parts)]
        if spans:
            begin, end = min(part.at for part in spans), max(part.at + part.end - part.begin for part in spans)
            yield key, ReadOperation(where, owner, begin, end, own, messages)

    def _messages(self, parts: Iterable[tuple[NeededRange, tuple[int, ...]]]) -> Iterator[OutgoingMessage]:
        """Packs parts with the same receivers into messages.

        A large part is a message of its own, so that it may arrive in its target.
        """
        groups: dict[tuple[tuple[int, ...], int], list[NeededRange]] = {}
        for part, receivers in parts:
            if receivers:
                is_large = part.nbytes * 4 >= self.sizes.piece
                groups.setdefault((receivers, part.at if is_large else -1), []).append(part)
        for (receivers, _), group in groups.items():
            yield OutgoingMessage(tuple(group), receivers, sum(part.nbytes for part in group))

    # Lost slots

    def _keepers(self, olds: Iterable[int]) -> list[int]:
        """Returns the keepers of lost slots, ascending."""
        return sorted({self.readers.keeper_of[old] for old in olds})

    @property
    def made(self) -> list[int]:
        """The lost old ranks whose shards of cells are made again, ascending."""
        return sorted(self.lost if self.makes_parity else set(self.lost).intersection(self.owners))

    def _slices(
        self, keeper: int, rank: int, own: _Needs, slices: Iterable[tuple[int, StripeSlice]]
    ) -> Iterator[_Keyed]:
        """Yields the operations for what a keeper makes: columns, decode, then emit.

        Each slice is emitted after the columns of the next one.
        """
        before: tuple[tuple[int, int, int], StripeSlice] | None = None
        needs = self._all_needs if keeper == rank else own
        for index, (ready, stripe_slice) in enumerate(slices):
            key = (ready, 1 + keeper, index)
            yield from ((key, operation) for operation in self._columns(stripe_slice, rank))
            if keeper == rank:
                yield key, DecodeOperation(stripe_slice)
            if before is not None:
                yield from ((key, operation) for operation in self._emission(before[1], rank, needs))
            before = key, stripe_slice
        if before is not None:
            yield from ((before[0], operation) for operation in self._emission(before[1], rank, needs))

    def _cell_slices(self, keeper: int) -> Iterator[tuple[int, StripeSlice]]:
        """Yields the slices of a keeper's lost slots, each with the window that completes it."""
        stripes: dict[tuple[int, int], list[MadeShard]] = {}
        for old in sorted(old for old in self.lost if self.readers.keeper_of[old] == keeper):
            part = self.placement.rank_placement(old)
            for block in part.blocks if self.makes_parity else part.blocks[: part.data_blocks]:
                made = MadeShard(block.shard, old, block.offset, block.nbytes)
                stripes.setdefault((block.lane, block.stripe), []).append(made)
        ready = sorted((self._ready(*stripe), *stripe) for stripe in stripes)
        for window, number, stripe in ready:
            lane, shards = self.placement.lanes[number], self._stripe_read(number, stripe)
            inputs = {shard: self._input(number, stripe, shard) for shard in shards}
            wanted = tuple(sorted(stripes[number, stripe]))
            live = tuple(s for s in shards if self.has_live_cells and (s < lane.code.k or lane.code.k == 1))
            rows = (len(shards) + len(wanted)) * lane.code.w
            width = min(self.sizes.band // rows, self.sizes.piece // lane.code.w) // ALIGNMENT * ALIGNMENT
            whole = Stripe(lane, number, stripe, inputs, wanted, lane.packet_bytes, live)
            yield from ((window, each) for each in whole.slices(max(width, ALIGNMENT), keeper))

    def _takes_part(self, keeper: int, rank: int, own: _Needs) -> bool:
        """Whether a rank sends or receives bytes of the sections that a keeper decodes."""
        olds = self._sections_of(keeper)
        if rank == keeper or any((PieceSource.SLOT, old) in own for old in olds):
            return True
        at_hand = self.readers.reader_of
        return any(at_hand[source] == rank for source in section_sources(self.placement, olds, at_hand))

    def _sections_of(self, keeper: int) -> list[int]:
        return [old for old in self.sections if self.readers.keeper_of[old] == keeper]

    def _section_slices(self, keeper: int) -> Iterator[tuple[int, StripeSlice]]:
        """Yields the slices of the lost sections that a keeper decodes, each with its window.

        They end at chunk borders, so that their sources read each chunk once; with f > 1 they are
        blocks. Stripes of several sections overlap, so a slice may come after one of a later
        window: then it has that window, because the windows of a list never go back.
        """
        window = 0
        for stripe in section_stripes(self.placement, self._sections_of(keeper), self.readers.reader_of):
            width = min(self.sizes.band // (len(stripe.inputs) + len(stripe.made)), self.sizes.piece)
            unit = self.placement.chunk_bytes if width >= self.placement.chunk_bytes else ALIGNMENT
            width = max(width // unit * unit, ALIGNMENT)
            for each in stripe.slices(width, keeper):
                window = max(window, (stripe.place[0] + each.begin) // self._window_bytes)
                yield window, each

    def _ready(self, number: int, stripe: int) -> int:
        """Returns the window after which all surviving data of a stripe have come.

        Raises:
            ValueError: the stripe can't be decoded from the slots at hand.
        """
        self._stripe_read(number, stripe)
        lane = self.placement.lanes[number]
        if number not in self._lane_ends:  # of a lane with copies the end, of another one the begin
            offsets = [self._lane_offsets(old)[number] for old in lane.members if old in self.readers.reader_of]
            is_copied = lane.code.k == 1  # the keeper may take any copy
            copied_bytes = lane.code.f * lane.shard_bytes if is_copied else 0
            self._lane_ends[number] = max(each[is_copied] for each in offsets) + copied_bytes
        # No member has a data shard of this stripe behind `stripe` others of the lane.
        shards = min(stripe + 1, lane.code.k) if lane.code.k > 1 else 0
        return (self._lane_ends[number] + shards * lane.shard_bytes - 1) // self._window_bytes

    def _columns(self, stripe_slice: StripeSlice, rank: int) -> Iterator[TransferOperation]:
        """Yields the operations that bring a slice's columns to its keeper."""
        stripe, keeper, width = stripe_slice.stripe, stripe_slice.keeper, stripe_slice.width
        for row, (shard, (old, offset, size)) in enumerate(stripe.inputs.items()):
            reader = self.readers.reader_of[old]
            is_near = self.readers.is_near(old, keeper)
            if shard in stripe.live or rank not in (keeper, reader) or (is_near and rank != keeper):
                continue
            packets, step = stripe.lane.code.w, stripe.lane.packet_bytes
            new = row * packets * width
            if width == step:  # whole packets form one run
                columns, packets = size, 1
            else:
                columns = min(stripe_slice.end, size - (packets - 1) * step) - stripe_slice.begin
            if columns <= 0:
                continue  # zeros
            copy = RegionCopy(stripe_slice.begin, new, columns, (packets,), (step,), (width,))
            location = PieceLocation(PieceSource.SLOT, old, offset)
            need = PieceTransfer("", size, location, copy, (keeper,))
            begin, end = copy.old, (packets - 1) * step + stripe_slice.begin + columns
            part, nbytes = NeededRange(need, offset + begin, begin, end), packets * columns
            if rank == keeper and not is_near:
                yield ReceiveOperation(old, reader, (part,), nbytes, stripe_slice)
            elif rank == keeper:
                yield ReadOperation(PieceSource.SLOT, old, offset + begin, offset + end, (part,), (), stripe_slice)
            else:
                message = OutgoingMessage((part,), (keeper,), nbytes)
                yield ReadOperation(PieceSource.SLOT, old, offset + begin, offset + end, (), (message,))

    def _emission(self, stripe_slice: StripeSlice, rank: int, needs: _Needs) -> Iterator[TransferOperation]:
        """Yields the operations that bring a slice's made bytes to the ranks that need them."""
        parts: list[tuple[NeededRange, tuple[int, ...]]] = []
        stripe = stripe_slice.stripe
        is_alone = stripe.lane.cell == NO_CELL or stripe.lane.code.k > 1
        if is_alone:  # else the reader of another copy sends the copies of the others
            for index, made in enumerate(stripe.made):
                if made.shard < stripe.lane.code.k:
                    parts += self._made_parts(stripe_slice, index, made, needs)
        others = [(part, tuple(r for r in receivers if r != stripe_slice.keeper)) for part, receivers in parts]
        if rank != stripe_slice.keeper:
            for message in self._messages(others):
                if rank in message.receivers:
                    owner = stripe.made[0].owner
                    yield ReceiveOperation(owner, stripe_slice.keeper, message.parts, message.nbytes)
            return
        own = tuple(part for part, receivers in parts if rank in receivers)
        yield EmitOperation(stripe_slice, own, tuple(self._messages(others)))

    def _made_parts(
        self, stripe_slice: StripeSlice, index: int, made: MadeShard, needs: _Needs
    ) -> Iterator[tuple[NeededRange, tuple[int, ...]]]:
        """Yields the needed ranges of one made shard, by offsets in the slice's made packets."""
        lane = stripe_slice.stripe.lane
        is_section = lane.cell == NO_CELL
        source = (PieceSource.SLOT, made.owner) if is_section else (PieceSource.CELL, lane.cell)
        pieces = needs.get(source)
        for packet in range(lane.code.w if pieces else 0):
            row = (index * lane.code.w + packet) * stripe_slice.width
            span = stripe_slice.slot_range(made, packet) if is_section else stripe_slice.cell_range(made.shard, packet)
            for extent in pieces.extents(*span, row) if pieces else ():
                yield from self._parts(made.owner, extent, extent.begin, extent.end)

    def _stripe_read(self, lane: int, stripe: int) -> tuple[int, ...]:
        """Returns the shards that a stripe reads."""
        if lane not in self._reads:
            self._reads[lane] = stripe_reads(self.placement, lane, self.readers.reader_of)
        return self._reads[lane][stripe]

    def _input(self, lane: int, stripe: int, shard: int) -> ShardSource:
        """Returns where a shard of a cell lies."""
        layout, is_parity = self.placement.lanes[lane], shard >= self.placement.lanes[lane].code.k
        member = layout.member_of(stripe, shard)
        old = layout.members[member]
        offset = self._lane_offsets(old)[lane][is_parity]
        for run in layout.stripe_runs(member, is_parity):
            if stripe in run:
                return ShardSource(old, offset + run.index(stripe) * layout.shard_bytes, layout.shard_bytes)
            offset += len(run) * layout.shard_bytes
        raise AssertionError("a member stores every shard that its place says")

    def _lane_offsets(self, owner: int) -> dict[int, tuple[int, int]]:
        if owner not in self._offsets:
            self._offsets[owner] = self.placement.lane_offsets(owner)
        return self._offsets[owner]
