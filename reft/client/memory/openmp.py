"""Threads of GNU OpenMP that wait at a barrier sleep, instead of spinning, while copy threads share their cores.

    core 0   team ───────► barrier …spins…     team ─►        what the copy thread of core 0 could have used
    core 1   team ─► copy thread ───────► team ───────►       slices of the scheduler, milliseconds each

libgomp lets a thread spin at a barrier for some 10 ms, but sleep after some microseconds once it has made more threads than there
are cores (`gomp_managed_threads` and `gomp_throttled_spin_count_var` in its config/linux/wait.h). So one more team is made,
which does nothing, for as long as is copied. LLVM's OpenMP and Intel's yield by themselves where threads are too many.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TEAM = 2  # the thread that asks for it, and one more


@contextmanager
def oversubscribed() -> Iterator[None]:
    """While it lasts, this process has one more OpenMP thread than torch's, asleep. Without effect where there is no libgomp."""
    libgomp = _libgomp()
    if libgomp is None:
        yield
        return
    tried, there, over = threading.Event(), threading.Event(), threading.Event()
    # libgomp ends the process if it can't make a thread. So one is made and ended ahead of its own, with the keeper there.
    spare = threading.Thread(target=tried.wait, name="reft-spare", daemon=True)

    def keep_a_team() -> None:
        tried.set()
        spare.join()
        # A team lives as long as the thread that it was made in. What it runs is a getter of libgomp's.
        libgomp.GOMP_parallel(libgomp.omp_get_thread_num, None, TEAM, 0)
        there.set()
        over.wait()

    keeper = threading.Thread(target=keep_a_team, name="reft-team", daemon=True)
    try:
        spare.start()
        keeper.start()
    except RuntimeError:  # no more threads are to be had: the copy is slower, and that is all
        tried.set()
        yield
        return
    there.wait()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def _libgomp() -> Any:
    """The one that torch computes with, which it loads for all to see; None if it computes with another OpenMP."""
    loaded = ctypes.CDLL(None)
    return loaded if hasattr(loaded, "GOMP_parallel") and hasattr(loaded, "omp_get_thread_num") else None
