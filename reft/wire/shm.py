"""Maps files of shared memory so that the kernel can map their huge pages whole.

    reserved   |  . . . |████████████████|. . .  |     addresses without memory,
                        ^                              one huge page more than the file
                        a multiple of a huge page: only from here does one
                        page-table entry cover a whole huge page

Without this, a mapping may begin at any page, if the mount has no huge pages of its own. Then the
file's huge pages are mapped as small ones, with one fault for each sixteen of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy import ctypeslib

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAP_FIXED = 0x10  # the same on all of Linux; Python has no name for it
POPULATE_READ = 22  # advice: map the pages now, Linux 5.14; Python has no name for it


def huge_bytes() -> int:
    """Returns the bytes of a huge page.

    These are the bytes of a small page if this kernel has no huge ones.
    """
    try:
        return int(_SIZE.read_text())
    except OSError:
        return mmap.PAGESIZE


def map_file(descriptor: int, nbytes: int) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    """Maps a file's first bytes, shared and writable.

    They stay mapped while either result is held.

    Returns:
        An mmap object that takes advice, and uint8 [nbytes].

    Raises:
        OSError: the kernel refuses.
        ValueError: the file is shorter than `nbytes`; touching missing bytes would kill the
            process.
    """
    file_bytes = os.fstat(descriptor).st_size
    if not 0 < nbytes <= file_bytes:
        raise ValueError(f"{nbytes} bytes of a file of {file_bytes} can't be mapped.")
    huge = huge_bytes()
    reserved = mmap.mmap(-1, nbytes + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    begin = np.frombuffer(reserved, np.uint8).ctypes.data
    address = -(-begin // huge) * huge
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), f"{nbytes} bytes can't be mapped: {os.strerror(ctypes.get_errno())}")
    pages = (ctypes.c_uint8 * nbytes).from_address(address)
    pages.owner = reserved  # type: ignore[attr-defined]  # the end of `reserved` unmaps all pages
    return reserved, ctypeslib.as_array(pages)


def advise(pages: npt.NDArray[np.uint8], advice: int) -> int:
    """Gives the kernel advice on memory that begins at a page.

    The result is 0, or the errno. mmap.madvise is not used: it holds the interpreter's lock during
    the kernel's work.
    """
    return ctypes.get_errno() if _madvise()(pages.ctypes.data, pages.nbytes, advice) else 0


@cache  # looking it up takes as long as mapping half a MiB
def _madvise() -> Any:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
