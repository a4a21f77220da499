"""Huge pages for files of shared memory, which need no mount option, no administrator and no setting.

    file   |x    |x    |x    |x  |     one small page is written into each place of a huge page
           |█████|█████|█████|░░░|     the kernel collapses each place into one (MADV_COLLAPSE, Linux 6.1), clearing the rest;
                                       what it refuses, and the end, are left to the caller: small pages

MADV_COLLAPSE heeds neither the mount's huge= nor shmem_enabled, but for "deny". A place of which no page is present is refused,
one of which all are is copied page by page, which takes far longer than clearing it.
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from reft.wire.shm import advise, huge_bytes

_COLLAPSE = 25  # MADV_COLLAPSE; Python has no name for it
_PLACES = 32  # are asked for at a time
_THREADS = 2  # one core nearly saturates memory; the second hides what a hypervisor takes to back a page
_TRANSIENT = (errno.EAGAIN, errno.EBUSY)  # a page was on its way to or from a list of the kernel


def make_huge(descriptor: int, pages: npt.NDArray[np.uint8], begin: int) -> int:
    """Makes the pages of a file from `begin` on, none of which is present, as huge ones as far as the kernel does so.

    Blocks, but not Python. The first lasting refusal ends it: memory is in pieces, and each further try would search it again.

    Args:
        pages: uint8 [n], the file's mapping from its first byte on, see `reft.wire.shm`.

    Returns:
        How many bytes are surely in huge pages now.
    """
    size = huge_bytes()
    first, end = -(-begin // size) * size, pages.nbytes // size * size
    parts = iter(range(first, end, _PLACES * size))

    def run(_: int) -> int:
        nonlocal parts
        made = 0
        while (at := next(parts, None)) is not None:
            stop = min(at + _PLACES * size, end)
            refused = _collapse(descriptor, pages, range(at, stop, size))
            if not refused:
                made += stop - at
            elif refused not in _TRANSIENT:
                parts = iter(())
        return made

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="reft-huge") as pool:
        return sum(pool.map(run, range(_THREADS)))


def _collapse(descriptor: int, pages: npt.NDArray[np.uint8], places: range) -> int:
    """Makes each place one huge page; 0, or the errno of what refused one of them."""
    try:
        for place in places:
            os.pwrite(descriptor, b"\0", place)
    except OSError as error:  # no room: the caller finds out, and says so
        return error.errno or errno.EIO
    some = pages[places.start : places.stop]
    # Twice: what was on its way is where it belongs by then.
    return advise(some, _COLLAPSE) and advise(some, _COLLAPSE)
