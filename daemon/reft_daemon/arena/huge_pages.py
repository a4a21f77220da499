"""Makes huge pages in files of shared memory. This needs no mount option, root, or kernel setting.

    file   |x    |x    |x    |x  |     one small page is written per huge page
           |█████|█████|█████|░░░|     MADV_COLLAPSE (Linux 6.1) makes each range one huge page
                                       and clears the rest of the range; where the kernel refuses,
                                       and at the file's end, the caller makes small pages

MADV_COLLAPSE ignores the mount's huge= option and shmem_enabled, except for "deny". The kernel
refuses a range without any present page. A range whose pages are all present is copied page by
page, which takes far longer than clearing.
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
# one core nearly saturates memory; the second hides the time that a hypervisor needs to back a page
_THREADS = 2
_TRANSIENT = (errno.EAGAIN, errno.EBUSY)  # the kernel was moving a page between its lists


def make_huge(descriptor: int, pages: npt.NDArray[np.uint8], begin: int) -> int:
    """Makes a file's pages from `begin` on, as huge pages where the kernel allows it.

    None of these pages may be present before. Blocks this thread, but not Python. Stops at the
    first lasting refusal: memory is fragmented, and each further try would search it again.

    Args:
        descriptor: the open file.
        pages: uint8 [n], the file's mapping from its first byte on, see `reft.wire.shm`.
        begin: offset of the first page to make, in bytes.

    Returns:
        The number of bytes that are now certainly in huge pages.
    """
    size = huge_bytes()
    first, end = -(-begin // size) * size, pages.nbytes // size * size
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
    # The second call succeeds if the kernel was still moving a page at the first call.
    return advise(block, _COLLAPSE) and advise(block, _COLLAPSE)
