"""Tests of mapped slots: after `touch`, the first snapshot into a slot costs no page faults."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reft.client.link.slots import MappedSlot, SlotLeases
from reft.client.memory import prefault
from reft.config import Config
from reft.core.commit.version import Epoch
from reft.errors import FormatError
from reft.wire import local_socket
from reft.wire.slot_format import PAGE, Geometry, SharedSlotMap, SlotMap

MANY = Geometry(table_capacity=0, data_capacity=16 << 20, chunk_bytes=256 << 10)


@pytest.fixture
def descriptor():
    """Returns the descriptor of a slot's file with all pages. The slot that maps it owns it."""
    file = os.memfd_create("slot")
    os.posix_fallocate(file, 0, MANY.file_bytes)
    SlotMap.create(np.frombuffer(mmap.mmap(file, MANY.file_bytes), np.uint8), MANY, "job", 0)
    return file


def faults_of_writing(slot: MappedSlot) -> int:
    data = slot.map.data
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    data[::PAGE] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_a_touched_slot_is_written_without_page_faults(descriptor):
    slot = MappedSlot.open(0, "slot", descriptor, MANY.file_bytes, keeps=False)
    slot.touch()
    assert faults_of_writing(slot) < 16


def test_touch_works_without_populate_read(descriptor, monkeypatch):
    monkeypatch.setattr(prefault, "POPULATE_READ", 9999)  # unknown to the kernel, as before Linux 5.14
    slot = MappedSlot.open(0, "slot", descriptor, MANY.file_bytes, keeps=False)
    slot.touch()
    assert faults_of_writing(slot) < 16


def test_the_pages_of_a_kept_slot_are_mapped_for_reading(descriptor):
    slot = MappedSlot.open(0, "slot", descriptor, MANY.file_bytes, keeps=True)
    assert isinstance(slot.map, SharedSlotMap)
    pages = slot.map.map_pages(0, 3 * PAGE)
    assert pages is not None and pages.nbytes == 3 * PAGE and not pages.any()
    slot.close()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_descriptor_is_kept_only_with_keeps(descriptor, keeps):
    slot = MappedSlot.open(0, "slot", descriptor, MANY.file_bytes, keeps)
    out = np.ones(3 * PAGE, np.uint8)
    slot.map.read(PAGE, out)
    assert not out.any()
    assert slot.descriptor == (descriptor if keeps else -1)
    slot.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def leases() -> SlotLeases:
    calls: Any = None
    return SlotLeases("unix:/d", "/s", "job", Epoch(1, bytes(16)), 0, Config(), False, None, calls)


def test_descriptors_of_memfds_are_kept_also_beside_slots_in_files(tmp_path, monkeypatch):
    """A restarted daemon needs them back. Of a file it has one itself."""
    descriptors = [os.memfd_create("slot", os.MFD_ALLOW_SEALING), os.open(tmp_path / "slot", os.O_RDWR | os.O_CREAT)]
    for each in descriptors:
        os.posix_fallocate(each, 0, MANY.file_bytes)
        SlotMap.create(np.frombuffer(mmap.mmap(each, MANY.file_bytes), np.uint8), MANY, "job", 0)
    fcntl.fcntl(descriptors[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    monkeypatch.setattr(local_socket, "ask_slots", lambda *_: list(descriptors))
    memfd, file = leases().take(["a", "b"])
    assert (memfd.descriptor, file.descriptor) == (descriptors[0], -1)
    assert is_open(descriptors[0]) and not is_open(descriptors[1])
    memfd.close()


def test_more_memfds_than_one_message_holds_are_given_back_in_several(monkeypatch):
    asked: list[tuple[list[str], list[int]]] = []
    monkeypatch.setattr(
        local_socket, "ask_slots", lambda _, request, give, __: asked.append((list(request.returned), list(give)))
    )
    count = local_socket.DESCRIPTORS_MAX + 3
    slots: list[Any] = [SimpleNamespace(name=f"slot-{i}", descriptor=i) for i in range(count)]
    leases().give_back([*slots, SimpleNamespace(name="file", descriptor=-1)])
    assert [len(give) for _, give in asked] == [local_socket.DESCRIPTORS_MAX, 3]
    assert [name for names, _ in asked for name in names] == [slot.name for slot in slots]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_left_slot_stays_until_its_last_user_goes(descriptor, is_closed):
    slot = MappedSlot.open(0, "slot", descriptor, MANY.file_bytes, keeps=True)
    pages = weakref.ref(slot.map)
    slot.leave()
    slot.leave()
    out = np.ones(PAGE, np.uint8)
    slot.map.read(PAGE, out)
    assert not out.any() and slot.descriptor == descriptor, "a running snapshot writes on"
    if is_closed:
        slot.close()
        slot.close()
    del slot
    assert pages() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1 << 20], ids=["cut", "no slot"])
def test_a_damaged_slot_leaves_no_descriptor_open(descriptor, nbytes, keeps, monkeypatch):
    """An open descriptor keeps the memory of a slot that the daemon takes for freed."""
    damaged = os.memfd_create("damaged")
    os.ftruncate(damaged, nbytes)
    descriptors = [descriptor, damaged, os.dup(descriptor)]
    monkeypatch.setattr(local_socket, "ask_slots", lambda *_: descriptors)
    with pytest.raises(FormatError):
        leases().take(["a", "b", "c"], keeps)
    assert not any(map(is_open, descriptors))
