"""Spare files of a standby node (`reft-daemon --spare COUNTxSIZE`), which can become slots fast.

    start     COUNT unnamed files of SIZE, every page made  ──► each page is backed and cleared
    new slot  a spare file gets the slot's size and name  ──► no page is new
    freed     spare files are made again, while arena and spare files stay below COUNT x SIZE

A file of a tmpfs can't take over pages of another file. So a spare file must have about the size of
a slot. Files without a name vanish with the daemon. Where the tmpfs is too small, slots are memfds:
spare files can't be made there, and would not help.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reft.core.budget import MemoryLimit, format_bytes, refusal
from reft.wire.shm import map_file
from reft.wire.slot_format import Bytes
from reft_daemon.arena.huge_pages import make_huge

log = logging.getLogger("reft.daemon")
CHUNK = 64 << 20  # bytes that are checked against the limits, and made, at a time
PIECE = bytes(1 << 20)


@dataclass(frozen=True)
class SpareFiles:
    """The wanted spare files: their number and size."""

    count: int = 0
    file_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.count * self.file_bytes


class SparePool:
    """The spare files of one arena, see the module.

    Args:
        want: the wanted files, from --spare.
        folder: the arena's folder.
        held: returns the bytes that the arena holds; they count against `want`.
        limits: returns all limits on further memory now.
    """

    def __init__(
        self, want: SpareFiles, folder: Path, held: Callable[[], int], limits: Callable[[], list[MemoryLimit]]
    ) -> None:
        self.want = want
        self._folder, self._held_bytes, self._limits = folder, held, limits
        self._ready: list[int] = []
        self._growing_bytes = 0  # finished bytes of the file that is being made
        self._lock = threading.Lock()
        self._logged_reason = ""

    @property
    def bytes(self) -> int:
        """Bytes that the spare files have taken from the machine."""
        return len(self._ready) * self.want.file_bytes + self._growing_bytes

    def ready_bytes(self, slots: int) -> int:
        """Returns how many bytes of ready files `slots` new slots would use."""
        return min(slots, len(self._ready)) * self.want.file_bytes

    def refill(self) -> None:
        """Makes the missing files; blocks meanwhile. A shortage of memory is logged once."""
        ready_before = len(self._ready)
        reason = self._refusal(max(self._missing_files(), 0) * self.want.file_bytes)
        while not reason and self._missing_files() > 0:
            reason = self._make_file()
        if reason and reason != self._logged_reason:
            log.warning(
                "spare files take %s of the %s wanted: %s",
                format_bytes(self.bytes),
                format_bytes(self.want.bytes),
                reason,
            )
        if len(self._ready) > ready_before:
            log.info("%d spare files of %s are ready for slots", len(self._ready), format_bytes(self.want.file_bytes))
        self._logged_reason = reason

    def _missing_files(self) -> int:
        missing_bytes = self.want.bytes - self._held_bytes() - self.bytes
        return missing_bytes // self.want.file_bytes if self.want.file_bytes else 0

    def _refusal(self, need: int) -> str:
        return (refusal(need, self._limits(), "spare memory needs") if need else None) or ""

    def _make_file(self) -> str:
        """Makes one more file; returns the reason if that fails, else an empty text."""
        file_bytes, descriptor = self.want.file_bytes, -1
        try:
            descriptor = os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.ftruncate(descriptor, file_bytes)
            pages = map_file(descriptor, file_bytes)[1]
            while self._growing_bytes < file_bytes and self.want.count:
                end = min(self._growing_bytes + CHUNK, file_bytes)
                if reason := self._refusal(end - self._growing_bytes):
                    return reason
                _fill(descriptor, pages[:end], self._growing_bytes)
                self._growing_bytes = end
            with self._lock:
                self._growing_bytes = 0
                if self.want.count:  # 0: the pool was closed meanwhile
                    self._ready.append(descriptor)
                    descriptor = -1
            return ""
        except OSError as error:
            return str(error)
        finally:
            self._growing_bytes = 0
            if descriptor >= 0:
                os.close(descriptor)

    def take(self, path: Path, count: int) -> int | None:
        """Names a ready file `path` and cuts it to `count` bytes.

        The result is None if no file is ready. A file that is shorter than `count` keeps its size.

        Raises:
            OSError: the file could not be named.
        """
        with self._lock:
            if not self._ready:
                return None
            descriptor = self._ready.pop()
        try:
            path.unlink(missing_ok=True)
            # `src_dir_fd` has no effect on an absolute path. But Python follows the link to the
            # unnamed file only if a folder is given.
            os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
            os.ftruncate(descriptor, min(count, self.want.file_bytes))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def close(self) -> None:
        """Gives all spare files back."""
        with self._lock:
            self.want = SpareFiles()  # stops a refill in another thread
            while self._ready:
                os.close(self._ready.pop())


def _fill(descriptor: int, pages: Bytes, begin: int) -> None:
    """Makes the pages from `begin` on: the machine backs and clears each of them."""
    if make_huge(descriptor, pages, begin) == pages.nbytes - begin:
        return
    while begin < pages.nbytes:
        begin += os.pwrite(descriptor, PIECE[: pages.nbytes - begin], begin)
