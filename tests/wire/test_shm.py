"""Tests that a mapping begins where a huge page may. It must last while any array holds it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from reft.wire import shm
from reft.wire.shm import huge_bytes, map_file


@pytest.fixture
def descriptor():
    number = os.memfd_create("mapped-here")
    os.ftruncate(number, 100_000)
    yield number
    os.close(number)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("mapped-here")


def test_a_mapping_begins_at_a_huge_page_and_is_the_file(descriptor):
    _, pages = map_file(descriptor, 100_000)
    assert pages.ctypes.data % huge_bytes() == 0 and pages.nbytes == 100_000
    pages[99_999] = 7
    assert os.pread(descriptor, 1, 99_999) == b"\x07"


def test_a_system_without_huge_pages_uses_small_ones(descriptor, monkeypatch, tmp_path):
    monkeypatch.setattr(shm, "_SIZE", tmp_path / "missing")
    _, pages = map_file(descriptor, 100_000)
    pages[0] = 7
    assert os.pread(descriptor, 1, 0) == b"\x07"


@pytest.mark.parametrize("nbytes", [0, 100_001])
def test_more_than_the_file_has_is_refused(descriptor, nbytes):
    with pytest.raises(ValueError, match="of a file of 100000"):
        map_file(descriptor, nbytes)
    assert mappings() == 0


def test_a_refusal_of_the_kernel_is_raised(descriptor):
    reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    with pytest.raises(PermissionError, match="can't be mapped"):
        map_file(reader, 100_000)
    os.close(reader)


def test_a_mapping_ends_with_its_last_array(descriptor):
    view = map_file(descriptor, 100_000)[1][5:10]
    gc.collect()
    view[0] = 7
    assert os.pread(descriptor, 1, 5) == b"\x07" and mappings() == 1
    del view
    gc.collect()
    assert mappings() == 0
