"""Passes, looks, refusals and what is said, of reft.ResumableLoader."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import reft
from reft.client.state import random_state, serialization
from reft.client.state.host_state import HostState
from reft.client.state.restored_generators import RestoredGenerators
from reft.client.state.tracked_objects import TrackedObjects
from reft.config import Config
from reft.errors import ConfigError, LayoutChanged
from tests.support.drawing_data import SAMPLES, Drawing, DrawingStream, loader_of


def resumable(seed: int = 0, **settings: Any) -> reft.ResumableLoader:
    return reft.ResumableLoader(DataLoader(Drawing(), **{"batch_size": 2, **settings}), seed=seed)


def epochs(loader: reft.ResumableLoader, end: int) -> list[list[Any]]:
    """Returns the batches of each epoch that is left."""
    return [[batch.tolist() for batch in loader] for _ in loader.epochs(end)]


def indices(batches: list[Any]) -> list[int]:
    return [int(sample[0]) for batch in batches for sample in batch]


def through_bytes(state: dict[str, Any]) -> dict[str, Any]:
    plain = {"subjects": {}, "data": serialization.to_plain(state)}
    return serialization.from_plain(serialization.decode(serialization.encode(plain))["data"])


class Shuffled(Sampler[int]):
    """Draws its orders from a generator of its own."""

    def __init__(self, generator: Any, draw: Any) -> None:
        self.generator, self.draw = generator, draw

    def __iter__(self) -> Any:
        return iter(self.draw(self.generator))


def python_order(generator: random.Random) -> list[int]:
    return generator.sample(range(SAMPLES), SAMPLES)


def numpy_order(generator: Any) -> list[int]:
    return generator.permutation(SAMPLES).tolist()


def drawn_order(_: None) -> Any:
    """Draws each index from the default generators when it is asked for."""
    for _ in range(SAMPLES):
        yield (random.randrange(SAMPLES) + int(torch.randint(SAMPLES, ())) + np.random.randint(SAMPLES)) % SAMPLES


SAMPLERS = {
    "own torch generator": lambda: RandomSampler(Drawing(), generator=torch.Generator().manual_seed(3)),
    "with replacement": lambda: RandomSampler(Drawing(), replacement=True, num_samples=40),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 3, 9),
    "subset": lambda: SubsetRandomSampler(range(3, 10)),
    "own random.Random": lambda: Shuffled(random.Random(3), python_order),
    "own numpy Generator": lambda: Shuffled(np.random.default_rng(3), numpy_order),
    "drawn as it goes": lambda: Shuffled(None, drawn_order),
    "own numpy RandomState": lambda: Shuffled(np.random.RandomState(3), numpy_order),
}


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_any_sampler_goes_on_in_its_order(sampler, batch):
    expected = epochs(resumable(sampler=SAMPLERS[sampler]()), 3)
    assert expected[0] != expected[1] != expected[2]
    loader = resumable(sampler=SAMPLERS[sampler]())
    batches = loader.endless()
    for _ in range(len(expected[0]) + batch):
        next(batches)
    state = through_bytes(loader.state_dict())
    resumed = resumable(sampler=SAMPLERS[sampler]())
    resumed.load_state_dict(state)
    rest = epochs(resumed, 3)
    # At batch 0 the mark lies at the end of epoch 0, so an empty pass comes first.
    assert rest == [expected[1][2:], expected[2]] if batch else rest == [[], *expected[1:]]


def test_a_loader_without_batches_goes_on():
    expected = epochs(resumable(batch_size=None, shuffle=True), 2)
    assert sorted(int(sample[0]) for sample in expected[0]) == list(range(SAMPLES))
    resumed = resumable(batch_size=None, shuffle=True)
    resumed.load_state_dict({**resumed.state_dict(), "epoch": 1, "batch": 4})
    assert epochs(resumed, 2) == [expected[1][4:]]


def test_training_s_generators_stay_where_they_are():
    for settings in ({"shuffle": True}, {"shuffle": True, "num_workers": 1}):
        before = random_state.capture()
        epochs(resumable(**settings), 1)
        assert serialization.encode({"subjects": {}, "random": random_state.capture()}) == serialization.encode(
            {"subjects": {}, "random": before}
        )


def test_orders_and_draws_follow_from_the_seed_and_the_epoch():
    torch.manual_seed(1)
    first = epochs(resumable(shuffle=True), 2)
    torch.manual_seed(2)
    assert epochs(resumable(shuffle=True), 2) == first
    assert sorted(indices(first[0])) == list(range(SAMPLES))
    assert indices(first[0]) != indices(first[1])
    assert indices(epochs(resumable(seed=1, shuffle=True), 1)[0]) != indices(first[0])
    drawn = [sample[1] for epoch in first for batch in epoch for sample in batch]
    assert len(set(drawn)) == len(drawn)


def test_ranks_that_divide_the_data_draw_different_numbers():
    by_rank = [
        {sample[1] for epoch in epochs(reft.ResumableLoader(loader_of("distributed", "no workers", rank)), 2)
         for batch in epoch for sample in batch}
        for rank in (0, 1)
    ]  # fmt: skip
    assert not by_rank[0] & by_rank[1]


def test_a_pass_that_is_left_is_followed_by_the_next_epoch():
    loader = resumable()
    taken = []
    for epoch in loader.epochs(2):
        for batch in loader:
            taken.append((epoch, loader.batch, int(batch[0, 0])))
            if loader.batch == 2:
                break
    assert taken == [(0, 1, 0), (0, 2, 2), (1, 1, 0), (1, 2, 2)]
    assert (loader.epoch, loader.batch) == (2, 0)


def test_a_look_at_the_first_batch_takes_nothing_from_the_pass():
    expected = epochs(resumable(shuffle=True), 2)
    loader = resumable(shuffle=True)
    assert next(iter(loader)).tolist() == expected[0][0]  # before the epochs
    loader.load_state_dict({**loader.state_dict(), "batch": 3})
    seen = []
    for _ in loader.epochs(2):
        seen.append([next(iter(loader)).tolist(), *(batch.tolist() for batch in loader)])
    assert seen == [[expected[0][3], *expected[0][3:]], [expected[1][0], *expected[1]]]


def test_a_second_pass_over_an_epoch_is_refused():
    loader = resumable()
    for _ in loader.epochs(1):
        assert len(list(loader)) == 6
        with pytest.raises(ConfigError, match="passed over up to batch 6"):
            iter(loader)


def test_a_pass_outside_of_the_epochs_is_refused():
    loader = resumable()
    batches = iter(loader)
    next(batches)
    with pytest.raises(ConfigError, match="only inside of its epochs"):
        next(batches)
    assert loader.batch == 0


def test_an_older_pass_is_refused():
    loader = resumable()
    for _ in loader.epochs(1):
        older = iter(loader)
        next(older)
        next(iter(loader))
        with pytest.raises(ConfigError, match="after another one began"):
            next(older)


def test_an_endless_loader_without_batches_ends():
    assert list(resumable(sampler=[]).endless()) == []


def test_generators_are_put_back_when_the_first_pass_begins():
    for batch in (2, 6):  # the pass gives a batch; the pass ends at once
        torch.manual_seed(4)
        saved, expected = random_state.capture(), torch.rand(1)
        loader = resumable(shuffle=True)
        loader.load_state_dict({**loader.state_dict(), "batch": batch})
        loader.restored(RestoredGenerators(saved))
        torch.rand(3)
        for _ in loader.epochs(1):
            passed = iter(loader)
            next(passed, None)
            assert torch.rand(1) == expected
            next(passed, None)
            assert torch.rand(1) != expected  # once only


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dataset": Drawing(12)}, "samples was 11 and is 12"),
        ({"batch_size": 3}, "batch_size was 2 and is 3"),
        ({"drop_last": True}, "drop_last was False and is True"),
        ({"shuffle": True}, "sampler was 'BatchSampler of SequentialSampler' and is 'BatchSampler of RandomSampler'"),
    ],
)
def test_the_position_of_another_loader_is_refused(settings, words):
    state = resumable().state_dict()
    other = reft.ResumableLoader(DataLoader(**{"dataset": Drawing(), "batch_size": 2, **settings}))
    with pytest.raises(LayoutChanged, match=words):
        other.load_state_dict(state)


def test_the_position_of_another_seed_or_of_no_resumable_loader_is_refused():
    with pytest.raises(LayoutChanged, match="seed was 0 and is 1"):
        resumable(seed=1).load_state_dict(resumable().state_dict())
    with pytest.raises(LayoutChanged, match=r"no reft\.ResumableLoader of this release"):
        resumable().load_state_dict({"epoch": 0, "batch": 3, "at_epoch_begin": {}})


def test_samplers_with_other_generators_are_refused():
    state = resumable(sampler=SAMPLERS["own torch generator"]()).state_dict()
    with pytest.raises(LayoutChanged, match=r"had the generators \['sampler.sampler.generator'\]; now they have \[\]"):
        resumable(sampler=RandomSampler(Drawing())).load_state_dict(state)


def test_an_epoch_that_became_shorter_is_refused():
    loader = reft.ResumableLoader(DataLoader(DrawingStream(), batch_size=2))
    loader.load_state_dict({**loader.state_dict(), "batch": 9})
    with pytest.raises(LayoutChanged, match="epoch 0 ended after 6 batches; 9 were read before"):
        epochs(loader, 1)


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: reft.ResumableLoader([1, 2]), "the position of a list can't be held"),
        (lambda: reft.ResumableLoader(OwnIteration(Drawing())), "an __iter__ of its own"),
        (lambda: reft.ResumableLoader(resumable()), "position of a ResumableLoader can't be held"),
        (lambda: resumable(num_workers=1, in_order=False), "in_order=False"),
        (lambda: resumable(seed=-1), "seed is -1"),
    ],
)
def test_what_can_not_be_held_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_plain_loader_in_state_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"reft\.ResumableLoader\(loader\)"):
        HostState(TrackedObjects({}, (), {}), {"data": DataLoader(Drawing())})


class Jittered(Drawing):
    """Has a transform with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transforms = [{"noise": np.random.default_rng(0)}]
        self.itself = self
        self.default = torch.default_generator


class Iterated(Sampler[int]):
    """A sampler that is its own iterator."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at


def held(loader: reft.ResumableLoader) -> reft.ResumableLoader:
    """Returns the loader after an attach has asked for its position."""
    loader.state_dict()
    return loader


def test_a_loader_that_no_attach_was_given_says_so_once(capfd):
    loader = resumable()
    next(iter(loader))  # a look
    assert capfd.readouterr().err == ""
    epochs(loader, 2)
    said = capfd.readouterr().err
    assert said.count("[reft]") == 1 and "not covered: the position of this ResumableLoader" in said
    epochs(held(resumable()), 2)
    assert capfd.readouterr().err == ""


def test_a_loader_in_state_says_nothing_if_reft_is_switched_off(capfd):
    loader, model = resumable(), torch.nn.Linear(1, 1)
    off = Config.load(mode="off")
    reft.attach(model, torch.optim.SGD(model.parameters()), state={"data": loader}, config=off)
    epochs(loader, 1)
    assert "not covered" not in capfd.readouterr().err


def test_what_is_not_held_is_said_once_when_training_starts(capfd):
    loader = held(reft.ResumableLoader(DataLoader(Jittered(), batch_size=2)))
    assert capfd.readouterr().err == ""
    epochs(loader, 2)
    said = capfd.readouterr().err
    assert said.count("[reft] not covered: dataset.transforms[0]['noise'], a generator of its own") == 1
    assert said.count("[reft]") == 1
    epochs(held(resumable(shuffle=True, generator=torch.Generator())), 1)
    assert capfd.readouterr().err == ""
    next(reft.ResumableLoader(DataLoader(Drawing(), sampler=Iterated())).endless())
    assert "the place of Iterated, which is its own iterator" in capfd.readouterr().err


def test_settings_of_the_loader_stay():
    loader = DataLoader(Drawing(), batch_size=4, drop_last=True, num_workers=1, prefetch_factor=3, timeout=7,
                        multiprocessing_context="spawn", persistent_workers=True)  # fmt: skip
    wrapped = reft.ResumableLoader(loader)
    rebuilt: Any = wrapped._source
    for name in ("num_workers", "prefetch_factor", "timeout", "multiprocessing_context", "persistent_workers"):
        assert getattr(rebuilt._iterable, name) == getattr(loader, name)
    assert len(wrapped) == 2
    assert wrapped.dataset is loader.dataset  # other attributes are the loader's
    assert [len(epoch) for epoch in epochs(resumable(batch_size=4, drop_last=True), 1)] == [2]


def show_dataset(worker: int) -> None:
    get_worker_info().dataset.first = 100


class Shifted(Drawing):
    """Samples that worker_init_fn shifts, and that know the epoch."""

    first = 0
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.first + index, self.epoch])


def test_workers_see_the_user_s_dataset_and_each_epoch():
    settings: Any = {"num_workers": 1, "persistent_workers": True, "worker_init_fn": show_dataset}
    loader = reft.ResumableLoader(DataLoader(Shifted(), batch_size=SAMPLES, **settings))
    assert [epoch[0][1] for epoch in epochs(loader, 2)] == [[101, 0], [101, 1]]


class InBulk(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitems__(self, wanted: list[int]) -> list[int]:
        return [10 * index for index in wanted]


def test_datasets_that_fetch_in_bulk_do_so():
    loader = DataLoader(InBulk(), batch_sampler=BatchSampler(SequentialSampler(InBulk()), 3, False), collate_fn=tuple)
    assert [list(reft.ResumableLoader(loader).endless().__next__())] == [[0, 10, 20]]


@pytest.mark.parametrize("at", range(1, 6))
def test_a_pass_that_is_left_early_ends_at_the_same_batch_after_a_restart(at):
    """The test stands at the top of the body, as the docstring of ResumableLoader says."""
    first, resumed = (resumable(batch_size=1) for _ in range(2))
    handed: list[tuple[int, int]] = []
    states = []

    def train(loader, epochs):
        for epoch in loader.epochs(epochs):
            for _ in loader:
                if loader.batch > 3:
                    break
                handed.append((epoch, loader.batch))
                states.append(loader.state_dict())

    train(first, 2)
    expected, handed[:] = handed[at:], []
    resumed.load_state_dict(states[at - 1])
    train(resumed, 2)
    assert handed == expected and len(states) >= 6
