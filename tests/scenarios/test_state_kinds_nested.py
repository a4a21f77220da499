"""State in lists, dicts and tensor subclasses is restored bit for bit, and trains on exactly."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects
from reft.errors import LayoutChanged, UnsupportedState
from tests.support.foreign_optimizers import Adafactor, BlockTensor, Lion, Lion8, Shampoo

INPUTS = torch.linspace(-1, 1, 64 * 16).view(64, 16)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1))


def large_network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 360), nn.Tanh(), nn.Linear(360, 340), nn.Tanh(), nn.Linear(340, 1))


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(INPUTS) - INPUTS.square().sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.step(closure).item()
    loss = closure()
    optimizer.step()
    return loss.item()


def index(model: nn.Module, optimizer: torch.optim.Optimizer) -> TensorIndex:
    return TrackedObjects({"model.0": model}, [optimizer], {}).bind()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    return {name: each.detach().view(torch.uint8).numpy().tobytes() if each.dim() else str(each.item())
            for name, each in sorted(index(model, optimizer).tensors.items())}  # fmt: skip


def train_and_return(attach, make, steps=4):
    """Trains, attaches new objects, and compares the state and the next two steps of both."""
    torch.manual_seed(1)
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in session.steps(steps):
        step_once(model, optimizer)
    assert session.seal(timeout=60)
    other, another = make()
    assert attach(other, another).step == steps
    assert state_of(other, another) == state_of(model, optimizer)
    for _ in range(2):
        assert step_once(other, another) == step_once(model, optimizer)
    assert state_of(other, another) == state_of(model, optimizer)
    return optimizer, another


@pytest.mark.parametrize("steps", [1, 2, 6], ids=["one step", "half a history", "a full history"])
def test_lbfgs(attach, steps):
    def make():
        model = network()
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=8)

    optimizer, another = train_and_return(attach, make, steps)
    state, other = (next(iter(each.state.values())) for each in (optimizer, another))
    assert [type(state[key]) for key in state] == [type(other[key]) for key in state]
    assert other["n_iter"] == state["n_iter"] and len(other["old_dirs"]) == len(state["old_dirs"])


@pytest.mark.slow
def test_lbfgs_of_130_000_parameters(attach):
    """Its history was too large for a capsule from 1,300 parameters on."""

    def make():
        model = large_network()
        assert sum(each.numel() for each in model.parameters()) > 129_000
        return model, torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=5, history_size=20)

    train_and_return(attach, make, steps=3)


def test_each_step_of_lbfgs_is_held_while_its_history_grows(attach):
    model = large_network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1, history_size=8)
    session = attach(model, optimizer)
    for _ in session.steps(6):
        step_once(model, optimizer)
    assert session.seal(timeout=60)
    assert session.stats()["skipped"] == 0, "the slots have room for the whole history from the first step on"


@pytest.mark.parametrize("kind", [Lion, Adafactor, Shampoo, Lion8], ids=lambda kind: kind.__name__)
def test_other_peoples_optimizers(attach, kind):
    def make():
        model = network()
        return model, kind(model.parameters())

    optimizer, another = train_and_return(attach, make)
    for mine, other in zip(optimizer.state.values(), another.state.values(), strict=True):
        assert {key: type(each) for key, each in mine.items()} == {key: type(each) for key, each in other.items()}


class LateMomentum(torch.optim.Optimizer):
    """SGD whose momentum begins in step 3; until then its place in the state is empty."""

    def __init__(self, parameters, empty):
        super().__init__(parameters, {"lr": 0.01})
        self.empty = empty

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(step=0, momentum=copy.deepcopy(self.empty), rest=[torch.zeros(3), []])
            state["step"] += 1
            if state["step"] == 3 and isinstance(self.empty, list):
                state["momentum"].append(parameter.grad.clone())
                state["rest"][1].append(torch.ones(2))
            elif state["step"] == 3:
                state["momentum"] = [parameter.grad.clone()] if self.empty == 0 else parameter.grad.clone()
            elif state["step"] > 3:
                momentum = state["momentum"]
                (momentum[0] if isinstance(momentum, list) else momentum).mul_(0.9).add_(parameter.grad)
            held = (
                state["momentum"][0] if isinstance(state["momentum"], list) and state["momentum"] else state["momentum"]
            )
            parameter.add_(
                held if isinstance(held, torch.Tensor) else parameter.grad, alpha=-self.param_groups[0]["lr"]
            )


@pytest.mark.parametrize("empty", [None, 0, []], ids=str)
def test_a_tensor_that_takes_the_place_of_a_number_is_held_and_comes_back(attach, empty):
    """From its second mark on, a session only compares what it found at the first one."""

    def make():
        model = network()
        return model, LateMomentum(model.parameters(), empty)

    optimizer, another = train_and_return(attach, make, steps=5)
    for mine, other in zip(optimizer.state.values(), another.state.values(), strict=True):
        assert mine["step"] == other["step"] and type(mine["momentum"]) is type(other["momentum"])


@pytest.mark.parametrize("is_late", [False, True], ids=["tensor from the start", "tensor from step 3 on"])
def test_a_learning_rate_that_is_a_tensor_is_held_and_comes_back(attach, is_late):
    def make(is_late=is_late):
        model = network()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01 if is_late else torch.tensor(0.01), foreach=False)

    model, optimizer = make()
    session = attach(model, optimizer)
    for step in session.steps(6):
        if step == 3:
            optimizer.param_groups[0].update(lr=torch.tensor(0.5), mine=torch.arange(6.0).view(2, 3))
        step_once(model, optimizer)
    assert session.seal(timeout=60).step == 6
    other, another = make()
    assert attach(other, another).step == 6
    group = another.param_groups[0]
    assert group["lr"].item() == 0.5 and group["lr"].dtype is torch.float32 and group["lr"].device.type == "cpu"
    assert torch.equal(group["mine"], torch.arange(6.0).view(2, 3))
    assert state_of(other, another) == state_of(model, optimizer)
    assert step_once(other, another) == step_once(model, optimizer)
    assert state_of(other, another) == state_of(model, optimizer)


def two_groups(model, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [*layer.parameters()]} for layer in (model[0], model[2])], **options)


def test_one_learning_rate_tensor_that_groups_share_later_comes_back_shared(attach):
    model = network()
    optimizer = two_groups(model, lr=0.01)
    session = attach(model, optimizer)
    for step in session.steps(4):
        if step == 2:
            optimizer.param_groups[1]["lr"] = optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        step_once(model, optimizer)
    assert session.seal(timeout=60).step == 4
    other = network()
    another = two_groups(other, lr=0.01)
    assert attach(other, another).step == 4
    first, second = (group["lr"] for group in another.param_groups)
    assert first is second and first.item() == 0.5


def test_a_learning_rate_that_shares_memory_with_a_buffer_is_refused_where_the_script_does_not_share(attach):
    def make():
        model = network()
        model.register_buffer("rate", torch.tensor(0.25))
        return model, two_groups(model, lr=0.01)

    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in session.steps(3):
        optimizer.param_groups[1]["lr"] = model.rate
        step_once(model, optimizer)
    assert session.seal(timeout=60)
    with pytest.raises(LayoutChanged, match="group 1 of the snapshot's optimizer has a tensor 'lr'"):
        attach(*make())


class Adapted(nn.Module):
    """A frozen base in 8 bits with a trainable adapter, as LoRA over a quantised model has."""

    def __init__(self):
        super().__init__()
        self.base = nn.Parameter(BlockTensor.of(torch.randn(16, 16)), requires_grad=False)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, inputs):
        return self.up(self.down(inputs @ self.base.dequantized()))


def test_an_adapter_over_a_quantised_base(attach):
    def make():
        model = Adapted()
        return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)

    train_and_return(attach, make)
    assert {"model.0.base/codes", "model.0.base/scale"} <= set(index(*make()).tensors)


class Opaque(Lion):
    """Keeps a tensor in an object of its own, which no leaf and no capsule can hold."""

    class Average:
        def __init__(self, value):
            self.value = value

    def update(self, parameter, gradient, state, lr):
        super().update(parameter, gradient, state, lr)
        state.setdefault("average", Opaque.Average(parameter.clone()))


def test_state_that_cannot_be_held_is_named_at_the_mark_at_attach_and_at_a_later_restart(attach, caplog, capsys):
    model = network()
    optimizer = Opaque(model.parameters())
    session = attach(model, optimizer)
    for _ in session.steps(3):
        step_once(model, optimizer)
    assert not session.seal(timeout=5)
    named = (
        r"optimizer.0: state[model.0.0.weight]['average'] is a tests.scenarios.test_state_kinds_nested.Opaque.Average"
    )
    assert named in caplog.text, "training goes on, and the log says what is not held"
    with pytest.raises(UnsupportedState, match=re.escape(named)):
        attach(model, optimizer)
    capsys.readouterr()
    other = network()
    assert attach(other, Opaque(other.parameters())).step == 0
    assert f"the run before held no whole step. rank 0: {named}" in capsys.readouterr().err
