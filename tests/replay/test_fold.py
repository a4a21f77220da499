"""Folds recorded gradients beside the owner's optimizer: the same bits after each update."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from reft.replay.fold import CannotFold, ParameterFold, reads_parameter

STEPS = 20
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "sgd_decay": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd_dampening": ("SGD", {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01}),
    "sgd_nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd_nesterov_decay": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    "sgd_maximize": ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 1e-2}),
    "adam_l2": ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    "adam_amsgrad": ("Adam", {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "adam_maximize": ("Adam", {"lr": 1e-2, "maximize": True, "weight_decay": 0.1}),
    "adam_decoupled": ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw": ("AdamW", {"lr": 1e-2}),
    "adamw_amsgrad": ("AdamW", {"lr": 1e-2, "amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    "adamw_maximize": ("AdamW", {"lr": 1e-2, "maximize": True}),
}
MODES = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "default": {}}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the replayer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Update(NamedTuple):
    """What a record holds of one parameter's update."""

    scalars: Mapping[str, Any]
    gradient: torch.Tensor
    parameter: torch.Tensor | None


class Owner:
    """Trains a small model, and records each update at the optimizer's pre-hook.

    Attributes:
        updates: parameter → its updates since the last look.
    """

    def __init__(self, kind: str, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        torch.manual_seed(1)
        self.kind = kind
        self.parameters = {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}
        first, *rest = self.parameters.values()
        groups = [{"params": [first], "lr": 0.03}, {"params": rest}]
        self.optimizer = getattr(torch.optim, kind)(groups, **settings)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.updates: dict[str, list[Update]] = {name: [] for name in shapes}
        self.optimizer.register_step_pre_hook(self._record)

    def _record(self, *_: object) -> None:
        for group in self.optimizer.param_groups:
            scalars = {key: copy.copy(value) for key, value in group.items() if key != "params"}
            needs_parameter = reads_parameter(self.kind, scalars)
            for name, parameter in self.parameters.items():
                if any(parameter is each for each in group["params"]) and parameter.grad is not None:
                    before = parameter.detach().clone() if needs_parameter else None
                    self.updates[name].append(Update(scalars, parameter.grad.clone(), before))

    def state(self, name: str) -> dict[str, torch.Tensor]:
        return {key: value.clone() for key, value in self.optimizer.state[self.parameters[name]].items()}

    def loss(self, step: int, part: int = 0) -> torch.Tensor:
        noise = torch.Generator().manual_seed(100 * step + part)
        each = (p * torch.randn(p.shape, generator=noise) for p in self.parameters.values())
        return torch.stack([(product * product.detach().sign()).sum() for product in each]).sum() * 10.0 ** -(step % 5)


def plain(owner: Owner, step: int) -> None:
    owner.loss(step).backward()


def clipped(owner: Owner, step: int) -> None:
    owner.loss(step).backward()
    clip_grad_norm_(owner.parameters.values(), 0.3)


def accumulated(owner: Owner, step: int) -> None:
    for part in range(3):
        (owner.loss(step, part) / 3).backward()


SHAPES = {"bias": (33,), "matrix": (61, 33), "kernel": (8, 5, 3, 3)}


def train(
    owner: Owner, backward: Callable[[Owner, int], None] = plain, skipped: int = 0, steps: int = STEPS + 1
) -> Iterator[int]:
    """Yields after each step; each `skipped`-th one does not update."""
    for step in range(1, steps + 1):
        if not skipped or step % skipped:
            backward(owner, step)
            owner.optimizer.step()
            owner.optimizer.zero_grad(set_to_none=True)
            owner.schedule.step()
        yield step


def check_follows(owner: Owner, steps: Iterator[int], look_each: int = 1) -> None:
    """Folds all updates since the last look, and compares the state bit for bit."""
    next(steps)  # makes the state
    states = {name: owner.state(name) for name in owner.parameters}
    counts = [len(each) for each in owner.updates.values()]
    assert min(counts) == 1
    for updates in owner.updates.values():
        updates.clear()
    folded = 0
    for step in steps:
        if step % look_each:
            continue
        for name, updates in owner.updates.items():
            fold = ParameterFold(name, owner.kind, states[name])
            for update in updates:
                before = update.gradient.clone()
                fold.update(*update)
                assert torch.equal(update.gradient, before), "a record is only read"
                folded += 1
            updates.clear()
            for key, value in owner.state(name).items():
                have = states[name][key]
                assert have.dtype == value.dtype and have.stride() == value.stride()
                assert have.numpy().tobytes() == value.numpy().tobytes(), (step, name, key)
    assert folded >= 3 * len(owner.parameters)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS)
def test_the_fold_has_the_owners_bits(config, mode):
    kind, settings = CONFIGS[config]
    owner = Owner(kind, {**settings, **MODES[mode]}, SHAPES)
    check_follows(owner, train(owner))


@pytest.mark.parametrize("backward", [clipped, accumulated])
@pytest.mark.parametrize("config", ["sgd_nesterov_decay", "adam_l2", "adamw"])
def test_clipped_and_accumulated_gradients_fold_alike(config, backward):
    kind, settings = CONFIGS[config]
    owner = Owner(kind, settings, SHAPES)
    check_follows(owner, train(owner, backward))


@pytest.mark.parametrize("config", ["sgd_decay", "adam_amsgrad", "adamw"])
def test_several_steps_fold_at_once_and_steps_without_update_count_nothing(config):
    kind, settings = CONFIGS[config]
    owner = Owner(kind, settings, SHAPES)
    check_follows(owner, train(owner, skipped=4), look_each=3)


@pytest.mark.parametrize("config", ["sgd_decay", "adam_l2", "adamw"])
def test_steps_that_a_grad_scaler_skips_are_no_updates(config):
    kind, settings = CONFIGS[config]
    owner = Owner(kind, settings, SHAPES)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)

    def scaled() -> Iterator[int]:
        for step in range(1, STEPS + 2):
            loss = owner.loss(step) * (float("inf") if step % 6 == 5 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(owner.optimizer)
            clip_grad_norm_(owner.parameters.values(), 1.0)
            scaler.step(owner.optimizer)
            scaler.update()
            owner.optimizer.zero_grad()
            yield step

    check_follows(owner, scaled())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", ["sgd_decay", "adam_amsgrad", "adamw"])
def test_a_large_leaf_folds_whole(config, mode):
    kind, settings = CONFIGS[config]
    owner = Owner(kind, {**settings, **MODES[mode]}, {"small": (3,), "large": (1031, 127)})
    check_follows(owner, train(owner, steps=4))


@pytest.mark.parametrize("mode", ["for-loop", "fused"])
def test_one_thread_folds_what_the_owner_does_with_several(mode):
    """Holds for float32; the module says where it does not."""
    kind, settings = CONFIGS["adam_l2"]
    owner = Owner(kind, {**settings, **MODES[mode]}, {"small": (3,), "large": (1031, 127)})

    def with_threads() -> Iterator[int]:
        steps = train(owner, steps=4)
        while True:
            torch.set_num_threads(3)
            step = next(steps, None)
            torch.set_num_threads(1)
            if step is None:
                return
            yield step

    check_follows(owner, with_threads())


# What is refused


def adam_state(step: float = 3.0) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(step), "exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)}


def test_momentum_that_does_not_exist_yet_is_not_folded():
    """The first step clones the gradient. Zeros in its place would turn -0.0 into 0.0."""
    fold = ParameterFold("weight", "SGD", {})
    with pytest.raises(CannotFold, match="weight had no momentum_buffer before"):
        fold.update({"lr": 0.1, "momentum": 0.9}, torch.tensor([-0.0, 1.0]))


def test_a_parameter_that_the_update_reads_must_be_recorded():
    for kind, scalars, reads in (
        ("SGD", {"weight_decay": 0.1}, True),
        ("SGD", {"weight_decay": 0}, False),
        ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": False}, True),
        ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, False),
        ("AdamW", {"weight_decay": 0.1}, False),
    ):
        assert reads_parameter(kind, scalars) is reads
        if reads:
            with pytest.raises(CannotFold, match="was not recorded"):
                ParameterFold("weight", kind, adam_state()).update(scalars, torch.ones(5))


def test_an_unknown_class_and_what_torch_refuses_are_named():
    with pytest.raises(CannotFold, match="weight is updated by LBFGS; recomputed are SGD, Adam, AdamW"):
        ParameterFold("weight", "LBFGS", {})
    no_second = {key: value for key, value in adam_state().items() if key != "exp_avg_sq"}
    for state, scalars, gradient in (
        (no_second, {}, torch.ones(5)),
        (adam_state(), {"amsgrad": True}, torch.ones(5)),
        (adam_state(), {"lr": "fast"}, torch.ones(5)),
        (adam_state(), {}, torch.ones(7)),
        (adam_state(), {}, torch.ones(5, dtype=torch.int32)),
    ):
        with pytest.raises(CannotFold, match="torch refuses the update of weight"):
            ParameterFold("weight", "Adam", state).update(scalars, gradient)


def test_on_another_device_a_copy_of_the_state_is_updated_and_brought_back(monkeypatch):
    owner = Owner("AdamW", {"lr": 1e-2}, {"matrix": (61, 33)})
    steps = train(owner)
    next(steps)
    state = owner.state("matrix")
    before = {key: value.clone() for key, value in state.items()}
    owner.updates["matrix"].clear()
    next(steps)
    with monkeypatch.context() as patched:  # as if each copy lay on a device
        patched.setattr(torch.Tensor, "to", lambda self, *_: self.clone())
        fold = ParameterFold("matrix", "AdamW", state)
        fold.update(*owner.updates["matrix"][0])
    assert torch.equal(state["exp_avg"], before["exp_avg"])
    fold.finish()
    assert all(torch.equal(state[key], value) for key, value in owner.state("matrix").items())


def test_a_device_that_gives_nothing_back_is_an_error():
    state = {"step": torch.tensor(1.0), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    fold = ParameterFold("w", "AdamW", state, torch.device("meta"))
    fold.update({"lr": 0.1}, torch.ones(4))
    with pytest.raises(CannotFold, match="the state of w can't be read from meta"):
        fold.finish()


FIRST_UPDATE = """
import sys, torch
from reft.replay.fold import ParameterFold, load_optimizers
load_optimizers()
before = set(sys.modules)
for kind, state in (("SGD", {"momentum_buffer"}), ("AdamW", {"step", "exp_avg", "exp_avg_sq"})):
    tensors = {key: torch.zeros(() if key == "step" else 4) for key in state}
    ParameterFold("weight", kind, tensors).update({"lr": 0.1, "momentum": 0.9}, torch.ones(4))
print(sorted(set(sys.modules) - before))
"""


def test_the_first_update_loads_nothing_more():
    """A replayer loads before its process is nice, not in the middle of its first order."""
    done = subprocess.run([sys.executable, "-c", FIRST_UPDATE], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)
