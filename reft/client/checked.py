"""Slots as loading reads them: each chunk is compared with its digest when its bytes are first wanted.

A wrong chunk is noted and raises nothing: other ranks wait for its bytes, and the plan is made again once all are through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from reft.core.placement import Placement
from reft.wire.slot_format import Bytes, SlotMap, chunk_digest

AtChunk = Callable[[int], object]


class Checked:
    """The data of a slot, whose chunks are compared with their digests when they are first read."""

    def __init__(self, slot: SlotMap, data_bytes: int, at_chunk: AtChunk) -> None:
        self._at_chunk = at_chunk
        self._digests = slot.digests
        self._whole = slot.data[: slot.header.data_bytes]  # asking the slot for each chunk costs as much as its digest
        self._is_seen = np.zeros(slot.chunks, np.bool_)
        self._size = slot.header.geometry.chunk_bytes
        # A slot that is too short is damaged, but its reader must still send something.
        self.is_bad = slot.header.data_bytes < data_bytes
        self.data: Bytes = np.zeros(data_bytes, np.uint8) if self.is_bad else slot.data

    def checked(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Parts of begin..end, one for each chunk, just after the chunk was checked: it is in the core's cache."""
        while begin < end:
            index = begin // self._size
            stop = min(end, (index + 1) * self._size)
            self._check(index)
            yield begin, stop
            begin = stop

    def _check(self, index: int) -> None:
        if index >= len(self._is_seen) or self._is_seen[index]:
            return
        self._is_seen[index] = True  # first, so that a thread at the next piece does not read it again
        self._at_chunk(index)
        chunk = self._whole[index * self._size : (index + 1) * self._size]
        if chunk_digest(chunk) != int(self._digests[index]):
            self.is_bad = True


class Source(Checked):
    """A slot that this rank reads: of its own old rank, or of another."""

    def __init__(self, slot: SlotMap, placement: Placement, old: int, at_chunk: AtChunk) -> None:
        part = placement.part(old)
        super().__init__(slot, part.kept_offset, at_chunk)
        self.offsets = {(block.lane, block.stripe, block.shard): block.offset for block in part.blocks}
