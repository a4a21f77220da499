"""Loaders of iterable datasets: a restart reads the epoch again, up to its place.

Each worker draws from generators seeded by (seed, replica, epoch, worker), from the epoch's first
sample on. So the batches that are read again are the same, and so are those that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from reft.client.data import own_generators
from reft.client.data.seeded_generators import Purpose, SeededGenerators, seed_generators
from reft.client.data.sources import length, rebuilt, replica_of, seed_workers, set_epoch
from reft.errors import LayoutChanged


class SeededStream(IterableDataset[Any]):
    """The user's dataset; an iterator in a worker seeds the worker's generators.

    Args:
        inner: the user's dataset.
        seed: the loader's seed.
        replica: this rank's number among the ranks that divide the data.
    """

    def __init__(self, inner: Any, seed: int, replica: int) -> None:
        self.inner = inner
        self._seeds = (seed, Purpose.STREAM, replica)
        self._epoch = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_()  # persistent workers read it

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self._epoch)
        set_epoch(epoch, [self.inner])
        worker = get_worker_info()
        if worker is not None:
            seed_generators(*self._seeds, epoch, worker.id)
        return iter(self.inner)

    def begin(self, epoch: int) -> SeededGenerators:
        """Begins an epoch, and returns the generators for samples that are made in this process."""
        self._epoch.fill_(epoch)
        return SeededGenerators(*self._seeds, epoch, 0)


class IterableSource:
    """The epochs of a loader of an iterable dataset.

    Args:
        loader: the user's loader.
        seed: the loader's seed.
        place: puts the rebuilt loader in the place of the user's, and returns what to iterate.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, place: Callable[[DataLoader[Any]], Iterable[Any]]) -> None:
        self._loader = loader
        self._seed = seed
        self._replica, self.replicas = replica_of([loader.dataset])
        self._stream = SeededStream(loader.dataset, seed, self._replica)
        self._workers = torch.Generator()
        batching = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "collate_fn": loader.collate_fn}
        self._iterable = place(rebuilt(loader, self._stream, self._workers, **batching))
        self.facts = {
            "samples": length(loader.dataset),
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "workers": loader.num_workers,
            "seed": seed,
        }

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """Yields the batches of an epoch, from the batch with number `first` on.

        Raises:
            LayoutChanged: the epoch has fewer batches than it had.
        """
        seed_workers(self._workers, self._loader, self._seed, self._replica, epoch)
        set_epoch(epoch, [self._iterable])
        generators = self._stream.begin(epoch)
        with generators:
            batches = iter(self._iterable)
            for number in range(first):
                if next(batches, self) is self:
                    raise LayoutChanged(f"epoch {epoch} ended after {number} batches; {first} were read before.")
        while True:
            with generators:
                batch = next(batches, self)
            if batch is self:
                return
            yield batch

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Returns nothing: the position is enough."""
        return {}

    def load(self, epoch: int, batch: int, state: Mapping[str, Any]) -> None:
        """Needs nothing but the position."""

    def not_held(self) -> list[str]:
        """Returns a line for each thing that a restart does not bring back."""
        if self._loader.num_workers and not self._loader.persistent_workers:
            return []  # each epoch's workers begin with the same copy of the dataset
        return [
            f"{path}, a generator of its own: draw from the default generators of random, numpy or torch instead"
            for path in own_generators.find(self._loader.dataset, "dataset")
        ]
