"""Loaders that know their own position: torchdata's StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import RandomSampler

from reft.client.data.seeded_generators import Purpose, seeded
from reft.client.data.sources import length, replica_of, samplers, set_epoch


class StatefulSource:
    """The epochs of a loader with state_dict and load_state_dict.

    The loader draws from training's generators, as it does alone.

    Args:
        loader: the user's loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._samplers = samplers(loader)
        _, self.replicas = replica_of(self._samplers)
        self.facts = {"class": type(loader).__name__, "samples": length(loader.dataset), "workers": loader.num_workers}
        self._held: tuple[int, int, Any] | None = None  # epoch, batch, and the loader's state there
        self._ended: int | None = None  # the newest epoch whose end was reached

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """Yields the batches of an epoch, from the batch with number `first` on."""
        set_epoch(epoch, [*self._samplers, self._loader.dataset])
        if not first:
            self._ended = None
            batches = iter(self._loader)
        else:
            with seeded(0, Purpose.WORKERS, epoch, first):  # a begun epoch moved training's generators then
                self._loader.load_state_dict(self._state_at(epoch, first))
                if self._ended == epoch:
                    self._loader.state_dict()  # takes the state over; an iterator would begin the next epoch
                    return
                batches = iter(self._loader)
        yield from batches
        self._ended = epoch

    def _state_at(self, epoch: int, batch: int) -> Any:
        """Returns the loader's state at a batch. Later batches may have been looked at."""
        if self._held is None or self._held[:2] != (epoch, batch):
            self._held = epoch, batch, self._loader.state_dict()
        return self._held[2]

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Returns the loader's own state; nothing before the epoch's first batch."""
        return {"loader": self._loader.state_dict(), "ended": self._ended == epoch} if batch else {}

    def load(self, epoch: int, batch: int, state: Mapping[str, Any]) -> None:
        """Holds the loader's own state until the epoch is iterated."""
        self._held = (epoch, batch, state["loader"]) if batch else None
        self._ended = epoch if batch and state["ended"] else None

    def not_held(self) -> list[str]:
        """Returns a line for each thing that a restart does not bring back."""
        if not self._loader.num_workers:
            if not self._has_given_generator():
                return []
            return [
                "the order of later epochs that generator= of a StatefulDataLoader gives: leave it out, or wrap a "
                "DataLoader in its place"
            ]
        return ["random numbers that workers of a StatefulDataLoader draw: a DataLoader in its place holds them"]

    def _has_given_generator(self) -> bool:
        """Returns whether a generator of the user gives the order, not one that torchdata made."""
        return any(
            each.generator is self._loader.generator or isinstance(each, RandomSampler)
            for each in self._samplers
            if getattr(each, "generator", None) is not None
        )
