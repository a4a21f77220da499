"""Loaders of map-style datasets: each batch follows from (seed, epoch, number of the batch).

    sampler ─► BatchOrder ─► (epoch, number, indices) ─► any worker: SeededDataset ─► batch

The order of an epoch is drawn by the user's sampler, under generators seeded by (seed, epoch). The
samples of a batch are made and collated under generators seeded by (seed, replica, epoch, number).
So a loader begins anywhere: earlier batches cost their indices only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from reft.client.data import own_generators
from reft.client.data.seeded_generators import Purpose, SeededGenerators, seeded
from reft.client.data.sources import length, rebuilt, replica_of, samplers, seed_workers, set_epoch
from reft.errors import LayoutChanged


class NumberedBatch(NamedTuple):
    """The indices of one batch, and which batch they are."""

    epoch: int
    number: int
    indices: Any


class SeededDataset(Dataset[Any]):
    """Returns whole batches of the user's dataset, by NumberedBatch.

    Args:
        inner: the user's dataset.
        collate: makes a batch of samples, or of one sample if the loader does not batch.
        batches: whether the loader makes batches of samples.
        seed: the loader's seed.
        replica: this rank's number among the ranks that divide the data.
    """

    def __init__(self, inner: Any, collate: Callable[[Any], Any], batches: bool, seed: int, replica: int) -> None:
        self.inner = inner
        self._collate = collate
        self._batches = batches
        self._seeds = (seed, Purpose.SAMPLES, replica)
        self._epoch: int | None = None  # the epoch that this process's dataset knows of

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, batch: NumberedBatch) -> Any:
        if batch.epoch != self._epoch:
            set_epoch(batch.epoch, [self.inner])
            self._epoch = batch.epoch
        with seeded(*self._seeds, batch.epoch, batch.number):
            return self._collate(self._samples(batch.indices))

    def _samples(self, indices: Any) -> Any:
        """Returns what torch's own fetcher returns."""
        if not self._batches:
            return self.inner[indices]
        if getattr(self.inner, "__getitems__", None):
            return self.inner.__getitems__(indices)
        return [self.inner[index] for index in indices]


class BatchOrder:
    """The numbered batches of one epoch, from one of them on.

    Args:
        each_sampler: the sampler that gives the indices, then the samplers inside of it.
        dataset: the user's dataset.
        seed: the loader's seed.

    Attributes:
        epoch: the epoch that the next iterator is for.
        first: the number of the iterator's first batch.
    """

    def __init__(self, each_sampler: list[Any], dataset: Any, seed: int) -> None:
        self.epoch = self.first = 0
        self._samplers = each_sampler
        self._seed = seed
        self._generators = own_generators.find(each_sampler[0], "sampler", without=[dataset])
        self._began: tuple[int, dict[str, Any]] | None = None  # an epoch, and the generators at its begin

    def __iter__(self) -> Iterator[NumberedBatch]:
        epoch, first = self.epoch, self.first
        set_epoch(epoch, self._samplers)
        if self._began is not None and self._began[0] == epoch:
            own_generators.put(self._generators, self._began[1])
        self._began = epoch, own_generators.take(self._generators)
        generators = SeededGenerators(self._seed, Purpose.ORDER, epoch)
        # Samplers of torch draw all that they need for their first indices.
        draws_later = any(not type(each).__module__.startswith("torch.utils.data.") for each in self._samplers)
        with generators:
            batches = islice(self._samplers[0], first, None)
        for number in count(first):
            with generators if draws_later or number == first else nullcontext():
                indices = next(batches, None)
            if indices is None:
                return
            yield NumberedBatch(epoch, number, indices)

    def state(self, epoch: int) -> dict[str, Any]:
        """Returns the samplers' own generators, as they were when the epoch began."""
        if self._began is not None and self._began[0] == epoch:
            return self._began[1]
        return own_generators.take(self._generators)

    def load(self, epoch: int, states: Mapping[str, Any]) -> None:
        """Begins the epoch, whenever it is iterated, with these generators.

        Raises:
            LayoutChanged: the samplers have other generators.
        """
        if states.keys() != self._generators.keys():
            raise LayoutChanged(
                f"the samplers had the generators {sorted(states)}; now they have {sorted(self._generators)}."
            )
        own_generators.put(self._generators, states)
        self._began = epoch, dict(states)


class MapSource:
    """The epochs of a loader of a map-style dataset.

    Args:
        loader: the user's loader.
        seed: the loader's seed.
        place: puts the rebuilt loader in the place of the user's, and returns what to iterate.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, place: Callable[[DataLoader[Any]], Iterable[Any]]) -> None:
        self._loader = loader
        self._seed = seed
        self._samplers = samplers(loader)
        self._replica, self.replicas = replica_of(self._samplers)
        self._order = BatchOrder(self._samplers, loader.dataset, seed)
        dataset = SeededDataset(
            loader.dataset, loader.collate_fn, loader.batch_sampler is not None, seed, self._replica
        )
        self._workers = torch.Generator()
        self._iterable = place(
            rebuilt(loader, dataset, self._workers, batch_size=None, sampler=self._order, collate_fn=_unchanged)
        )
        self.facts = {
            "samples": length(loader.dataset),
            "batch_size": getattr(self._samplers[0], "batch_size", None),
            "drop_last": loader.drop_last,
            "sampler": " of ".join(type(each).__name__ for each in self._samplers),
            "seed": seed,
        }

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """Returns the batches of an epoch, from the batch with number `first` on."""
        seed_workers(self._workers, self._loader, self._seed, self._replica, epoch)
        set_epoch(epoch, [self._iterable])  # Accelerate's loader has one
        self._order.epoch, self._order.first = epoch, first
        return iter(self._iterable)

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Returns the samplers' own generators, as they were when the epoch began, and seeds."""
        return {
            "generators": self._order.state(epoch),
            "initial_seeds": [getattr(each, "initial_seed", None) for each in self._samplers],  # Accelerate's
        }

    def load(self, epoch: int, batch: int, state: Mapping[str, Any]) -> None:
        """Sets the samplers' own generators and seeds."""
        self._order.load(epoch, state["generators"])
        for sampler, initial_seed in zip(self._samplers, state["initial_seeds"], strict=True):
            if initial_seed is not None:
                sampler.initial_seed = initial_seed

    def not_held(self) -> list[str]:
        """Returns a line for each thing that a restart does not bring back."""
        root = {"dataset": self._loader.dataset, "collate_fn": self._loader.collate_fn}
        lines = [
            f"{path}, a generator of its own: draw from the default generators of random, numpy or torch instead"
            for name, value in root.items()
            for path in own_generators.find(value, name)
        ]
        lines += [
            f"the place of {type(each).__name__}, which is its own iterator: give it an __iter__ that begins the epoch"
            for each in self._samplers
            if hasattr(each, "__next__")
        ]
        return lines


def _unchanged(batch: Any) -> Any:
    """Returns the batch: SeededDataset has collated it."""
    return batch
