"""Which marks give no snapshot because the state would not be complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from reft.client.schedule.foreign_optimizers import ForeignOptimizerGuard


class DeepSpeedEngine:
    """An optimizer that is not torch's, and keeps its gradients in buffers of its own."""


def test_a_mark_between_the_micro_batches_of_an_engine_gives_no_snapshot():
    guard = ForeignOptimizerGuard([DeepSpeedEngine()], lambda _: False, lambda _: None)
    guard.own_step(0)
    assert guard.mark(is_unmarked=False, modules=()) == ""
    reason = guard.mark(is_unmarked=False, modules=())
    assert "no step of DeepSpeedEngine since the last mark" in reason
    guard.own_step(0)
    assert guard.mark(is_unmarked=False, modules=()) == ""


def test_a_step_that_a_gradient_scaler_skipped_is_a_step_of_any_optimizer():
    guard = ForeignOptimizerGuard([DeepSpeedEngine()], lambda _: False, lambda _: None)
    guard.skipped_step()
    assert guard.mark(is_unmarked=False, modules=()) == ""


@contextmanager
def guarded(*passed: torch.optim.Optimizer) -> Iterator[ForeignOptimizerGuard]:
    """Returns a guard with the hooks that a session has."""
    guard = ForeignOptimizerGuard(passed, lambda _: True, lambda _: None)
    removables = [each.register_step_pre_hook(lambda *_, i=i: guard.own_step(i)) for i, each in enumerate(passed)]
    try:
        yield guard
    finally:
        guard.remove()
        for each in removables:
            each.remove()


def parameter() -> nn.Parameter:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return weight


def steps_of(*optimizers: torch.optim.Optimizer) -> None:
    for each in optimizers:
        each.step()


@pytest.mark.parametrize("comes_first", [False, True])
def test_a_second_optimizer_beside_the_passed_one_gives_no_snapshot_from_its_second_iteration_on(comes_first):
    weight = parameter()
    passed, other = torch.optim.SGD([weight]), torch.optim.AdamW([weight])
    both = (other, passed) if comes_first else (passed, other)
    with guarded(passed) as guard:
        reasons = []
        for stepping in (both, (passed,), both, (passed,), both):
            steps_of(*stepping)
            reasons.append(guard.mark(is_unmarked=False, modules=()))
    assert [bool(each) for each in reasons] == [False, False, True, False, True]
    assert "updated by a AdamW that was not passed to attach" in reasons[-1]


@pytest.mark.parametrize("settings", [{"momentum": 0.0}, {"momentum": 0.9}])
def test_an_optimizer_without_state_or_made_anew_in_each_iteration_is_no_second_one(settings):
    weight = parameter()
    passed, lasting = torch.optim.AdamW([weight]), torch.optim.SGD([weight])
    with guarded(passed) as guard:
        for _ in range(4):
            anew = torch.optim.SGD([weight], **settings)
            steps_of(anew, lasting, anew, passed)
            assert guard.mark(is_unmarked=False, modules=()) == ""


class Around(torch.optim.SGD):
    """An optimizer whose step calls that of another one, and may raise."""

    inner: Any = None
    raises = False

    def step(self, closure: Any = None) -> None:
        if self.raises:
            raise FloatingPointError
        self.inner.step()


@pytest.mark.parametrize("is_inner_passed", [False, True])
def test_a_step_inside_or_around_the_step_of_a_passed_one_is_no_second_one(is_inner_passed):
    weight = parameter()
    outer = Around([weight])
    outer.inner = torch.optim.AdamW([weight])
    with guarded(outer.inner if is_inner_passed else outer) as guard:
        for _ in range(4):
            steps_of(outer)
            assert guard.mark(is_unmarked=False, modules=()) == ""


def test_a_second_optimizer_is_seen_after_a_step_that_raised():
    weight = parameter()
    passed, other = Around([weight]), torch.optim.AdamW([weight])
    passed.inner, passed.raises = torch.optim.SGD([weight]), True
    with guarded(passed) as guard:
        with pytest.raises(FloatingPointError):
            passed.step()
        guard.mark(is_unmarked=False, modules=())
        passed.raises = False
        reasons = []
        for _ in range(2):
            steps_of(passed, other)
            reasons.append(guard.mark(is_unmarked=False, modules=()))
    assert [bool(each) for each in reasons] == [False, True]
