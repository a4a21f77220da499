"""Executes one rank's part in a load plan, in the plan's order.

    plan ─► read ahead: helper threads verify this rank's ranges and copy them into its tensors
         ─► post: wait for the check; send to all ranks that need the range, or receive it in place
         ─► window of transfers under way, oldest first: wait ─► (from a buffer: copy on)
         ─► at the end of a slice with a lost shard: a helper thread decodes

Memory: a buffer is created at first use and then reused. If no buffer is free, the executor waits
for the oldest transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from reft.client.restore.decode import Decoder
from reft.client.restore.load_plan import LoadPlan, ShardRange, StripeSlice
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Transport, Work
from reft.client.restore.verified_slot import SlotSource
from reft.core.coding.placement import Lane
from reft.errors import RestoreError
from reft.wire.slot_format import Bytes

VERDICT_TAG = (1 << 31) - 1  # larger than the tag of any range


class BufferPool:
    """A few buffers of one size, each created at first use."""

    def __init__(self, count: int, nbytes: int, is_pinned: bool) -> None:
        self._unused, self._nbytes, self._is_pinned = count, nbytes, is_pinned
        self._free: list[Bytes] = []

    def take(self, wait: Callable[[], None]) -> Bytes:
        """Returns a free buffer; calls `wait` until another one is given back."""
        while not self._free and not self._unused:
            wait()
        if self._free:
            return self._free.pop()
        self._unused -= 1
        return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned).numpy()

    def give(self, buffer: Bytes) -> None:
        self._free.append(buffer)


@dataclass
class _PendingDecode:
    """A slice to decode, with its parity."""

    stripe_slice: StripeSlice
    flat_view: FlatTensorView
    rows: dict[tuple[int, int], Bytes] = field(default_factory=dict)
    buffer: Bytes | None = None


@dataclass
class _Transfer:
    """A transfer under way, or the decode that follows the transfers of a slice."""

    works: list[Work] = field(default_factory=list)
    nbytes: int = 0
    copying: Future[Bytes] | None = None
    staging: Bytes | None = None
    # Where the staged bytes go: view, offset, size.
    target: tuple[FlatTensorView, int, int] | None = None
    pending: _PendingDecode | None = None


# index of the range in its slice → its verified bytes
LocalReads = dict[int, Future[Bytes]]


class PeerMessages:
    """Messages between this rank and other ranks; remembers which ranks took part.

    Args:
        transport: None if there are no other ranks.
        rank: this rank.
    """

    def __init__(self, transport: Transport | None, rank: int) -> None:
        self.rank = rank
        self._transport = transport
        self._senders: set[int] = set()
        self._receivers: set[int] = set()

    def send(self, data: Bytes, to: int, tag: int) -> Work:
        """Begins to send a message; see `Transport.send`."""
        self._receivers.add(to)
        return self._peers.send(data, to, tag)

    def receive(self, into: Bytes, source: int, tag: int) -> Work:
        """Begins to receive a message; see `Transport.receive`."""
        self._senders.add(source)
        return self._peers.receive(into, source, tag)

    def exchange_verdicts(self, is_bad: bool) -> bool:
        """Exchanges with peers whether sent bytes were wrong; returns whether all were right.

        Args:
            is_bad: whether bytes that this rank sent were wrong.

        Raises:
            RestoreError: a peer is gone.
        """
        own_bad = np.array([is_bad], np.uint8)
        peers_bad = np.zeros(len(self._senders), np.uint8)
        works = []
        for peer in sorted(self._senders | self._receivers):
            # Both ranks of a pair post in the same order, the lower rank's message first:
            # a transport may have no tags.
            for sender in sorted((peer, self.rank)):
                if sender == self.rank and peer in self._receivers:
                    works.append(self._peers.send(own_bad, peer, VERDICT_TAG))
                elif sender == peer and peer in self._senders:
                    at = sorted(self._senders).index(peer)
                    works.append(self._peers.receive(peers_bad[at : at + 1], peer, VERDICT_TAG))
        for work in works:
            work.wait()
        return not is_bad and not peers_bad.any()

    @property
    def _peers(self) -> Transport:
        if self._transport is None:
            raise RestoreError(f"rank {self.rank} needs bytes of other ranks, and has no transport.")
        return self._transport


@dataclass(frozen=True)
class LocalShards:
    """The shards in the slots that this rank reads, and their places in cells.

    Attributes:
        rank: this rank.
        lanes: all lanes of the placement.
        sources: old rank → slot, for the slots that this rank reads.
        flat_views: cell → its live memory, for the cells that this rank holds.
    """

    rank: int
    lanes: Sequence[Lane]
    sources: Mapping[int, SlotSource]
    flat_views: Mapping[int, FlatTensorView]

    @property
    def is_bad(self) -> bool:
        """Whether a slot that this rank reads is damaged, as far as it was read."""
        return any(source.is_bad for source in self.sources.values())

    def read(self, shard_range: ShardRange) -> Bytes:
        """Returns the verified bytes of a range in a local slot.

        Copies data of a cell that this rank holds into live memory.
        """
        lane = self.lanes[shard_range.stream.lane]
        source, offset = self.find(shard_range)
        end = offset + shard_range.end - shard_range.begin
        flat_view = self.flat_views.get(lane.cell) if shard_range.stream.shard < lane.code.k else None
        view = (
            None
            if flat_view is None
            else flat_view.view(self.target(shard_range), self.target(shard_range) + end - offset)
        )
        if view is not None:
            source.copy(offset, view)
            return view
        for first, last in source.verify_chunks(offset, end):
            if flat_view is not None:
                flat_view.write(self.target(shard_range) + first - offset, source.data[first:last])
        return source.data[offset:end]

    def find(self, shard_range: ShardRange) -> tuple[SlotSource, int]:
        """Returns the local slot of a range, and the range's offset there."""
        stream = shard_range.stream
        old, shard = stream.at_hand[self.rank]
        source = self.sources[old]
        return source, source.offsets[stream.lane, stream.stripe, shard] + shard_range.begin

    def target(self, shard_range: ShardRange) -> int:
        """Returns the offset of a data range in its cell."""
        stream = shard_range.stream
        return self.lanes[stream.lane].data_range(stream.stripe, stream.shard)[0] + shard_range.begin


class TransferExecutor:
    """Executes one rank's part in a load plan; see the module.

    Args:
        load_plan: the plan; the same on all ranks.
        peers: messages to and from other ranks.
        local: the shards in the slots that this rank reads.
        pool: helper threads.
        decoder: decodes lost shards.
        is_pinned: whether messages and parity for a device arrive in pinned memory.
    """

    def __init__(
        self,
        load_plan: LoadPlan,
        peers: PeerMessages,
        local: LocalShards,
        pool: ThreadPoolExecutor,
        decoder: Decoder,
        is_pinned: bool,
    ) -> None:
        sizes = load_plan.sizes
        self._load_plan, self._peers, self._local = load_plan, peers, local
        self._pool, self._decoder = pool, decoder
        self._under_way: deque[_Transfer] = deque()
        self._bytes = 0
        self._decodes: deque[Future[None]] = deque()
        self._staging_buffers = BufferPool(max(sizes.window // sizes.piece, 1), sizes.piece, is_pinned)
        self._parity_buffers = BufferPool(sizes.groups, sizes.group, is_pinned)

    def run(self) -> None:
        """Runs all transfers and decodes of all cells that this rank takes part in.

        Raises:
            RestoreError: a peer is gone.
        """
        for cell in self._load_plan.cells(self._peers.rank):
            tag = 0
            for stripe_slice, local_reads in self._read_ahead(cell):
                pending = self._begin_decode(stripe_slice)
                for i, shard_range in enumerate(stripe_slice.ranges):
                    self._post(shard_range, tag + i, local_reads.get(i), pending)
                tag += len(stripe_slice.ranges)
                if pending is not None:
                    self._under_way.append(_Transfer(pending=pending))
        while self._under_way:
            self._retire()
        while self._decodes:
            self._decodes.popleft().result()

    # Reading ahead

    def _read_ahead(self, cell: int) -> Iterator[tuple[StripeSlice, LocalReads]]:
        """Yields the slices, some time after submitting the reads of their local ranges."""
        submitted: deque[tuple[StripeSlice, LocalReads, int]] = deque()
        ahead_bytes = 0
        for stripe_slice in self._load_plan.slices(cell):
            local_ranges = [
                (i, shard_range)
                for i, shard_range in enumerate(stripe_slice.ranges)
                if self._peers.rank in shard_range.stream.at_hand
            ]
            local_reads = {i: self._pool.submit(self._local.read, shard_range) for i, shard_range in local_ranges}
            submitted.append(
                (stripe_slice, local_reads, sum(shard_range.end - shard_range.begin for _, shard_range in local_ranges))
            )
            ahead_bytes += submitted[-1][2]
            while ahead_bytes > self._load_plan.sizes.ahead:
                oldest = submitted.popleft()
                ahead_bytes -= oldest[2]
                yield oldest[:2]
        yield from (each[:2] for each in submitted)

    # Sending and receiving

    def _post(
        self, shard_range: ShardRange, tag: int, copying: Future[Bytes] | None, pending: _PendingDecode | None
    ) -> None:
        """Begins this rank's part in a range, if the rank has one."""
        stream, nbytes = shard_range.stream, shard_range.end - shard_range.begin
        entry = _Transfer(copying=copying)
        if stream.sender == self._peers.rank:
            assert copying is not None, "the sender reads the range from a local slot"
            if stream.receivers:
                data = copying.result()  # verify before sending
                entry.works = [self._peers.send(data, to, tag) for to in stream.receivers]
        elif self._peers.rank in stream.receivers:
            into = self._receive_memory(shard_range, entry, pending)
            entry.works = [self._peers.receive(into, stream.sender, tag)]
        elif copying is None:
            return
        entry.nbytes = nbytes * len(entry.works)
        self._bytes += entry.nbytes
        self._under_way.append(entry)
        while self._bytes > self._load_plan.sizes.window and len(self._under_way) > 1:
            self._retire()

    def _receive_memory(self, shard_range: ShardRange, entry: _Transfer, pending: _PendingDecode | None) -> Bytes:
        """Returns the memory that receives a range."""
        stream, nbytes = shard_range.stream, shard_range.end - shard_range.begin
        lane = self._local.lanes[stream.lane]
        if stream.shard >= lane.code.k:
            assert pending is not None and pending.buffer is not None, "parity is received only for a slice to decode"
            width = pending.stripe_slice.end - pending.stripe_slice.begin
            packet, column = divmod(shard_range.begin, lane.packet_bytes)
            order = [shard for shard in pending.stripe_slice.read.shards if shard >= lane.code.k].index(stream.shard)
            at = (order * lane.code.w + packet) * width + column - pending.stripe_slice.begin
            return pending.buffer[at : at + nbytes]
        flat_view, begin = self._local.flat_views[lane.cell], self._local.target(shard_range)
        view = flat_view.view(begin, begin + nbytes)
        if view is not None:
            return view
        entry.staging = self._staging_buffers.take(self._free_a_buffer)
        entry.target = (flat_view, begin, nbytes)
        return entry.staging[:nbytes]

    def _begin_decode(self, stripe_slice: StripeSlice) -> _PendingDecode | None:
        """Returns the decode to do after a slice; None if this rank need not decode."""
        lane = self._local.lanes[stripe_slice.lane]
        flat_view = self._local.flat_views.get(lane.cell)
        if not stripe_slice.has_lost_shards or flat_view is None:
            return None
        pending = _PendingDecode(stripe_slice, flat_view, buffer=self._parity_buffers.take(self._free_a_buffer))
        assert pending.buffer is not None
        width, at = stripe_slice.end - stripe_slice.begin, 0
        streams = {shard_range.stream.shard: shard_range.stream for shard_range in stripe_slice.ranges}
        for shard in stripe_slice.read.shards:
            if shard < lane.code.k:
                continue
            is_here = self._peers.rank in streams[shard].at_hand
            for packet in range(lane.code.w):
                row = pending.buffer[at : at + width]
                if is_here:
                    source, offset = self._local.find(
                        ShardRange(streams[shard], packet * lane.packet_bytes + stripe_slice.begin, 0)
                    )
                    row = source.data[offset : offset + width]
                pending.rows[shard, packet] = row
                at += width
        return pending

    # Ending

    def _free_a_buffer(self) -> None:
        """Finishes the oldest transfer or decode, so that its buffer becomes free."""
        if self._under_way:
            self._retire()
        else:
            self._decodes.popleft().result()

    def _retire(self) -> None:
        """Waits for the oldest transfer; starts the decode that follows a slice."""
        entry = self._under_way.popleft()
        for work in entry.works:
            work.wait()
        self._bytes -= entry.nbytes
        if entry.copying is not None:
            entry.copying.result()
        if entry.staging is not None and entry.target is not None:
            flat_view, begin, nbytes = entry.target
            flat_view.write(begin, entry.staging[:nbytes])
            self._staging_buffers.give(entry.staging)
        if entry.pending is not None:
            self._decodes.append(self._pool.submit(self._decode, entry.pending))

    def _decode(self, pending: _PendingDecode) -> None:
        self._decoder.decode(
            pending.stripe_slice, self._local.lanes[pending.stripe_slice.lane], pending.rows, pending.flat_view
        )
        if pending.buffer is not None:
            self._parity_buffers.give(pending.buffer)
