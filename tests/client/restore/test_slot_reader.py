"""Reading a slot: bytes arrive in their places, and each chunk that is read is compared there."""

from __future__ import annotations

import errno
import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.client.restore.slot_reader import READ_BYTES, ReadSegment, SlotReader
from reft.core.commit.version import Epoch, Version
from reft.wire import slot_format
from reft.wire.shm import map_file
from reft.wire.slot_format import PAGE, Geometry, SharedSlotMap, SlotMap, chunk_digest

CHUNKS = 11
BIG_CHUNKS = 2 * READ_BYTES // PAGE + 7  # two calls of the kernel, and some more


def sealed(chunks: int) -> tuple[np.ndarray, int]:
    """Returns a sealed slot's file and the size of its data; the last chunk is short."""
    geometry = Geometry(table_capacity=0, data_capacity=chunks * PAGE, chunk_bytes=PAGE)
    room = np.zeros(geometry.file_bytes, np.uint8)
    slot = SlotMap.create(room, geometry, "job", 0)
    nbytes = chunks * PAGE - 100
    slot.begin(Version(Epoch(1, bytes(16)), 1), bytes(16), b"", nbytes)
    slot.data[:nbytes] = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
    slot.landed()
    slot.sealed(np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], "<u8"))
    return room, nbytes


@pytest.fixture(scope="module")
def sealed_slot(tmp_path_factory):
    """A sealed slot in a file, its memory, and its data's size."""
    room, nbytes = sealed(CHUNKS)
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


def reader_of(slot: SlotMap, at_chunk=lambda _: None) -> SlotReader:
    return SlotReader(slot, slot.header.data_bytes, at_chunk)


def segments_of(cuts: list[int]) -> list[ReadSegment]:
    """Returns every second range between the cuts, so that there are gaps."""
    return [ReadSegment(begin, np.zeros(end - begin, np.uint8)) for begin, end in list(pairwise(cuts))[::2]]


CUTS = st.lists(st.integers(0, CHUNKS * PAGE - 100), min_size=2, max_size=12, unique=True).map(sorted)


@given(CUTS, st.booleans())
def test_any_segments_are_filled_and_each_chunk_is_read_once(sealed_slot, cuts, has_file):
    path, room, nbytes = sealed_slot
    seen: list[int] = []
    with path.open("rb") as file:
        slot = SlotMap(room, file.fileno() if has_file else None)
        reader, segments = SlotReader(slot, nbytes, seen.append), segments_of(cuts)
        reader.read(segments)
    assert all(np.array_equal(memory, slot.data[at : at + memory.nbytes]) for at, memory in segments)
    assert not reader.is_bad
    needed = {at // PAGE for segment in segments for at in range(segment.at, segment.end)}
    # A chunk between two needed chunks is read with them: one call is cheaper than two.
    assert seen == sorted(set(seen)) and needed <= set(seen)
    assert all(chunk in needed or {chunk - 1, chunk + 1} <= needed for chunk in seen)


@given(st.lists(st.integers(0, BIG_CHUNKS * PAGE - 100), min_size=2, max_size=9, unique=True).map(sorted))
def test_segments_longer_than_one_call_are_filled(cuts):
    room, nbytes = BIG
    seen: list[int] = []
    slot = SlotMap(room)
    reader, segments = SlotReader(slot, nbytes, seen.append), segments_of(cuts)
    reader.read(segments)
    assert all(np.array_equal(memory, slot.data[at : at + memory.nbytes]) for at, memory in segments)
    assert not reader.is_bad and seen == sorted(set(seen))


BIG = sealed(BIG_CHUNKS)


def test_segments_of_one_run_without_gaps_are_filled(sealed_slot):
    _, room, nbytes = sealed_slot
    seen: list[int] = []
    reader = SlotReader(SlotMap(room), nbytes, seen.append)
    segments = [
        ReadSegment(begin, np.zeros(end - begin, np.uint8)) for begin, end in pairwise([5, 70, PAGE, 3 * PAGE + 1])
    ]
    reader.read(segments)
    assert np.array_equal(np.concatenate([memory for _, memory in segments]), SlotMap(room).data[5 : 3 * PAGE + 1])
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_changed_byte_in_the_file_is_detected(open_slot, chunk):
    slot, _, file = open_slot
    at = slot.header.geometry.data_offset + chunk * PAGE + 7
    os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 1]), at)
    reader = reader_of(slot)
    reader.read([ReadSegment(100, np.zeros(slot.header.data_bytes - 100, np.uint8))])
    assert reader.is_bad


@pytest.mark.parametrize("is_gap", [False, True])
def test_a_changed_byte_that_nobody_wants_is_detected(open_slot, is_gap):
    """Whole chunks are compared, so what is wanted is compared too."""
    slot, _, file = open_slot
    os.pwrite(file, bytes([slot.data[PAGE + 7] ^ 1]), slot.header.geometry.data_offset + PAGE + 7)
    reader = reader_of(slot)
    reader.read([ReadSegment(PAGE + (100 if is_gap else 0), np.zeros(50, np.uint8))])
    assert reader.is_bad


def test_the_bytes_that_arrived_are_compared_not_the_mapped_ones(open_slot):
    """A copy that went wrong must be detected."""
    slot, room, file = open_slot
    good = SlotMap(room, file)  # the map is right, the file is not
    os.pwrite(file, b"\0" * 64, slot.header.geometry.data_offset + PAGE)
    reader = reader_of(good)
    reader.read([ReadSegment(0, np.zeros(3 * PAGE, np.uint8))])
    assert reader.is_bad


def test_failed_memory_counts_as_damage_and_raises_no_signal(open_slot, monkeypatch):
    slot, _, _ = open_slot

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")  # the kernel's error for a page with failed memory

    monkeypatch.setattr(os, "preadv", fail)
    reader = reader_of(slot)
    reader.read([ReadSegment(0, np.zeros(2 * PAGE, np.uint8))])
    assert reader.is_bad


def test_a_truncated_file_counts_as_damage(open_slot):
    slot, room, file = open_slot
    cut = SlotMap(room, file)
    os.ftruncate(file, slot.header.geometry.data_offset + 2 * PAGE + 5)
    reader = reader_of(cut)
    reader.read([ReadSegment(0, np.zeros(4 * PAGE, np.uint8))])
    assert reader.is_bad


# Mapped pages


@pytest.fixture
def shared_slot(open_slot):
    """The slot, as pages of its file; and the file."""
    _, _, file = open_slot
    return SharedSlotMap(map_file(file, os.fstat(file).st_size)[1], file), file


def refuse(*_: object) -> int:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("begin", [0, 100, 3 * PAGE + 1])
def test_mapped_pages_are_copied_without_a_read_of_the_file(shared_slot, monkeypatch, begin):
    monkeypatch.setattr(os, "preadv", refuse)
    slot, _ = shared_slot
    reader, segments = reader_of(slot), segments_of([begin, begin + 7, 4 * PAGE, 6 * PAGE + 9])
    digests = reader.read(segments)
    assert not reader.is_bad and all(digests[index] == int(slot.digests[index]) for index in digests)
    assert all(np.array_equal(memory, slot.data[at : at + memory.nbytes]) for at, memory in segments)


def test_pages_that_the_kernel_refuses_are_not_touched(shared_slot, monkeypatch):
    """Touching one would end this process if its memory has failed."""
    monkeypatch.setattr(slot_format, "advise", lambda *_: errno.EFAULT)
    slot, file = shared_slot
    at = slot.header.geometry.data_offset
    segments = segments_of([0, 2 * PAGE])
    reader = reader_of(slot)
    reader.read(segments)
    assert not reader.is_bad and segments[0].memory.tobytes() == os.pread(file, 2 * PAGE, at)
    monkeypatch.setattr(os, "preadv", refuse)
    reader.read(segments)
    assert reader.is_bad


def test_missing_pages_count_as_damage_and_raise_no_signal(shared_slot):
    slot, file = shared_slot
    os.ftruncate(file, slot.header.geometry.data_offset + 2 * PAGE)
    reader = reader_of(slot)
    reader.read([ReadSegment(0, np.zeros(4 * PAGE, np.uint8))])
    assert reader.is_bad


def test_a_copy_of_mapped_pages_that_went_wrong_is_detected(shared_slot, monkeypatch):
    copy = np.copyto

    def copy_wrongly(target: np.ndarray, source: np.ndarray) -> None:
        copy(target, source)
        target[-1] ^= 1

    reader = reader_of(shared_slot[0])
    monkeypatch.setattr(np, "copyto", copy_wrongly)
    reader.read([ReadSegment(0, np.zeros(2 * PAGE, np.uint8))])
    assert reader.is_bad


# Calls that read the file


def test_a_read_returned_in_parts_is_completed(open_slot, monkeypatch):
    slot, _, _ = open_slot
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: whole(file, [into[0][:1000]], at))
    reader, segments = reader_of(slot), segments_of([10, PAGE + 3, PAGE + 9, 2 * PAGE])
    reader.read(segments)
    assert not reader.is_bad
    assert all(np.array_equal(memory, slot.data[at : at + memory.nbytes]) for at, memory in segments)


def test_more_memory_than_one_call_takes_is_filled(open_slot):
    """The kernel takes at most 1024 pieces of memory in one call."""
    slot, _, _ = open_slot
    reader, segments = reader_of(slot), segments_of(list(range(0, 10 * PAGE, 9)))
    reader.read(segments)
    assert len(segments) > 2 * os.sysconf("SC_IOV_MAX") and not reader.is_bad
    assert all(np.array_equal(memory, slot.data[at : at + memory.nbytes]) for at, memory in segments)


def test_a_slot_that_is_too_short_counts_as_damage_and_is_not_read(sealed_slot):
    _, room, nbytes = sealed_slot
    seen: list[int] = []
    reader = SlotReader(SlotMap(room), nbytes + 1, seen.append)
    reader.read([ReadSegment(0, np.ones(2 * PAGE, np.uint8))])
    assert reader.is_bad and not seen and not reader.mapped(0, PAGE).any()


# The mapping


def test_mapped_bytes_are_compared(sealed_slot):
    _, room, _ = sealed_slot
    seen: list[int] = []
    reader = reader_of(SlotMap(room), seen.append)
    assert np.array_equal(reader.mapped(PAGE + 5, 3 * PAGE), SlotMap(room).data[PAGE + 5 : 3 * PAGE])
    assert not reader.is_bad and seen == [1, 2]


def test_a_changed_byte_of_the_mapping_is_detected(sealed_slot):
    slot = SlotMap(sealed_slot[1].copy())
    slot.data[2 * PAGE] ^= 1
    reader = reader_of(slot)
    reader.mapped(0, PAGE)
    assert not reader.is_bad
    reader.mapped(PAGE, 2 * PAGE + 1)
    assert reader.is_bad
