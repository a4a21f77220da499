"""Which position means the same to other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

import reft
from reft.errors import LayoutChanged
from tests.support.drawing_data import Drawing, DrawingStream


class Numbered(Drawing):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def rank_of(rank: int, ranks: int, batch_size: int = 2) -> reft.ResumableLoader:
    data = Numbered(26)
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank)
    return reft.ResumableLoader(DataLoader(data, batch_size=batch_size, sampler=sampler))


def read(loaders: list[reft.ResumableLoader], batches: int | None = None) -> list[int]:
    """Returns the samples that the ranks read in epoch 0, in the order of the whole epoch."""
    taken: list[list[int]] = []
    for loader in loaders:
        taken.append([])
        for _ in loader.epochs(1):
            for batch in loader:
                taken[-1] += batch.tolist()
                if loader.batch == batches:
                    break
    return [sample for turn in zip(*taken, strict=True) for sample in turn]


def positions(ranks: int, batches: int) -> list[dict[str, Any]]:
    states = []
    for rank in range(ranks):
        loader = rank_of(rank, ranks)
        batch_source = loader.endless()
        for _ in range(batches):
            next(batch_source)
        states.append(loader.state_dict())
    return states


@pytest.mark.parametrize(
    ("before", "batches", "now", "batch", "again"),
    [(4, 1, 2, 2, 0), (2, 2, 4, 1, 0), (4, 2, 3, 2, 4), (2, 7, 3, 5, 0), (2, 3, 1, 6, 0)],
)
def test_samples_split_in_turn_go_on_on_other_ranks(before, batches, now, batch, again, capfd):
    everything = read([rank_of(rank, 1) for rank in range(1)])
    states = positions(before, batches)
    loaders = [rank_of(rank, now) for rank in range(now)]
    for loader in loaders:
        loader.load_state_dicts(states)
        assert (loader.epoch, loader.batch) == (0, batch)
    assert f"{again} samples are read again" in capfd.readouterr().err
    rest = read(loaders)
    assert rest[: len(everything) - batch * 2 * now] == everything[batch * 2 * now :]


def test_a_batch_size_may_change_with_the_ranks():
    loader = rank_of(0, 2, batch_size=4)
    loader.load_state_dicts(positions(4, 3))
    assert loader.batch == 3
    with pytest.raises(LayoutChanged, match="batch_size was 2 and is 4"):
        rank_of(0, 4, batch_size=4).load_state_dict(positions(4, 1)[0])


def loaders_of_torch() -> list[reft.ResumableLoader]:
    return [
        reft.ResumableLoader(DataLoader(Drawing(), batch_size=2, **settings))
        for settings in ({"shuffle": True}, {"sampler": SubsetRandomSampler(range(9))})
    ]


def test_ranks_that_read_alike_keep_their_place():
    for loader in loaders_of_torch():
        state = {**loader.state_dict(), "epoch": 1, "batch": 3}
        loader.load_state_dicts([state, state, state])
        assert (loader.epoch, loader.batch) == (1, 3)


def test_an_epoch_that_nobody_can_divide_anew_begins_again(capfd):
    loader = reft.ResumableLoader(DataLoader(DrawingStream(), batch_size=2))
    state = {**loader.state_dict(), "epoch": 1, "batch": 3}
    loader.load_state_dict(state)
    assert loader.batch == 3
    loader.load_state_dicts([state, state])
    assert (loader.epoch, loader.batch) == (1, 0)
    assert "data: epoch 1 begins again" in capfd.readouterr().err


def test_ranks_at_different_places_are_refused():
    loader = loaders_of_torch()[0]
    with pytest.raises(LayoutChanged, match="different places"):
        loader.load_state_dicts([loader.state_dict(), {**loader.state_dict(), "batch": 1}])
