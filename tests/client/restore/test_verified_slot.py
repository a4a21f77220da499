"""Reading a slot: every chunk is compared once, with the bytes that arrived."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.client.restore import verified_slot
from reft.client.restore.verified_slot import VerifiedSlotReader
from reft.core.commit.version import Epoch, Version
from reft.wire.slot_format import PAGE, Geometry, SlotMap, chunk_digest

CHUNKS = 11


@pytest.fixture(scope="module")
def sealed_slot(tmp_path_factory):
    """A sealed slot in a file, its memory, and its data's size.

    The last chunk is short.
    """
    geometry = Geometry(table_capacity=0, data_capacity=CHUNKS * PAGE, chunk_bytes=PAGE)
    room = np.zeros(geometry.file_bytes, np.uint8)
    slot = SlotMap.create(room, geometry, "job", 0)
    nbytes = CHUNKS * PAGE - 100
    slot.begin(Version(Epoch(1, bytes(16)), 1), bytes(16), b"", nbytes)
    slot.data[:nbytes] = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
    slot.landed()
    slot.sealed(np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], "<u8"))
    path = tmp_path_factory.mktemp("slot") / "slot"
    room.tofile(path)
    return path, room, nbytes


@pytest.fixture
def open_slot(sealed_slot, tmp_path):
    """The slot, mapped and with a file that a test may change."""
    path = tmp_path / "slot"
    path.write_bytes(sealed_slot[0].read_bytes())
    file = os.open(path, os.O_RDWR)
    yield SlotMap(np.memmap(path, np.uint8, "r"), file), sealed_slot[1], file
    os.close(file)


RANGES = st.tuples(st.integers(0, CHUNKS * PAGE - 101), st.integers(1, CHUNKS * PAGE - 100)).map(
    lambda pair: (pair[0], min(pair[0] + pair[1], CHUNKS * PAGE - 100))
)


@given(
    ranges=st.lists(RANGES, min_size=1, max_size=4), has_file=st.booleans(), unit=st.sampled_from([1, PAGE, 3 * PAGE])
)
def test_any_ranges_are_copied_and_each_chunk_is_compared_once(sealed_slot, ranges, has_file, unit):
    path, room, nbytes = sealed_slot
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(verified_slot, "READ_BYTES", unit)
        slot = SlotMap(room, file.fileno() if has_file else None)
        source = VerifiedSlotReader(slot, nbytes, seen.append)
        for begin, end in ranges:
            out = np.zeros(end - begin, np.uint8)
            source.copy(begin, out)
            assert np.array_equal(out, slot.data[begin:end])
    assert not source.is_bad
    assert sorted(seen) == sorted({at // PAGE for begin, end in ranges for at in range(begin, end)})


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_changed_byte_in_the_file_is_detected(open_slot, chunk):
    slot, _, file = open_slot
    at = slot.header.geometry.data_offset + chunk * PAGE + 7
    os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 1]), at)
    source = VerifiedSlotReader(slot, slot.header.data_bytes, lambda _: None)
    source.copy(100, np.zeros(slot.header.data_bytes - 100, np.uint8))
    assert source.is_bad


def test_the_copied_bytes_are_compared_not_the_mapped_ones(open_slot):
    """A copy that went wrong must be detected."""
    slot, room, file = open_slot
    good = SlotMap(room, file)  # the map is right, the file is not
    os.pwrite(file, b"\0" * 64, slot.header.geometry.data_offset + PAGE)
    source = VerifiedSlotReader(good, good.header.data_bytes, lambda _: None)
    source.copy(0, np.zeros(3 * PAGE, np.uint8))
    assert source.is_bad


def test_failed_memory_counts_as_damage_and_raises_no_signal(open_slot, monkeypatch):
    slot, _, _ = open_slot

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")  # the kernel's error for a page with failed memory

    monkeypatch.setattr(os, "preadv", fail)
    source = VerifiedSlotReader(slot, slot.header.data_bytes, lambda _: None)
    source.copy(0, np.zeros(2 * PAGE, np.uint8))
    assert source.is_bad


def test_a_truncated_file_counts_as_damage(open_slot):
    slot, room, file = open_slot
    cut = SlotMap(room, file)
    os.ftruncate(file, slot.header.geometry.data_offset + 2 * PAGE + 5)
    source = VerifiedSlotReader(cut, cut.header.data_bytes, lambda _: None)
    source.copy(0, np.zeros(4 * PAGE, np.uint8))
    assert source.is_bad


def test_a_read_returned_in_parts_is_completed(open_slot, monkeypatch):
    slot, _, _ = open_slot
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: whole(file, [into[0][:1000]], at))
    source, out = VerifiedSlotReader(slot, slot.header.data_bytes, lambda _: None), np.zeros(2 * PAGE, np.uint8)
    source.copy(0, out)
    assert not source.is_bad and np.array_equal(out, slot.data[: 2 * PAGE])


def test_a_slot_that_is_too_short_counts_as_damage_and_reads_as_zeros(sealed_slot):
    _, room, nbytes = sealed_slot
    source, out = VerifiedSlotReader(SlotMap(room), nbytes + 1, lambda _: None), np.ones(2 * PAGE, np.uint8)
    source.copy(0, out)
    assert source.is_bad and not out.any()
