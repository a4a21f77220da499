"""Copies past the caches write the same bytes as numpy, and no others.

This holds at any size and alignment. Where reft was installed without a compiler, only numpy's copy
is tested.
"""

from __future__ import annotations

import platform
import runpy
import sys
import threading

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reft.client import memory as package
from reft.client.memory import streaming

ROOM = 1 << 12
LINE = 64
COPIES = [np.copyto] if streaming.copy is np.copyto else [np.copyto, streaming.copy]
each_copy = pytest.mark.parametrize("copy", COPIES, ids=lambda copy: "numpy" if copy is np.copyto else "extension")


def aligned(nbytes: int, seed: int) -> np.ndarray:
    """Returns random bytes that begin at a cache line."""
    memory = np.random.default_rng(seed).integers(0, 256, nbytes + LINE, np.uint8)
    begin = -memory.ctypes.data % LINE
    return memory[begin : begin + nbytes]


@each_copy
@given(size=st.integers(0, ROOM), to=st.integers(0, 200), begin=st.integers(0, 200), seed=st.integers(0, 1 << 32))
@example(size=ROOM, to=0, begin=0, seed=0)
@example(size=ROOM + 1, to=0, begin=1, seed=0)
@example(size=ROOM - 1, to=63, begin=0, seed=0)
@example(size=LINE - 1, to=1, begin=0, seed=0)
@example(size=1, to=5, begin=3, seed=0)
def test_a_copy_writes_the_same_bytes_and_no_others(copy, size, to, begin, seed):
    source, memory = aligned(ROOM + 400, seed), aligned(ROOM + 400, seed + 1)
    expected = memory.copy()
    expected[to : to + size] = source[begin : begin + size]
    copy(memory[to : to + size], source[begin : begin + size])
    assert np.array_equal(memory, expected)


@each_copy
@pytest.mark.parametrize(("target", "source"), [(64, 128), (128, 64), (0, 64)])
def test_a_target_of_another_size_is_refused_and_not_written(copy, target, source):
    memory = np.zeros(target, np.uint8)
    with pytest.raises(ValueError):
        copy(memory, np.ones(source, np.uint8))
    assert not memory.any()


@each_copy
def test_a_target_that_may_not_be_written_is_refused(copy):
    memory = np.zeros(256, np.uint8)
    memory.flags.writeable = False
    with pytest.raises((TypeError, ValueError)):
        copy(memory, np.ones(256, np.uint8))
    assert not memory.any()


@each_copy
def test_other_threads_run_python_while_bytes_are_copied(copy):
    source, target = np.ones(64 << 20, np.uint8), np.zeros(64 << 20, np.uint8)
    # Not the ends: memcpy may copy backwards, and the ends in any order.
    first, last = 8 << 20, 56 << 20

    def runs_meanwhile() -> bool:
        target[:] = 0
        copying = threading.Thread(target=copy, args=(target, source))
        copying.start()
        is_partial = False
        while copying.is_alive():
            is_partial |= bool(target[first] != target[last])
        return is_partial

    assert any(runs_meanwhile() for _ in range(50)), "this thread never ran while bytes were copied"


def test_the_extension_copies_past_the_caches_on_x86_64():
    assert streaming.is_past_caches == (streaming.copy is not np.copyto and platform.machine() == "x86_64")


def test_without_the_extension_numpy_copies(monkeypatch):
    monkeypatch.delattr(package, "_streaming", raising=False)
    monkeypatch.setitem(sys.modules, "reft.client.memory._streaming", None)
    namespace = runpy.run_path(streaming.__file__)
    assert namespace["copy"] is np.copyto and namespace["is_past_caches"] is False
