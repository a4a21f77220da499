"""One rank's part in the list of pieces: reads ahead, sends, receives, decodes, never out of order.

    list ─► ahead: own pieces are checked, and copied into own tensors, by helper threads
         ─► post: wait for the check; send to all who need it, or receive into place; coded groups: a mark behind them
         ─► window of what is under way, oldest first: wait ─► (from a buffer: copy on) ─► mark: helper thread decodes

Memory: buffers are made when first wanted and used again; if none is free, the oldest piece under way is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from reft.client.restore.decode import Decoder
from reft.client.restore.load_plan import LoadPlan, ShardRange, StripeSlice
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Transport, Work
from reft.client.restore.verified_slot import SlotSource
from reft.errors import RestoreError
from reft.wire.slot_format import Bytes

VERDICT_TAG = (1 << 31) - 1


class BufferPool:
    """A few buffers of one size, each made when it is first needed."""

    def __init__(self, count: int, nbytes: int, is_pinned: bool) -> None:
        self._unmade, self._nbytes, self._is_pinned = count, nbytes, is_pinned
        self._free: list[Bytes] = []

    def take(self, wait: Callable[[], None]) -> Bytes:
        """A buffer; `wait` is called until one was given back."""
        while not self._free and not self._unmade:
            wait()
        if self._free:
            return self._free.pop()
        self._unmade -= 1
        return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned).numpy()

    def give(self, buffer: Bytes) -> None:
        self._free.append(buffer)


@dataclass
class _Coded:
    """A group to decode: its parity, and when all of it is there."""

    group: StripeSlice
    flat_view: FlatTensorView
    rows: dict[tuple[int, int], Bytes] = field(default_factory=dict)
    buffer: Bytes | None = None


@dataclass
class _UnderWay:
    """A piece on its way, or the mark behind a group that is to be decoded."""

    works: list[Work] = field(default_factory=list)
    nbytes: int = 0
    copying: Future[Bytes] | None = None
    staging: Bytes | None = None
    place: tuple[FlatTensorView, int, int] | None = None  # where the staging's bytes go: space, offset, size
    coded: _Coded | None = None


Reading = dict[int, Future[Bytes]]  # by the piece's place in its group


class TransferExecutor:
    """See the module.

    Args:
        transport: None if there is nobody to send to.
        rank: this rank.
        sequencer: makes the list.
        read: old rank → slot, for those that this rank reads.
        flat_views: cell → its live memory, for those that this rank holds.
        pool: helper threads.
        decoder: of lost shards.
        is_pinned: whether messages and parity for a device arrive in pinned memory.
    """

    def __init__(
        self, transport: Transport | None, rank: int, sequencer: LoadPlan, read: Mapping[int, SlotSource],
        flat_views: Mapping[int, FlatTensorView], pool: ThreadPoolExecutor, decoder: Decoder, is_pinned: bool,
    ) -> None:  # fmt: skip
        self._transport, self._rank, self._sequencer, self._read = transport, rank, sequencer, read
        self._spaces, self._pool = flat_views, pool
        self._lanes, self._sizes = sequencer.placement.lanes, sequencer.sizes
        self._decoder = decoder
        self._under_way: deque[_UnderWay] = deque()
        self._bytes = 0
        self._decodes: deque[Future[None]] = deque()
        self._stagings = BufferPool(max(self._sizes.window // self._sizes.piece, 1), self._sizes.piece, is_pinned)
        self._parities = BufferPool(self._sizes.groups, self._sizes.group, is_pinned)
        self._senders: set[int] = set()
        self._receivers: set[int] = set()

    def run(self) -> None:
        """All pieces of all cells that this rank has a part in.

        Raises:
            RestoreError: a peer is gone.
        """
        for cell in self._sequencer.cells(self._rank):
            tag = 0
            for group, reading in self._ahead(cell):
                coded = self._coded(group)
                for i, piece in enumerate(group.pieces):
                    self._post(piece, tag + i, reading.get(i), coded)
                tag += len(group.pieces)
                if coded is not None:
                    self._under_way.append(_UnderWay(coded=coded))
        while self._under_way:
            self._retire()
        while self._decodes:
            self._decodes.popleft().result()

    def verdicts(self) -> bool:
        """Tells all who got bytes from here whether they were right; whether all that came here were.

        Raises:
            RestoreError: a peer is gone.
        """
        own = np.array([any(source.is_bad for source in self._read.values())], np.uint8)
        theirs = np.zeros(len(self._senders), np.uint8)
        works = []
        for peer in sorted(self._senders | self._receivers):
            # Both of a pair post in one order, the lower rank's message first: a transport may know no tags.
            for sender in sorted((peer, self._rank)):
                if sender == self._rank and peer in self._receivers:
                    works.append(self._peers.send(own, peer, VERDICT_TAG))
                elif sender == peer and peer in self._senders:
                    at = sorted(self._senders).index(peer)
                    works.append(self._peers.receive(theirs[at : at + 1], peer, VERDICT_TAG))
        for work in works:
            work.wait()
        return not own.any() and not theirs.any()

    @property
    def _peers(self) -> Transport:
        if self._transport is None:
            raise RestoreError(f"rank {self._rank} needs what other ranks have, and has no way to them.")
        return self._transport

    # Reading ahead

    def _ahead(self, cell: int) -> Iterator[tuple[StripeSlice, Reading]]:
        """The groups, some time after reading of what they need from here began."""
        waiting: deque[tuple[StripeSlice, Reading, int]] = deque()
        nbytes = 0
        for group in self._sequencer.groups(cell):
            mine = [(i, piece) for i, piece in enumerate(group.pieces) if self._rank in piece.stream.at_hand]
            reading = {i: self._pool.submit(self._read_piece, piece) for i, piece in mine}
            waiting.append((group, reading, sum(piece.end - piece.begin for _, piece in mine)))
            nbytes += waiting[-1][2]
            while nbytes > self._sizes.ahead:
                first = waiting.popleft()
                nbytes -= first[2]
                yield first[:2]
        yield from (each[:2] for each in waiting)

    def _read_piece(self, piece: ShardRange) -> Bytes:
        """What a piece has in a slot here, checked; in live memory if it is data of a cell that this rank holds."""
        lane = self._lanes[piece.stream.lane]
        source, offset = self._at_hand(piece)
        end = offset + piece.end - piece.begin
        flat_view = self._spaces.get(lane.cell) if piece.stream.shard < lane.code.k else None
        view = None if flat_view is None else flat_view.view(self._target(piece), self._target(piece) + end - offset)
        if view is not None:
            source.copy(offset, view)
            return view
        for first, last in source.checked(offset, end):
            if flat_view is not None:
                flat_view.write(self._target(piece) + first - offset, source.data[first:last])
        return source.data[offset:end]

    def _at_hand(self, piece: ShardRange) -> tuple[SlotSource, int]:
        """The slot from which this rank reads a piece, and where it begins there."""
        stream = piece.stream
        old, shard = stream.at_hand[self._rank]
        source = self._read[old]
        return source, source.offsets[stream.lane, stream.stripe, shard] + piece.begin

    def _target(self, piece: ShardRange) -> int:
        """Where a piece of data begins in its cell."""
        return self._lanes[piece.stream.lane].data_range(piece.stream.stripe, piece.stream.shard)[0] + piece.begin

    # Sending and receiving

    def _post(self, piece: ShardRange, tag: int, copying: Future[Bytes] | None, coded: _Coded | None) -> None:
        """Begins this rank's part in a piece, if it has one."""
        stream, nbytes = piece.stream, piece.end - piece.begin
        entry = _UnderWay(copying=copying)
        if stream.sender == self._rank:
            assert copying is not None, "the sender has it at hand"
            if stream.receivers:
                data = copying.result()  # nothing is sent before its digest was compared
                entry.works = [self._peers.send(data, to, tag) for to in stream.receivers]
                self._receivers.update(stream.receivers)
        elif self._rank in stream.receivers:
            into = self._into(piece, entry, coded)
            entry.works = [self._peers.receive(into, stream.sender, tag)]
            self._senders.add(stream.sender)
        elif copying is None:
            return
        entry.nbytes = nbytes * len(entry.works)
        self._bytes += entry.nbytes
        self._under_way.append(entry)
        while self._bytes > self._sizes.window and len(self._under_way) > 1:
            self._retire()

    def _into(self, piece: ShardRange, entry: _UnderWay, coded: _Coded | None) -> Bytes:
        """The memory in which a piece arrives."""
        stream, nbytes = piece.stream, piece.end - piece.begin
        lane = self._lanes[stream.lane]
        if stream.shard >= lane.code.k:
            assert coded is not None and coded.buffer is not None, "parity comes for a group to decode"
            width = coded.group.end - coded.group.begin
            packet, column = divmod(piece.begin, lane.packet_bytes)
            order = [shard for shard in coded.group.read.shards if shard >= lane.code.k].index(stream.shard)
            at = (order * lane.code.w + packet) * width + column - coded.group.begin
            return coded.buffer[at : at + nbytes]
        flat_view, begin = self._spaces[lane.cell], self._target(piece)
        view = flat_view.view(begin, begin + nbytes)
        if view is not None:
            return view
        entry.staging = self._stagings.take(self._make_room)
        entry.place = (flat_view, begin, nbytes)
        return entry.staging[:nbytes]

    def _coded(self, group: StripeSlice) -> _Coded | None:
        """Room for the parity of a group that this rank must decode."""
        lane = self._lanes[group.lane]
        flat_view = self._spaces.get(lane.cell)
        if not group.is_coded or flat_view is None:
            return None
        coded = _Coded(group, flat_view, buffer=self._parities.take(self._make_room))
        assert coded.buffer is not None
        width, at = group.end - group.begin, 0
        streams = {piece.stream.shard: piece.stream for piece in group.pieces}
        for shard in group.read.shards:
            if shard < lane.code.k:
                continue
            is_here = self._rank in streams[shard].at_hand
            for packet in range(lane.code.w):
                row = coded.buffer[at : at + width]
                if is_here:
                    source, offset = self._at_hand(
                        ShardRange(streams[shard], packet * lane.packet_bytes + group.begin, 0)
                    )
                    row = source.data[offset : offset + width]
                coded.rows[shard, packet] = row
                at += width
        return coded

    # Ending

    def _make_room(self) -> None:
        """Brings the oldest thing under way to its end, so that its buffer comes back."""
        if self._under_way:
            self._retire()
        else:
            self._decodes.popleft().result()

    def _retire(self) -> None:
        """Waits for the oldest piece under way; at a mark, has its group decoded."""
        entry = self._under_way.popleft()
        for work in entry.works:
            work.wait()
        self._bytes -= entry.nbytes
        if entry.copying is not None:
            entry.copying.result()
        if entry.staging is not None and entry.place is not None:
            flat_view, begin, nbytes = entry.place
            flat_view.write(begin, entry.staging[:nbytes])
            self._stagings.give(entry.staging)
        if entry.coded is not None:
            self._decodes.append(self._pool.submit(self._decode, entry.coded))

    def _decode(self, coded: _Coded) -> None:
        self._decoder.decode(coded.group, self._lanes[coded.group.lane], coded.rows, coded.flat_view)
        if coded.buffer is not None:
            self._parities.give(coded.buffer)
