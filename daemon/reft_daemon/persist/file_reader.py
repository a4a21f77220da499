"""Reads ranges of one checkpoint's files, and serves them to `reft-cli export`.

    stdin    requests ─► a thread each, FETCHES at most ─► stdout   answers, in the same order

Invariants
  1. Bytes before the data are those of a head that fits the digest in its index. With a key, the
     index has a MAC.
  2. A chunk of the data that differs is found by who asked, with the digests in the head.
  3. At most 2 FETCHES ranges and one head are in memory.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, BinaryIO, Final

import numpy as np

from reft.core.persist import stored_names
from reft.errors import FormatError, ReftError
from reft.wire.range_pipe import FileRequest, read_request, write_answer, write_error
from reft.wire.slot_format import PAGE, Bytes, best_header
from reft.wire.stored_format import StoredFile, head_digest
from reft_daemon.persist.storage_root import AnyFolder

FETCHES: Final = 4
RANGE_MAX: Final = 256 << 20
_GONE: Final = (errno.ENOENT, errno.ESTALE)  # retention has removed the checkpoint meanwhile


class CheckpointFileReader:
    """Reads ranges of the files of one checkpoint, from several threads.

    Args:
        files: rank → folder and file, see `CheckpointStore.indexes`.
    """

    def __init__(self, files: Mapping[int, tuple[AnyFolder, StoredFile]]) -> None:
        self._files = files
        self._head_bytes: dict[int, int] = {}
        self._head: tuple[int, Bytes] = -1, np.empty(0, np.uint8)  # of the rank that was asked for last
        self._lock = threading.Lock()

    def read(self, request: FileRequest) -> Bytes:
        """Returns bytes of a rank's file.

        Raises:
            FormatError: the checkpoint has no such bytes, or its head is damaged.
            OSError: storage can't be read.
        """
        rank, offset, nbytes = request
        if rank not in self._files:
            raise FormatError(f"the checkpoint has no file of rank {rank}.")
        if nbytes > RANGE_MAX or offset + nbytes > self._files[rank][1].nbytes:
            raise FormatError(f"rank {rank}'s file has no {nbytes} bytes at {offset}.")
        with self._lock:
            if offset < self._head_bytes.get(rank, offset + 1):
                head = self._head_of(rank)
                if offset + nbytes <= head.nbytes:
                    return head[offset : offset + nbytes]
                if offset < head.nbytes:
                    raise FormatError(f"{nbytes} bytes at {offset} are not all in the head of rank {rank}'s file.")
        return self._fetch(rank, offset, nbytes)

    def _head_of(self, rank: int) -> Bytes:
        """Returns all bytes before the data, compared with their digest."""
        if self._head[0] != rank:
            nbytes = best_header(self._fetch(rank, 0, 2 * PAGE)).geometry.data_offset
            head = self._fetch(rank, 0, nbytes)
            if head_digest(head.data) != self._files[rank][1].head_digest:
                raise FormatError(f"the head of rank {rank}'s file does not fit its digest.")
            self._head_bytes[rank], self._head = nbytes, (rank, head)
        return self._head[1]

    def _fetch(self, rank: int, offset: int, nbytes: int) -> Bytes:
        folder, file = self._files[rank]
        if offset + nbytes > file.nbytes:
            raise FormatError(f"rank {rank}'s file ends after {file.nbytes} bytes.")
        data = np.empty(nbytes, np.uint8)
        folder.read_range(stored_names.rank_file(rank), file.nbytes, file.runs, offset, data)
        return data


def serve(reader: CheckpointFileReader, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers requests until there are no more.

    Raises:
        OSError: nobody reads the answers.
    """
    begun: SimpleQueue[Future[Bytes] | None] = SimpleQueue()
    room = threading.Semaphore(2 * FETCHES)

    def take() -> None:
        with ThreadPoolExecutor(FETCHES, "reft-fetch") as pool:
            while request := read_request(requests):
                room.acquire()
                begun.put(pool.submit(reader.read, request))
        begun.put(None)

    threading.Thread(target=take, name="reft-requests", daemon=True).start()
    while future := begun.get():
        try:
            data = future.result()
        except (ReftError, OSError) as error:
            write_error(answers, error_row(error))
        else:
            write_answer(answers, data.data)
        room.release()


def error_row(error: ReftError | OSError) -> dict[str, Any]:
    """Returns an error as the fields of a JSON object."""
    if isinstance(error, ReftError):
        return {"error": error.message, "hint": error.hint, "is_damage": isinstance(error, FormatError)}
    return {"error": str(error), "hint": "", "is_damage": error.errno in _GONE}
