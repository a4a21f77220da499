"""Every kind of state is restored bit for bit. The objects of the next session are new."""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest
import torch
from torch import nn

from reft.client.state.tensors import flat_bytes

ODD_DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool,
              torch.complex64]  # fmt: skip


def step_once(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    loss = sum(p.float().square().sum() for p in model.parameters() if p.requires_grad and p.is_floating_point())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def state_bytes(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, bytes]:
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    for i, optimizer in enumerate(optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for k, state in enumerate(optimizer.state.get(parameter, {}) for parameter in parameters):
            tensors |= {f"{i}.{k}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: flat_bytes(tensor.contiguous()).numpy().tobytes() for name, tensor in tensors.items()}


def train(session, model, *optimizers, steps=3):
    for _ in session.steps(session.step + steps):
        step_once(model, *optimizers)
    assert session.seal(timeout=60)


def round_trip(attach, make, steps=3, **arguments):
    """Trains objects from `make`, attaches new ones, and compares.

    Returns both, and the new session.
    """
    torch.manual_seed(1)
    model, *optimizers = make()
    train(attach(model, optimizers, **arguments), model, *optimizers, steps=steps)
    expected = state_bytes(model, *optimizers)
    torch.manual_seed(2)
    other, *others = make()
    session = attach(other, others, **arguments)
    assert (session.step, session.restored_from) == (steps, "memory")
    assert state_bytes(other, *others) == expected
    return (model, *optimizers), (other, *others), session


@pytest.mark.parametrize("dtype", ODD_DTYPES, ids=str)
def test_a_buffer_of_any_dtype_is_restored(attach, dtype):
    def make():
        model = nn.Linear(3, 5)
        model.register_buffer("odd", torch.randint(0, 2, (7, 3)).to(dtype))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    round_trip(attach, make)


def test_moments_of_bf16_parameters_are_not_cast(attach):
    def make():
        model = nn.Linear(64, 64, dtype=torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    round_trip(attach, make)


def test_nan_payloads_and_signed_zeros_survive(attach):
    pattern = torch.tensor([0x7F800001, 0x7FC12345, -0x80000000, 0x00000001], dtype=torch.int64).to(torch.int32)

    def make():
        model = nn.Linear(2, 2)
        model.register_buffer("bits", torch.zeros(4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = make()
    model.bits.copy_(pattern.view(torch.float32))
    train(attach(model, optimizer), model, optimizer)
    other, another = make()
    attach(other, another)
    assert torch.equal(other.bits.view(torch.int32), pattern)


@pytest.mark.parametrize(
    "kind",
    [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
     torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
     torch.optim.Adafactor],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_restored_optimizers_step_exactly_as_before(attach, kind):
    def make():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        return model, kind(model.parameters(), lr=1e-2)

    (model, optimizer), (other, another), session = round_trip(attach, make)
    step_once(model, optimizer)
    step_once(other, another)
    assert state_bytes(model, optimizer) == state_bytes(other, another)
    assert session.stats()["skipped"] == 0


def test_tied_parameters_are_stored_once_and_stay_tied(attach):
    def make():
        model = nn.ModuleDict({"embed": nn.Embedding(50, 16), "head": nn.Linear(16, 50, bias=False)})
        model["head"].weight = model["embed"].weight
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    _, (other, _), session = round_trip(attach, make)
    assert session.stats()["bytes"] == 0  # nothing taken yet
    assert other["head"].weight is other["embed"].weight


def test_parameters_that_are_unfrozen_during_training(attach):
    def make():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model[0].requires_grad_(False)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = make()
    session = attach(model, optimizer)
    train(session, model, optimizer)
    model[0].requires_grad_(True)  # new moments appear during the run: another layout, larger slots
    for _ in session.steps(session.step + 200):
        step_once(model, optimizer)
        if session.stats()["sealed_step"] > 4:
            break
    session.step_end()
    assert session.seal(timeout=60)
    expected, at = state_bytes(model, optimizer), session.step
    other, another = make()
    other[0].requires_grad_(True)
    assert attach(other, another).step == at
    assert state_bytes(other, another) == expected


def test_two_models_and_two_optimizers(attach):
    def make():
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        return (
            model,
            torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam(model[1].parameters()),
        )

    round_trip(attach, make)


def test_parameter_groups_and_their_scalars(attach):
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "weight_decay": 0.3}]
        return model, torch.optim.AdamW(groups, lr=1e-3)

    model, optimizer = make()
    session = attach(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.123
    optimizer.param_groups[1]["betas"] = (0.5, 0.25)
    train(session, model, optimizer)
    other, another = make()
    attach(other, another)
    assert another.param_groups[0]["lr"] == 0.123 and another.param_groups[1]["betas"] == (0.5, 0.25)


def test_a_tensor_learning_rate(attach):
    def make():
        model = nn.Linear(4, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))

    model, optimizer = make()
    session = attach(model, optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.625)
    train(session, model, optimizer)
    other, another = make()
    attach(other, another)
    assert another.param_groups[0]["lr"].item() == 0.625


def test_transposed_and_strided_tensors(attach):
    def make():
        model = nn.Linear(4, 4)
        model.register_buffer("turned", torch.randn(6, 3).t())
        model.register_buffer("gapped", torch.randn(8, 8)[::2, ::3])
        model.register_buffer("last", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        model.register_buffer("none", torch.empty(0, 5))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    _, (other, _), _ = round_trip(attach, make)
    assert other.turned.stride() == (1, 3) and other.gapped.stride() == (16, 3)


def test_grad_scaler_scale_and_growth(attach):
    def make():
        return nn.Linear(4, 4), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def train_scaled(model, optimizer, scaler, session, steps):
        for step in session.steps(session.step + steps):
            loss = model(torch.ones(2, 4)).sum() * (float("inf") if step == 3 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert session.seal(timeout=60)

    model, scaler = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer, state={"scaler": scaler})
    train_scaled(model, optimizer, scaler, session, 6)
    other, fresh = make()
    another = torch.optim.SGD(other.parameters(), lr=0.1)
    assert attach(other, another, state={"scaler": fresh}).step == 6
    fresh.scale(torch.ones(1))
    assert fresh.get_scale() == scaler.get_scale() != 8.0
    assert fresh.state_dict() == scaler.state_dict()


def test_a_disabled_scaler_is_accepted(attach):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, state={"scaler": torch.amp.GradScaler("cpu", enabled=False)}) as session:
        for _ in session.steps(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert session.seal(timeout=60)
    other = nn.Linear(2, 2)
    fresh = torch.amp.GradScaler("cpu", enabled=False)
    assert attach(other, torch.optim.SGD(other.parameters(), lr=0.1), state={"scaler": fresh}).step == 2


class Keeper:
    """A user's object whose state is any value."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_objects_schedulers_modules_and_generators(attach):
    tree = {
        "nested": [(1, 2.5, None, True), {"k": b"\x00\xff"}], 7: "int key", "nan": float("inf"),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "counter": collections.Counter({3: 2}), "big": 2**100,
    }  # fmt: skip

    def make():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        state = {
            "keeper": Keeper(None), "lr": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            "average": torch.optim.swa_utils.AveragedModel(model), "generator": torch.Generator(),
        }  # fmt: skip
        return model, optimizer, state

    model, optimizer, state = make()
    state["keeper"].value = {**tree, "tensor": torch.tensor([1.5], dtype=torch.bfloat16)}
    state["generator"].manual_seed(77)
    session = attach(model, optimizer, state=state)
    for _ in session.steps(3):
        step_once(model, optimizer)
        state["lr"].step()
        state["average"].update_parameters(model)
    assert session.seal(timeout=60)
    other, another, fresh = make()
    attach(other, another, state=fresh)
    assert fresh["lr"].state_dict() == state["lr"].state_dict()
    assert state_bytes(fresh["average"]) == state_bytes(state["average"])
    assert torch.equal(fresh["generator"].get_state(), state["generator"].get_state())
    value = fresh["keeper"].value
    assert torch.equal(value.pop("tensor"), torch.tensor([1.5], dtype=torch.bfloat16))
    assert np.array_equal(value.pop("array"), tree["array"])
    assert value == {key: value for key, value in tree.items() if key != "array"}
    assert type(value["counter"]) is collections.Counter


def test_every_random_generator_continues_after_a_restore(attach):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    random.gauss(0, 1)
    np.random.standard_normal()
    train(session, model, optimizer)
    expected = (random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3).tolist())
    random.seed(6)
    np.random.seed(6)
    torch.manual_seed(6)
    attach(model, optimizer)
    assert (random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3).tolist()) == expected


@pytest.mark.slow
def test_two_thousand_tiny_leaves(attach):
    def make():
        model = nn.ParameterList([torch.randn(3) for _ in range(2000)])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    round_trip(attach, make)


def test_restored_state_does_not_share_memory_with_the_slot(attach):
    """With `load_state_dict` the slot would become live state, and training would write into it."""

    def make():
        model = nn.Linear(32, 32)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    _, (other, another), session = round_trip(attach, make)
    step_once(other, another)  # without a mark: the snapshot in memory must not change
    torch.manual_seed(9)
    third, optimizer = make()
    session.close()
    attach(third, optimizer)
    assert state_bytes(third, optimizer) != state_bytes(other, another)
