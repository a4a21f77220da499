"""Slots as loading reads them: each chunk is compared with its digest when its bytes are first wanted.

A wrong chunk is noted and raises nothing: other ranks wait for its bytes, and the plan is made again once all are through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from reft.core.coding.placement import Placement
from reft.core.layout.layout import align
from reft.errors import FormatError
from reft.wire.slot_format import Bytes, SlotMap, chunk_digest

AtChunk = Callable[[int], object]

READ_BYTES = 1 << 20  # at a time: few calls, and still in the core's cache when it is digested


class VerifiedSlotReader:
    """The data of a slot, whose chunks are compared with their digests when they are first read."""

    def __init__(self, slot: SlotMap, data_bytes: int, at_chunk: AtChunk) -> None:
        self._slot, self._at_chunk = slot, at_chunk
        self._digests = slot.digests
        self._whole = slot.data[: slot.header.data_bytes]  # asking the slot for each chunk costs as much as its digest
        self._is_seen = bytearray(slot.chunks)
        self._size = slot.header.geometry.chunk_bytes
        # A slot that is too short is damaged, but its reader must still send something.
        self.is_bad = self._is_short = slot.header.data_bytes < data_bytes
        self.data: Bytes = np.zeros(data_bytes, np.uint8) if self.is_bad else slot.data

    def checked(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Parts of begin..end, one for each chunk, just after the chunk was checked: it is in the core's cache."""
        while begin < end:
            index = begin // self._size
            stop = min(end, (index + 1) * self._size)
            self._check(index)
            yield begin, stop
            begin = stop

    def copy(self, begin: int, out: Bytes) -> None:
        """Copies data from `begin` on into uint8 [n]; of whole chunks, what has arrived there is compared.

        The kernel copies those, and none of the slot's pages is mapped here, which would be a good part of a copy's cost. A page
        whose memory has failed is an error then, not a signal.
        """
        size, end = self._size, begin + out.nbytes
        first, last = align(begin, size), end if end == self._whole.nbytes else end // size * size
        if self._is_short or first >= last:
            first = last = end
        self._copy_mapped(begin, out[: first - begin])
        step = align(READ_BYTES, size)
        for at in range(first, last, step):
            self._read(at, out[at - begin : min(at + step, last) - begin])
        self._copy_mapped(last, out[last - begin :])

    def _copy_mapped(self, begin: int, out: Bytes) -> None:
        for at, stop in self.checked(begin, begin + out.nbytes):
            np.copyto(out[at - begin : stop - begin], self.data[at:stop])

    def _read(self, begin: int, out: Bytes) -> None:
        """Copies some whole chunks."""
        size = self._size
        coming = [at for at in range(0, out.nbytes, size) if self._begins((begin + at) // size)]
        try:
            self._slot.read(begin, out)
        except (OSError, FormatError):
            self.is_bad = True
            return
        for at in coming:
            self._compare((begin + at) // size, out[at : at + size])

    def _check(self, index: int) -> None:
        if self._begins(index):
            self._compare(index, self._whole[index * self._size : (index + 1) * self._size])

    def _begins(self, index: int) -> bool:
        """Whether a chunk is still to be compared; from now on it is not."""
        if index >= len(self._is_seen) or self._is_seen[index]:
            return False
        self._is_seen[index] = True  # first, so that a thread at the next piece does not compare it again
        self._at_chunk(index)
        return True

    def _compare(self, index: int, chunk: Bytes) -> None:
        if chunk_digest(chunk) != int(self._digests[index]):
            self.is_bad = True


class SlotSource(VerifiedSlotReader):
    """A slot that this rank reads: of its own old rank, or of another."""

    def __init__(self, slot: SlotMap, placement: Placement, old: int, at_chunk: AtChunk) -> None:
        part = placement.part(old)
        super().__init__(slot, part.unreplicated_offset, at_chunk)
        self.offsets = {(block.lane, block.stripe, block.shard): block.offset for block in part.blocks}
