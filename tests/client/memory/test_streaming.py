"""Copies past the caches: the same bytes, at any size and place, and nothing beside them."""

from __future__ import annotations

import platform

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.client.memory import streaming as module
from reft.client.memory.streaming import streaming

ROOM = 1 << 12


@pytest.fixture(scope="module")
def copy():
    return streaming()


def test_this_machine_streams(copy):
    assert (copy is not np.copyto) == (platform.machine() == "x86_64")


@given(size=st.integers(0, ROOM), to=st.integers(0, 200), begin=st.integers(0, 200), seed=st.integers(0, 1 << 32))
def test_bytes_are_the_same_and_none_beside_them_is_written(copy, size, to, begin, seed):
    random = np.random.default_rng(seed)
    source = random.integers(0, 256, ROOM + 400, np.uint8)
    memory = random.integers(0, 256, ROOM + 464, np.uint8)
    memory = memory[-memory.__array_interface__["data"][0] % 64 :]  # so that `to` says how a target is aligned
    expected = memory.copy()
    expected[to : to + size] = source[begin : begin + size]
    copy(memory[to : to + size], source[begin : begin + size])
    assert np.array_equal(memory, expected)


def test_a_target_of_another_size_is_refused(copy):
    with pytest.raises(ValueError):
        copy(np.zeros(64, np.uint8), np.zeros(128, np.uint8))


def refuse(code):
    raise PermissionError(13, "Permission denied")


def test_where_no_code_may_be_mapped_numpy_copies_and_the_log_says_so(monkeypatch, caplog):
    caplog.set_level("INFO", "reft")
    monkeypatch.setattr(module, "mapped", refuse)
    assert streaming() is np.copyto
    assert "Permission denied" in caplog.text


def test_other_processors_run_none_of_it_and_the_log_says_so(monkeypatch, caplog):
    caplog.set_level("INFO", "reft")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert streaming() is np.copyto
    assert "aarch64" in caplog.text
