"""Carries out one rank's transfer operations: the trainer's driver of `reft.core.recovery.walk`.

    read       slot's file ─► digests ─► live memory, message, or a buffer for several of them
    receive    message ─► live memory, or a buffer ─► digest ─► live memory
    decode     columns of k shards ─► made packets          in helper threads, as reads are
    emit       made packets ─► chunk digests ─► live memory and messages

Invariants
  1. A chunk is compared with its digest before it is sent or counts. A message is compared where
     it arrives, by a digest of the memory from which it was sent. What is wrong is recorded and
     stops no rank: afterwards all ranks discard the load.
  2. Beside slots and tensors a rank holds the buffers of the operations that the walk has under
     way, and the rows of slices: four bands at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch

from reft.client.restore.decode import StripeDecoder
from reft.client.restore.gather_scatter import gather, scatter
from reft.client.restore.slot_reader import ReadSegment, SlotReader
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Work
from reft.client.restore.verify import ChunkVerifier, PeerMessages, message_digest
from reft.core.layout.regions import ByteRuns
from reft.core.recovery.plan import (
    DecodeOperation,
    EmitOperation,
    NeededRange,
    OutgoingMessage,
    ReadOperation,
    ReceiveOperation,
    StripeSlice,
    TransferOperation,
    TransferSizes,
    cell_name,
)
from reft.core.recovery.shard_matching import PieceSource
from reft.core.recovery.walk import WalkPhase, walk
from reft.wire.slot_format import Bytes

THREADS = 2  # one core nearly saturates memory; the second hides page faults
NOTHING_KNOWN: Mapping[int, int] = MappingProxyType({})
SEGMENTS_MAX = 1024  # with more runs, one read into a buffer is faster


class BufferPool:
    """Buffers of one size, which are used again. The walk bounds their number."""

    def __init__(self, nbytes: int, is_pinned: bool) -> None:
        self._nbytes, self._is_pinned = nbytes, is_pinned
        self._free: list[Bytes] = []

    def take(self, nbytes: int) -> Bytes:
        """Returns a buffer of at least `nbytes`."""
        try:
            if nbytes <= self._nbytes:
                return self._free.pop()
        except IndexError:  # another thread may have taken the last one
            pass
        nbytes = max(nbytes, self._nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned).numpy()

    def give(self, buffer: Bytes) -> None:
        if buffer.nbytes == self._nbytes:
            self._free.append(buffer)


@dataclass(frozen=True)
class LiveTarget:
    """This rank's live memory, by the names of the plan's targets.

    Attributes:
        flat_view: the live memory of all targets.
        offsets: name → where the target begins in `flat_view`.
    """

    flat_view: FlatTensorView
    offsets: Mapping[str, int]


@dataclass
class _PendingOperation:
    """What an operation under way holds."""

    reading: Future[None] | None = None
    receiving: Bytes | None = None
    outgoing: list[tuple[Bytes, int, OutgoingMessage]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    buffers: list[Bytes] = field(default_factory=list)


@dataclass
class _SliceMemory:
    """The rows of a slice, and its made packets."""

    rows: Bytes
    made: Bytes
    decoding: Future[None] | None = None


class TransferExecutor:
    """Carries out the operations of one rank; see the module.

    Args:
        sizes: of the plan.
        chunk_bytes: size of the slots' chunks.
        peers: messages to and from other ranks.
        slots: old rank → its slot, for the slots that this rank reads.
        inline_leaves: old rank → its needed inline leaves, end to end.
        verifiers: old rank → verifier of its lost slot, for the slots that this rank makes.
        target: live memory.
        decoder: makes lost shards.
        at_progress: called with the bytes placed by each finished operation.
    """

    def __init__(
        self,
        sizes: TransferSizes,
        chunk_bytes: int,
        peers: PeerMessages,
        slots: Mapping[int, SlotReader],
        inline_leaves: Mapping[int, Bytes],
        verifiers: Mapping[int, ChunkVerifier],
        target: LiveTarget,
        decoder: StripeDecoder,
        at_progress: Callable[[int], object],
    ) -> None:
        self._sizes, self._chunk_bytes, self._peers = sizes, chunk_bytes, peers
        self._slots, self._inline_leaves = slots, inline_leaves
        self._verifiers, self._target, self._decoder, self._at_progress = verifiers, target, decoder, at_progress
        self._pending: dict[TransferOperation, _PendingOperation] = {}
        self._slices: dict[StripeSlice, _SliceMemory] = {}
        self._buffers = BufferPool(sizes.piece, target.flat_view.is_on_device and torch.cuda.is_available())

    def run(self, operations: Iterable[TransferOperation]) -> None:
        """Runs the operations of this rank, in list order.

        Raises:
            RestoreError: a peer is gone, or a slot on another node can't be read.
        """
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="reft-load")
        try:
            for phase, operation in walk(operations, self._sizes):
                if phase is WalkPhase.START:
                    assert isinstance(operation, ReadOperation), "only reads start early"
                    pending = self._begin(operation, operation.slice)
                    pending.reading = pool.submit(self._read, operation, pending)
                elif phase is WalkPhase.POST:
                    self._post(operation)
                elif isinstance(operation, DecodeOperation):
                    memory = self._open(operation.slice)
                    memory.decoding = pool.submit(self._decode, operation.slice, memory)
                else:
                    self._finish(operation)
        finally:
            # After an error: each read that has not begun could wait for one more deadline.
            pool.shutdown(cancel_futures=True)

    # Posting and finishing

    def _begin(self, operation: TransferOperation, stripe_slice: StripeSlice | None = None) -> _PendingOperation:
        if stripe_slice is not None:
            self._open(stripe_slice)
        return self._pending.setdefault(operation, _PendingOperation())

    def _open(self, stripe_slice: StripeSlice) -> _SliceMemory:
        """Returns the memory of a slice that this rank makes."""
        if stripe_slice not in self._slices:
            made = len(stripe_slice.made) * stripe_slice.lane.code.w
            memory = np.empty(stripe_slice.registers * stripe_slice.width, np.uint8)
            border = memory.nbytes - made * stripe_slice.width
            self._slices[stripe_slice] = _SliceMemory(memory[:border], memory[border:])
        return self._slices[stripe_slice]

    def _post(self, operation: TransferOperation) -> None:
        if isinstance(operation, ReceiveOperation):
            self._receive(operation)
        elif isinstance(operation, EmitOperation):
            self._emit(operation)
        elif isinstance(operation, ReadOperation) and operation.messages:
            self._send(self._pending[operation], operation.owner)

    def _send(self, pending: _PendingOperation, owner: int) -> None:
        """Posts the messages of an operation, once their bytes are verified."""
        if pending.reading is not None:
            pending.reading.result()
        for data, digest, message in pending.outgoing:
            pending.works += [self._peers.send(data, digest, to, owner) for to in message.receivers]

    def _receive(self, operation: ReceiveOperation) -> None:
        """Posts a receive: into its target if that is one run of memory."""
        pending = self._begin(operation, operation.slice)
        into = self._run_of(operation.parts[0], operation.slice) if len(operation.parts) == 1 else None
        if into is None:
            pending.buffers.append(self._buffers.take(operation.nbytes))
            into = pending.buffers[0][: operation.nbytes]
        pending.receiving = into
        pending.works.append(self._peers.receive(into, operation.sender))

    def _finish(self, operation: ReadOperation | ReceiveOperation | EmitOperation) -> None:
        pending = self._pending.pop(operation)
        if pending.reading is not None:
            pending.reading.result()
        for work in pending.works:
            work.wait()
        if isinstance(operation, ReceiveOperation):
            assert pending.receiving is not None, "a receive was posted"
            at = _source_offset(operation.parts) or 0
            digest = message_digest(pending.receiving, at, self._chunk_bytes, NOTHING_KNOWN)
            self._peers.received(digest, operation.sender, operation.owner)
            if pending.buffers:
                done = 0
                for part in operation.parts:
                    runs = _runs(part, 0)
                    nbytes = int(runs.nbytes.sum())
                    self._unpack(part, runs, pending.receiving[done : done + nbytes], operation.slice)
                    done += nbytes
        if pending.buffers:
            self._target.flat_view.wait()
        for buffer in pending.buffers:
            self._buffers.give(buffer)
        self._at_progress(sum(part.nbytes for part in operation.parts))

    # Reading

    def _read(self, operation: ReadOperation, pending: _PendingOperation) -> None:
        """Reads and verifies the bytes of an operation, places them and packs its messages."""
        if operation.source is PieceSource.CAPSULE:
            self._place(operation, pending, self._inline_leaves[operation.owner], 0)
            return
        slot = self._slots.get(operation.owner)
        if slot is None:  # damaged when it was opened: its bytes do not count
            pending.outgoing += [(np.empty(message.nbytes, np.uint8), 0, message) for message in operation.messages]
            return
        if self._read_directly(operation, pending, slot):
            return
        if self._target.flat_view.is_on_device and operation.slice is None and slot.is_pinned:
            data, digests = slot.mapped(operation.begin, operation.end), dict[int, int]()
        else:
            pending.buffers.append(self._buffers.take(operation.end - operation.begin))
            data = pending.buffers[0][: operation.end - operation.begin]
            digests = slot.read([ReadSegment(operation.begin, data)])
        self._place(operation, pending, data, operation.begin, digests)

    def _read_directly(self, operation: ReadOperation, pending: _PendingOperation, slot: SlotReader) -> bool:
        """Reads to the first place where the bytes belong, and sends them from there.

        Returns False if the bytes belong to several places.
        """
        # Several needs may take bytes of one range, each other bytes.
        own = {(id(part.need), part.at) for part in operation.parts}
        if own and all((id(part.need), part.at) in own for message in operation.messages for part in message.parts):
            segments = self._segments(operation.parts, operation.slice)
            if segments is None:
                return False
            digests = slot.read(segments)
            for message in operation.messages:
                self._add_outgoing(pending, message, self._placed(message, pending), digests)
            return True
        runs = [_runs(part, part.at) for message in operation.messages for part in message.parts]
        if own or len(operation.messages) > 1 or sum(len(each.old) for each in runs) > SEGMENTS_MAX:
            return False
        message, segments, at = operation.messages[0], [], 0
        pending.buffers.append(self._buffers.take(message.nbytes))
        data = pending.buffers[0][: message.nbytes]
        for each in runs:
            for old, nbytes in zip(each.old.tolist(), each.nbytes.tolist(), strict=True):
                segments.append(ReadSegment(old, data[at : at + nbytes]))
                at += nbytes
        self._add_outgoing(pending, message, data, slot.read(segments))
        return True

    def _placed(self, message: OutgoingMessage, pending: _PendingOperation) -> Bytes:
        """Returns the bytes of a message whose parts are in this rank's live memory."""
        view = self._run_of(message.parts[0], None) if len(message.parts) == 1 else None
        if view is not None:
            return view
        pending.buffers.append(self._buffers.take(message.nbytes))
        data, at = pending.buffers[-1], 0
        for part in message.parts:
            runs = _runs(part, 0)
            for new, nbytes in zip(runs.new.tolist(), runs.nbytes.tolist(), strict=True):
                begin = self._target.offsets[part.need.name] + new
                self._target.flat_view.read(begin, data[at : at + nbytes])
                at += nbytes
        return data[:at]

    def _add_outgoing(
        self, pending: _PendingOperation, message: OutgoingMessage, data: Bytes, digests: Mapping[int, int]
    ) -> None:
        at = _source_offset(message.parts)
        known = NOTHING_KNOWN if at is None else digests
        digest = message_digest(data, at or 0, self._chunk_bytes, known)
        pending.outgoing.append((data, digest, message))

    def _segments(self, parts: Iterable[NeededRange], stripe_slice: StripeSlice | None) -> list[ReadSegment] | None:
        """Returns the memory of all parts, by source offset.

        None if some of it is not host memory, or lies in too many runs.
        """
        segments = []
        for part in parts:
            runs = _runs(part, part.at)
            if len(runs.old) > SEGMENTS_MAX:
                return None
            for old, new, nbytes in zip(runs.old.tolist(), runs.new.tolist(), runs.nbytes.tolist(), strict=True):
                if stripe_slice is not None:
                    segments.append(ReadSegment(old, self._slices[stripe_slice].rows[new : new + nbytes]))
                    continue
                begin = self._target.offsets[part.need.name] + new
                for memory, first, last, at in self._target.flat_view.parts(begin, begin + nbytes):
                    if isinstance(memory, torch.Tensor):
                        return None
                    segments.append(ReadSegment(old + at, memory[first:last]))
        return segments

    def _place(
        self,
        operation: ReadOperation | EmitOperation,
        pending: _PendingOperation,
        data: Bytes,
        begin: int,
        digests: Mapping[int, int] = NOTHING_KNOWN,
    ) -> None:
        """Places the parts that this rank needs, and packs the messages to others.

        Args:
            operation: whose parts and messages.
            pending: takes the packed messages.
            data: the source's bytes, from `begin` on.
            begin: offset in the source.
            digests: chunk → its digest, taken from `data`.
        """
        stripe_slice = operation.slice if isinstance(operation, ReadOperation) else None
        for part in operation.parts:
            runs = _runs(part, part.at - begin)
            if len(runs.old) == 1:
                packed = data[int(runs.old[0]) : int(runs.old[0] + runs.nbytes[0])]
            else:
                packed = np.empty(int(runs.nbytes.sum()), np.uint8)
                gather(data, runs.old, runs.nbytes, packed)
                pending.buffers.append(packed)  # a device may still read it
            self._unpack(part, runs, packed, stripe_slice)
        for message in operation.messages:
            self._add_outgoing(pending, message, self._pack(message, pending, data, begin), digests)

    def _pack(self, message: OutgoingMessage, pending: _PendingOperation, data: Bytes, begin: int) -> Bytes:
        runs = [_runs(part, part.at - begin) for part in message.parts]
        if len(runs) == 1 and len(runs[0].old) == 1:
            first = int(runs[0].old[0])
            return data[first : first + message.nbytes]
        pending.buffers.append(self._buffers.take(message.nbytes))
        packed, done = pending.buffers[-1], 0
        for each in runs:
            done += gather(data, each.old, each.nbytes, packed[done:])
        return packed[:done]

    # Targets

    def _run_of(self, part: NeededRange, stripe_slice: StripeSlice | None) -> Bytes | None:
        """Returns the memory of a part if that is one run of host memory."""
        runs = _runs(part, 0)
        if stripe_slice is not None:
            return self._slices[stripe_slice].rows[int(runs.new[0]) :][: int(runs.nbytes.sum())]
        if len(runs.new) != 1:
            return None
        begin = self._target.offsets[part.need.name] + int(runs.new[0])
        return self._target.flat_view.view(begin, begin + int(runs.nbytes[0]))

    def _unpack(self, part: NeededRange, runs: ByteRuns, data: Bytes, stripe_slice: StripeSlice | None) -> None:
        if stripe_slice is not None:
            np.copyto(self._slices[stripe_slice].rows[int(runs.new[0]) :][: data.nbytes], data)
        else:
            scatter(data, self._target.flat_view, self._target.offsets[part.need.name], runs.new, runs.nbytes)

    # Lost slots

    def _decode(self, stripe_slice: StripeSlice, memory: _SliceMemory) -> None:
        base = self._target.offsets.get(cell_name(stripe_slice.lane.cell), 0)
        self._decoder.decode(stripe_slice, memory.rows, self._target.flat_view, base, memory.made)

    def _emit(self, operation: EmitOperation) -> None:
        """Verifies the made packets of a slice, places them and posts its messages."""
        stripe_slice, pending = operation.slice, self._begin(operation)
        memory = self._slices.pop(stripe_slice)
        assert memory.decoding is not None, "a slice is decoded before it is emitted"
        memory.decoding.result()
        at = 0
        for made in stripe_slice.made:
            for packet in range(stripe_slice.lane.code.w):
                offset = made.offset + packet * stripe_slice.lane.packet_bytes + stripe_slice.begin
                self._verifiers[made.owner].take(offset, memory.made[at : at + stripe_slice.width])
                at += stripe_slice.width
        self._place(operation, pending, memory.made, 0)
        pending.buffers.append(memory.made)
        self._send(pending, operation.owner)


def _source_offset(parts: Sequence[NeededRange]) -> int | None:
    """Returns where a message of one run begins in its source.

    None for a packed message.
    Both ranks of a pair find the same offset, so they cut the message at the same places.
    """
    if len(parts) > 1:
        return None
    runs = _runs(parts[0], parts[0].at)
    return int(runs.old[0]) if len(runs.old) == 1 else None


def _runs(part: NeededRange, at: int) -> ByteRuns:
    """Returns the byte runs of a range, in the source and in the target.

    In the source, the range begins at `at`.
    """
    old, new, nbytes = part.need.copy.within(part.begin, part.end)
    return ByteRuns(old + (at - part.begin), new, nbytes)
