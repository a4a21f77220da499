"""Makes or maps pages in threads, before their first use.

    memory   | block | block | block | …     each thread takes the next block, and makes its pages
                ^       ^
             thread  thread

Blocks are short for two reasons. The kernel locks the address space while it makes pages, so other
threads that map memory wait. And `settle` waits until each thread has finished its block.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from reft.wire.shm import POPULATE_READ, advise
from reft.wire.slot_format import Bytes

# One core nearly saturates memory; the second hides the time that a hypervisor takes to back a
# page.
THREADS = 2
BLOCK_BYTES = 16 << 20
_POPULATE_WRITE = 23  # for madvise, Linux 5.14; Python has no name for it


class PageMaker:
    """Threads that make the pages of fresh memory, from construction on.

    Args:
        memory: uint8 [n], private, begins at a page border. Nothing else may write into it
            meanwhile: before Linux 5.14 the kernel makes no pages on request, and these threads
            write zeros.
    """

    def __init__(self, memory: Bytes) -> None:
        self._blocks_left = deque(_blocks(memory))
        self._threads = [
            threading.Thread(target=self._run, name=f"reft-pages-{i}", daemon=True)
            for i in range(min(THREADS, len(self._blocks_left)))
        ]
        for thread in self._threads:
            thread.start()

    def settle(self) -> None:
        """Begins no further block; returns once no page is being made."""
        self._blocks_left.clear()
        self.wait()

    def wait(self) -> None:
        """Waits until all blocks are done, or the rest was dropped by `settle`."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            try:
                block = self._blocks_left.popleft()
            except IndexError:
                return
            _make(block)


def map_shared(memory: Bytes) -> None:
    """Maps existing pages, so that reads and writes cost no page fault later.

    Args:
        memory: uint8 [n], begins at a page border.
    """
    blocks = [*_blocks(memory)]
    if len(blocks) == 1:
        _map(blocks[0])  # a thread would take longer to start
        return
    with ThreadPoolExecutor(THREADS, thread_name_prefix="reft-pages") as pool:
        list(pool.map(_map, blocks))


def _blocks(memory: Bytes) -> Iterator[Bytes]:
    return (memory[at : at + BLOCK_BYTES] for at in range(0, memory.nbytes, BLOCK_BYTES))


def _make(block: Bytes) -> None:
    if advise(block, _POPULATE_WRITE):
        block[:: mmap.PAGESIZE] = 0


def _map(block: Bytes) -> None:
    if advise(block, POPULATE_READ):
        block[:: mmap.PAGESIZE].sum()
