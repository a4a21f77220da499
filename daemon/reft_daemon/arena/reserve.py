"""Reserves file system space for records: other processes fill the same file system.

Docker's /dev/shm has 64 MiB, and files of crashed processes stay there.

    start, every second ─► an unnamed file takes a size of SIZES, at most half of the free space
    a record does not fit ─► the file gives all of its space back ─► the record is written

A restarted job is found by its record. So a full /dev/shm must not keep records from being written.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from reft_daemon.arena import limits

SIZES = (8 << 20, 2 << 20, 512 << 10, 128 << 10)  # bytes; a record of 16,384 ranks has 1 MB, most have some KB


class SpaceReserve:
    """The reserved space in one file system.

    Args:
        folder: a folder of that file system. Where unnamed files don't exist, nothing is reserved.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor, self._bytes = -1, 0
        with contextlib.suppress(OSError):
            self._descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self.refill()

    def refill(self) -> None:
        """Reserves the missing space if twice that space is free.

        A failing allocation would take all free space for a moment.
        """
        for size in SIZES:
            if self._descriptor < 0 or size <= self._bytes:
                return
            if limits.file_system_free(self._descriptor) >= 2 * size:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(self._descriptor, 0, size)
                    self._bytes = size

    def release(self) -> bool:
        """Gives the whole reserve back; returns False if the reserve was empty."""
        reserved_bytes, self._bytes = self._bytes, 0
        if reserved_bytes:
            os.ftruncate(self._descriptor, 0)
        return bool(reserved_bytes)

    def close(self) -> None:
        """Closes the file, which frees the reserve."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
