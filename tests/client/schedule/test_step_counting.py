"""Steps that a GradScaler skips: with marks, without marks, and on a device."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from reft.client.memory.cuda import HostCopy
from reft.client.schedule.step_counting import Call, CallCounting
from tests.client.attach.test_run import make
from tests.scenarios.test_state_kinds import state_bytes, step_once


@dataclass
class Flags:
    """A stand-in for the device that tells which steps it skips.

    Attributes:
        skips: whether the device skips the step that is under way.
        begun: the copies of flags that were begun.
        waits: (index of the copy, copies begun at that time) of each wait in the trainer's thread.
    """

    skips: bool = False
    begun: int = 0
    waits: list[tuple[int, int]] = field(default_factory=list)

    def begin_copy(self, tensor: torch.Tensor) -> HostCopy:
        assert tensor.device.type == "meta"
        self.begun += 1
        return HostCopy(torch.tensor([float(self.skips)]), Event(self, self.begun))


@dataclass
class Event:
    flags: Flags
    index: int

    def synchronize(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.flags.waits.append((self.index, self.flags.begun))


class FusedOnDevice(torch.optim.SGD):
    """An optimizer whose kernel skips steps, as only its device knows."""

    flags: Flags

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"] if not self.flags.skips else ():
            parameter.sub_(parameter.grad, alpha=0.1)


def test_the_call_after_a_skipped_one_gets_the_same_number():
    flags, counting = Flags(), CallCounting(0)

    def count(skips: bool) -> Call:
        flags.skips = skips
        return counting.count(flags.begin_copy(torch.empty(1, device="meta")))

    assert [count(skips) for skips in (False, False, True, True, False, False)] == [
        Call.FIRST,
        Call.STEP,
        Call.STEP,
        Call.AGAIN,
        Call.AGAIN,
        Call.STEP,
    ]
    assert counting.count(None) is Call.STEP


@pytest.mark.parametrize("skipped", [{2}, {0}, {3, 4}, {6}])
def test_without_marks_steps_that_a_device_skips_are_not_counted(attach, monkeypatch, skipped):
    """No snapshot of a skipped call is whole, and no call waits for its own flag."""
    model = nn.Linear(4, 4)
    optimizer, flags = FusedOnDevice(model.parameters(), lr=0.1), Flags()
    optimizer.flags, optimizer.found_inf = flags, torch.empty(1, device="meta")
    session = attach(model, optimizer)
    monkeypatch.setattr(session._hooks, "_begin_copy", flags.begin_copy)
    after = {}
    for call in range(9):
        flags.skips = call in skipped
        step_once(model, optimizer)
        if not flags.skips and call - 1 not in skipped:
            after[session.step] = state_bytes(model, optimizer)
            assert session.step == 1 + call - len([each for each in skipped if each < call])
    assert flags.begun == 9 and flags.waits == [(call, call + 1) for call in range(1, 9)]
    assert session.seal(timeout=60).step == 9 - len(skipped)
    other = nn.Linear(4, 4)
    another = FusedOnDevice(other.parameters(), lr=0.1)
    session = attach(other, another)
    assert session.step in after and state_bytes(other, another) == after[session.step]


def test_the_snapshot_of_a_call_that_the_device_skipped_is_void(attach, monkeypatch):
    model = nn.Linear(4, 4)
    optimizer, flags = FusedOnDevice(model.parameters(), lr=0.1), Flags()
    optimizer.flags, optimizer.found_inf = flags, torch.empty(1, device="meta")
    session = attach(model, optimizer)
    monkeypatch.setattr(session._hooks, "_begin_copy", flags.begin_copy)
    for _ in range(3):
        step_once(model, optimizer)
    assert session.seal(timeout=60).step == 3
    flags.skips = True
    step_once(model, optimizer)
    assert not session.seal(timeout=10) and session.stats()["whole_step"] == 3
    other = nn.Linear(4, 4)
    assert attach(other, FusedOnDevice(other.parameters(), lr=0.1)).step == 3


def scaled_step(model, optimizer, scaler, factor: float) -> None:
    """One iteration that drops gradients at its start, as most loops do."""
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4)).sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("is_held", [True, False])
def test_a_marked_step_that_a_scaler_skips_is_a_step(attach, fused, is_held):
    """The snapshot is taken, although gradients exist: the scaler has dropped them."""
    model = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=fused), torch.amp.GradScaler("cpu", init_scale=8.0)
    session = attach(model, optimizer, state={"scaler": scaler} if is_held else {})
    for step in session.steps(4):
        scaled_step(model, optimizer, scaler, float("inf") if step == 3 else 1.0)
    assert model.weight.grad is not None and session.step == 4
    # A fused optimizer is called, and its kernel skips the step.
    assert bool(session.seal(timeout=10)) == (is_held or fused)
    expected = state_bytes(model, optimizer)
    other, fresh = nn.Linear(4, 4), torch.amp.GradScaler("cpu", init_scale=8.0)
    another = torch.optim.AdamW(other.parameters(), fused=fused)
    session = attach(other, another, state={"scaler": fresh} if is_held else {})
    assert session.step == (4 if is_held or fused else 3) and state_bytes(other, another) == expected


@pytest.mark.parametrize("fused", [False, True])
def test_without_marks_a_step_that_a_scaler_skips_counts_nothing(attach, fused):
    model = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=fused), torch.amp.GradScaler("cpu", init_scale=8.0)
    session = attach(model, optimizer, state={"scaler": scaler})
    for call in range(6):
        scaled_step(model, optimizer, scaler, float("inf") if call in (0, 3) else 1.0)
    assert session.step == 4 and session.seal(timeout=60).step == 4


def test_a_scaler_may_be_copied_while_a_session_is_open_and_is_as_before_after_close(attach):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with attach(model, optimizer, state={"scaler": scaler}):
        assert copy.deepcopy(scaler).state_dict() == scaler.state_dict()
        step_once(model, optimizer)
    assert "step" not in vars(scaler)
