"""`reft-daemon --spare COUNTxSIZE`: files that a standby node has ready to become slots, with every page present and cleared.

    idle    COUNT files of SIZE, without a name, every page made    ──► the machine has backed and cleared each page
    slots   are made: each takes a file, which is cut or extended to the slot's size and gets its name ──► no page is new
    freed   filled again, as far as the arena leaves room below COUNT x SIZE

A file of a tmpfs can't take over pages of another, so what is ready must have about the size of a slot. Files without a
name vanish with the daemon. Where the tmpfs is too small and slots are memfds, this helps nothing, and can't be filled.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reft.core.budget import MemoryLimit, refusal, size
from reft.wire.shm import map_file
from reft.wire.slot_format import Bytes
from reft_daemon.arena.huge_pages import make_huge

log = logging.getLogger("reft.daemon")
CHUNK = 64 << 20  # is asked for, and made, at a time
PIECE = bytes(1 << 20)


@dataclass(frozen=True)
class SpareFiles:
    """What is wanted: so many files of so many bytes."""

    count: int = 0
    file_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.count * self.file_bytes


class SparePool:
    """See the module.

    Args:
        want: --spare.
        folder: of the arena.
        held: bytes of the arena, which count against what is wanted.
        limits: all bounds on further memory now.
    """

    def __init__(
        self, want: SpareFiles, folder: Path, held: Callable[[], int], limits: Callable[[], list[MemoryLimit]]
    ) -> None:
        self.want = want
        self._folder, self._held, self._limits = folder, held, limits
        self._ready: list[int] = []
        self._growing = 0  # bytes of the file that is being made
        self._lock = threading.Lock()
        self._said = ""

    @property
    def bytes(self) -> int:
        """What has been taken from the machine."""
        return len(self._ready) * self.want.file_bytes + self._growing

    def ready_bytes(self, slots: int) -> int:
        """How much of what is ready so many slots would take."""
        return min(slots, len(self._ready)) * self.want.file_bytes

    def refill(self) -> None:
        """Makes the files that are missing; blocks for as long as that takes. What there is no room for is logged once."""
        before = len(self._ready)
        reason = self._refusal(max(self._missing(), 0) * self.want.file_bytes)
        while not reason and self._missing() > 0:
            reason = self._make()
        if reason and reason != self._said:
            log.warning("spare memory stays at %s of %s: %s", size(self.bytes), size(self.want.bytes), reason)
        if len(self._ready) > before:
            log.info("%d files of %s are ready for slots", len(self._ready), size(self.want.file_bytes))
        self._said = reason

    def _missing(self) -> int:
        room = self.want.bytes - self._held() - self.bytes
        return room // self.want.file_bytes if self.want.file_bytes else 0

    def _refusal(self, need: int) -> str:
        return (refusal(need, self._limits(), "spare memory needs") if need else None) or ""

    def _make(self) -> str:
        """One file more; why not, if not."""
        wanted, descriptor = self.want.file_bytes, -1
        try:
            descriptor = os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.ftruncate(descriptor, wanted)
            pages = map_file(descriptor, wanted)[1]
            while self._growing < wanted and self.want.count:
                end = min(self._growing + CHUNK, wanted)
                if reason := self._refusal(end - self._growing):
                    return reason
                _fill(descriptor, pages[:end], self._growing)
                self._growing = end
            with self._lock:
                self._growing = 0
                if self.want.count:  # else it was closed meanwhile
                    self._ready.append(descriptor)
                    descriptor = -1
            return ""
        except OSError as error:
            return str(error)
        finally:
            self._growing = 0
            if descriptor >= 0:
                os.close(descriptor)

    def take(self, path: Path, count: int) -> int | None:
        """A ready file under this name, cut to `count` bytes if it is longer; None if there is none.

        Raises:
            OSError: it could not be named.
        """
        with self._lock:
            if not self._ready:
                return None
            descriptor = self._ready.pop()
        try:
            path.unlink(missing_ok=True)
            # A folder, of which an absolute path has no need, makes Python follow the link to the file that has no name.
            os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
            os.ftruncate(descriptor, min(count, self.want.file_bytes))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def close(self) -> None:
        """Gives all of it back."""
        with self._lock:
            self.want = SpareFiles()  # ends a refill in another thread
            while self._ready:
                os.close(self._ready.pop())


def _fill(descriptor: int, pages: Bytes, begin: int) -> None:
    """Makes the pages from `begin` on, and has the machine back and clear each."""
    if make_huge(descriptor, pages, begin) == pages.nbytes - begin:
        return
    while begin < pages.nbytes:
        begin += os.pwrite(descriptor, PIECE[: pages.nbytes - begin], begin)
