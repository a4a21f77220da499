"""When an optimizer's step is about to write: behind the closure that torch's own optimizers call first."""

from __future__ import annotations

import pytest
import torch

from reft.client.state.extract.optimizers import OptimizerExtractor


class Foreign(torch.optim.SGD):
    """May write before it calls its closure, for all that is known."""


def events(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, *arguments: object, **named: object
) -> list[object]:
    """What happened in a step, with the parameter's value at each event."""
    said: list[object] = []
    note = lambda what: said.append((what, round(parameter.item(), 3)))  # noqa: E731

    def closure():
        note("closure")
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    OptimizerExtractor().hook(optimizer, lambda *_: note("before"), lambda *_: note("after"))
    fill = lambda value: closure if value == "closure" else value  # noqa: E731
    optimizer.step(*map(fill, arguments), **{key: fill(value) for key, value in named.items()})
    return said


@pytest.fixture
def parameter():
    value = torch.nn.Parameter(torch.ones(1))
    value.grad = torch.ones(1)
    return value


@pytest.mark.parametrize(("arguments", "named"), [(["closure"], {}), ([], {"closure": "closure"})])
def test_the_closure_runs_before_the_window_ends(parameter, arguments, named):
    said = events(torch.optim.SGD([parameter], lr=0.1), parameter, *arguments, **named)
    assert said == [("closure", 1.0), ("before", 1.0), ("after", 0.8)]


@pytest.mark.parametrize("named", [{}, {"closure": None}])
def test_without_a_closure_the_window_ends_with_the_call(parameter, named):
    assert events(torch.optim.SGD([parameter], lr=0.1), parameter, **named) == [("before", 1.0), ("after", 0.9)]


def test_the_first_of_many_calls_of_the_closure_counts(parameter):
    said = events(torch.optim.LBFGS([parameter], lr=0.1, max_iter=3), parameter, "closure")
    assert [what for what, _ in said] == ["closure", "before", "closure", "closure", "after"]
    assert said[1] == ("before", 1.0)


def test_an_optimizer_of_somebody_else_may_write_first(parameter):
    said = events(Foreign([parameter], lr=0.1), parameter, "closure")
    assert [what for what, _ in said] == ["before", "closure", "after"]
