"""reft's calls of CUDA, against a fake runtime with CUDA's rules for threads and devices."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reft.client.link.slots import MappedSlot
from reft.client.memory.cuda import Device, HostCopy, begin_host_copy
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore.materialize import make_missing_state
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects
from reft.errors import UnsupportedState
from reft.wire.slot_format import Geometry, SlotMap
from tests.support.cuda_runtime import Runtime
from tests.support.snapshot import Away

OWN = torch.device("cuda", 3)  # this rank's device; other ranks have the others
SMALL = Geometry(table_capacity=0, data_capacity=4096, chunk_bytes=4096)


@pytest.fixture
def runtime(monkeypatch) -> Runtime:
    fake = Runtime()
    fake.install(monkeypatch)
    return fake


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


def test_no_thread_makes_a_context_on_another_ranks_device(runtime):
    """Else device 0 would hold a context of every rank of the node."""
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
    act()  # also where the script never set a device
    in_new_thread(HostCopy(torch.zeros(1), device.record_compute(), OWN).wait)
    slot = slot_of(os.memfd_create("slot"))
    in_new_thread(lambda: slot.register(OWN))
    in_new_thread(slot.close)
    assert [call[0] for call in runtime.calls] == ["register", "unregister"]
    assert runtime.contexts == {3}


class AsTorchDoes(TorchDispatchMode):
    """Copies when something waits, and resolves a lazy source's target at once, as torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default or not args[2]:
            return func(*args, **(kwargs or {}))
        target, source, _ = args
        is_conj, is_neg = source.is_conj(), source.is_neg()
        raw = torch._conj(source) if is_conj else torch._neg_view(source) if is_neg else source
        self.copies.append(lambda: target.copy_(raw))
        if is_conj:
            target.conj_physical_()
        if is_neg:
            target.neg_()
        return target


@pytest.mark.parametrize("lazy", [torch.conj, lambda x: x.conj().imag, lambda x: x.real.t()])
def test_a_lazy_view_comes_to_the_host_as_its_values(runtime, monkeypatch, lazy):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **options: empty(*sizes, **options))
    tensor = lazy(torch.randn(3, 2, dtype=torch.complex64))
    with AsTorchDoes() as device:
        copy = begin_host_copy(tensor.as_subclass(Away))
    (arrive,) = device.copies
    monkeypatch.setattr(runtime, "call", arrive)
    assert torch.equal(copy.wait(), tensor) and copy.device == torch.device("cuda", 0)


def test_a_failed_pin_does_not_end_the_next_step(runtime, caplog):
    """The runtime keeps the error, and torch would raise it at this thread's next kernel."""
    runtime.error = 712
    slot = slot_of(os.memfd_create("slot"))
    slot.register(OWN)
    runtime.launch()
    assert "712" in caplog.text
    slot.close()
    assert len(runtime.calls) == 1, "what was not pinned is not unpinned"


def test_a_slot_is_unpinned_once_and_a_failed_unpin_does_not_reach_torch(runtime):
    slot = slot_of(os.memfd_create("slot"))
    slot.register(OWN)
    runtime.error = 4
    slot.close()
    runtime.launch()
    slot.close()
    assert [call[0] for call in runtime.calls] == ["register", "unregister"]


def test_a_slot_that_is_not_closed_is_unpinned_before_its_pages_are_unmapped(runtime, monkeypatch):
    """For example if attach fails: CUDA would take memory that is mapped there later for pinned.

    A copy would then go into the old slot's pages.
    """
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


def test_the_host_sleeps_when_it_waits_and_waits_only_for_the_side_stream(runtime):
    """A thread may wait for copies for a whole window.

    It must not keep a core busy. A mark never waits.
    """
    device = Device(OWN)
    device.host_waits(device.record_side())
    first = device.times([device.record_compute(), device.record_side()])
    second = device.times([device.record_compute()])
    assert first is not None and second is not None and first[0] < first[1] < second[0]
    assert set(runtime.waits) == {("side", "sleeps")}


def test_a_mark_is_ordered_behind_the_stream_that_has_written(runtime):
    """A loop may train in a stream of its own, and mark outside of it."""
    device, trains = Device(OWN), replace(torch.cuda.current_stream(OWN), name="trains")
    with device.behind_writer():
        assert runtime.stream_waits == [], "nothing has been written yet"
    with runtime.on_stream(trains):
        device.note_writer()
        with device.behind_writer():
            assert runtime.stream_waits == [], "one stream is in order"
    with contextlib.suppress(RuntimeError), device.behind_writer():
        assert runtime.stream_waits == [("compute", "trains")]
        raise RuntimeError("the device is full")
    assert runtime.stream_waits == [("compute", "trains"), ("trains", "compute")]


def test_times_are_right_for_events_before_the_anchor_event(runtime):
    """The iteration profile asks about a window whose copies the engine has already measured."""
    device = Device(OWN)
    early, later, last = (device.record_compute() for _ in range(3))
    (at_later,) = device.times([later])
    at_early, at_last = device.times([early, last])
    assert at_later - at_early == pytest.approx(0.001) and at_last - at_later == pytest.approx(0.001)


def test_state_on_several_devices_is_refused_at_attach(monkeypatch):
    """The engine would refuse it too, but only at each mark. The run would never be protected."""

    def add(self, name, *_, **__) -> None:
        self.tensors[name] = SimpleNamespace(device=torch.device("cuda", len(self.tensors)))

    monkeypatch.setattr(TensorIndex, "add", add)
    tracked = TrackedObjects({"model.0": torch.nn.Linear(2, 2)}, [], {})
    with pytest.raises(
        UnsupportedState, match=r"(?s)cuda:0, cuda:1; one device for each process .* a process for each device"
    ):
        tracked.bind()


def test_a_restored_scale_is_made_on_the_device_of_the_state():
    """A scaler knows only the type of its device, not the index."""
    scaler = SimpleNamespace(_device="cpu", _scale=None)
    tracked = TrackedObjects({"model.0": torch.nn.Linear(2, 2, device="meta")}, [], {"scaler": scaler})
    leaf = SimpleNamespace(name="state.scaler._scale", shape=(), dtype="float32")
    make_missing_state([leaf], tracked, HugePageBuffer(0))
    assert scaler._scale.device.type == "meta"
