"""Tests of the scan for objects with state that are not in state=."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from reft.client.attach.arguments import AttachArguments
from reft.client.rehearsal import alive
from reft.client.rehearsal.alive import AVERAGED, AliveObjects


class Held:
    """An object with state, as scripts write them."""

    def __init__(self, **parts):
        self.__dict__.update(parts)

    def state_dict(self):
        return {}

    def load_state_dict(self, saved):
        pass


class WeightEma(Held):
    """An average that is no module."""


class EmaView(nn.ModuleList):
    """Wraps an average, and has no tensors of its own."""


class Walk:
    """A script's objects, and what a scan finds of those that the script made."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.each_step = []

    def step(self):
        self.model(torch.randn(8, 4)).square().sum().backward()
        self.optimizer.step()
        for function in self.each_step:
            function()

    def found(self, *mine, **state):
        """Returns the kinds of the objects that the scan finds among `mine`, in their order."""
        self.step()
        tracked = AttachArguments(self.model, [self.optimizer], None, state, None, "auto", 1).tracked()
        scan = AliveObjects(tracked, state)
        scan.note_modules()
        self.step()
        names = {id(each): f"mine{index}" for index, each in enumerate(mine)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(alive, "names_of_objects", lambda: names)
            kinds = {each["name"]: each["kind"] for each in scan.find()}
        return [kinds.get(name) for name in names.values()]


@pytest.fixture
def walk():
    torch.manual_seed(0)
    return Walk()


def test_a_scheduler_of_a_tracked_optimizer_is_found_until_it_is_in_state(walk):
    schedule = lr_scheduler.StepLR(walk.optimizer, 2)
    assert walk.found(schedule) == ["scheduler"]
    assert walk.found(schedule, lr=schedule) == [None]
    assert walk.found(schedule, all=Held(parts={"lr": [schedule]})) == [None], "a part of an object in state="
    other = lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), 2)
    assert walk.found(other) == [None], "an optimizer that is not this session's"


def test_of_nested_schedulers_the_outer_one_is_named(walk):
    parts = [lr_scheduler.ConstantLR(walk.optimizer), lr_scheduler.ExponentialLR(walk.optimizer, 0.9)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer = lr_scheduler.SequentialLR(walk.optimizer, parts, [3])
    assert walk.found(outer, *parts) == ["scheduler", None, None]
    assert walk.found(outer, *parts, lr=outer) == [None, None, None]
    plateau = lr_scheduler.ReduceLROnPlateau(walk.optimizer)
    assert walk.found(plateau) == ["scheduler"]


def test_an_averaged_model_is_found_also_if_it_stands_still(walk):
    still = AveragedModel(walk.model)
    assert walk.found(still, still.module) == ["ema", None]
    assert walk.found(still, still.module, ema=still) == [None, None]
    moving = AveragedModel(walk.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    walk.each_step.append(lambda: moving.update_parameters(walk.model))
    assert walk.found(moving) == ["ema"]
    assert walk.found(moving, all=Held(ema=moving)) == [None]


def test_an_average_of_any_other_class_is_found_by_a_name(walk):
    average = WeightEma(shadow=[torch.zeros(3)], model=walk.model)
    assert walk.found(average) == ["ema"]
    assert walk.found(average, ema=average) == [None]


@pytest.mark.parametrize("name", ["ema", "model_ema", "ema_model", "EMA", "ModelEma", "EMAModel", "netEMA", "AveragedModel",
                                  "moving_average", "ema2"])  # fmt: skip
def test_names_of_averages(name):
    assert AVERAGED.search(name)


@pytest.mark.parametrize(
    "name", ["schema", "Schema", "semantic", "emails", "demand", "memory", "Gemma", "theme_a", "emanate"]
)
def test_names_that_are_no_averages(name):
    assert not AVERAGED.search(name)


def test_a_module_that_is_trained_elsewhere_is_found_and_one_that_stands_still_is_not(walk):
    trained, frozen = nn.Linear(4, 4), nn.Linear(4, 4)
    loss = nn.CrossEntropyLoss(weight=torch.ones(4))
    walk.each_step.append(lambda: trained.weight.data.add_(1))
    assert walk.found(trained, frozen, loss, walk.model, walk.model[0]) == ["module", None, None, None, None]
    assert walk.found(trained, other=trained) == [None]
    assert walk.found(trained, all=Held(part=trained)) == [None]


def test_of_a_module_that_is_found_no_parts_are_named(walk):
    teacher = copy.deepcopy(walk.model)
    walk.each_step.append(lambda: teacher[0].bias.data.add_(1))
    assert walk.found(teacher, teacher[0], teacher[1]) == ["module", None, None]


def test_what_wraps_the_model_is_no_state(walk):
    wrappers = [nn.Sequential(walk.model), torch.compile(walk.model, backend="eager"), nn.ModuleList([walk.model[0]])]
    with_loss = nn.ModuleList([walk.model, nn.CrossEntropyLoss(weight=torch.ones(4))])
    assert walk.found(*wrappers, with_loss) == [None] * 4
    ema = AveragedModel(walk.model)
    assert walk.found(EmaView([ema]), ema=ema) == [None]


def test_a_scaler_that_is_on_is_found(walk):
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    assert walk.found(scaler, off) == ["scaler", None]
    assert walk.found(scaler, scaler=scaler) == [None]


def test_another_optimizer_with_moments_is_found(walk):
    parameter = nn.Parameter(torch.zeros(2))
    adam, plain = torch.optim.Adam([parameter]), torch.optim.SGD([parameter])
    parameter.grad = torch.ones(2)
    walk.each_step += [adam.step, plain.step]
    wrapper = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    wrapper.state = walk.optimizer.state
    assert walk.found(adam, plain, wrapper, walk.optimizer) == ["optimizer", None, None, None]


def test_a_loader_is_found_unless_something_in_state_may_know_the_position(walk):
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)))
    assert walk.found(loader) == ["loader"]
    assert walk.found(loader, lr=lr_scheduler.StepLR(walk.optimizer, 2), values=Held(best=1.0)) == ["loader"]
    assert walk.found(loader, data=Held(loader=loader)) == [None]
    other = DataLoader(TensorDataset(torch.zeros(4, 1)))
    assert walk.found(loader, data=Held(inner=SimpleNamespace(loader=other))) == [None], "the loader of the validation"
    iterable = type("Batches", (Held,), {"__iter__": lambda self: iter(())})()
    assert walk.found(loader, data=iterable) == [None]


def test_an_object_of_the_scripts_own_class_is_found(walk):
    position, trainer = Held(at=3), Held(model=walk.model)
    assert walk.found(position, trainer) == ["object", None], "the second holds what is tracked"
    assert walk.found(position, position=position) == [None]
    assert walk.found(SimpleNamespace(state_dict=partial(dict))) == [None]


def test_a_loop_with_all_its_objects_in_state_has_none(walk):
    ema, schedule = AveragedModel(walk.model), lr_scheduler.CosineAnnealingLR(walk.optimizer, 10)
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)), shuffle=True)
    mine = [ema, ema.module, schedule, loader, walk.model, walk.optimizer, *walk.model]
    assert walk.found(*mine, ema=ema, lr=schedule, data=Held(loader=loader)) == [None] * len(mine)


def test_asking_runs_no_code_of_the_objects(walk):
    class Trap:
        __slots__ = ("__dict__", "__weakref__")

        def __getattribute__(self, name):
            raise AssertionError(name)

    trap = Trap()
    assert walk.found(trap, data=Held(part=trap)) == [None]


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    "tensor",
    [lambda: torch.eye(4).to_sparse(), lambda: torch.eye(4).to_sparse_csr(), quantized,
     lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
     lambda: torch.empty(2, device="meta")],
    ids=["coo", "csr", "quantized", "jagged", "meta"],
)  # fmt: skip
def test_a_module_with_other_than_plain_memory_does_not_end_the_recording(walk, tensor):
    module = nn.Linear(2, 2)
    module.register_buffer("other", tensor())
    assert walk.found(module) == [None]
    walk.each_step.append(lambda: module.weight.data.add_(1))
    assert walk.found(module) == ["module"], "its plain tensors are seen"


def test_a_lazy_module_that_nothing_has_called_has_no_memory(walk):
    assert walk.found(nn.LazyLinear(4)) == [None]
