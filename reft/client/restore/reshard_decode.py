"""Decodes lost shards slice by slice, and verifies them with the slot's digests.

    slice of k shards ─► program ─► slice of the lost shard ─► messages
                                          │
                                          └─► ChunkVerifier: bytes of the slot, in any order
                                              ─► digest of each chunk

A chunk may end in another packet or another shard than it began. Bytes that come too early are kept
in memory: at most one chunk for each packet of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from reft.core.coding.erasure import XorProgram, decode_program, run
from reft.core.recovery.regather import LostShardSlice
from reft.wire.slot_format import Bytes


@dataclass
class ChunkVerifier:
    """Compares a slot's chunks with their digests; accepts the slot's bytes in any order.

    Args:
        digests: the slot's digests, taken when it was sealed.
        chunk_bytes: size of a chunk.
        end: where the slot's data shards end; zeros follow up to the next chunk.
    """

    digests: npt.NDArray[np.uint64]
    chunk_bytes: int
    end: int
    wrong: list[int] = field(default_factory=list)
    # Chunk → number of bytes digested so far, and the digest's state.
    _done: dict[int, tuple[int, xxhash.xxh3_64]] = field(default_factory=dict)
    # Chunk → offset in the chunk → bytes that came too early.
    _early: dict[int, dict[int, Bytes]] = field(default_factory=dict)

    def take(self, at: int, data: Bytes) -> None:
        """Accepts bytes uint8[n] of the slot's data that begin at `at`."""
        while data.nbytes:
            chunk, offset = divmod(at, self.chunk_bytes)
            size = min(data.nbytes, self.chunk_bytes - offset)
            self._take_part(chunk, offset, data[:size])
            at, data = at + size, data[size:]

    def finish(self) -> list[int]:
        """Returns the chunks that differ or lack bytes; call it after all bytes were passed."""
        chunks = -(-self.end // self.chunk_bytes)
        if self.end % self.chunk_bytes:
            self.take(self.end, np.zeros(-self.end % self.chunk_bytes, np.uint8))
        unfinished = set(self._done) | set(self._early)
        missing = [] if len(self.digests) >= chunks else list(range(len(self.digests), chunks))
        return sorted({*self.wrong, *unfinished, *missing})

    def _take_part(self, chunk: int, offset: int, data: Bytes) -> None:
        done, state = self._done.pop(chunk) if chunk in self._done else (0, xxhash.xxh3_64())
        early = self._early.pop(chunk, {})
        early[offset] = data
        while done in early:
            piece = early.pop(done)
            state.update(piece.data)
            done += piece.nbytes
        if done == self.chunk_bytes:
            if chunk >= len(self.digests) or state.intdigest() != int(self.digests[chunk]):
                self.wrong.append(chunk)
            return
        self._done[chunk] = (done, state)
        if early:
            # Copy: the caller reuses the buffer.
            self._early[chunk] = {at: each if at != offset else each.copy() for at, each in early.items()}


@dataclass
class StripeDecoder:
    """Decodes slices of lost shards; caches the XOR programs."""

    _programs: dict[tuple[object, ...], XorProgram] = field(default_factory=dict)

    def decode(self, lost_slice: LostShardSlice, shards: Mapping[int, Bytes]) -> Bytes:
        """Returns the slice of the lost shard: uint8 [packets x columns], packet after packet.

        Args:
            lost_slice: the slice to decode.
            shards: shard → the same slice of it, for each shard of lost_slice.read.shards.
        """
        code, width = lost_slice.lane.code, lost_slice.end - lost_slice.begin
        if code.k == 1:
            return shards[lost_slice.read.shards[0]]
        program = self._program(lost_slice)
        inputs = [shards[shard][packet * width : (packet + 1) * width] for shard, packet in program.inputs]
        memory = np.empty((len(program.outputs) + program.scratch, width), np.uint8)
        outputs = [memory[i] for i in range(len(program.outputs))]
        run(program, inputs, outputs, [memory[len(outputs) + i] for i in range(program.scratch)])
        first = program.outputs.index((lost_slice.block.shard, 0))
        return memory[first : first + code.w].reshape(-1)

    def _program(self, lost_slice: LostShardSlice) -> XorProgram:
        code = lost_slice.lane.code
        parities = tuple(shard - code.k for shard in lost_slice.read.shards if shard >= code.k)
        # The code itself would be a slow key: its tables have thousands of entries to hash.
        key = (code.kind, code.k, code.f, code.w, lost_slice.read.lost, parities)
        if key not in self._programs:
            self._programs[key] = decode_program(code, lost_slice.read.lost, parities)
        return self._programs[key]
