"""reft's loader around one that Accelerate has prepared, with a stand-in for Accelerate's class.

`trainers/test_trainers.py` runs Accelerate itself.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import reft
from reft.errors import ConfigError
from reft.integrations.accelerate import Batches, attach
from tests.support.daemons import ROOT
from tests.support.drawing_data import Drawing


class DataLoaderShard:
    """Iterates as Accelerate's class of this name: one batch ahead, and its generator is shared."""

    def __init__(self, base: DataLoader[Any], generator: torch.Generator, from_rank_0: list[torch.Tensor]) -> None:
        self.base_dataloader, self.generator, self.from_rank_0 = base, generator, from_rank_0
        self.epochs: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        if self.from_rank_0:
            self.generator.set_state(self.from_rank_0.pop())
        batches = iter(self.base_dataloader)
        ahead = next(batches)
        for batch in batches:
            yield ahead
            ahead = batch
        yield ahead


def prepared(*from_rank_0: torch.Tensor, seed: int = 7) -> DataLoaderShard:
    generator = torch.Generator().manual_seed(seed)
    sampler = BatchSampler(RandomSampler(Drawing(), generator=generator), 2, False)
    return DataLoaderShard(DataLoader(Drawing(), batch_sampler=sampler), generator, list(from_rank_0))


def passes(loader: reft.ResumableLoader, end: int) -> list[list[Any]]:
    return [[batch.tolist() for batch in loader] for _ in loader.epochs(end)]


def test_a_prepared_loader_goes_on_with_the_next_batch():
    expected = passes(reft.ResumableLoader(prepared()), 3)
    assert expected[0] != expected[1]
    shard = prepared()
    loader = reft.ResumableLoader(shard)
    batches = loader.endless()
    for _ in range(8):
        next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 2)  # not the batch that is read ahead
    # A restarted rank 0 has a generator in another state, and tells the other ranks.
    resumed_shard = prepared(torch.Generator().manual_seed(1).get_state(), seed=1)
    resumed = reft.ResumableLoader(resumed_shard)
    resumed.load_state_dict(state)
    assert passes(resumed, 3) == [expected[1][2:], expected[2]]
    assert resumed_shard.epochs == [1, 2]


def test_a_prepared_loader_keeps_the_user_s_sampler_and_dataset():
    shard = prepared()
    base = shard.base_dataloader
    reft.ResumableLoader(shard)
    assert shard.base_dataloader is not base
    assert shard.dataset is base.dataset
    assert shard.batch_sampler is base.batch_sampler
    assert isinstance(shard.base_dataloader, DataLoader)
    assert len(shard) == 6


class SeedableRandomSampler(RandomSampler):
    """Seeds each epoch by a seed of its own, as Accelerate's class of this name."""

    def __init__(self, initial_seed: int) -> None:
        super().__init__(Drawing(), generator=torch.Generator())
        self.initial_seed = initial_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()


def test_the_seed_of_accelerate_s_sampler_is_held():
    def seeded(initial_seed: int) -> reft.ResumableLoader:
        return reft.ResumableLoader(DataLoader(Drawing(), batch_size=2, sampler=SeedableRandomSampler(initial_seed)))

    expected = passes(seeded(5), 2)
    resumed = seeded(6)  # a script that does not seed draws another one at each start
    resumed.load_state_dict({**seeded(5).state_dict(), "batch": 3})
    assert passes(resumed, 2) == [expected[0][3:], expected[1]]


def test_other_prepared_loaders_are_refused():
    dispatcher = type("DataLoaderDispatcher", (DataLoaderShard,), {})
    with pytest.raises(ConfigError, match="dispatch_batches=False"):
        reft.ResumableLoader(dispatcher(DataLoader(Drawing()), torch.Generator(), []))


def test_a_loader_that_was_not_prepared_is_refused_on_several_processes():
    names = ("step", "sync_gradients", "scaler", "is_main_process", "_custom_objects")
    accelerator = SimpleNamespace(num_processes=2, **dict.fromkeys(names))
    with pytest.raises(ConfigError, match="each of the 2 processes would read all batches"):
        attach(accelerator, torch.nn.Linear(1, 1), None, reft.ResumableLoader(DataLoader(Drawing())))


def test_no_page_shows_the_former_name():
    pages = [ROOT / "README.md", *(ROOT / "examples").glob("*.md"), *(ROOT / "reft").rglob("*.py")]
    shown = [path for path in pages if re.search(r"\bBatches\(|`Batches`", path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in shown] == ["reft/integrations/accelerate.py"]


def test_the_former_name_stays_and_says_the_new_one():
    with pytest.warns(DeprecationWarning, match=r"reft\.ResumableLoader"):
        batches = Batches(prepared())
    expected = reft.ResumableLoader(prepared()).endless()
    assert [next(batches).tolist() for _ in range(8)] == [next(expected).tolist() for _ in range(8)]
    state = batches.state_dict()
    with pytest.warns(DeprecationWarning):
        resumed = Batches(prepared())
    resumed.load_state_dict(state)
    assert next(resumed).tolist() == next(expected).tolist()
