"""Files of shared memory, mapped where the kernel can map their huge pages whole.

    reserved   |  . . . |████████████████|. . .  |     addresses without memory, one huge page more than the file
                        ^ a multiple of a huge page: only there is one entry of a page table enough for all of it

A mapping where the kernel would put it begins at any page if the mount has no huge pages of its own. The file's huge
pages are then mapped as small ones, with a fault for each sixteen of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAP_FIXED = 0x10  # Linux, everywhere; Python has no name for it


def huge_bytes() -> int:
    """Bytes of a huge page; of a small one if this kernel has none."""
    try:
        return int(_SIZE.read_text())
    except OSError:
        return mmap.PAGESIZE


def map_file(descriptor: int, nbytes: int) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    """Maps a file's first bytes, shared and writable; they stay mapped as long as either of the two is held.

    Returns:
        What can be given advice, and uint8 [nbytes].

    Raises:
        OSError: the kernel refuses.
        ValueError: the file is shorter than that; touching what is missing would kill the process.
    """
    has = os.fstat(descriptor).st_size
    if not 0 < nbytes <= has:
        raise ValueError(f"{nbytes} bytes of a file of {has} can't be mapped.")
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
    pages.owner = reserved  # type: ignore[attr-defined]  # whose end unmaps all of it
    return reserved, np.ctypeslib.as_array(pages)


def advise(pages: npt.NDArray[np.uint8], advice: int) -> int:
    """Gives the kernel advice on some memory, which begins at a page; 0, or the errno with which it is refused.

    Not mmap.madvise: that holds the interpreter's lock for as long as the kernel takes.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return ctypes.get_errno() if madvise(pages.ctypes.data, pages.nbytes, advice) else 0
