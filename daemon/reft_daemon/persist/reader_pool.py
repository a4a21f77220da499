"""Threads that read storage for the daemon, and that its end does not wait for.

The interpreter joins the threads of an executor at its end. Storage may hold a read for ever, and
then the daemon's process would stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread


class ReaderPool:
    """A few threads, which read files one read at a time.

    Args:
        count: how many threads there are at most. A read that storage holds keeps one of them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._started = 0
        self._reads: SimpleQueue[tuple[Future[bytes], tuple[int, int, int]] | None] = SimpleQueue()

    async def pread(self, descriptor: int, size: int, offset: int) -> bytes:
        """Reads bytes of a file.

        Raises:
            OSError: the file can't be read.
            RuntimeError: no thread can be started.
        """
        if self._started < self._count:
            Thread(target=self._run, name=f"reft-stored_{self._started}", daemon=True).start()
            self._started += 1
        future: Future[bytes] = Future()
        self._reads.put((future, (descriptor, size, offset)))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Gives up all reads that have not begun. The threads end as soon as storage lets them."""
        with contextlib.suppress(Empty):
            while read := self._reads.get_nowait():
                read[0].cancel()
        for _ in range(self._started):
            self._reads.put(None)

    def _run(self) -> None:
        while read := self._reads.get():
            future, arguments = read
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(os.pread(*arguments))
                except Exception as error:
                    future.set_exception(error)
