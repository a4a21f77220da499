"""Tests that slots use huge pages where the kernel allows it, and small pages elsewhere.

There is no other difference.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from reft.client.link.slots import MappedSlot
from reft.wire.shm import huge_bytes, map_file
from reft.wire.slot_format import Geometry
from reft_daemon.arena import huge_pages
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.huge_pages import make_huge
from tests.support.smaps import bytes_of, need_huge_pages

MIB = 1 << 20
HUGE = huge_bytes()


@pytest.fixture
def file():
    """An empty file of shared memory, and its mapping. It has three and a half huge pages."""
    descriptor = os.memfd_create("slot")
    os.ftruncate(descriptor, 3 * HUGE + HUGE // 2)
    yield descriptor, map_file(descriptor, 3 * HUGE + HUGE // 2)[1]
    os.close(descriptor)


def present(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def in_huge_pages(pages: np.ndarray) -> int:
    return bytes_of(pages.ctypes.data, "ShmemPmdMapped")


def test_all_but_the_end_is_made_of_huge_pages_of_zeros(file):
    need_huge_pages()
    descriptor, pages = file
    assert make_huge(descriptor, pages, 0) == 3 * HUGE
    assert in_huge_pages(pages) == present(descriptor) == 3 * HUGE
    os.posix_fallocate(descriptor, 0, pages.nbytes)
    assert present(descriptor) == pages.nbytes and not pages.any()


def test_existing_pages_are_left_unchanged(file):
    need_huge_pages()
    descriptor, pages = file
    kept = HUGE + 5
    pages[:kept] = 7
    assert make_huge(descriptor, pages, kept) == HUGE
    assert in_huge_pages(pages) == HUGE
    assert (pages[:kept] == 7).all() and not pages[kept:].any()


def test_a_lasting_refusal_by_the_kernel_ends_the_tries(file, monkeypatch):
    descriptor, pages = file
    monkeypatch.setattr(huge_pages, "_COLLAPSE", 9999)
    monkeypatch.setattr(huge_pages, "_PAGES_PER_CALL", 1)
    monkeypatch.setattr(huge_pages, "_THREADS", 1)
    assert make_huge(descriptor, pages, 0) == 0
    assert present(descriptor) <= os.sysconf("SC_PAGESIZE"), "one huge page was tried, not all"


def test_without_free_memory_make_huge_stops(file, monkeypatch):
    need_huge_pages()
    descriptor, pages = file
    write = os.pwrite

    def full(to: int, data: bytes, at: int) -> int:
        if at >= 2 * HUGE:
            raise OSError(28, "No space left on device")
        return write(to, data, at)

    monkeypatch.setattr(huge_pages, "_PAGES_PER_CALL", 1)
    monkeypatch.setattr(os, "pwrite", full)
    assert make_huge(descriptor, pages, 0) == 2 * HUGE == present(descriptor)


@pytest.mark.parametrize("is_memfd", [False, True])
def test_slots_lie_in_huge_pages_for_the_daemon_and_for_the_trainer(monkeypatch, is_memfd):
    need_huge_pages()
    geometry = Geometry(table_capacity=0, data_capacity=4 * HUGE, chunk_bytes=256 << 10)
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as folder:
        arena = Arena(Path(folder) / "arena", 0)
        if is_memfd:
            monkeypatch.setattr("reft_daemon.arena.limits.file_system_free", lambda folder: 0)
        (slot,) = arena.create("job", 0, {"rank-0.slot-0": geometry}, [])
        assert (slot.path is None) is is_memfd
        mapped = MappedSlot.open(0, "slot", os.dup(slot.descriptor), slot.file_bytes, keeps=False)
        mapped.touch()
        assert in_huge_pages(mapped.map.data) >= 4 * HUGE, "mapped whole, not in pieces of 4 KiB"
        mapped.map.data[:5] = 3
        slot.map.read(0, seen := np.zeros(5, np.uint8))
        assert (seen == 3).all()
        arena.free(slot)
        arena.forget("job")
        arena.close()
