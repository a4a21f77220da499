"""Makes huge pages in files of shared memory. This needs no mount option, root, or kernel setting.

    file   |x    |x    |x    |x  |     one small page is written per huge page
           |█████|█████|█████|░░░|     MADV_COLLAPSE (Linux 6.1) makes each range one huge page
                                       and clears the rest of the range

Some bytes get no huge page: those of a refused range, those before the first border of a huge page,
and those at the file's end. The callers in arena.py and pool.py make small pages there afterwards.

MADV_COLLAPSE ignores the mount's huge= option and shmem_enabled, except for "deny". Why one small
page is written: the kernel refuses a range without any present page. If all pages of a range are
present, the kernel copies them one by one. That takes far longer than clearing.
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from reft.wire.shm import advise, huge_bytes

_COLLAPSE = 25  # MADV_COLLAPSE; Python has no name for it
_PAGES_PER_CALL = 32  # huge pages per call of madvise
# One thread nearly saturates the memory's bandwidth. In a virtual machine the hypervisor gives real
# memory to each new page, and a thread waits for that. Meanwhile the second thread clears pages.
_THREADS = 2
_TRANSIENT = (errno.EAGAIN, errno.EBUSY)  # the kernel was moving a page between its lists


def make_huge(descriptor: int, pages: npt.NDArray[np.uint8], begin: int) -> int:
    """Makes a file's pages from `begin` on, as huge pages where the kernel allows it.

    None of these pages may be present before. The calling thread waits. Other Python threads run,
    because the interpreter's lock is free during the kernel's work.

    A refusal is lasting if its errno is not in _TRANSIENT. Then no further block is tried: memory
    is fragmented, and the kernel would search all memory again for each try. After a transient
    refusal the next block is tried; the refused one keeps small pages.

    Args:
        descriptor: the open file.
        pages: uint8 [n], the file's mapping from its first byte on, see `reft.wire.shm`.
        begin: offset of the first page to make, in bytes.

    Returns:
        The bytes of all blocks that the kernel accepted. A refused block counts as 0, although some
        of its pages may be huge.
    """
    size = huge_bytes()
    first, end = -(-begin // size) * size, pages.nbytes // size * size
    # Both threads take their next block from this one iterator. An empty iterator stops both.
    blocks = iter(range(first, end, _PAGES_PER_CALL * size))

    def collapse_blocks(_: int) -> int:
        nonlocal blocks
        collapsed_bytes = 0
        while (at := next(blocks, None)) is not None:
            stop = min(at + _PAGES_PER_CALL * size, end)
            refused = _collapse(descriptor, pages, range(at, stop, size))
            if not refused:
                collapsed_bytes += stop - at
            elif refused not in _TRANSIENT:
                blocks = iter(())
        return collapsed_bytes

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="reft-huge") as pool:
        return sum(pool.map(collapse_blocks, range(_THREADS)))


def _collapse(descriptor: int, pages: npt.NDArray[np.uint8], offsets: range) -> int:
    """Makes one huge page at each offset. The result is 0, or the errno of the first refusal."""
    try:
        for offset in offsets:
            os.pwrite(descriptor, b"\0", offset)
    except OSError as error:  # out of memory: the caller sees it next, and reports it
        return error.errno or errno.EIO
    block = pages[offsets.start : offsets.stop]
    # advise returns 0 on success. So the second call is made only if the first one failed: the
    # kernel may still have been moving a page at the first call.
    return advise(block, _COLLAPSE) and advise(block, _COLLAPSE)
