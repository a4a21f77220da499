"""Room for records in a file system that others fill: Docker's /dev/shm has 64 MiB, and what crashed stays there.

    start, every second ─► a file without a name takes SIZES[0], or what is at most half of what there is
    a record does not fit ─► the file gives all of it ─► the record is written

Records are what a restarted job is found by: a full /dev/shm must not keep it from restarting.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from reft_daemon.arena import limits

SIZES = (8 << 20, 2 << 20, 512 << 10, 128 << 10)  # bytes; a record of 16,384 ranks has 1 MB, most have some KB


class SpaceReserve:
    """Of one folder.

    Args:
        folder: in whose file system room is kept; where it has no files without names, none is.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor, self._bytes = -1, 0
        with contextlib.suppress(OSError):
            self._descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self.refill()

    def refill(self) -> None:
        """Takes what is missing, if there is twice as much: a try that fails would have had all of it for a moment."""
        for size in SIZES:
            if self._descriptor < 0 or size <= self._bytes:
                return
            if limits.file_system_free(self._descriptor) >= 2 * size:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(self._descriptor, 0, size)
                    self._bytes = size

    def give(self) -> bool:
        """Gives all of it back; False if there is none."""
        had, self._bytes = self._bytes, 0
        if had:
            os.ftruncate(self._descriptor, 0)
        return bool(had)

    def close(self) -> None:
        """Ends it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
