"""The restored generators are put back once."""

from __future__ import annotations

import random

import numpy as np
import torch

from reft.client.state import random_state
from reft.client.state.restored_generators import RestoredGenerators


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_the_first_call_puts_all_generators_back_and_later_calls_do_nothing() -> None:
    generators = RestoredGenerators(random_state.capture())
    expected = draw()
    generators.put_back()
    assert draw() == expected
    generators.put_back()
    assert draw() != expected
