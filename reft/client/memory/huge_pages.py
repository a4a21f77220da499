"""Fresh host memory for tensors that a restore has to make."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

from reft.client.memory.prefault import PageMaker
from reft.core.layout.layout import Leaf, align
from reft.wire.slot_format import Bytes

HUGE_BYTES = 2 << 20  # size of a huge page on x86 and most arm64


class HugePageBuffer:
    """Memory for many tensors, in huge pages.

    Making small pages costs several times as much as the copy into them. Tensors that malloc places
    one by one begin and end inside huge pages, so much of their memory lies in small pages. Each
    tensor made here has a storage of its own. The memory is freed once the last of these tensors is
    gone.

    Args:
        nbytes: the size of all tensors, each aligned.
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
        """Bytes that are still free.

        The number is 0 if all tensors together were smaller than a huge page.
        """
        return len(self._bytes) - self._at

    def make_pages(self) -> None:
        """Begins to make the pages in threads."""
        if self._pages is None and len(self._bytes):
            self._pages = PageMaker(self._bytes)

    def wait(self) -> None:
        """Waits until all pages are made; returns at once if `make_pages` was not called."""
        if self._pages is not None:
            self._pages.wait()

    def settle(self) -> None:
        """Stops making pages; returns once no page is being made.

        The kernel makes each remaining page when it is first written. That is cheaper: the page is
        still in the cache when the bytes follow the zeros.
        """
        if self._pages is not None:
            self._pages.settle()

    def close(self) -> None:
        """Stops making pages and gives out no more memory; the tensors made before stay valid."""
        self.settle()
        self._bytes = self._bytes[: self._at]

    def empty(self, leaf: Leaf, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor for the leaf; from malloc if the buffer is full."""
        end = self._at + leaf.nbytes
        if end > len(self._bytes) or not leaf.nbytes:
            return torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device="cpu")
        run = torch.from_numpy(self._bytes[self._at : end]).view(dtype)
        self._at = align(end)
        return run.as_strided(leaf.shape, leaf.stride)
