"""Pages of memory, made or mapped ahead of their first use, by threads that keep nobody from Python.

memory   | block          | block          | …     each thread takes the next block and has the kernel make its pages
            ^                ^
         thread           thread                   blocks are long: for each one a thread waits for the interpreter's lock,
                                                   5 ms if another thread computes in Python meanwhile
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from reft.wire.mapped import advise
from reft.wire.slot_format import Bytes

THREADS = 2  # one core nearly saturates memory; the second hides what a hypervisor takes to back a page
BLOCK_BYTES = 64 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; Python has no name for it


def make(block: Bytes) -> None:
    """Makes the pages of fresh private memory, uint8 [n] that nobody has written yet: what is there becomes zeros.

    By writing, a byte in each small page: the kernel makes the page that is written to, huge or small, and holds
    nothing that a thread needs that maps memory meanwhile, which MADV_POPULATE_WRITE does for as long as it runs.
    """
    block[:: mmap.PAGESIZE] = 0


def map_shared(block: Bytes) -> None:
    """Maps pages that are there, uint8 [n] from a page's begin on. They may be written from then on, which costs no fault."""
    if advise(block, _POPULATE_READ):
        block[:: mmap.PAGESIZE].sum()  # a kernel before 5.14


class Pages:
    """Makes the pages of some memory, beginning at once.

    Args:
        memory: uint8 [n], beginning at a page; kept until the threads have ended.
        treat: `make` or `map_shared`.
    """

    def __init__(self, memory: Bytes, treat: Callable[[Bytes], None]) -> None:
        self._memory, self._treat = memory, treat
        self._blocks = iter(range(0, memory.nbytes, BLOCK_BYTES))
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

    def wait(self) -> None:
        """Returns when all is done."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (at := next(self._blocks, None)) is not None:
            self._treat(self._memory[at : at + BLOCK_BYTES])
