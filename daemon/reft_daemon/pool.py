"""`reft-daemon --spare SIZE`: memory that a standby node has ready for the slots to come.

    idle    filled: a memfd, every page of it written ──────────────────────────► the machine has backed each page
    slots   are made: 64 MiB off the pool's end, 64 MiB on to the slot, and so on ─► the slot gets the pages that just came free
    freed   filled again, up to SIZE less what the arena holds

A file can't take over pages of another, so they pass through the kernel's free lists, at most CHUNK at a time. What that
saves is what makes new memory slow: page cache that must be thrown out first, and pages that a hypervisor must provide. A
memfd has no name: it vanishes with the daemon, and takes no room of the tmpfs in which slots lie.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from reft.core.budget import Limit, refusal, size

log = logging.getLogger("reft.daemon")
CHUNK = 64 << 20
PIECE = bytes(1 << 20)


class Pool:
    """See the module.

    Args:
        want_bytes: SIZE; 0 means that there is none.
        held: bytes of the arena, which count against it.
        limits: all bounds on further memory now.
    """

    def __init__(self, want_bytes: int, held: Callable[[], int], limits: Callable[[], list[Limit]]) -> None:
        self.want_bytes, self.bytes = want_bytes, 0
        self._held, self._limits = held, limits
        self._descriptor = os.memfd_create("reft-spare", os.MFD_CLOEXEC) if want_bytes else -1
        self._lock = threading.Lock()
        self._said = ""

    def refill(self) -> None:
        """Fills it up to what is wanted; blocks for as long as that takes. What there is no room for is logged once."""
        before = self.bytes
        reason = self._refusal(self._room())
        while not reason and self._room() > 0:
            with self._lock:
                need = min(self._room(), CHUNK)
                reason = self._refusal(need) or self._grow(need)
        if reason and reason != self._said:
            log.warning("spare memory stays at %s of %s: %s", size(self.bytes), size(self.want_bytes), reason)
        if self.bytes > before:
            log.info("%s of spare memory are ready for slots", size(self.bytes))
        self._said = reason

    def _room(self) -> int:
        return self.want_bytes - self._held() - self.bytes

    def _refusal(self, need: int) -> str:
        return (refusal(need, self._limits(), "spare memory needs") if need > 0 else None) or ""

    def _grow(self, need: int) -> str:
        try:
            for at in range(self.bytes, self.bytes + need, len(PIECE)):
                os.pwrite(self._descriptor, PIECE[: self.bytes + need - at], at)
        except OSError as error:
            os.ftruncate(self._descriptor, self.bytes)
            return str(error)
        self.bytes += max(need, 0)
        return ""

    def allocate(self, descriptor: int, count: int) -> None:
        """Gives a file in memory its first `count` bytes: from the pool as far as it goes, else anew.

        Raises:
            OSError: there is no room.
        """
        at = 0
        while at < count:
            part = self._give(min(CHUNK, count - at)) or count - at
            os.posix_fallocate(descriptor, at, part)
            at += part

    def _give(self, most: int) -> int:
        with self._lock:
            count = min(self.bytes, most)
            if count:
                self.bytes -= count
                os.ftruncate(self._descriptor, self.bytes)
            return count

    def close(self) -> None:
        """Gives all of it back."""
        self.want_bytes = 0  # ends a refill in another thread
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor, self.bytes = -1, 0
