"""The default random generators, seeded by a place in the data.

    training's generators   ──┐ put aside                    put back ┌──
    seeded by (seed, place)   └─ draw an order, or a batch's samples ─┘

So each batch draws the same numbers, whichever worker makes the batch, and training's generators
do not move. Generators of CUDA devices are left alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import TracebackType
from typing import Any

import numpy as np
import torch


class Purpose(IntEnum):
    """What is drawn; equal places of different purposes have different seeds."""

    ORDER = 0  # the order of an epoch
    SAMPLES = 1  # the samples of one batch
    STREAM = 2  # the samples of an iterable dataset, in one worker and epoch
    WORKERS = 3  # the seed that torch gives to the workers of an epoch


def words(seed: int, purpose: Purpose, *place: int) -> list[int]:
    """Returns eight random words of 32 bits, which follow from the arguments alone."""
    return np.random.SeedSequence(seed, spawn_key=(purpose, *place)).generate_state(8).tolist()


def seed_generators(seed: int, purpose: Purpose, *place: int) -> None:
    """Seeds the default generators of Python, numpy and torch on the CPU."""
    first, second, third, fourth, *rest = words(seed, purpose, *place)
    torch.default_generator.manual_seed(first << 32 | second)
    random.seed(third << 32 | fourth)
    np.random.seed(rest)


@contextmanager
def seeded(seed: int, purpose: Purpose, *place: int) -> Iterator[None]:
    """Seeds the default generators inside of `with`, and puts them back after it."""
    outside = _take()
    seed_generators(seed, purpose, *place)
    try:
        yield
    finally:
        _put(outside)


class SeededGenerators:
    """The default generators in states of their own, inside of `with`.

    Each further `with` goes on where the one before ended.

    Args:
        seed: the loader's seed.
        purpose: what is drawn.
        place: numbers that name the place, such as epoch and batch.
    """

    def __init__(self, seed: int, purpose: Purpose, *place: int) -> None:
        self._seed = seed
        self._purpose = purpose
        self._place = place
        self._inside: tuple[Any, ...] | None = None
        self._outside: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outside = _take()
        if self._inside is None:
            seed_generators(self._seed, self._purpose, *self._place)
        else:
            _put(self._inside)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._inside = _take()
        _put(self._outside)


def _take() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _put(states: tuple[Any, ...]) -> None:
    python, numpy, cpu = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.default_generator.set_state(cpu)
