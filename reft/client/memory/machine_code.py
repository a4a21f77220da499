"""The few loops that neither numpy nor torch has, as bytes that a processor runs."""

from __future__ import annotations

import errno
import mmap
import os
import platform

import numpy as np

from reft.wire.slot_format import Bytes


def mapped(code: bytes) -> Bytes:
    """Memory that can be run and not written; it is there for as long as what is returned.

    Args:
        code: for x86-64, in the calling convention of its System V ABI.

    Raises:
        OSError: this processor is another, or this system lets no process map code of its own.
    """
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOEXEC, f"code for x86-64 does not run on {platform.machine()}")
    descriptor = os.memfd_create("reft-code", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, code)
        memory = mmap.mmap(descriptor, len(code), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, np.uint8)


def address_of(array: np.ndarray) -> int:
    """Where the first element of an array lies."""
    address: int = array.__array_interface__["data"][0]
    return address
