"""When an optimizer begins to write: after the closure, in torch's own optimizers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from reft.client.state.tracked_objects import required_extractor


class Foreign(torch.optim.SGD):
    """An optimizer outside torch, which may write before it calls its closure."""


def events(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, *arguments: object, **keywords: object
) -> list[object]:
    """Returns the events of a step, each with the parameter's value."""
    log: list[object] = []
    note = lambda event: log.append((event, round(parameter.item(), 3)))  # noqa: E731

    def closure():
        note("closure")
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    required_extractor(optimizer).hook(optimizer, lambda *_: note("before"), lambda *_: note("after"))
    fill = lambda value: closure if value == "closure" else value  # noqa: E731
    optimizer.step(*map(fill, arguments), **{key: fill(value) for key, value in keywords.items()})
    return log


@pytest.fixture
def parameter():
    value = torch.nn.Parameter(torch.ones(1))
    value.grad = torch.ones(1)
    return value


@pytest.mark.parametrize(("arguments", "named"), [(["closure"], {}), ([], {"closure": "closure"})])
def test_the_closure_runs_before_the_window_ends(parameter, arguments, named):
    log = events(torch.optim.SGD([parameter], lr=0.1), parameter, *arguments, **named)
    assert log == [("closure", 1.0), ("before", 1.0), ("after", 0.8)]


@pytest.mark.parametrize("named", [{}, {"closure": None}])
def test_without_a_closure_the_window_ends_with_the_call(parameter, named):
    assert events(torch.optim.SGD([parameter], lr=0.1), parameter, **named) == [("before", 1.0), ("after", 0.9)]


def test_the_first_of_many_calls_of_the_closure_counts(parameter):
    log = events(torch.optim.LBFGS([parameter], lr=0.1, max_iter=3), parameter, "closure")
    assert [event for event, _ in log] == ["closure", "before", "closure", "closure", "after"]
    assert log[1] == ("before", 1.0)


def test_an_optimizer_outside_torch_may_write_before_its_closure(parameter):
    log = events(Foreign([parameter], lr=0.1), parameter, "closure")
    assert [event for event, _ in log] == ["before", "closure", "after"]


@pytest.fixture
def alone():
    """A process group of one rank: ZeroRedundancyOptimizer needs one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("arguments", "named"), [(["closure"], {}), ([], {"closure": "closure"})])
def test_torchs_zero_runs_the_closure_before_the_window_ends(parameter, alone, arguments, named):
    """Gradients are recorded when the window ends: those of the closure."""
    log = events(ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=0.1), parameter, *arguments, **named)
    assert log == [("closure", 1.0), ("before", 1.0), ("after", 0.8)]


def test_torchs_zero_of_another_class_may_write_before_its_closure(parameter, alone):
    log = events(ZeroRedundancyOptimizer([parameter], Foreign, lr=0.1), parameter, "closure")
    assert [event for event, _ in log] == ["before", "closure", "after"]
