"""Decodes lost shards a band at a time, and compares what comes out with the digests of the lost slot.

    band of k shards ─► program ─► band of the lost one ─► parcels
                                          │
                                          └─► Proof: bytes of the slot, in whatever order ─► digest of each chunk

A chunk ends in another packet, or another shard, than it began: what comes before its turn waits in memory, at most a chunk
for each packet of a shard.
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
    """The digests of a slot's chunks, from its bytes in any order.

    Args:
        digests: of the slot, as they were taken when it was sealed.
        chunk_bytes: size of a chunk.
        end: where the slot's data shards end; after that are zeros, up to the next chunk.
    """

    digests: npt.NDArray[np.uint64]
    chunk_bytes: int
    end: int
    wrong: list[int] = field(default_factory=list)
    _done: dict[int, tuple[int, xxhash.xxh3_64]] = field(default_factory=dict)  # chunk → bytes digested so far
    _early: dict[int, dict[int, Bytes]] = field(default_factory=dict)  # chunk → offset in it → bytes

    def take(self, at: int, data: Bytes) -> None:
        """Bytes uint8[n] of the slot's data, from `at` on."""
        while data.nbytes:
            chunk, offset = divmod(at, self.chunk_bytes)
            size = min(data.nbytes, self.chunk_bytes - offset)
            self._take(chunk, offset, data[:size])
            at, data = at + size, data[size:]

    def finish(self) -> list[int]:
        """The chunks that differ, once all bytes were taken; one that lacks some differs."""
        chunks = -(-self.end // self.chunk_bytes)
        if self.end % self.chunk_bytes:
            self.take(self.end, np.zeros(-self.end % self.chunk_bytes, np.uint8))
        unfinished = set(self._done) | set(self._early)
        missing = [] if len(self.digests) >= chunks else list(range(len(self.digests), chunks))
        return sorted({*self.wrong, *unfinished, *missing})

    def _take(self, chunk: int, offset: int, data: Bytes) -> None:
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
            # What was handed in is a buffer that will be used again.
            self._early[chunk] = {at: each if at != offset else each.copy() for at, each in early.items()}


@dataclass
class StripeDecoder:
    """Decodes bands; remembers its programs."""

    _programs: dict[tuple[object, ...], XorProgram] = field(default_factory=dict)

    def decode(self, band: LostShardSlice, shards: Mapping[int, Bytes]) -> Bytes:
        """The band of the lost shard: uint8 [packets x columns], packet after packet.

        Args:
            shards: of each shard of band.read.shards the same band.
        """
        code, width = band.lane.code, band.end - band.begin
        if code.k == 1:
            return shards[band.read.shards[0]]
        program = self._program(band)
        inputs = [shards[shard][packet * width : (packet + 1) * width] for shard, packet in program.inputs]
        room = np.empty((len(program.outputs) + program.scratch, width), np.uint8)
        outputs = [room[i] for i in range(len(program.outputs))]
        run(program, inputs, outputs, [room[len(outputs) + i] for i in range(program.scratch)])
        first = program.outputs.index((band.block.shard, 0))
        return room[first : first + code.w].reshape(-1)

    def _program(self, band: LostShardSlice) -> XorProgram:
        code = band.lane.code
        parities = tuple(shard - code.k for shard in band.read.shards if shard >= code.k)
        # Not the code itself: its tables are thousands of entries to hash.
        key = (code.kind, code.k, code.f, code.w, band.read.lost, parities)
        if key not in self._programs:
            self._programs[key] = decode_program(code, band.read.lost, parities)
        return self._programs[key]
