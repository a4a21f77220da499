"""Slot readers that compare each chunk with its digest at the first read.

A wrong chunk is recorded and raises no error: other ranks wait for its bytes. All ranks make a new
plan after the load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from reft.core.coding.placement import Placement
from reft.core.layout.layout import align
from reft.errors import FormatError
from reft.wire.slot_format import Bytes, SlotMap, chunk_digest

AtChunk = Callable[[int], object]

READ_BYTES = 1 << 20  # at a time: few calls, and still in the core's cache for the digest


class VerifiedSlotReader:
    """Reads a slot's data; compares each chunk with its digest at the first read."""

    def __init__(self, slot: SlotMap, data_bytes: int, at_chunk: AtChunk) -> None:
        self._slot, self._at_chunk = slot, at_chunk
        self._digests = slot.digests
        # Kept: asking the slot for each chunk would cost as much as the chunk's digest.
        self._data = slot.data[: slot.header.data_bytes]
        self._is_verified = bytearray(slot.chunks)
        self._size = slot.header.geometry.chunk_bytes
        # A slot that is too short is damaged, but its reader must still send something.
        self.is_bad = self._is_short = slot.header.data_bytes < data_bytes
        self.data: Bytes = np.zeros(data_bytes, np.uint8) if self.is_bad else slot.data

    def verify_chunks(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields the parts of begin..end, one for each chunk, just after the chunk was verified.

        The chunk is then in the core's cache.
        """
        while begin < end:
            index = begin // self._size
            stop = min(end, (index + 1) * self._size)
            self._check(index)
            yield begin, stop
            begin = stop

    def copy(self, begin: int, out: Bytes) -> None:
        """Copies data from `begin` on into uint8 [n], and verifies the copy of whole chunks.

        The kernel copies whole chunks from the slot's file. This process maps none of these pages,
        which would be a good part of a copy's cost. A page with failed memory is then an error, not
        a signal.
        """
        size, end = self._size, begin + out.nbytes
        first, last = align(begin, size), end if end == self._data.nbytes else end // size * size
        if self._is_short or first >= last:
            first = last = end
        self._copy_mapped(begin, out[: first - begin])
        step = align(READ_BYTES, size)
        for at in range(first, last, step):
            self._read(at, out[at - begin : min(at + step, last) - begin])
        self._copy_mapped(last, out[last - begin :])

    def _copy_mapped(self, begin: int, out: Bytes) -> None:
        for at, stop in self.verify_chunks(begin, begin + out.nbytes):
            np.copyto(out[at - begin : stop - begin], self.data[at:stop])

    def _read(self, begin: int, out: Bytes) -> None:
        """Copies some whole chunks from the slot's file and verifies them."""
        size = self._size
        unverified = [at for at in range(0, out.nbytes, size) if self._start_chunk((begin + at) // size)]
        try:
            self._slot.read(begin, out)
        except (OSError, FormatError):
            self.is_bad = True
            return
        for at in unverified:
            self._compare((begin + at) // size, out[at : at + size])

    def _check(self, index: int) -> None:
        if self._start_chunk(index):
            self._compare(index, self._data[index * self._size : (index + 1) * self._size])

    def _start_chunk(self, index: int) -> bool:
        """Marks a chunk as verified; returns whether the caller must verify it."""
        if index >= len(self._is_verified) or self._is_verified[index]:
            return False
        self._is_verified[index] = True  # before comparing, so that no other thread compares it again
        self._at_chunk(index)
        return True

    def _compare(self, index: int, chunk: Bytes) -> None:
        if chunk_digest(chunk) != int(self._digests[index]):
            self.is_bad = True


class SlotSource(VerifiedSlotReader):
    """A slot that this rank reads, its own or another old rank's."""

    def __init__(self, slot: SlotMap, placement: Placement, old: int, at_chunk: AtChunk) -> None:
        part = placement.rank_placement(old)
        super().__init__(slot, part.unreplicated_offset, at_chunk)
        self.offsets = {(block.lane, block.stripe, block.shard): block.offset for block in part.blocks}
