"""Training captured in a CUDA graph.

Hooks are called once, during the capture, when nothing runs. They are never called when the graph
is replayed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import reft.client.memory.cuda as device_module
from reft.client.attach import begin
from reft.client.link.slots import MappedSlot
from reft.client.memory.cuda import Device
from reft.client.session import Session
from reft.client.snapshot.cuda_engine import CudaCopyEngine
from reft.wire.slot_format import Geometry, SlotMap
from tests.scenarios.test_state_kinds import state_bytes
from tests.support.cuda_runtime import Runtime
from tests.support.streams import Late


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that is large enough to be copied on the side stream.

    Small leaves are gathered elsewhere.
    """
    model = torch.nn.Linear(512, 512)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()


@pytest.fixture
def device(monkeypatch) -> Late:
    """A fake device whose copies run only when something waits for them."""
    late = Late()
    monkeypatch.setattr(begin, "copy_engine", lambda context, introduction: CudaCopyEngine(late))
    return late


def capture(device: Late, optimizer: torch.optim.Optimizer, session: Session) -> None:
    """Calls the hooks as in a capture; the parameters stay unchanged."""
    device.captures = True
    with session.idle():  # as a schedule's hooks do for gaps
        pass
    before = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.step()
    after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, value in zip(after, before, strict=True):
        parameter.data.copy_(value)
    device.captures = False


def replay(model: torch.nn.Module) -> None:
    """Writes the state without a hook, and without a change of torch's version counters."""
    for parameter in model.parameters():
        parameter.data.add_(1)


@contextlib.contextmanager
def held_up(session: Session) -> Iterator[None]:
    """Stops the snapshot thread; the side stream then only runs if something waits for it."""
    may_go = threading.Event()
    session._window.snapshots.thread._thread.submit(lambda: may_go.wait(20))
    yield
    may_go.set()


def test_a_snapshot_never_holds_what_a_later_replay_writes(attach, device, caplog):
    model, optimizer = make()
    session = attach(model, optimizer)
    step_once(model, optimizer)
    session.step_end()
    assert session.seal(timeout=60)
    with caplog.at_level(logging.WARNING, "reft"):
        capture(device, optimizer, session)
        capture(device, optimizer, session)
    assert sum("call no hook. Mark each step" in message for message in caplog.messages) == 1
    replay(model)
    with held_up(session):
        session.step_end()
        expected = state_bytes(model, optimizer)
        replay(model)  # the next step, which has no mark
    session.close()
    other, another = make()
    assert attach(other, another).step == 2 and state_bytes(other, another) == expected


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_capture_drops_the_snapshot_that_is_not_sealed_yet(attach, device, is_fused):
    model, optimizer = make()
    if is_fused:  # its kernel counts no writes
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    session = attach(model, optimizer)
    step_once(model, optimizer)
    session.step_end()
    assert session.seal(timeout=60)
    with held_up(session):
        step_once(model, optimizer)
        session.step_end()
        capture(device, optimizer, session)
        replay(model)
    session.step_end()
    assert session.seal(timeout=60).step == 3
    assert session.stats()["snapshots"] == 2 and session.stats()["skipped"] == 1


def test_captured_calls_of_the_optimizer_count_no_steps(attach, device):
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in range(3):
        step_once(model, optimizer)
    capture(device, optimizer, session)
    assert session.step == 3


@pytest.mark.parametrize("is_capturable", [False, True])
def test_an_optimizer_that_never_calls_hooks_is_fenced_at_each_mark(attach, device, is_capturable):
    """Its step was captured before attach. SGD has no group with `capturable`."""
    model, optimizer = make()
    step_once(model, optimizer)
    optimizer.zero_grad()  # the end of the captured step, so that no gradients are left
    for group in optimizer.param_groups if is_capturable else ():
        group["capturable"] = True
    session = attach(model, optimizer)
    replay(model)
    with held_up(session):
        session.step_end()
        expected = state_bytes(model, optimizer)
        replay(model)
    session.close()
    other, another = make()
    assert attach(other, another).step == 1 and state_bytes(other, another) == expected


def test_a_capturable_optimizer_that_calls_its_hooks_keeps_the_window_open(attach, device):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "capturable": True}], lr=0.1)
    session = attach(model, optimizer)
    for is_open in (False, True):
        model(torch.ones(2, 4)).sum().backward()
        session.step_end()  # the first mark comes before any call
        assert (session._window.snapshots.open_guard is not None) is is_open
        optimizer.step()


def test_a_mark_reads_the_state_behind_the_stream_of_the_step(attach, device):
    model, optimizer = make()
    session = attach(model, optimizer)
    step_once(model, optimizer)
    assert device.order.count("note writer") == 1
    device.order.clear()
    session.step_end()
    wanted = ("compute waits for writer", "side waits for compute", "writer waits for compute")
    assert [entry for entry in device.order if entry in wanted] == list(wanted)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_mark_within_a_capture_counts_nothing_and_leaves_the_graph_alone(attach, device, caplog, steps_before):
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in range(steps_before):
        step_once(model, optimizer)
        session.step_end()
    device.order.clear()
    device.captures = True
    session.step_end()
    device.captures = False
    assert device.order == [] and session.step == steps_before
    assert "Call it after each replay" in caplog.text
    for step in range(3):
        step_once(model, optimizer)
        session.step_end()
        assert session.seal() and session.step == steps_before + step + 1


class Driver:
    """A fake CUDA driver: the capture mode of this thread, which is global at first."""

    def __init__(self) -> None:
        self.mode, self.modes = 0, []

    def exchange(self, reference) -> None:
        mode = reference._obj
        mode.value, self.mode = self.mode, mode.value

    def note(self, *_: object) -> int:
        self.modes.append(self.mode)
        return 0


def test_calls_of_cuda_in_other_threads_break_no_capture(monkeypatch):
    """A wait for an event would break a capture in the global mode.

    Pinning memory would break it too.
    """
    driver, runtime = Driver(), Runtime()
    runtime.install(monkeypatch)
    monkeypatch.setattr(runtime, "call", driver.note)
    monkeypatch.setattr(device_module, "_capture_mode_setter", lambda: driver.exchange)
    device = Device(torch.device("cuda", 0))
    driver.modes.clear()
    device.host_waits(device.record_side())
    geometry = Geometry(table_capacity=64, data_capacity=64, chunk_bytes=64)
    pages = np.zeros(geometry.file_bytes, np.uint8)
    slot = MappedSlot(0, "slot", -1, SlotMap.create(pages, geometry, "job", 0), pages)
    slot.register(torch.device("cuda", 0))
    slot.close()
    assert slot.map.is_pinned and len(runtime.calls) == 2 and driver.modes == [1, 1, 1] and driver.mode == 0
    with contextlib.suppress(RuntimeError), device_module.beside_captures():
        raise RuntimeError("an error of the device")
    assert driver.mode == 0
