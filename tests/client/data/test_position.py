"""A loader goes on from each place, with each kind of sampler and of worker.

The process does not die here: new objects get the state. `e2e/test_data_position.py` kills.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

import reft
from reft.client.state import random_state, serialization
from reft.client.state.restored_generators import RestoredGenerators
from tests.support.drawing_data import KINDS, WORKERS, loader_of

EPOCHS = 3
PLACES = ("mid-epoch", "last batch", "between epochs", "in validation")


class Loop:
    """A training loop that draws from the default generator in each step and each validation."""

    def __init__(self, kind: str, workers: str) -> None:
        self.loader = reft.ResumableLoader(loader_of(kind, workers))

    def run(self) -> Iterator[tuple[str, Any]]:
        """Yields the loop's events, and before each epoch a place where it may be marked."""
        for epoch in self.loader.epochs(EPOCHS):
            yield f"epoch {epoch}", None
            for batch in self.loader:
                yield f"batch {epoch}", (batch.tolist(), torch.rand(()).item())
            yield f"validation {epoch}", torch.rand(()).item()

    def state(self) -> dict[str, Any]:
        """Returns what a capsule has of the loop, through the capsule's bytes."""
        tree = {"subjects": {}, "data": serialization.to_plain(self.loader.state_dict())}
        return serialization.decode(serialization.encode({**tree, "random": random_state.capture()}))

    def load(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(serialization.from_plain(state["data"]))
        torch.rand(7)  # what a script draws between attach and its first step
        self.loader.restored(RestoredGenerators(state["random"]))


def is_at(place: str, events: list[tuple[str, Any]], batches: int) -> bool:
    """Decides whether the loop is where epoch 1 is to be interrupted."""
    names = [name for name, _ in events]
    taken = names.count("batch 1")
    return {
        "mid-epoch": names[-1] == "batch 1" and taken == 3,
        "last batch": names[-1] == "batch 1" and taken == batches,
        "between epochs": names[-1] == "epoch 2",
        "in validation": names[-1] == "validation 1",
    }[place]


@cache
def undisturbed(kind: str, workers: str) -> tuple[list[tuple[str, Any]], dict[str, tuple[int, dict[str, Any]]]]:
    """Returns all events, and for each place: the number of events before it, and the state."""
    torch.manual_seed(5)
    loop = Loop(kind, workers)
    events: list[tuple[str, Any]] = []
    states: dict[str, tuple[int, dict[str, Any]]] = {}
    batches = {"distributed": 3}.get(kind, 6)
    for event in loop.run():
        events.append(event)
        for place in PLACES:
            if place not in states and is_at(place, events, batches):
                states[place] = len(events), loop.state()
    return events, states


def without_draws(events: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the events without what the loop itself drew."""
    return [(name, value[0] if name.startswith("batch") else None) for name, value in events]


# Workers that are forked for each epoch take longest.
CELLS = [
    pytest.param(*cell, marks=[pytest.mark.slow] * (cell[1] == "2 workers" and cell[::2] != ("shuffle", "mid-epoch")))
    for cell in product(KINDS, WORKERS, PLACES)
]


@pytest.mark.parametrize(("kind", "workers", "place"), CELLS)
def test_a_new_loader_goes_on_with_the_next_batch(kind, workers, place):
    # The draws of a map-style dataset do not depend on workers. Those of an iterable one depend on
    # the number of workers, and not on whether the workers persist.
    has_workers = kind == "iterable" and workers != "no workers"
    events, states = undisturbed(kind, "2 persistent workers" if has_workers else "no workers")
    count, state = states[place]
    torch.manual_seed(99)
    loop = Loop(kind, workers)
    loop.load(state)
    resumed = [event for event in loop.run() if not event[0].startswith("epoch")]
    if place == "in validation":  # the mark lies behind a validation, which the body runs again
        expected = [event for event in events[count - 1 :] if not event[0].startswith("epoch")]
        assert without_draws(resumed) == without_draws(expected)
    else:
        assert resumed == [event for event in events[count:] if not event[0].startswith("epoch")]
