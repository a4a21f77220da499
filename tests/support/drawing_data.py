"""Datasets whose samples draw from all default generators, and loops over them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

SAMPLES = 11
KINDS = ("shuffle", "distributed", "batch sampler", "iterable")
WORKERS = {
    "no workers": {},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def drawn(index: int) -> list[float]:
    return [index, torch.rand(()).item(), random.random(), np.random.rand()]


class Drawing(Dataset[Any]):
    """Samples by index."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(drawn(index))


class DrawingStream(IterableDataset[Any]):
    """Samples in order, divided among the workers. It has no length."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, SAMPLES, step):
            yield torch.tensor(drawn(index))


def loader_of(kind: str, workers: str, rank: int = 1) -> DataLoader[Any]:
    """Returns a loader. Each epoch has six batches, or three for each of two ranks."""
    settings: Any = WORKERS[workers]
    data = Drawing()
    if kind == "iterable":
        return DataLoader(DrawingStream(), batch_size=2, **settings)
    if kind == "distributed":
        sampler = DistributedSampler(data, num_replicas=2, rank=rank)
        return DataLoader(data, batch_size=2, sampler=sampler, **settings)
    if kind == "batch sampler":
        sampler = BatchSampler(RandomSampler(data), batch_size=2, drop_last=False)
        return DataLoader(data, batch_sampler=sampler, **settings)
    return DataLoader(data, batch_size=2, shuffle=True, **settings)
