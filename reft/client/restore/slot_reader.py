"""Reads a slot's data straight to where the bytes belong, and verifies each chunk there.

    slot's file   | chunk 3        | chunk 4        |
                     │      │  │      │    │              pages are mapped for 4 MiB of chunks
    memory        scratch  leaf a  gap   leaf b …         parts that nobody wants go to scratch
                     └──────┴──┴─ digest of chunk 3       from the same memory, while in the cache

The kernel refuses to map failed memory and pages that a cut file lacks. Touching such a page would
end the process. So the file is read then, and that call says what is wrong.

A wrong chunk is recorded and raises no error: other ranks wait for its bytes. All ranks make a new
plan after the load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from reft.core.layout.layout import align
from reft.errors import FormatError
from reft.wire.slot_format import Bytes, SharedSlotMap, SlotMap, chunk_digest

AtChunk = Callable[[int], object]

READ_BYTES = 4 << 20  # at a time: few calls of the kernel


class ReadSegment(NamedTuple):
    """Memory uint8 [n] that takes the n bytes of a slot's data from `at` on."""

    at: int
    memory: Bytes

    @property
    def end(self) -> int:
        """Returns the offset behind the last byte."""
        return self.at + self.memory.nbytes


class SlotReader:
    """Reads a slot's data; compares every chunk that it reads with the chunk's digest.

    Args:
        slot: the sealed slot.
        data_bytes: the data that the placement expects.
        at_chunk: called before each chunk is read, from several threads.

    Attributes:
        is_bad: whether a chunk was wrong, or the slot is too short.
        is_pinned: whether a device may copy from the slot's mapping beside the host.
    """

    def __init__(self, slot: SlotMap, data_bytes: int, at_chunk: AtChunk) -> None:
        self._slot, self._at_chunk = slot, at_chunk
        self.is_pinned = slot.is_pinned
        self._digests = slot.digests
        self._size = slot.header.geometry.chunk_bytes
        self._end = slot.header.data_bytes
        # A slot that is too short is damaged, but its reader must still send something.
        self.is_bad = self._is_short = self._end < data_bytes

    def read(self, segments: Sequence[ReadSegment]) -> dict[int, int]:
        """Fills the segments, which are ascending and do not overlap; returns chunk → its digest.

        Whole chunks are read. A page with failed memory is an error, not a signal.
        """
        digests: dict[int, int] = {}
        if self._is_short:
            return digests
        scratch = np.empty(0, np.uint8)
        for begin, end, some in self._steps(segments):
            views = []
            at = begin
            for segment in [*some, ReadSegment(end, np.empty(0, np.uint8))]:
                if at < segment.at:
                    if scratch.nbytes < end - begin:
                        scratch = np.empty(end - begin, np.uint8)
                    views.append(scratch[at - begin : segment.at - begin])
                views.append(segment.memory)
                at = segment.end
            digests |= self._read_chunks(begin, [view for view in views if view.nbytes])
        return digests

    def mapped(self, begin: int, end: int) -> Bytes:
        """Returns verified bytes of the slot's mapping: uint8 [end - begin]."""
        if self._is_short:
            return np.zeros(end - begin, np.uint8)
        for index in range(begin // self._size, -(-end // self._size)):
            self._at_chunk(index)
            self._compare(index, chunk_digest(self._slot.chunk(index)))
        return self._slot.data[begin:end]

    def _steps(self, segments: Sequence[ReadSegment]) -> Iterator[tuple[int, int, list[ReadSegment]]]:
        """Yields begin and end of consecutive needed chunks, about READ_BYTES, and what lies there.

        Chunks in which no segment lies are left out.
        """
        step = align(READ_BYTES, self._size)
        begin = end = 0
        some: list[ReadSegment] = []
        for segment in segments:
            at = segment.at
            while at < segment.end:
                first = at // self._size * self._size
                if first >= end + self._size or first >= begin + step:
                    if some:
                        yield begin, min(end, self._end), some
                    begin, some = first, []
                stop = min(segment.end, begin + step)
                some.append(ReadSegment(at, segment.memory[at - segment.at : stop - segment.at]))
                at, end = stop, align(stop, self._size)
        if some:
            yield begin, min(end, self._end), some

    def _read_chunks(self, begin: int, views: Sequence[Bytes]) -> dict[int, int]:
        digests: dict[int, int] = {}
        first = begin // self._size
        nbytes = sum(view.nbytes for view in views)
        for index in range(first, first + -(-nbytes // self._size)):
            self._at_chunk(index)
        mapped = None
        if isinstance(self._slot, SharedSlotMap):
            mapped = self._slot.map_pages(begin, begin + nbytes)
        if mapped is None:
            try:
                self._slot.read(begin, *views)
            except FormatError:
                self.is_bad = True
                return digests
        index, rest, digest = first, self._size, xxhash.xxh3_64()
        for view in views:
            at = 0
            while at < view.nbytes:
                part = view[at : at + rest]
                if mapped is not None:
                    np.copyto(part, mapped[: part.nbytes])
                    mapped = mapped[part.nbytes :]
                digest.update(part.data)
                at, rest = at + part.nbytes, rest - part.nbytes
                if not rest:
                    digests[index] = digest.intdigest()
                    index, rest, digest = index + 1, self._size, xxhash.xxh3_64()
        if rest < self._size:
            digests[index] = digest.intdigest()
        for index, value in digests.items():
            self._compare(index, value)
        return digests

    def _compare(self, index: int, digest: int) -> None:
        if index >= len(self._digests) or digest != int(self._digests[index]):
            self.is_bad = True
