"""Wrappers do not change leaf names; two tensors with one name are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.testing._internal.distributed.fake_pg import FakeStore

from reft.client.state.tracked_objects import TrackedObjects
from reft.errors import UnsupportedState


def plain():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 2))


def checkpointed():
    model = plain()
    model[1] = checkpoint_wrapper(model[1])
    return model


def compiled_inside_and_out():
    model = checkpointed()
    model[0].compile()  # in place: changes no name
    model[2] = torch.compile(model[2], backend="eager")
    return torch.compile(model, backend="eager")


def averaged():
    return torch.optim.swa_utils.AveragedModel(plain()).module


def leaves(model, optimizer=()):
    found = TrackedObjects({"model.0": model}, optimizer, {}).bind().leaves()
    return sorted((leaf.name, leaf.describe()) for leaf in found)


@pytest.mark.parametrize("wrapped", [checkpointed, compiled_inside_and_out, averaged])
def test_wrappers_do_not_change_names(wrapped):
    assert leaves(wrapped()) == leaves(plain())


@pytest.fixture
def rank_one_of_two():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def test_fsdp1_with_and_without_inner_wrappers_has_the_same_names(rank_one_of_two):
    model = checkpointed()
    model[1] = FSDP(model[1], use_orig_params=True, device_id=torch.device("cpu"))
    outer = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    assert [name for name, _ in leaves(outer)] == [name for name, _ in leaves(plain())]


def test_ddp_has_the_names_of_its_module(rank_one_of_two):
    assert leaves(nn.parallel.DistributedDataParallel(plain())) == leaves(plain())


def test_state_of_plain_modules_is_restored_into_wrapped_modules(attach):
    def train(session, model, optimizer):
        for _ in session.steps(session.step + 2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.seal(timeout=60)

    first = plain()
    optimizer = torch.optim.AdamW(first.parameters())
    train(attach(first, optimizer), first, optimizer)
    expected = [each.clone() for each in (*first.parameters(), *first.buffers())]
    other = compiled_inside_and_out()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert attach(other, torch.optim.AdamW(other.parameters())).step == 2
    assert all(map(torch.equal, (*other.parameters(), *other.buffers()), expected))


def test_two_tensors_with_one_name_are_refused():
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    model.register_parameter("weight", nn.Parameter(torch.zeros(2)))
    with pytest.raises(UnsupportedState, match=r"two tensors are called model\.0\.weight"):
        leaves(model)


class Scaled(nn.Linear):
    """Keeps a scale as extra state, as fp8 layers do."""

    scale = 1.0

    def get_extra_state(self):
        return {"scale": self.scale, "history": torch.full((4,), self.scale)}

    def set_extra_state(self, state):
        assert torch.equal(state["history"], torch.full((4,), state["scale"]))
        self.scale = state["scale"]


class Stateless(nn.Linear):
    """Has the method for other checkpoints only, as Megatron's layers do."""

    def get_extra_state(self) -> None:
        return None


def test_a_module_declared_without_extra_state_has_none():
    model = nn.Sequential(Scaled(2, 2), Stateless(2, 2))
    assert [*TrackedObjects({"model.0": model}, [], {}).extra_states()] == ["model.0.0.extra_state"]


def test_extra_state_is_restored(attach):
    model = nn.Sequential(Scaled(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer)
    for step in session.steps(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model[0].scale = 0.5**step
    assert session.seal(timeout=60)
    other = nn.Sequential(Scaled(2, 2), nn.Linear(2, 2))
    attach(checkpoint_wrapper(other), torch.optim.SGD(other.parameters(), lr=0.1))
    assert other[0].scale == 0.25
