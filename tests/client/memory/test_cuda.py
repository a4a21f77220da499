"""What reft asks of CUDA, by the rules of its runtime for threads and devices; there is no CUDA here, see the stand-in."""

from __future__ import annotations

import mmap
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reft.client.link.slots import MappedSlot
from reft.client.memory.cuda import Device
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore.materialize import make_missing_state
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects
from reft.errors import UnsupportedState
from reft.wire.slot_format import Geometry, SlotMap
from tests.support.cuda_runtime import Runtime

OWN = torch.device("cuda", 3)  # of this rank; other ranks have the others
SMALL = Geometry(table_capacity=0, data_capacity=4096, chunk_bytes=4096)


@pytest.fixture
def runtime(monkeypatch) -> Runtime:
    found = Runtime()
    found.install(monkeypatch)
    return found


def in_new_thread(act) -> None:
    errors = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def slot_of(file: int) -> MappedSlot:
    os.posix_fallocate(file, 0, SMALL.file_bytes)
    SlotMap.create(np.frombuffer(mmap.mmap(file, SMALL.file_bytes), np.uint8), SMALL, "job", 0)
    return MappedSlot.open(0, "slot", file, SMALL.file_bytes, keeps=False)


def test_threads_of_reft_make_no_context_on_the_device_of_another_rank(runtime):
    """Device 0 would hold one of every rank of the node."""
    device = Device(OWN)

    def act() -> None:
        for _ in range(2):
            with device.on_side():
                assert runtime.device == 3 and runtime.current_stream().name == "side"
            assert runtime.device == 0 and runtime.current_stream(OWN).name == "compute"
        device.host_waits(device.record_side())
        device.side_waits(device.record_compute())
        device.compute_waits(device.record_side())
        assert device.times([device.record_compute()]) is not None

    in_new_thread(act)
    act()  # also where the script never set its device
    slot = slot_of(os.memfd_create("slot"))
    in_new_thread(lambda: slot.register(OWN))
    in_new_thread(slot.close)
    assert [call[0] for call in runtime.calls] == ["register", "unregister"]
    assert runtime.contexts == {3}


def test_a_slot_that_cannot_be_pinned_does_not_end_the_next_step(runtime, caplog):
    """The runtime keeps the error, and torch takes it for that of the next kernel of this thread."""
    runtime.error = 712
    slot = slot_of(os.memfd_create("slot"))
    slot.register(OWN)
    runtime.launch()
    assert "712" in caplog.text
    slot.close()
    assert len(runtime.calls) == 1, "what was not pinned is not unpinned"


def test_a_slot_is_unpinned_once_and_an_error_of_that_stays_with_reft(runtime):
    slot = slot_of(os.memfd_create("slot"))
    slot.register(OWN)
    runtime.error = 4
    slot.close()
    runtime.launch()
    slot.close()
    assert [call[0] for call in runtime.calls] == ["register", "unregister"]


def test_a_slot_that_nobody_closes_is_unpinned_before_its_pages_are_gone(runtime, monkeypatch):
    """As where attach fails: else CUDA would take what is mapped there next for pinned, and copy into the old slot's pages."""
    slot = slot_of(os.memfd_create("slot"))
    slot.register(OWN)
    ((_, address, nbytes, _),) = runtime.calls
    was_mapped = []
    monkeypatch.setattr(runtime, "call", lambda: was_mapped.append(is_mapped(address, nbytes)))
    del slot
    assert was_mapped == [True] and runtime.calls[-1] == ("unregister", address)
    assert not is_mapped(address, nbytes)


def is_mapped(address: int, nbytes: int) -> bool:
    with open("/proc/self/maps") as lines:
        spans = [line.split()[0].split("-") for line in lines if "memfd:slot" in line]
    return any(int(begin, 16) <= address < address + nbytes <= int(end, 16) for begin, end in spans)


def test_nobody_spins_and_nobody_waits_for_what_training_computes(runtime):
    """A thread that waits for copies does so for a whole window, and a mark waits for nothing."""
    device = Device(OWN)
    device.host_waits(device.record_side())
    first = device.times([device.record_compute(), device.record_side()])
    second = device.times([device.record_compute()])
    assert first is not None and second is not None and first[0] < first[1] < second[0]
    assert set(runtime.waits) == {("side", "sleeps")}


def test_events_are_told_apart_that_were_passed_before_those_asked_about_first(runtime):
    """The rhythm asks about a window of which the engine has told its copies already."""
    device = Device(OWN)
    early, later, last = (device.record_compute() for _ in range(3))
    (at_later,) = device.times([later])
    at_early, at_last = device.times([early, last])
    assert at_later - at_early == pytest.approx(0.001) and at_last - at_later == pytest.approx(0.001)


def test_state_on_several_devices_is_refused_at_attach(monkeypatch):
    """Not by the engine, at each mark of a run that is then never protected."""

    def add(self, name, *_, **__) -> None:
        self.tensors[name] = SimpleNamespace(device=torch.device("cuda", len(self.tensors)))

    monkeypatch.setattr(TensorIndex, "add", add)
    tracked = TrackedObjects({"model.0": torch.nn.Linear(2, 2)}, [], {})
    with pytest.raises(
        UnsupportedState, match=r"cuda:0, cuda:1; one device for each process .* a process for each device"
    ):
        tracked.bind()


def test_a_scale_is_made_again_where_the_state_lies_whatever_device_is_current():
    """The scaler itself knows no more than the kind of its device."""
    scaler = SimpleNamespace(_device="cpu", _scale=None)
    tracked = TrackedObjects({"model.0": torch.nn.Linear(2, 2, device="meta")}, [], {"scaler": scaler})
    leaf = SimpleNamespace(name="state.scaler._scale", shape=(), dtype="float32")
    make_missing_state([leaf], tracked, HugePageBuffer(0))
    assert scaler._scale.device.type == "meta"
