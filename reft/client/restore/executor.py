"""Loads one rank's state by its transfer operations: the trainer's driver of `recovery.walk`.

    read       slot's file ─► digests ─► live memory, a message, or a buffer for several of them
    receive    message ─► live memory, or a buffer ─► digest ─► live memory
    decode     columns of k shards ─► made packets          in helper threads, as reads are
    emit       made packets ─► chunk digests ─► live memory and messages

    then  ─► LoadReport: damaged slots; faults of messages, of decoding, of copies to a device

Invariants
  1. A chunk is compared with its digest before it is sent or counts. A message is compared where
     it arrives, by a digest of the memory from which it was sent. What is wrong is recorded and
     stops no rank: afterwards all ranks discard the load.
  2. Beside slots and tensors a rank holds the buffers of the operations that the walk has under
     way, and the rows of slices: four bands at most.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from reft.client.restore.decode import StripeDecoder
from reft.client.restore.slot_reader import ReadSegment, SlotReader
from reft.client.restore.tensor_view import FlatTensorView, gather
from reft.client.restore.transport import Work
from reft.client.restore.verify import ChunkVerifier, PeerMessages, message_digest
from reft.console import say
from reft.core.budget import format_bytes
from reft.core.recovery.plan import (
    DecodeOperation,
    EmitOperation,
    NeededRange,
    OutgoingMessage,
    ReadOperation,
    ReceiveOperation,
    TransferOperation,
    TransferSizes,
    cell_name,
)
from reft.core.recovery.shard_matching import PieceSource
from reft.core.recovery.stripes import StripeSlice
from reft.core.recovery.walk import WalkPhase, walk
from reft.wire.slot_format import Bytes

THREADS = 2  # one core nearly saturates memory; the second hides page faults
NOTHING_KNOWN: Mapping[int, int] = MappingProxyType({})
SEGMENTS_MAX = 1024  # with more runs, one read into a buffer is faster
PROGRESS_S = 5.0  # a load that takes longer says so, this often
NO_RANK = -1


@dataclass(frozen=True)
class LoadReport:
    """What one rank tells all ranks of the bytes that it read, received and decoded.

    Attributes:
        damaged: old ranks whose slots are damaged, and parity numbers of damaged parity slots.
        faults: what went wrong with bytes that were right when they were read → the old rank, or
            parity number, whose bytes they were; NO_RANK if another source would not help.
    """

    damaged: tuple[int, ...] = ()
    faults: dict[str, int] = field(default_factory=dict)


class LoadProgress:
    """Prints how far a long load is.

    Args:
        total: bytes to place.
        speaks: whether this rank prints.
    """

    def __init__(self, total: int, speaks: bool) -> None:
        self._total, self._speaks = total, speaks
        self._done = 0
        self._began = self._said = time.monotonic()

    def add(self, nbytes: int) -> None:
        """Counts placed bytes; prints a line after each PROGRESS_S."""
        self._done += nbytes
        now = time.monotonic()
        if self._speaks and now - self._said >= PROGRESS_S:
            self._said = now
            rate = self._done / (now - self._began)
            rest = f", about {(self._total - self._done) / rate:.0f} s left" if rate else ""
            say(f"restores: {format_bytes(self._done)} of {format_bytes(self._total)} of this rank's state{rest}.")


class BufferPool:
    """Buffers of one size, which are used again. The walk bounds their number."""

    def __init__(self, nbytes: int, is_pinned: bool) -> None:
        self._nbytes, self._is_pinned = nbytes, is_pinned
        self._free: list[Bytes] = []

    def take(self, nbytes: int) -> Bytes:
        """Returns a buffer of at least `nbytes`; small ones are not used again."""
        if nbytes * 4 <= self._nbytes:
            return np.empty(nbytes, np.uint8)
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


class _PackedMessage(NamedTuple):
    """A message's bytes, verified, and their digest."""

    data: Bytes
    digest: int
    receivers: tuple[int, ...]


@dataclass
class _PendingOperation:
    """What an operation under way holds."""

    reading: Future[list[_PackedMessage]] | None = None
    receiving: Bytes | None = None
    works: list[Work] = field(default_factory=list)
    buffers: list[Bytes] = field(default_factory=list)
    made: Bytes | None = None  # packets of a slice; they belong to no pool


@dataclass
class TransferExecutor:
    """Fills this rank's live memory, and serves the other ranks; see the module.

    Args:
        sizes: of the plan; the same on all ranks.
        chunk_bytes: size of the slots' chunks; the same on all ranks.
        peers: messages to and from other ranks.
        slots: old rank, or parity number → its slot, for the slots that this rank reads.
        live: the live memory of all targets.
        offsets: name of a target → where it begins in `live`.
        decoder: makes lost shards.
        inline_leaves: old rank → its needed inline leaves, end to end.
        verifiers: old rank → verifier of its lost slot, for the slots that this rank makes.
    """

    sizes: TransferSizes
    chunk_bytes: int
    peers: PeerMessages
    slots: Mapping[int, SlotReader]
    live: FlatTensorView
    offsets: Mapping[str, int]
    decoder: StripeDecoder
    inline_leaves: Mapping[int, Bytes] = field(default_factory=dict)
    verifiers: Mapping[int, ChunkVerifier] = field(default_factory=dict)
    _pending: dict[TransferOperation, _PendingOperation] = field(default_factory=dict)
    # Slice that this rank makes → the columns that it reads; then the decoding of them
    _rows: dict[StripeSlice, Bytes] = field(default_factory=dict)
    _made: dict[StripeSlice, Future[Bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._buffers = BufferPool(self.sizes.piece, self.live.is_on_device and torch.cuda.is_available())
        self._progress = LoadProgress(self.live.nbytes, self.peers.rank == 0)

    def load(self, operations: Iterable[TransferOperation]) -> LoadReport:
        """Runs the operations of this rank, in list order; all ranks call it together.

        Raises:
            RestoreError: a peer is gone, or a slot on another node can't be read.
            ValueError: a stripe can't be decoded from the slots at hand.
        """
        self._run(operations)
        faults = {text: owner for owner, text in self.peers.compare().items()}
        for old, verifier in self.verifiers.items():
            if wrong := verifier.finish():
                text = f"chunk {wrong[0]} of rank {old}, decoded from its peers, differs from the saved bytes"
                # Unreplicated leaves have no other source. Without this capsule, an older version
                # is used.
                faults[text] = old if verifier.is_in_section(wrong[0]) else NO_RANK
        if not self.live.are_copies_right():
            faults[f"rank {self.peers.rank}'s device holds other bytes than were copied to it"] = NO_RANK
        self.live.finish()
        return LoadReport(tuple(sorted(old for old, slot in self.slots.items() if slot.is_bad)), faults)

    def _run(self, operations: Iterable[TransferOperation]) -> None:
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="reft-load")
        try:
            for phase, operation in walk(operations, self.sizes):
                if phase is WalkPhase.START:
                    assert isinstance(operation, ReadOperation), "only reads start early"
                    pending = self._begin(operation, operation.slice)
                    pending.reading = pool.submit(self._read, operation, pending)
                elif phase is WalkPhase.POST:
                    self._post(operation)
                elif isinstance(operation, DecodeOperation):
                    self._made[operation.slice] = pool.submit(self._decode, operation.slice)
                else:
                    self._finish(operation)
        finally:
            # After an error: each read that has not begun could wait for one more deadline.
            pool.shutdown(cancel_futures=True)

    # Posting and finishing

    def _begin(self, operation: TransferOperation, stripe_slice: StripeSlice | None = None) -> _PendingOperation:
        if stripe_slice is not None and stripe_slice not in self._rows:
            self._rows[stripe_slice] = stripe_slice.empty_rows()
        return self._pending.setdefault(operation, _PendingOperation())

    def _post(self, operation: TransferOperation) -> None:
        if isinstance(operation, ReceiveOperation):
            self._receive(operation)
        elif isinstance(operation, EmitOperation):
            self._emit(operation)
        elif isinstance(operation, ReadOperation) and operation.messages:
            pending = self._pending[operation]
            assert pending.reading is not None, "a read was started"
            self._send(pending, operation.owner, pending.reading.result())

    def _send(self, pending: _PendingOperation, owner: int, messages: Iterable[_PackedMessage]) -> None:
        for message in messages:
            pending.works += [self.peers.send(message.data, message.digest, to, owner) for to in message.receivers]

    def _receive(self, operation: ReceiveOperation) -> None:
        """Posts a receive: into its target if that is one run of memory."""
        pending = self._begin(operation, operation.slice)
        pending.receiving = self._run_of(operation.parts[0], operation.slice) if len(operation.parts) == 1 else None
        if pending.receiving is None:
            pending.receiving = self._buffer(pending, operation.nbytes)
        pending.works.append(self.peers.receive(pending.receiving, operation.sender))

    def _finish(self, operation: ReadOperation | ReceiveOperation | EmitOperation) -> None:
        pending = self._pending.pop(operation)
        if pending.reading is not None:
            pending.reading.result()
        for work in pending.works:
            work.wait()
        if isinstance(operation, ReceiveOperation):
            assert pending.receiving is not None, "a receive was posted"
            message = self._packed(operation.parts, pending.receiving, (), NOTHING_KNOWN)
            self.peers.received(message.digest, operation.sender, operation.owner)
            if pending.buffers:
                done = 0
                for part in operation.parts:
                    self._place(part, pending.receiving[done : done + part.nbytes])
                    done += part.nbytes
        if pending.buffers or pending.made is not None:
            self.live.wait()
        for buffer in pending.buffers:
            self._buffers.give(buffer)
        self._progress.add(sum(part.nbytes for part in operation.parts))

    # Reading

    def _read(self, operation: ReadOperation, pending: _PendingOperation) -> list[_PackedMessage]:
        """Reads and verifies the bytes of an operation, and places them; returns its messages."""
        owner, parts, messages = operation.owner, operation.parts, operation.messages
        if operation.source is PieceSource.CAPSULE:
            return self._distribute(pending, parts, messages, self.inline_leaves[owner], 0)
        slot = self.slots.get(owner)
        if slot is None:  # damaged when it was opened: its bytes do not count
            return [_PackedMessage(np.empty(each.nbytes, np.uint8), 0, each.receivers) for each in messages]
        if operation.slice is not None:
            slot.read(_packed_segments(parts, self._run_of(parts[0], operation.slice)))
            return []
        if (segments := self._live_segments(operation)) is not None:
            digests = slot.read(segments)
            return [self._packed(m.parts, self._run_of(m.parts[0]), m.receivers, digests) for m in messages]
        if not parts and len(messages) == 1 and _is_in_few_runs(messages[0].parts):
            data = self._buffer(pending, messages[0].nbytes)
            digests = slot.read(_packed_segments(messages[0].parts, data))
            return [self._packed(messages[0].parts, data, messages[0].receivers, digests)]
        if self.live.is_on_device and slot.is_pinned:
            data, digests = slot.mapped(operation.begin, operation.end), dict[int, int]()
        else:
            data = self._buffer(pending, operation.end - operation.begin)
            digests = slot.read([ReadSegment(operation.begin, data)])
        return self._distribute(pending, parts, messages, data, operation.begin, digests)

    def _live_segments(self, operation: ReadOperation) -> list[ReadSegment] | None:
        """Returns the live memory that takes all bytes of an operation, by source offset.

        None if some of it is not host memory, lies in too many runs, or can't be sent as it lies.
        """
        own = {(id(part.need), part.at) for part in operation.parts}
        for message in operation.messages:
            part = message.parts[0]
            if len(message.parts) > 1 or (id(part.need), part.at) not in own or self._run_of(part) is None:
                return None
        if not _is_in_few_runs(operation.parts):
            return None
        segments = []
        for part in operation.parts:
            for old, new, nbytes in part.runs.rows():
                begin = self.offsets[part.need.name] + new
                for memory, first, last, at in self.live.parts(begin, begin + nbytes):
                    if isinstance(memory, torch.Tensor):
                        return None
                    segments.append(ReadSegment(old + at, memory[first:last]))
        return segments

    def _distribute(
        self,
        pending: _PendingOperation,
        parts: Iterable[NeededRange],
        messages: Iterable[OutgoingMessage],
        data: Bytes,
        begin: int,
        digests: Mapping[int, int] = NOTHING_KNOWN,
    ) -> list[_PackedMessage]:
        """Places the parts that this rank needs; returns the messages to others.

        Args:
            pending: takes the buffers.
            parts: what this rank needs.
            messages: what other ranks need.
            data: the source's bytes, from `begin` on.
            begin: offset in the source.
            digests: chunk → its digest, taken from `data`.
        """
        for part in parts:
            self._place(part, self._gathered(pending, [part], data, begin))
        return [
            self._packed(each.parts, self._gathered(pending, each.parts, data, begin), each.receivers, digests)
            for each in messages
        ]

    def _gathered(self, pending: _PendingOperation, parts: Sequence[NeededRange], data: Bytes, begin: int) -> Bytes:
        """Returns the bytes of parts, end to end: in `data` if they lie there so, else copied."""
        runs = [part.runs for part in parts]
        nbytes = sum(int(each.nbytes.sum()) for each in runs)
        if len(runs) == 1 and len(runs[0].old) == 1:
            return data[int(runs[0].old[0]) - begin :][:nbytes]
        gathered, done = self._buffer(pending, nbytes), 0
        for each in runs:
            done += gather(data, each.old - begin, each.nbytes, gathered[done:])
        return gathered

    def _packed(
        self,
        parts: Sequence[NeededRange],
        data: Bytes | None,
        receivers: tuple[int, ...],
        digests: Mapping[int, int],
    ) -> _PackedMessage:
        """Returns a message with its digest.

        Both ranks of a pair cut a message of one run where the source's chunks end, and a packed
        message as if it began with a chunk.
        """
        assert data is not None, "the bytes lie in one run of host memory"
        runs = parts[0].runs
        at = int(runs.old[0]) if len(parts) == 1 and len(runs.old) == 1 else None
        known = NOTHING_KNOWN if at is None else digests
        return _PackedMessage(data, message_digest(data, at or 0, self.chunk_bytes, known), receivers)

    def _buffer(self, pending: _PendingOperation, nbytes: int) -> Bytes:
        """Returns memory that stays until the operation is finished; a device may read it."""
        pending.buffers.append(self._buffers.take(nbytes))
        return pending.buffers[-1][:nbytes]

    # Targets

    def _run_of(self, part: NeededRange, stripe_slice: StripeSlice | None = None) -> Bytes | None:
        """Returns the memory of a part: rows of a slice, or one run of live host memory."""
        runs = part.runs
        if stripe_slice is not None:
            return self._rows[stripe_slice][int(runs.new[0]) :][: part.nbytes]
        if len(runs.new) != 1:
            return None
        begin = self.offsets[part.need.name] + int(runs.new[0])
        return self.live.view(begin, begin + part.nbytes)

    def _place(self, part: NeededRange, data: Bytes) -> None:
        """Writes the bytes of a part, which lie end to end, into live memory."""
        runs = part.runs
        self.live.scatter(self.offsets[part.need.name], runs.new, runs.nbytes, data)

    # Lost slots

    def _decode(self, stripe_slice: StripeSlice) -> Bytes:
        rows = self._rows.pop(stripe_slice) if stripe_slice in self._rows else stripe_slice.empty_rows()
        base = self.offsets.get(cell_name(stripe_slice.stripe.lane.cell), 0)
        return self.decoder.decode(stripe_slice, rows, self.live, base)

    def _emit(self, operation: EmitOperation) -> None:
        """Verifies the made packets of a slice, places them and posts its messages."""
        stripe_slice, pending = operation.slice, self._begin(operation)
        pending.made = self._made.pop(stripe_slice).result()
        for owner, begin, data in stripe_slice.made_parts(pending.made):
            self.verifiers[owner].take(begin, data)
        messages = self._distribute(pending, operation.parts, operation.messages, pending.made.reshape(-1), 0)
        self._send(pending, operation.owner, messages)


def _packed_segments(parts: Iterable[NeededRange], memory: Bytes | None) -> list[ReadSegment]:
    """Returns the pieces of `memory` that take the bytes of parts, end to end."""
    assert memory is not None, "rows and buffers are host memory"
    segments, done = [], 0
    for part in parts:
        for old, _, nbytes in part.runs.rows():
            segments.append(ReadSegment(old, memory[done : done + nbytes]))
            done += nbytes
    return segments


def _is_in_few_runs(parts: Iterable[NeededRange]) -> bool:
    return sum(len(part.runs.old) for part in parts) <= SEGMENTS_MAX
