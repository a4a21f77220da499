"""Tests the bytes of a slot: golden files, damaged headers, impossible sizes, life of a slot."""

from __future__ import annotations

import contextlib
import errno
import gzip
import importlib.util
import os
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.errors import FormatError
from reft.wire import capsule_format
from reft.wire.messages import STEP_MAX, places_from, table_from, table_to
from reft.wire.shm import map_file
from reft.wire.slot_format import (
    CAPSULE_MAX,
    CHECKSUM,
    HEADER,
    PAGE,
    SEQ_MAX,
    FileSlotMap,
    Geometry,
    Header,
    SlotMap,
    UnknownFormat,
    chunk_digest,
    decode_header,
    newest_header,
)

_spec = importlib.util.spec_from_file_location("golden_make", Path(__file__).parent / "golden/make.py")
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

USED = HEADER.size + CHECKSUM.size  # used bytes of a header page
EPOCH = Epoch(1, b"e" * 16)


def read_all(slot: np.ndarray) -> tuple[object, object, bytes] | None:
    """Returns layout, capsule and data as a restoring rank reads them; None if not SEALED.

    Raises:
        FormatError: the slot is damaged.
    """
    map_ = SlotMap(slot)
    if map_.header.state is not SlotState.SEALED:
        return None
    held = table_from(map_.table())
    tree = capsule_format.decode(map_.capsule(), golden.NAMES)
    if map_.bad_chunks():
        raise FormatError("a chunk is damaged")
    return held, tree, map_.data[: map_.header.data_bytes].tobytes()


def same(one: object, other: object) -> bool:
    return capsule_format.encode(one) == capsule_format.encode(other)


def filled(data: bytes, chunk_bytes: int = 4096) -> tuple[np.ndarray, SlotMap]:
    """Returns a sealed slot with `data`."""
    geometry = Geometry(4096, 4 * chunk_bytes, chunk_bytes)
    slot = np.zeros(geometry.file_bytes, np.uint8)
    map_ = SlotMap.create(slot, geometry, "job", 0)
    map_.begin(Version(EPOCH, 1), b"l" * 16, b"table", len(data))
    map_.put_capsule(b"capsule")
    map_.data[: len(data)] = np.frombuffer(data, np.uint8)
    map_.landed()
    map_.sealed(np.array([chunk_digest(map_.chunk(i)) for i in range(map_.chunks)], np.uint64))
    return slot, map_


# Golden files


@pytest.mark.parametrize("state", golden.STATES)
def test_a_golden_file_is_reproduced_byte_for_byte(state):
    assert np.array_equal(golden.read(state), golden.make(state))


@pytest.mark.parametrize("state", golden.STATES)
def test_a_golden_file_has_the_expected_header(state):
    header = newest_header(golden.read(state))
    assert header.state is SlotState[state.upper()]
    assert (header.job, header.rank, header.geometry) == (golden.JOB, golden.RANK, golden.GEOMETRY)
    assert header.version == (None if state == "empty" else golden.VERSION)


def test_the_golden_sealed_file_is_read_in_full():
    held, tree, data = read_all(golden.read("sealed"))
    assert held == golden.layout() and data == golden.payload().tobytes()
    assert same(tree, golden.NAMED_TREE)
    places = places_from(SlotMap(golden.read("sealed")).table())
    assert {name: place for name, place in places.items() if place} == golden.PLACES


@pytest.mark.parametrize("state", ["empty", "writing", "landed"])
def test_only_a_sealed_slot_can_be_read(state):
    assert read_all(golden.read(state)) is None


def test_another_holder_may_seal_a_landed_slot():
    slot = golden.read("landed")
    map_ = SlotMap(slot)
    map_.sealed(np.array([chunk_digest(map_.chunk(i)) for i in range(map_.chunks)], np.uint64))
    assert np.array_equal(slot, golden.read("sealed"))


# Two copies


def page_of_newest(slot: np.ndarray) -> int:
    return (newest_header(slot).seq % 2) * PAGE


def test_a_torn_header_leaves_the_previous_one():
    slot = golden.read("sealed")
    slot[page_of_newest(slot) + 40] ^= 1
    header = newest_header(slot)
    assert header.state is SlotState.LANDED and header.version == golden.VERSION


def test_an_older_copy_that_is_damaged_changes_nothing():
    slot = golden.read("sealed")
    slot[PAGE - page_of_newest(slot) :][:USED] = 255
    assert read_all(slot) is not None


def test_both_copies_bad_is_an_error():
    slot = golden.read("sealed")
    slot[100] ^= 1
    slot[PAGE + 100] ^= 1
    with pytest.raises(FormatError, match="checksum"):
        SlotMap(slot)


def test_the_writers_next_header_goes_over_the_older_copy():
    slot, map_ = filled(b"x" * 100)
    before = page_of_newest(slot)
    map_.empty()
    assert page_of_newest(slot) == PAGE - before


@pytest.mark.parametrize("cut", [0, 1, 8, USED // 2, USED - 1])
@pytest.mark.parametrize("write", [1, 2, 3])
def test_a_writer_that_dies_within_a_header_leaves_the_old_state_or_the_new(write, cut):
    """Cuts every header write of begin, landed and sealed after `cut` bytes."""
    states = ("empty", "writing", "landed", "sealed")
    before, after = golden.make(states[write - 1]), golden.make(states[write])
    page = page_of_newest(after)
    torn = before.copy()
    torn[page : page + cut] = after[page : page + cut]
    assert newest_header(torn).state in (SlotState[states[write - 1].upper()], SlotState[states[write].upper()])


# What a reader refuses


def with_header(header: Header, major: int = 2, minor: int = 0, size: int | None = None) -> np.ndarray:
    """Returns a slot with `header` in both header copies."""
    body = bytearray(header.encode()[: HEADER.size])
    struct.pack_into("<HH", body, 8, major, minor)
    page = bytes(body) + CHECKSUM.pack(xxhash.xxh3_64_intdigest(bytes(body)))
    slot = np.zeros(golden.GEOMETRY.file_bytes if size is None else size, np.uint8)
    for at in (0, PAGE):
        slot[at : at + len(page)] = np.frombuffer(page, np.uint8)
    return slot


GOOD = Header(golden.GEOMETRY, "job", 3, SlotState.SEALED, golden.VERSION, data_bytes=12288, table_bytes=4096)


def test_a_newer_major_version_is_refused_by_name():
    with pytest.raises(UnknownFormat, match=r"(?s)format 4\.7; this reft reads 2 and 3\..*Fix: "):
        SlotMap(with_header(GOOD, major=4, minor=7))


def test_a_slot_of_the_format_before_is_read():
    """Its capsule has all names in full."""
    slot = np.frombuffer(gzip.decompress((golden.FOLDER / "slot-2.0-sealed.gz").read_bytes()), np.uint8).copy()
    held, tree, data = read_all(slot)
    assert held == golden.layout() and same(tree, golden.TREE) and data == golden.payload().tobytes()


def test_the_oldest_major_version_is_refused_by_name():
    """Its table gives no places. So a reader would take the data shards of a cell for leaves."""
    slot = np.frombuffer(gzip.decompress((golden.FOLDER / "slot-1.0-sealed.gz").read_bytes()), np.uint8)
    with pytest.raises(FormatError, match=r"(?s)format 1\.0; this reft reads 2 and 3\..*Fix: "):
        SlotMap(slot)


def test_any_minor_version_is_read():
    assert SlotMap(with_header(GOOD, minor=9)).header == GOOD


@pytest.mark.parametrize(
    "changes",
    [
        {"geometry": replace(golden.GEOMETRY, chunk_bytes=0)},
        {"geometry": replace(golden.GEOMETRY, data_capacity=1 << 63)},
        {"geometry": replace(golden.GEOMETRY, table_capacity=(1 << 64) - 1)},
        {"table_bytes": 4097},
        {"data_bytes": 12289},
        {"data_bytes": (1 << 64) - 1},
        {"capsule_bytes": CAPSULE_MAX + 1},
        {"state": 4},
        {"state": 255},
    ],
)
def test_impossible_sizes_and_states_are_refused(changes):
    with pytest.raises(FormatError):
        SlotMap(with_header(replace(GOOD, **changes)))


@pytest.mark.parametrize("size", [0, 7, USED - 1, PAGE, 2 * PAGE, golden.GEOMETRY.file_bytes - 1])
def test_a_file_that_is_too_short(size):
    with pytest.raises(FormatError):
        SlotMap(golden.read("sealed")[:size])


@given(st.binary(max_size=600))
def test_any_bytes_are_a_header_or_an_error(data):
    with pytest.raises(FormatError):
        decode_header(data)


@given(st.binary(min_size=HEADER.size - 8, max_size=HEADER.size - 8))
def test_any_fields_with_a_right_checksum_are_a_header_or_an_error(fields):
    body = b"REFTSLOT" + fields
    try:
        header = decode_header(body + CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)))
    except FormatError:
        return
    assert header.data_bytes <= header.geometry.data_capacity and header.geometry.chunk_bytes > 0


def regions() -> st.SearchStrategy[int]:
    """Draws offsets of used bytes in the golden sealed slot."""
    header = SlotMap(golden.read("sealed")).header
    geometry = header.geometry
    spans = [
        (0, USED), (PAGE, PAGE + USED), (geometry.table_offset, geometry.table_offset + header.table_bytes),
        (geometry.digests_offset, geometry.digests_offset + 24),
        (geometry.capsule_offset, geometry.capsule_offset + header.capsule_bytes),
        (geometry.data_offset, geometry.data_offset + header.data_bytes),
    ]  # fmt: skip
    return st.one_of([st.integers(first, last - 1) for first, last in spans])


@given(st.lists(st.tuples(regions(), st.integers(1, 255)), min_size=1, max_size=6))
@example([(2, 1)])
@settings(max_examples=200, deadline=None)
def test_flipped_bytes_never_crash_and_never_yield_a_wrong_payload(flips):
    slot = golden.read("sealed")
    for at, mask in flips:
        slot[at] ^= mask
    try:
        content = read_all(slot)
    except FormatError:
        return
    if content is not None:
        held, tree, data = content
        assert held == golden.layout() and same(tree, golden.NAMED_TREE) and data == golden.payload().tobytes()


def test_every_single_flip_in_a_header_is_noticed():
    """Flips the newest copy: the slot is not SEALED any more, an erasure and no error."""
    slot = golden.read("sealed")
    page = page_of_newest(slot)
    for at in range(page, page + USED):
        slot[at] ^= 16
        assert newest_header(slot).state is SlotState.LANDED
        slot[at] ^= 16


# The life of a slot


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 4 * 4096])
def test_chunks_of_any_size_of_data(size):
    data = bytes(range(256)) * 64
    slot, map_ = filled(data[:size])
    again = SlotMap(slot)
    assert again.chunks == -(-size // 4096)
    assert b"".join(again.chunk(i).tobytes() for i in range(again.chunks)) == data[:size]
    assert again.bad_chunks() == []
    assert (again.table(), again.capsule()) == (b"table", b"capsule")
    assert map_.header == again.header


def test_a_damaged_chunk_is_named():
    _, map_ = filled(bytes(3 * 4096))
    map_.data[4096 + 7] = 1
    map_.data[3 * 4096 - 1] = 1
    assert map_.bad_chunks() == [1, 2]


def test_what_does_not_fit_is_refused_before_anything_is_written():
    slot, map_ = filled(b"kept")
    before = slot.copy()
    with pytest.raises(FormatError, match="don't fit"):
        map_.begin(Version(EPOCH, 2), b"l" * 16, b"t" * 4097, 0)
    with pytest.raises(FormatError, match="don't fit"):
        map_.begin(Version(EPOCH, 2), b"l" * 16, b"t", 4 * 4096 + 1)
    with pytest.raises(FormatError, match=f"the limit is {CAPSULE_MAX}"):
        map_.put_capsule(bytes(CAPSULE_MAX + 1))
    assert np.array_equal(slot, before)


def test_an_emptied_slot_can_not_be_read():
    slot, map_ = filled(b"gone")
    map_.empty()
    assert SlotMap(slot).header.version is None and read_all(slot) is None


def test_the_table_is_written_once_for_all_versions_of_a_layout():
    slot, map_ = filled(b"one")
    at = map_.header.geometry.table_offset
    slot[at] ^= 1
    map_.begin(Version(EPOCH, 2), b"l" * 16, b"table", 3)
    assert slot[at] == ord("t") ^ 1
    map_.begin(Version(EPOCH, 3), b"m" * 16, b"table", 3)
    map_.landed()
    assert SlotMap(slot).table() == b"table"


def test_a_layout_is_new_until_a_version_of_it_has_landed():
    """Zeros are written only while the layout is new. So a failed snapshot must leave it new."""
    slot, map_ = filled(b"one")

    def begin(layout: bytes) -> bool:
        map_.begin(Version(EPOCH, 2), layout * 16, b"table", 3)
        return map_.is_new_layout

    assert not begin(b"l")
    assert begin(b"m") and begin(b"m"), "the first of the two failed before it had landed"
    map_.empty()
    map_ = SlotMap(slot)
    assert begin(b"m") and begin(b"l"), "the other layout's bytes lie over the zeros now"
    map_.landed()
    assert not begin(b"l") and map_.table() == b"table"


def test_a_writer_that_died_before_its_table_leaves_no_header_with_a_table():
    """Otherwise the next writer of that layout would skip the table.

    It would then seal a useless version.
    """
    table, held = table_to(golden.layout()), golden.layout()
    slot = golden.make("empty")
    dying = SlotMap(slot)
    dying._write_bytes = lambda *_: None  # SIGKILL between the header and the table
    dying.begin(golden.VERSION, held.digest, table, held.data_bytes)
    SlotMap(slot).empty()
    next_writer = SlotMap(slot)
    next_writer.begin(Version(EPOCH, 9), held.digest, table, held.data_bytes)
    next_writer.landed()
    assert SlotMap(slot).table() == table


def test_parts_never_overlap_and_begin_at_pages():
    for table, data, chunk in [(0, 0, 4096), (1, 1, 4096), (5000, 10_000_000, 8192), (4096, 1 << 40, 1 << 20)]:
        geometry = Geometry(table, data, chunk)
        sizes = [2 * PAGE, table, 8 * geometry.chunks, CAPSULE_MAX, data]
        offsets = [0, geometry.table_offset, geometry.digests_offset, geometry.capsule_offset, geometry.data_offset]
        ends = [*offsets[1:], geometry.file_bytes]
        for offset, size, end in zip(offsets, sizes, ends, strict=True):
            assert offset % PAGE == 0 and offset + size <= end


@pytest.fixture
def quick_switches():
    """Makes Python threads take turns at once. A thread then waits only for the lock itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_digest_lets_other_threads_run_meanwhile(quick_switches):
    """Long work must not hold the interpreter's lock, or training would wait for it."""
    begun, done = threading.Event(), threading.Event()

    def digest() -> None:
        data = np.zeros(1 << 30, np.uint8)  # pages of zeros, which cost no memory
        begun.set()
        chunk_digest(data)
        done.set()

    thread = threading.Thread(target=digest)
    thread.start()
    begun.wait()
    turns = 0
    while not done.is_set():
        turns += 1
    thread.join()
    assert turns > 10_000


def test_a_page_with_failed_memory_is_an_error_with_its_place(monkeypatch, tmp_path):
    slot, _ = filled(b"x" * 10_000)
    path = tmp_path / "slot"
    path.write_bytes(slot.tobytes())

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open(path, "rb") as file:
        map_ = SlotMap(slot, file.fileno())
        assert map_.bad_chunks() == []
        monkeypatch.setattr(os, "preadv", fails)
        with pytest.raises(FormatError, match=r"byte \d+ of rank 0's slot can't be read: .*Input/output"):
            map_.bad_chunks()


# A slot that is not mapped


@pytest.fixture
def file() -> Iterator[int]:
    """A file for a slot like that of `filled`."""
    descriptor = os.memfd_create("slot")
    os.ftruncate(descriptor, Geometry(4096, 4 * 4096, 4096).file_bytes)
    yield descriptor
    os.close(descriptor)


def test_a_slot_is_written_and_read_through_a_descriptor_as_through_a_mapping(file):
    data = bytes(range(256)) * 40
    mapped, _ = filled(data)
    slot = FileSlotMap.create_in(file, Geometry(4096, 4 * 4096, 4096), "job", 0)
    slot.begin(Version(EPOCH, 1), b"l" * 16, b"table", len(data))
    slot.put_capsule(b"capsule")
    slot.write(0, np.frombuffer(data, np.uint8)[:5000])
    slot.write(5000, np.frombuffer(data, np.uint8)[5000:])
    slot.landed()
    slot.sealed(np.fromiter(slot.digests_of(0, slot.chunks), np.uint64))
    assert os.pread(file, mapped.nbytes, 0) == mapped.tobytes()
    again = FileSlotMap(file)
    assert (again.header, again.table(), again.capsule(), again.bad_chunks()) == (slot.header, b"table", b"capsule", [])
    assert again.digests[: again.chunks].tolist() == SlotMap(mapped).digests[: again.chunks].tolist()
    again.empty()
    assert slot.reread().state is SlotState.EMPTY
    with pytest.raises(TypeError, match="not mapped"):
        _ = slot.data


def test_what_does_not_fit_or_can_not_be_written_is_refused(file, monkeypatch):
    slot = FileSlotMap.create_in(file, Geometry(4096, 4 * 4096, 4096), "job", 0)
    with pytest.raises(FormatError, match="end behind the slot's data"):
        slot.write(4 * 4096 - 1, np.zeros(2, np.uint8))
    slot.write(5 * 4096, np.zeros(0, np.uint8))  # a decoded packet of zeros alone lies behind the data
    slot.begin(Version(EPOCH, 1), b"l" * 16, b"table", 5000)
    with pytest.raises(FormatError, match="1 digests for 2 chunks"):
        slot.sealed(np.zeros(1, np.uint64))

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(FormatError, match=r"can't be written: .*No space left"):
        slot.landed()
    assert slot.header.state is SlotState.WRITING, "what was not written does not count"


def descriptors_of(file: int) -> int:
    """Returns how many descriptors this process has of the file."""
    wanted, found = os.fstat(file), 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found += os.path.samestat(os.fstat(int(number)), wanted)
    return found


def test_a_slot_in_use_reaches_no_other_file(file):
    """The slot's owner may close its descriptor while a thread still writes."""
    own = os.dup(file)
    slot = FileSlotMap.create_in(own, Geometry(4096, 4 * 4096, 4096), "job", 0)
    os.close(own)
    other = os.memfd_create("other")
    slot.write(0, np.ones(4096, np.uint8))
    assert other == own and os.fstat(other).st_size == 0
    os.close(other)
    assert descriptors_of(file) == 2
    del slot
    assert descriptors_of(file) == 1


# The end of the sequence numbers


@pytest.mark.parametrize("seq", [SEQ_MAX + 1, (1 << 64) - 2, (1 << 64) - 1])
def test_a_sequence_number_that_no_writer_reaches_is_damage(seq):
    geometry = Geometry(4096, 4096, 4096)
    forged = Header(geometry, "job", 0, seq=seq)
    with pytest.raises(FormatError, match=f"sequence number {seq}; the last one is {SEQ_MAX}"):
        decode_header(forged.encode())
    slot = np.zeros(geometry.file_bytes, np.uint8)
    sound = SlotMap.create(slot, geometry, "job", 0)
    offset = (seq % 2) * PAGE
    slot[offset : offset + USED] = np.frombuffer(forged.encode(), np.uint8)
    assert newest_header(slot).seq in (0, 1), "the other copy counts"
    sound.begin(Version(EPOCH, 1), b"l" * 16, b"", 0)
    sound.landed()
    assert newest_header(slot).state is SlotState.LANDED


def test_a_step_that_no_message_of_the_round_can_name_is_damage():
    """Reported for its dead trainer, it made each call of Status an error."""
    for step in (STEP_MAX, STEP_MAX + 1, (1 << 64) - 1):
        header = Header(Geometry(4096, 4096, 4096), "job", 0, SlotState.SEALED, Version(EPOCH, step))
        if step == STEP_MAX:
            assert decode_header(header.encode()) == header
        else:
            with pytest.raises(FormatError, match=f"names step {step}; steps end at {STEP_MAX}"):
                decode_header(header.encode())


@pytest.mark.parametrize("opens", [SlotMap, FileSlotMap])
def test_a_slot_at_the_last_sequence_number_is_read_and_not_written(file, opens):
    geometry = Geometry(4096, 4 * 4096, 4096)
    pages = map_file(file, geometry.file_bytes)[1]
    SlotMap.create(pages, geometry, "job", 0)
    pages[:USED] = np.frombuffer(Header(geometry, "job", 0, seq=SEQ_MAX).encode(), np.uint8)
    slot = opens(pages if opens is SlotMap else file)
    assert slot.reread().seq == SEQ_MAX
    for write in (slot.empty, slot.landed, lambda: slot.begin(Version(EPOCH, 1), b"l" * 16, b"", 0)):
        with pytest.raises(FormatError, match="can't be again"):
            write()
    assert slot.reread().seq == SEQ_MAX
