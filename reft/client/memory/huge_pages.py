"""Fresh host memory for state that is held but does not exist yet."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

from reft.client.memory.prefault import PageMaker
from reft.core.layout.layout import Leaf, align
from reft.wire.slot_format import Bytes

HUGE_BYTES = 2 << 20  # of a huge page on x86 and most arm64


class HugePageBuffer:
    """Memory for many tensors in huge pages: in small pages it costs several times the copy into it.

    Tensors that malloc places one by one begin and end between huge pages, and much of them misses those. Each tensor
    made here has a storage of its own; the memory is given back once the last of them is gone.

    Args:
        nbytes: of all tensors, each aligned.
    """

    def __init__(self, nbytes: int) -> None:
        self._at = 0
        self._bytes: Bytes = np.empty(0, np.uint8)
        self._pages: PageMaker | None = None
        if nbytes >= HUGE_BYTES:
            pages = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
            whole = np.frombuffer(pages, np.uint8)
            begin = -whole.ctypes.data % HUGE_BYTES
            self._bytes = whole[begin : begin + nbytes]

    @property
    def nbytes(self) -> int:
        """What is left of it; 0 if it was not worth making."""
        return len(self._bytes) - self._at

    def make_pages(self) -> None:
        """Begins to make its pages, beside the caller."""
        if self._pages is None and len(self._bytes):
            self._pages = PageMaker(self._bytes)

    def wait(self) -> None:
        """Returns when all its pages are made, if they are being made."""
        if self._pages is not None:
            self._pages.wait()

    def settle(self) -> None:
        """Makes no more pages; returns when none is being made.

        The others come when they are first written: zeros and then bytes while the page is in the cache cost less than all
        zeros first.
        """
        if self._pages is not None:
            self._pages.settle()

    def close(self) -> None:
        """Nothing more is wanted of it; what was made of it stays, and nobody writes into it any more."""
        self.settle()
        self._bytes = self._bytes[: self._at]

    def empty(self, leaf: Leaf, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the leaf's shape and strides; from malloc if there is no room, or none was worth making."""
        end = self._at + leaf.nbytes
        if end > len(self._bytes) or not leaf.nbytes:
            return torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device="cpu")
        run = torch.from_numpy(self._bytes[self._at : end]).view(dtype)
        self._at = align(end)
        return run.as_strided(leaf.shape, leaf.stride)
