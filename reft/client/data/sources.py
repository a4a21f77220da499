"""What a ResumableLoader asks of the loader below, and what all kinds share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, get_worker_info

from reft.client.data.seeded_generators import Purpose, words

KEPT = (
    *("num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"),
    *("pin_memory_device", "in_order"),
)


class EpochSource(Protocol):
    """The epochs of one loader."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the meaning of a position depends on."""

    @property
    def replicas(self) -> int:
        """The number of ranks that divide each epoch, as far as the sampler tells."""

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """Returns the batches of an epoch, from the batch with number `first` on."""

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Returns what a restart needs besides the position, as plain values."""

    def load(self, epoch: int, batch: int, state: Mapping[str, Any]) -> None:
        """Goes back to the state. The next call of `batches` is for the same epoch and batch."""

    def not_held(self) -> list[str]:
        """Returns a line for each thing that a restart does not bring back."""


class WorkerSettings:
    """Runs in each worker first: shows the worker the user's own dataset.

    Many a `worker_init_fn` divides `get_worker_info().dataset` among the workers.

    Args:
        init_fn: the user's worker_init_fn.
    """

    def __init__(self, init_fn: Callable[[int], None] | None) -> None:
        self._init_fn = init_fn

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.inner)  # WorkerInfo is frozen
        if self._init_fn is not None:
            self._init_fn(worker)


def rebuilt(loader: DataLoader[Any], dataset: Any, generator: torch.Generator, **batching: Any) -> DataLoader[Any]:
    """Returns a loader with the user's settings, for another dataset.

    Args:
        loader: the user's loader.
        dataset: the user's dataset, wrapped; the attribute `inner` is the user's.
        generator: gives the seed of the workers.
        batching: the settings that say how batches are made.
    """
    settings = {name: getattr(loader, name) for name in KEPT}
    worker_init_fn = WorkerSettings(loader.worker_init_fn)
    return DataLoader(dataset, worker_init_fn=worker_init_fn, generator=generator, **settings, **batching)


def seed_workers(generator: torch.Generator, loader: DataLoader[Any], seed: int, replica: int, epoch: int) -> None:
    """Seeds the workers of an epoch. Persistent workers have the same seed in every process."""
    first, second, *_ = words(seed, Purpose.WORKERS, replica, 0 if loader.persistent_workers else epoch)
    generator.manual_seed(first << 32 | second)


def samplers(loader: DataLoader[Any]) -> list[Any]:
    """Returns the sampler of batches, or of samples, and all samplers inside of it."""
    found: list[Any] = []
    waiting = [loader.sampler if loader.batch_sampler is None else loader.batch_sampler]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is not None and all(sampler is not each for each in found):
            found.append(sampler)
            waiting += [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]
    return found


def replica_of(each_sampler: Iterable[Any]) -> tuple[int, int]:
    """Returns this rank's number among the ranks that divide the data, and their number.

    Ranks of one tensor-parallel group read the same data, so the number of a process says nothing.
    """
    for sampler in each_sampler:
        for rank, count in (("rank", "num_replicas"), ("process_index", "num_processes")):
            if hasattr(sampler, rank) and hasattr(sampler, count):
                return getattr(sampler, rank), getattr(sampler, count)
    return 0, 1


def set_epoch(epoch: int, each: Iterable[Any]) -> None:
    """Tells samplers and datasets the epoch, if they want to know."""
    for value in each:
        if hasattr(value, "set_epoch"):
            value.set_epoch(epoch)


def length(value: Any) -> int | None:
    """Returns the length; None if there is none."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None
