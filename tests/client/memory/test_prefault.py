"""Pages made ahead: all pages of the memory, no others, and none after `settle`."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from reft.client.memory import prefault as module
from reft.client.memory.prefault import BLOCK_BYTES, THREADS, PageMaker, map_shared
from reft.wire.shm import advise

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def fresh(nbytes: int) -> np.ndarray:
    """Returns private memory in small pages, none of which exists yet."""
    whole = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(whole, np.uint8)


def pages_of(memory: np.ndarray) -> list[int]:
    """Returns the indices of the memory's pages that exist."""
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(memory.ctypes.data // PAGE * 8)
        entries_of_pages = np.frombuffer(entries.read(-(-memory.nbytes // PAGE) * 8), np.uint64)
    return np.flatnonzero(entries_of_pages >> 63).tolist()


@pytest.fixture(params=["kernel", "numpy"])
def method(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(module, "_POPULATE_WRITE", 9999)  # unknown, as for a kernel before 5.14
    elif advise(fresh(PAGE), module._POPULATE_WRITE):
        pytest.skip("this kernel makes no pages on request")
    return request.param


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5000])
def test_each_page_is_made_and_no_other(method, nbytes):
    memory = fresh(nbytes + 2 * MIB)
    PageMaker(memory[:nbytes]).wait()
    assert pages_of(memory) == [*range(-(-nbytes // PAGE))]
    assert not memory.any()


def test_without_kernel_support_one_byte_of_each_page_is_written(monkeypatch):
    monkeypatch.setattr(module, "_POPULATE_WRITE", 9999)
    memory = np.ones(BLOCK_BYTES + 5 * PAGE + 1, np.uint8)
    PageMaker(memory[: BLOCK_BYTES + 3 * PAGE + 1]).wait()
    expected = np.ones_like(memory)
    expected[: BLOCK_BYTES + 3 * PAGE + 1 : PAGE] = 0
    assert np.array_equal(memory, expected)


def test_the_kernel_is_asked_for_one_block_at_a_time(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "advise", lambda block, advice: asked.append((block.ctypes.data, block.nbytes)) or 0)
    memory = fresh(4 * BLOCK_BYTES + 5000)
    begin = memory.ctypes.data
    PageMaker(memory).wait()
    assert sorted(asked) == [
        *((begin + i * BLOCK_BYTES, BLOCK_BYTES) for i in range(4)), (begin + 4 * BLOCK_BYTES, 5000),
    ]  # fmt: skip


def test_settle_waits_only_for_the_blocks_that_have_begun(monkeypatch):
    have_begun, go_on = threading.Barrier(THREADS + 1), threading.Event()
    made = []

    def slow(block) -> None:
        have_begun.wait(10)
        go_on.wait(10)
        made.append(block.ctypes.data)

    monkeypatch.setattr(module, "_make", slow)
    memory = fresh(8 * BLOCK_BYTES)
    pages = PageMaker(memory)
    have_begun.wait(10)  # each thread has a block
    settling = threading.Thread(target=pages.settle)
    settling.start()
    while pages._blocks_left:
        assert settling.is_alive()
    assert settling.is_alive() and not made
    go_on.set()
    settling.join(10)
    assert sorted(made) == [memory.ctypes.data, memory.ctypes.data + BLOCK_BYTES]


def test_one_block_takes_no_more_threads_than_it_can_use(monkeypatch):
    assert len(PageMaker(fresh(BLOCK_BYTES))._threads) == 1
    monkeypatch.setattr(module, "ThreadPoolExecutor", None)
    map_shared(fresh(BLOCK_BYTES))


def test_settle_and_wait_may_be_called_again():
    pages = PageMaker(fresh(MIB))
    for _ in range(2):
        pages.settle()
        pages.wait()
