"""Detects that the state was written between the mark and the fence."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from reft.client.state.tensors import TensorIndex
from reft.errors import ReftError


class WriteGuard:
    """Compares torch's version counters with their values at the mark.

    The counters must be read before the optimizer changes them. The fence and the snapshot thread
    both call `close`; the first call counts. This is a net, not a proof: fused kernels and `.data`
    don't count versions.

    Args:
        tensor_index: the leaves. Staged leaves may be written in the window.
        at_mark: the counters at the mark.
    """

    def __init__(self, tensor_index: TensorIndex, at_mark: Sequence[int]) -> None:
        self._tensor_index = tensor_index
        self._at_mark = at_mark
        self._at_fence: Sequence[int] | None = None
        self._torn = ""  # why the state is written where no counter shows it; empty if it is not
        self._lock = threading.Lock()

    def close(self) -> None:
        """Reads the counters, if no other thread has done so."""
        with self._lock:
            if self._at_fence is None:
                self._at_fence = self._tensor_index.versions()

    def tear(self, reason: str) -> None:
        """Makes each later check fail: the state will be written where no counter shows it."""
        self._torn = reason

    def check(self) -> None:
        """Closes the guard.

        Raises:
            ReftError: a leaf was written in place since the mark, or the guard was torn.
        """
        self.close()
        if self._torn:
            raise ReftError(self._torn)
        assert self._at_fence is not None
        if self._at_fence == self._at_mark:
            return
        for name, before, after in zip(
            self._tensor_index.locations.names(), self._at_mark, self._at_fence, strict=True
        ):
            if before != after:
                raise ReftError(f"{name} was written between the mark and the next optimizer step: torn, not kept.")
