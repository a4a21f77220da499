"""Copies that leave the caches to training.

An ordinary store reads the line that it will overwrite, and leaves it in the cache: of three bytes that cross the memory bus, one
is read for nothing. Non-temporal stores write lines whole, past the caches. glibc's memcpy uses them for copies beyond three
quarters of the last cache only, numpy never; a chunk, which is digested while it is in the core's cache, is far smaller. So this
file brings the one loop that is needed, as bytes that every x86-64 runs; elsewhere, and where the system lets no process map code
of its own, numpy copies.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import numpy as np

from reft.client.memory.machine_code import address_of, mapped
from reft.wire.slot_format import Bytes

log = logging.getLogger("reft")

LINE = 64
# void copy(void *target, const void *source, size_t nbytes); System V: rdi, rsi, rdx. Lines of 64 bytes, target aligned to 16.
LOOP = bytes.fromhex(
    "f30f1efa"  #       endbr64
    "f30f6f06"  # next: movdqu  xmm0, [rsi]
    "f30f6f4e10"  #     movdqu  xmm1, [rsi+16]
    "f30f6f5620"  #     movdqu  xmm2, [rsi+32]
    "f30f6f5e30"  #     movdqu  xmm3, [rsi+48]
    "660fe707"  #       movntdq [rdi], xmm0
    "660fe74f10"  #     movntdq [rdi+16], xmm1
    "660fe75720"  #     movntdq [rdi+32], xmm2
    "660fe75f30"  #     movntdq [rdi+48], xmm3
    "4883c640"  #       add     rsi, 64
    "4883c740"  #       add     rdi, 64
    "4883ea40"  #       sub     rdx, 64
    "75cc"  #           jne     next
    "0faef8"  #         sfence          what was written is seen before whatever is written after it
    "c3"  #             ret
)

Copy = Callable[[Bytes, Bytes], None]


def streaming() -> Copy:
    """A function that copies uint8 [n] into uint8 [n], past the caches where it can; it holds no lock of the interpreter."""
    try:
        loop = mapped(LOOP)
    except OSError as error:
        log.info("snapshots are copied through the caches: %s.", error)
        return np.copyto
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(address_of(loop))

    def copy(target: Bytes, source: Bytes, _loop: Bytes = loop) -> None:  # the code lives as long as what calls it
        size = source.nbytes // LINE * LINE
        to = address_of(target)
        if not size or to % LINE or target.nbytes != source.nbytes:
            np.copyto(target, source)
            return
        call(to, address_of(source), size)
        np.copyto(target[size:], source[size:])

    return copy
