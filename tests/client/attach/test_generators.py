"""When a restore puts the default random generators back, and when not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from reft.client.state.restored_generators import RestoredGenerators
from reft.config import Config
from tests.scenarios.test_state_kinds import train


class Loader:
    """A loader that puts the generators back itself, as reft's does."""

    def __init__(self) -> None:
        self.generators: RestoredGenerators | None = None

    def restored(self, generators: RestoredGenerators) -> None:
        self.generators = generators

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        pass


class Flag(Loader):
    """An object of the user's that happens to have such a name."""

    def restored(self) -> None:
        raise AssertionError("this method is not reft's")


def objects() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def held(attach: Any, **arguments: Any) -> float:
    """Trains and seals two steps; returns what the next step would draw."""
    model, optimizer = objects()
    torch.manual_seed(7)
    train(attach(model, optimizer, **arguments), model, optimizer, steps=2)
    return float(torch.rand(()))


def drawn() -> float:
    """Draws as a script does between attach and its loop; returns the first number of the step."""
    return float(torch.rand(()))


def test_the_first_step_begins_with_the_generators_of_the_mark(attach):
    expected = held(attach)
    session = attach(*objects())
    iter(DataLoader(TensorDataset(torch.zeros(4))))  # draws a seed for workers that it may have
    steps = session.steps(9)
    assert next(steps) == 2 and drawn() == expected
    between = drawn()
    next(steps)
    assert drawn() != between, "later steps go on from what was drawn"


def test_a_fresh_start_and_an_unmoved_restore_keep_the_generators(attach):
    model, optimizer = objects()
    session = attach(model, optimizer, state={"loader": (loader := Loader())})
    torch.manual_seed(5)
    next(session.steps(1))
    assert drawn() == float(torch.rand((), generator=torch.Generator().manual_seed(5)))
    assert loader.generators is None


def test_a_loop_that_marks_by_itself_keeps_what_it_has_drawn(attach):
    expected = held(attach)
    attach(*objects())
    assert drawn() == expected
    session = attach(*objects())
    torch.manual_seed(5)
    session.step_end()
    assert drawn() == float(torch.rand((), generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("generators", ["attach", "user"])
def test_a_deliberate_reseed_stays(attach, generators):
    expected, config, loader = held(attach, state={"loader": Loader()}), Config(generators=generators), Loader()
    torch.manual_seed(5)
    session = attach(*objects(), config=config, state={"loader": loader})
    assert (drawn() == expected) is (generators == "attach")
    torch.manual_seed(5)
    next(session.steps(9))
    assert drawn() == float(torch.rand((), generator=torch.Generator().manual_seed(5)))
    assert loader.generators is None


def test_a_loader_gets_the_generators_after_a_restore_and_each_is_put_back_once(attach):
    expected = held(attach, state={"loader": Loader(), "flag": Flag()})
    loader = Loader()
    session = attach(*objects(), state={"loader": loader, "flag": Flag()})
    drawn()
    assert loader.generators is not None
    loader.generators.put_back()
    assert drawn() == expected
    before = torch.get_rng_state()
    next(session.steps(9))
    assert torch.equal(torch.get_rng_state(), before), "the loader was first"
