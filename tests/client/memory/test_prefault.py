"""Pages made ahead: each one of the memory, none beside it, and no more once nobody wants them."""

from __future__ import annotations

import mmap
import platform
import time

import numpy as np
import pytest

from reft.client.memory import prefault as module
from reft.client.memory.prefault import BLOCK_BYTES, Pages, toucher
from tests.support.smaps import bytes_of

PLACE = 2 << 20


def refuse(code):
    raise PermissionError(13, "Permission denied")


@pytest.fixture(params=["machine code", "numpy"])
def way(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(module, "mapped", refuse)
    elif platform.machine() != "x86_64":
        pytest.skip("the loop is one of x86-64")
    return request.param


@pytest.mark.parametrize(
    "nbytes", [1, mmap.PAGESIZE, mmap.PAGESIZE + 1, PLACE - 1, PLACE, PLACE + 1, 3 * PLACE + 5000, BLOCK_BYTES + PLACE + 1]
)  # fmt: skip
def test_a_byte_of_each_small_page_is_written_and_nothing_else(way, nbytes):
    memory = np.ones(nbytes + 3 * PLACE, np.uint8)
    expected = memory.copy()
    expected[: nbytes : mmap.PAGESIZE] = 0
    toucher()(memory[:nbytes], np.zeros(1, np.uint64))
    assert np.array_equal(memory, expected)


def test_the_log_says_why_numpy_writes(monkeypatch, caplog):
    caplog.set_level("INFO", "reft")
    monkeypatch.setattr(module, "mapped", refuse)
    toucher()
    assert "Permission denied" in caplog.text


def test_nothing_is_written_once_all_is_taken(way):
    memory = np.ones(3 * PLACE, np.uint8)
    for taken in (memory.nbytes, memory.nbytes + 5 * PLACE):
        toucher()(memory, np.array([taken], np.uint64))
    assert memory.all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the loop is one of x86-64")
def test_who_stops_waits_for_one_place_a_thread():
    memory, taken = np.ones(8 * PLACE, np.uint8), np.array([5 * PLACE], np.uint64)
    toucher()(memory, taken)
    assert memory[: 5 * PLACE].all() and not memory[5 * PLACE :: mmap.PAGESIZE].any(), "places are taken one by one"
    assert taken[0] == 8 * PLACE


def test_both_threads_make_pages_and_all_are_there(way, monkeypatch):
    calls = []

    def noting():
        touch = toucher()
        return lambda memory, taken: (calls.append(taken), touch(memory, taken))

    monkeypatch.setattr(module, "toucher", noting)
    whole = mmap.mmap(-1, 2 * BLOCK_BYTES + PLACE + 5000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(whole, np.uint8)
    pages = Pages(memory)
    pages.wait()
    assert len(calls) == 2 and calls[0] is calls[1], "they share what is taken"
    assert bytes_of(memory.ctypes.data, "Rss") >= memory.nbytes


def test_settled_pages_are_made_by_nobody(monkeypatch):
    memory = np.ones(PLACE, np.uint8)
    seen = []

    def waiting():
        def touch(memory, taken):
            until = time.monotonic() + 10
            while taken[0] < memory.nbytes and time.monotonic() < until:
                pass
            seen.append(int(taken[0]))

        return touch

    monkeypatch.setattr(module, "toucher", waiting)
    Pages(memory).settle()
    assert seen == [PLACE, PLACE]
