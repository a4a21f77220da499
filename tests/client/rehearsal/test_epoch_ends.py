"""Tests of how the recorder sees that an epoch has ended."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from reft.client import torch_internals
from reft.client.data.loader import ResumableLoader
from reft.client.rehearsal.epoch_ends import EpochProgress

ROWS = TensorDataset(torch.zeros(4, 1))
PASS, EPOCH, SET = "a pass over a DataLoader", "epoch {} of a ResumableLoader", "set_epoch of a DistributedSampler"


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.zeros(4, 1)


def started(*loaders):
    progress = EpochProgress(loaders)
    progress.start()
    return progress


def seen(loader, epochs):
    """Returns what the marks of a plain loop see: one a batch."""
    progress, ends = started(), []
    for _ in range(epochs):
        for _ in loader:
            ends.append(progress.at_mark())
    return ends


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(ROWS),
        lambda: DataLoader(Stream()),
        lambda: DataLoader(ROWS, num_workers=1),
        lambda: DataLoader(ROWS, num_workers=1, persistent_workers=True),
        lambda: pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(ROWS),
    ],
    ids=["map", "iterable", "worker", "persistent", "stateful"],
)
def test_the_end_of_a_pass_is_seen_at_the_next_mark(make):
    assert seen(make(), 2)[:5] == [None, [], [], [], [PASS]]


def test_a_pass_that_the_loop_leaves_early_ends_too():
    progress, loader = started(), DataLoader(ROWS)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
        last = progress.at_mark()
    batches = iter(loader)
    next(batches)
    assert (last, progress.at_mark()) == ([], [PASS])


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_pass_over_validation_data_is_no_epoch(is_persistent):
    """An iterator may live on, as in Lightning, until the next validation makes a new one."""
    workers = {"num_workers": 1, "persistent_workers": True} if is_persistent else {}
    progress, training, validation = started(), iter(DataLoader(ROWS)), DataLoader(ROWS, **workers)
    kept, ends = iter(validation), []
    next(kept)
    for step in range(4):
        next(training)
        ends.append(progress.at_mark())
        if step == 2:
            kept = iter(validation)
            assert len([*kept]) == 4
    assert ends == [None, [], [], []]


def test_a_loader_made_anew_for_each_step_is_no_loader_that_trains():
    progress = started()
    assert [progress.at_mark() for _ in range(3) if next(iter(DataLoader(ROWS))) is not None] == [None] * 3


def test_a_loop_without_a_loader_says_nothing():
    progress = started()
    assert [progress.at_mark() for _ in range(3)] == [None] * 3


def test_a_torch_that_does_not_count_batches_says_nothing(monkeypatch):
    monkeypatch.setattr(torch_internals, "BATCHES_GIVEN", "_gone")
    assert seen(DataLoader(ROWS), 2) == [None] * 8


def test_a_sampler_tells_its_new_epoch():
    sampler, progress = DistributedSampler(ROWS, num_replicas=1, rank=0), started()
    sampler.set_epoch(3)  # a restart begins there
    ends = [progress.at_mark(), progress.at_mark()]
    sampler.set_epoch(4)
    assert [*ends, progress.at_mark(), progress.at_mark()] == [None, None, [SET], None]


def test_refts_loader_in_state_tells_its_epochs_from_where_it_was_restored():
    loader = ResumableLoader(DataLoader(ROWS))
    progress = EpochProgress([loader])
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "batch": 3})
    progress.start()
    batches, ends = loader.endless(), []
    for _ in range(6):
        next(batches)
        ends.append(progress.at_mark())
    assert ends == [[], [EPOCH.format(2)], [], [], [], [EPOCH.format(3)]]
