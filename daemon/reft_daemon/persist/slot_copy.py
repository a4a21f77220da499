"""Copies a sealed slot to storage as it is, without its parity.

    slot      | headers | table | digests | capsule | data shards | parity | unreplicated |
    file      |   the same bytes at the same offsets              | a hole | the same     |

    block A ─ read ─ compare with chunk digests ─ write ─►│
    block B           read ─ compare with chunk digests   │─ write ─►       two blocks, one writer

A chunk is compared in the block from which it is written. So the file has either the sealed bytes,
or the copy fails: a slot that its trainer has taken again, or damaged memory, never becomes a
checkpoint. Readers of slots read the file without knowing that it lies on storage.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np

from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.errors import FormatError
from reft.wire.slot_format import Header, chunk_digest, read_file, read_head
from reft.wire.stored_format import StoredFile, head_digest
from reft_daemon.persist.storage_root import AnyFile

BLOCK_BYTES: Final = 8 << 20


class SlotRange(NamedTuple):
    """Bytes of a slot's data that belong to a checkpoint.

    Attributes:
        begin: offset in the data.
        end: offset behind them.
    """

    begin: int
    end: int


class SlotSource(NamedTuple):
    """A slot that is copied to storage.

    Attributes:
        rank: the rank that must have written the slot.
        descriptor: of the slot's file.
        ranges: which bytes of the data are stored, ascending.
    """

    rank: int
    descriptor: int
    ranges: Sequence[SlotRange]


def copy_slot(
    slot: SlotSource, version: Version, file: AnyFile, writer: ThreadPoolExecutor
) -> Generator[int, None, StoredFile]:
    """Copies one slot; yields how many bytes each block has, and returns what was stored.

    Args:
        slot: the slot.
        version: the version that the slot must hold.
        file: the new file.
        writer: one thread.

    Raises:
        FormatError: the slot holds another version, or damaged bytes.
        OSError: the slot can't be read, or the file can't be written.
    """
    rank, descriptor = slot.rank, slot.descriptor
    head, header = read_head(descriptor)
    if header.state is not SlotState.SEALED or header.version != version or header.rank != rank:
        raise FormatError(f"the slot holds {header.version} of rank {header.rank}, not {version} of rank {rank}.")
    geometry = header.geometry
    digests = np.frombuffer(head, "<u8", geometry.chunks, geometry.digests_offset)
    file.write(memoryview(head), 0)
    yield len(head)
    blocks = [np.empty(max(BLOCK_BYTES // geometry.chunk_bytes, 1) * geometry.chunk_bytes, np.uint8) for _ in range(2)]
    pending: Future[None] | None = None
    try:
        for number, (first, end) in enumerate(_blocks(header, slot.ranges, blocks[0].nbytes // geometry.chunk_bytes)):
            begin = first * geometry.chunk_bytes
            block = blocks[number % 2][: min(end * geometry.chunk_bytes, header.data_bytes) - begin]
            read_file(descriptor, geometry.data_offset + begin, block)
            for index in range(first, end):
                at = (index - first) * geometry.chunk_bytes
                if chunk_digest(block[at : at + geometry.chunk_bytes]) != int(digests[index]):
                    raise FormatError(f"chunk {index} of rank {rank}'s slot has changed.")
            if pending is not None:
                pending.result()
            pending = writer.submit(file.write, block.data, geometry.data_offset + begin)
            yield block.nbytes
    finally:
        if pending is not None:
            pending.result()
    file.complete(geometry.file_bytes)
    return StoredFile(rank, geometry.file_bytes, head_digest(head), file.runs)


def verify_file(file: int, stored: StoredFile, ranges: Sequence[SlotRange]) -> Iterator[int]:
    """Compares a stored file with its digests; yields how many bytes were compared.

    Raises:
        FormatError: a byte differs.
        OSError: the file can't be read.
    """
    nbytes = os.fstat(file).st_size
    if nbytes != stored.nbytes:
        raise FormatError(f"rank {stored.rank}'s file has {nbytes} bytes, not {stored.nbytes}.")
    head, header = read_head(file)
    if head_digest(head) != stored.head_digest:
        raise FormatError(f"the head of rank {stored.rank}'s file does not fit its digest.")
    yield len(head)
    geometry = header.geometry
    digests = np.frombuffer(head, "<u8", geometry.chunks, geometry.digests_offset)
    buffer = np.empty(geometry.chunk_bytes, np.uint8)
    for first, end in _blocks(header, ranges, 1):
        for index in range(first, end):
            chunk = buffer[: min(geometry.chunk_bytes, header.data_bytes - index * geometry.chunk_bytes)]
            read_file(file, geometry.data_offset + index * geometry.chunk_bytes, chunk)
            if chunk_digest(chunk) != int(digests[index]):
                raise FormatError(f"chunk {index} of rank {stored.rank}'s file has a wrong digest.")
            yield chunk.nbytes


def stored_bytes(header: Header, ranges: Sequence[SlotRange]) -> int:
    """Returns how many bytes of a slot go to storage."""
    size = header.geometry.chunk_bytes
    chunks = sum(min(end * size, header.data_bytes) - first * size for first, end in _blocks(header, ranges, 1 << 30))
    return header.geometry.data_offset + chunks


def _blocks(header: Header, ranges: Sequence[SlotRange], chunks_max: int) -> Iterator[tuple[int, int]]:
    """Yields runs of chunks that have a byte of the ranges, each chunk once, ascending."""
    size, done = header.geometry.chunk_bytes, 0
    for begin, stop in ranges:
        first, end = max(begin // size, done), -(-min(stop, header.data_bytes) // size)
        while first < end:
            yield first, min(first + chunks_max, end)
            first = min(first + chunks_max, end)
        done = max(done, end)
