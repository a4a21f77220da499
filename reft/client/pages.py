"""Pages of memory, made or mapped ahead of their first use, by threads that keep nobody from Python.

memory   | block | block | block | …     each thread takes the next block and has the kernel make its pages
            ^       ^
         thread  thread                  blocks are short: whoever maps memory meanwhile waits for one of them
"""

from __future__ import annotations

import ctypes
import threading

from reft.wire.slot_format import Bytes

THREADS = 2  # one core nearly saturates memory; the second hides what a hypervisor takes to back a page
BLOCK_BYTES = 2 << 20  # one huge page, so that no two threads meet in one
POPULATE_READ, POPULATE_WRITE = 22, 23  # MADV_…, Linux 5.14; Python has no names for them


class Pages:
    """Makes the pages of some memory, beginning at once.

    Args:
        memory: uint8 [n], beginning at a page; kept until the threads have ended.
        advice: POPULATE_WRITE, or POPULATE_READ for memory that is only read.
    """

    def __init__(self, memory: Bytes, advice: int = POPULATE_WRITE) -> None:
        self._memory, self._advice = memory, advice
        self._blocks = iter(range(0, memory.nbytes, BLOCK_BYTES))
        self._refused = False
        count = min(THREADS, -(-memory.nbytes // BLOCK_BYTES))
        self._threads = [threading.Thread(target=self._run, name=f"reft-pages-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Nobody wants the rest any more; the threads end within a block."""
        self._blocks = iter(())

    def settle(self) -> None:
        """Stops, and returns when no page is being made: who uses such a one meanwhile makes it too."""
        self.stop()
        self.wait()

    def wait(self) -> bool:
        """Returns when all is done; False if the kernel makes no pages ahead: they come when they are first written."""
        for thread in self._threads:
            thread.join()
        return not self._refused

    def _run(self) -> None:
        # Not mmap.madvise: that holds the interpreter's lock for as long as the kernel takes.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        begin, end = self._memory.ctypes.data, self._memory.nbytes
        while not self._refused and (at := next(self._blocks, end)) < end:
            if madvise(begin + at, min(BLOCK_BYTES, end - at), self._advice):
                self._refused = True
