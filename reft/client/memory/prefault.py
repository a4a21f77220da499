"""Pages of memory, made or mapped ahead of their first use, by threads that keep nobody from Python.

memory   | place | place | place | place | …      each thread takes the next place of 2 MiB and writes a byte in each of its small
            ^       ^                             pages; the kernel makes the page that is written to, huge or small
         thread  thread

Attach computes in Python meanwhile. A thread that came back to Python for each place would wait for the interpreter's lock there,
5 ms each time, and one that came back for the last only could not be stopped, though a hypervisor may take a second for each
gigabyte. So the loop over the places is one of machine code, which a number in memory feeds, and stops. Elsewhere than on x86-64,
and where the system lets no process map code of its own, numpy writes, in long blocks.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from reft.client.memory.machine_code import address_of, mapped
from reft.wire.shm import advise
from reft.wire.slot_format import Bytes

log = logging.getLogger("reft")

THREADS = 2  # one core nearly saturates memory; the second hides what a hypervisor takes to back a page
BLOCK_BYTES = 64 << 20  # for which a thread comes back to Python
# void touch(void *memory, size_t nbytes, size_t *taken); System V: rdi, rsi, rdx. `taken`: bytes, from the first on.
LOOP = bytes.fromhex(
    "f30f1efa"  #             endbr64
    "b800002000"  #     next: mov  eax, 0x200000
    "f0480fc102"  #           lock xadd [rdx], rax      a place is one thread's
    "488d8800002000"  #       lea  rcx, [rax+0x200000]
    "4839f1"  #               cmp  rcx, rsi
    "480f47ce"  #             cmova rcx, rsi
    "4839c8"  #         page: cmp  rax, rcx
    "730c"  #                 jae  last
    "c6040700"  #             mov  byte ptr [rdi+rax], 0
    "480500100000"  #         add  rax, 0x1000
    "ebef"  #                 jmp  page
    "4839f1"  #         last: cmp  rcx, rsi
    "72d2"  #                 jb   next
    "c3"  #                   ret
)
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; Python has no name for it

Taken = npt.NDArray[np.uint64]
Touch = Callable[[Bytes, Taken], None]


def toucher() -> Touch:
    """A function that several threads call with the same memory, uint8 [n], and the same number, uint64 [1].

    It makes pages until there are none left, or that number is n or more.

    Not MADV_POPULATE_WRITE: for as long as that runs it holds what a thread needs that maps memory.
    """
    try:
        loop = mapped(LOOP)
    except OSError as error:
        log.info("fresh memory is made by numpy: %s.", error)
        begins = itertools.count(0, BLOCK_BYTES)

        def touch(memory: Bytes, taken: Taken) -> None:
            while (at := next(begins)) < memory.nbytes > taken[0]:
                memory[at : at + BLOCK_BYTES : mmap.PAGESIZE] = 0

        return touch
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)(address_of(loop))

    def run(memory: Bytes, taken: Taken, _loop: Bytes = loop) -> None:  # the code lives as long as what calls it
        call(address_of(memory), memory.nbytes, address_of(taken))

    return run


class Pages:
    """Makes the pages of fresh memory, beginning at once; what is there becomes zeros.

    Args:
        memory: uint8 [n], private, from a huge page's beginning on, and written by nobody; kept until the threads have ended.
    """

    def __init__(self, memory: Bytes) -> None:
        self._end, self._taken = memory.nbytes, np.zeros(1, np.uint64)
        touch = toucher()
        self._threads = [
            threading.Thread(target=touch, args=(memory, self._taken), name=f"reft-pages-{i}", daemon=True)
            for i in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def settle(self) -> None:
        """Stops, and returns when no page is being made: who uses such a one meanwhile makes it too."""
        self._taken[0] = self._end
        self.wait()

    def wait(self) -> None:
        """Returns when all is done."""
        for thread in self._threads:
            thread.join()


def map_shared(memory: Bytes) -> None:
    """Maps pages that are there, uint8 [n] from a page's beginning on. They may be written from then on, which costs no fault."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="reft-pages") as pool:
        list(pool.map(lambda at: _map(memory[at : at + BLOCK_BYTES]), range(0, memory.nbytes, BLOCK_BYTES)))


def _map(block: Bytes) -> None:
    if advise(block, _POPULATE_READ):
        block[:: mmap.PAGESIZE].sum()  # a kernel before 5.14
