"""State of optimizers that shares memory, and state that training removes or makes a number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reft.client.state.tracked_objects import TrackedObjects
from reft.errors import UnsupportedState
from tests.scenarios.test_state_kinds import round_trip, state_bytes, step_once, train


class Sharing(torch.optim.Optimizer):
    """Its first step makes state that shares memory, as `share` says."""

    def __init__(self, parameters, share, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.share = share

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter)
                    state["shared"] = self.share(self, parameter)
                state["moment"].mul_(0.9).add_(parameter.grad)
                state["shared"].sub_(state["moment"].mean() * group["lr"])


def own_master(optimizer, parameter):
    return parameter


def detached_master(optimizer, parameter):
    return parameter.detach().float()  # float32 already: the same memory


def view_of_one_buffer(optimizer, parameter):
    optimizer.buffer = getattr(optimizer, "buffer", torch.zeros(3))
    return optimizer.buffer[:]


@pytest.mark.parametrize("share", [own_master, detached_master, view_of_one_buffer])
def test_state_that_shares_memory_shares_it_again(attach, share):
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return model, Sharing(model.parameters(), share)

    (model, optimizer), (other, another), _ = round_trip(attach, make)
    for _ in range(2):
        step_once(model, optimizer)
        step_once(other, another)
    assert state_bytes(other, another) == state_bytes(model, optimizer)
    addresses = {state["shared"].data_ptr() for state in another.state.values()}
    expected = {parameter.data_ptr() for parameter in other.parameters()}
    assert len(addresses) == 1 if share is view_of_one_buffer else addresses == expected


def test_shared_state_comes_back_if_a_later_parameter_had_it_first(attach):
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return model, Sharing(model.parameters(), view_of_one_buffer)

    torch.manual_seed(1)
    model, optimizer = make()
    model[1](torch.ones(2, 4)).sum().backward()  # the first layer gets its state later
    optimizer.step()
    train(attach(model, optimizer), model, optimizer)
    other, another = make()
    attach(other, another)
    assert state_bytes(other, another) == state_bytes(model, optimizer)


@pytest.mark.parametrize("wide_at", [64, 16])
def test_buffers_of_other_element_sizes_in_one_block_all_come_back(attach, wide_at):
    """Both views begin at element 64 of their dtype, or at the same byte, and have one shape."""

    def make():
        model = nn.Linear(4, 4)
        block = torch.randint(0, 256, (1024,), dtype=torch.uint8)
        model.register_buffer("narrow", block[64:128])
        model.register_buffer("wide", block[4 * wide_at :][:256].view(torch.int32))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    round_trip(attach, make)


def test_state_with_the_memory_of_a_buffer_is_refused_by_name():
    model = nn.Linear(4, 4)
    model.register_buffer("average", torch.zeros(4))
    optimizer = Sharing([model.bias], lambda *_: model.average.detach())
    step_once(model, optimizer)
    with pytest.raises(UnsupportedState, match=r"optimizer\.0\.shared\.model\.0\.bias shares memory"):
        TrackedObjects({"model.0": model}, [optimizer], {}).bind()


def make_a_number(group):
    group["lr"] = 0.25


def remove_a_key(group):
    del group["mine"]


@pytest.mark.parametrize("change", [make_a_number, remove_a_key])
def test_a_group_comes_back_as_training_changed_it(attach, change):
    def make():
        model = nn.Linear(4, 4)
        return model, torch.optim.AdamW([{"params": [*model.parameters()], "mine": 7}], lr=torch.tensor(0.5))

    model, optimizer = make()
    session = attach(model, optimizer)
    for step in session.steps(4):
        if step == 2:
            change(optimizer.param_groups[0])
        step_once(model, optimizer)
    assert session.seal(timeout=60).step == 4
    other, another = make()
    assert attach(other, another).step == 4
    group, expected = ({**each.param_groups[0], "params": []} for each in (another, optimizer))
    assert group == expected and type(group["lr"]) is type(expected["lr"])
    assert state_bytes(other, another) == state_bytes(model, optimizer)


def test_state_that_the_script_loads_and_the_snapshot_lacks_is_removed(attach):
    """A script may load a checkpoint of its own before attach: what reft holds replaces it."""

    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        step_once(model, optimizer)
        return model, optimizer

    model, optimizer = make()
    session = attach(model, optimizer)
    for step in session.steps(3):
        step_once(model, optimizer)
        if step == 2:
            del optimizer.state[model[1].bias]
    assert session.seal(timeout=60).step == 3
    other, another = make()
    assert attach(other, another).step == 3
    assert state_bytes(other, another) == state_bytes(model, optimizer)
    assert len(another.state) == 3
