"""Executes one rank's part in a reshard plan, in the plan's order.

    message     sender: verifies chunks ─► packs (or sends in place)
                ─► receivers: unpack into live tensors
    lost slice  readers: columns of k shards ─► rebuilder: decodes, compares with the lost
                slot's digests ─► sends the slice's messages

Invariants
  1. A chunk is compared with its digest before it is sent. A wrong chunk is recorded and stops no
     rank: the receivers still get the bytes, and afterwards all ranks discard the load.
  2. Beside slots and tensors a rank holds at most TransferSizes.window of messages, one slice, and
     one chunk for each packet of a shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from reft.client.restore.executor import BufferPool, PeerMessages
from reft.client.restore.gather_scatter import Starts, gather, scatter
from reft.client.restore.reshard_decode import ChunkVerifier, StripeDecoder
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Work
from reft.client.restore.verified_slot import VerifiedSlotReader
from reft.core.layout.regions import ByteRuns
from reft.core.recovery.regather import LostShardSlice, NeededRange, ReshardPlan, TransferMessage
from reft.core.recovery.shard_matching import PieceSource
from reft.wire.slot_format import Bytes

TAG = 1


@dataclass
class _MessageTransfer:
    works: list[Work]
    nbytes: int
    staging: Bytes | None = None
    message: TransferMessage | None = None  # to unpack from the staging buffer


@dataclass
class ReshardExecutor:
    """Executes one rank's part in a reshard plan; see the module.

    Args:
        peers: messages to and from other ranks.
        reshard_plan: the plan; the same on all ranks.
        slots: old rank → its slot, for the slots that this rank reads.
        inline_leaves: old rank → name → bytes, for the capsules that this rank has.
        verifiers: old rank → verifier of its lost slot, for the slots that this rank decodes.
        flat_view: the live leaves of this rank.
        offsets: name → where the leaf begins in `flat_view`.
        is_pinned: whether messages for a device arrive in pinned memory.
    """

    peers: PeerMessages
    reshard_plan: ReshardPlan
    slots: Mapping[int, VerifiedSlotReader]
    inline_leaves: Mapping[int, Mapping[str, bytes]]
    verifiers: Mapping[int, ChunkVerifier]
    flat_view: FlatTensorView
    offsets: Mapping[str, int]
    is_pinned: bool
    _under_way: deque[_MessageTransfer] = field(default_factory=deque)
    _bytes: int = 0
    _stripe_decoder: StripeDecoder = field(default_factory=StripeDecoder)
    _shard_buffer: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    _inline_bytes: dict[int, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.reshard_plan.sizes
        self._staging_buffers = BufferPool(max(sizes.window // sizes.piece, 1) + 1, sizes.piece, self.is_pinned)

    def run(self) -> None:
        """Runs all entries of the plan that this rank takes part in.

        Raises:
            RestoreError: a peer is gone.
        """
        for entry in self.reshard_plan.entries(self.peers.rank):
            if isinstance(entry, LostShardSlice):
                self._run_lost_slice(entry)
            elif self.peers.rank == entry.sender:
                self._send_and_copy(entry, *self._source_of(entry))
            elif self.peers.rank in entry.receivers:
                self._receive(entry)
        while self._under_way:
            self._retire()
        self.flat_view.finish()

    # Messages

    def _source_of(self, message: TransferMessage) -> tuple[Bytes, Callable[[int], int]]:
        """Returns the verified source bytes of a message.

        The second value maps an offset of the source to an index in these bytes.
        """
        if message.where is PieceSource.SLOT:
            source = self.slots[message.owner]
            for part in message.parts:
                self._verify(source, part.at, part.at + part.end - part.begin)
            return source.data, lambda at: at
        if message.owner not in self._inline_bytes:
            names = [extent.needs[0].piece.name for extent in self.reshard_plan.inline_leaves(message.owner)]
            joined = b"".join(self.inline_leaves[message.owner][name] for name in names)
            self._inline_bytes[message.owner] = np.frombuffer(bytearray(joined), np.uint8)
        return self._inline_bytes[message.owner], lambda at: at

    def _verify(self, source: VerifiedSlotReader, begin: int, end: int) -> None:
        for _ in source.verify_chunks(begin, end):
            pass

    def _send_and_copy(self, message: TransferMessage, source: Bytes, offset_in: Callable[[int], int]) -> None:
        """Sends a message, and copies the bytes that this rank needs itself."""
        parts = [(part, _runs(part, offset_in(part.at))) for part in message.parts]
        others = [rank for rank in message.receivers if rank != self.peers.rank]
        if others:
            staging = None
            if len(parts) == 1 and len(parts[0][1].old) == 1:
                begin = int(parts[0][1].old[0])
                data = source[begin : begin + message.nbytes]
            else:
                staging = self._staging_buffers.take(self._retire)
                done = 0
                for _, runs in parts:
                    done += gather(source, runs.old, runs.nbytes, staging[done:])
                data = staging[:done]
            works = [self.peers.send(data, to, TAG) for to in others]
            self._post(_MessageTransfer(works, message.nbytes * len(others), staging))
        if self.peers.rank in message.receivers:
            for part, runs in parts:
                packed = np.empty(int(runs.nbytes.sum()), np.uint8)
                gather(source, runs.old, runs.nbytes, packed)
                self._unpack(part, runs, packed)

    def _receive(self, message: TransferMessage) -> None:
        """Receives a message; in place if it is one run of live memory."""
        if len(message.parts) == 1:
            part = message.parts[0]
            runs = _runs(part, 0)
            if len(runs.new) == 1:
                begin = self.offsets[part.need.leaf.name] + int(runs.new[0])
                view = self.flat_view.view(begin, begin + message.nbytes)
                if view is not None:
                    self._post(_MessageTransfer([self.peers.receive(view, message.sender, TAG)], message.nbytes))
                    return
        staging = self._staging_buffers.take(self._retire)
        work = self.peers.receive(staging[: message.nbytes], message.sender, TAG)
        self._post(_MessageTransfer([work], message.nbytes, staging, message))

    def _unpack(self, part: NeededRange, runs: ByteRuns, data: Bytes) -> None:
        scatter(data, self.flat_view, self.offsets[part.need.leaf.name], runs.new, runs.nbytes)

    def _post(self, entry: _MessageTransfer) -> None:
        self._under_way.append(entry)
        self._bytes += entry.nbytes
        while self._bytes > self.reshard_plan.sizes.window and len(self._under_way) > 1:
            self._retire()

    def _retire(self) -> None:
        """Waits for the oldest message under way, and unpacks it."""
        entry = self._under_way.popleft()
        for work in entry.works:
            work.wait()
        self._bytes -= entry.nbytes
        if entry.message is not None and entry.staging is not None:
            at = 0
            for part in entry.message.parts:
                runs = _runs(part, 0)
                nbytes = int(runs.nbytes.sum())
                self._unpack(part, runs, entry.staging[at : at + nbytes])
                at += nbytes
        if entry.staging is not None:
            self._staging_buffers.give(entry.staging)

    # Lost slices

    def _run_lost_slice(self, lost_slice: LostShardSlice) -> None:
        if self.peers.rank == lost_slice.rebuilder:
            self._rebuild(lost_slice)
            return
        for old, offset in lost_slice.inputs:
            if self.reshard_plan.reader_of[old] == self.peers.rank:
                self._send_slice(lost_slice, self.slots[old], offset)
        for message in lost_slice.messages:
            if self.peers.rank in message.receivers:
                self._receive(message)

    def _send_slice(self, lost_slice: LostShardSlice, source: VerifiedSlotReader, offset: int) -> None:
        staging, data = None, None
        if len(lost_slice.ranges) > 1:
            staging = self._staging_buffers.take(self._retire)
        data = self._columns(lost_slice, source, offset, staging)
        work = self.peers.send(data, lost_slice.rebuilder, TAG)
        self._post(_MessageTransfer([work], data.nbytes, staging))

    def _columns(
        self, lost_slice: LostShardSlice, source: VerifiedSlotReader, offset: int, buffer: Bytes | None
    ) -> Bytes:
        """Returns the verified slice of one local shard: in place, or packed into `buffer`."""
        ranges = [(offset + begin, offset + end) for begin, end in lost_slice.ranges]
        for begin, end in ranges:
            self._verify(source, begin, end)
        if buffer is None:
            return source.data[ranges[0][0] : ranges[0][1]]
        starts: Starts = np.array([begin for begin, _ in ranges], np.int64)
        nbytes: Starts = np.array([end - begin for begin, end in ranges], np.int64)
        return buffer[: gather(source.data, starts, nbytes, buffer)]

    def _rebuild(self, lost_slice: LostShardSlice) -> None:
        """Decodes a lost slice from local and received shards."""
        size = sum(end - begin for begin, end in lost_slice.ranges)
        if self._shard_buffer.nbytes < size * len(lost_slice.inputs):
            self._shard_buffer = np.empty(size * len(lost_slice.inputs), np.uint8)
        shards: dict[int, Bytes] = {}
        works = []
        for i, (shard, (old, offset)) in enumerate(zip(lost_slice.read.shards, lost_slice.inputs, strict=True)):
            buffer = self._shard_buffer[i * size : (i + 1) * size]
            reader = self.reshard_plan.reader_of[old]
            if reader == self.peers.rank:
                shards[shard] = self._columns(
                    lost_slice, self.slots[old], offset, buffer if len(lost_slice.ranges) > 1 else None
                )
            else:
                works.append(self.peers.receive(buffer, reader, TAG))
                shards[shard] = buffer
        for work in works:
            work.wait()
        data = self._stripe_decoder.decode(lost_slice, shards)
        verifier, width, at = self.verifiers[lost_slice.owner], lost_slice.end - lost_slice.begin, 0
        for begin, end in lost_slice.ranges:
            verifier.take(lost_slice.block.offset + begin, data[at : at + end - begin])
            at += end - begin

        def offset_in(source_offset: int) -> int:
            packet, column = divmod(source_offset - lost_slice.block.offset, lost_slice.lane.packet_bytes)
            return packet * width + column - lost_slice.begin

        for message in lost_slice.messages:
            # A message may be sent in place, so the next slice is decoded into new memory.
            self._send_and_copy(message, data, offset_in)


def _runs(part: NeededRange, at: int) -> ByteRuns:
    """Returns the byte runs of a range, in the source and in the new leaf.

    In the source, the range begins at `at`.
    """
    old, new, nbytes = part.need.copy.within(part.begin, part.end)
    return ByteRuns(old + (at - part.begin), new, nbytes)
