"""Serialization of small state, with optimizers that count in Python numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from reft.client.memory.cuda import HostCopy
from reft.client.state import serialization
from reft.client.state.host_state import HostState, storable
from reft.client.state.parameters import ParameterNames
from reft.client.state.tracked_objects import TrackedObjects
from reft.wire import capsule_format
from tests.scenarios.test_state_kinds import state_bytes

NAMES = [f"model.0.{i}" for i in range(6)]


def tree(scalars, **more):
    groups = [{"params": NAMES[:2], "values": {"lr": 0.1}}, {"params": NAMES[2:], "values": {"lr": 0.2}}]
    saved = {"class": "X", "groups": groups, "scalars": scalars, **more}
    return {"step": 7, "subjects": {"model.0": {}, "optimizer.0": saved}}


def same(one, other) -> bool:
    """Returns whether both are equal bitwise and in type, in any order of keys."""
    return sorted_of(one) == sorted_of(other)


def sorted_of(value) -> str:
    return str(sorted((k, sorted_of(v)) for k, v in value.items())) if isinstance(value, dict) else repr(value)


@pytest.mark.parametrize(
    ("scalars", "is_compact"),
    [
        ({}, False),
        ({name: {"step": 3} for name in NAMES}, True),
        ({name: {"step": 3} for name in NAMES[1:]}, True),  # one parameter never had a gradient
        ({name: {"step": 3 + (name == NAMES[2])} for name in NAMES}, True),
        ({name: {"step": 3} for name in [*NAMES, "of no group"]}, True),
        ({NAMES[0]: {"step": 3}}, False),  # the other parameters are frozen
        ({name: {"step": (3, 3.0, True)[i % 3]} for i, name in enumerate(NAMES)}, False),
        ({name: {"x": (0.0, -0.0)[i % 2], "y": float("nan")} for i, name in enumerate(NAMES)}, True),
        ({name: {"big": torch.arange(9).numpy()} for name in NAMES}, False),
    ],
)
def test_decode_returns_what_was_encoded(scalars, is_compact):
    for original in (tree(scalars), tree(scalars, shared=[["a", "b", "c", "d"]])):
        data = serialization.encode(original)
        saved = capsule_format.decode(data)["subjects"]["optimizer.0"]
        assert ("scalars" not in saved) == is_compact
        assert same(serialization.decode(data), original)


def test_groups_without_names_are_stored_unchanged():
    original = tree({name: {"step": 3} for name in NAMES})
    original["subjects"]["optimizer.0"]["groups"] = [{"lr": 0.1}]
    assert same(serialization.decode(serialization.encode(original)), original)
    assert same(capsule_format.decode(serialization.encode(original)), original)


class Counting(torch.optim.Optimizer):
    """Counts in Python numbers, as many optimizers outside torch do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.sub_(parameter.grad, alpha=group["lr"] / state["step"])


def test_counters_of_thousands_of_parameters_are_restored(attach):
    def make():
        names = [f"{'long' * 55}_{i}" for i in range(4000)]
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(1)) for name in names})
        return model, Counting(model.parameters())

    model, optimizer = make()
    session = attach(model, optimizer)
    for step in session.steps(3):
        for parameter in list(model.values())[: None if step else 3900]:
            parameter.grad = torch.ones(1)
        optimizer.step()
    assert session.seal(timeout=20).step == 3
    snapshots = session._window.snapshots
    tree = snapshots.host.capture(3)
    assert len(serialization.encode(tree)) > 4000 * 220  # every name in full
    assert len(serialization.encode(tree, snapshots.facts.names)) < 20_000
    other, another = make()
    assert attach(other, another).step == 3 and state_bytes(other, another) == state_bytes(model, optimizer)
    counts = [[each.state[p]["step"] for p in each.param_groups[0]["params"]] for each in (optimizer, another)]
    assert counts[0] == counts[1] == [3] * 3900 + [2] * 100


def test_tensors_of_a_device_are_copied_beside_training():
    """At the mark nobody waits for the device: on `meta`, a stand-in for it, a wait would fail."""
    values = {"a": torch.arange(3.0), "b": torch.tensor(4, dtype=torch.int32)}
    arrived = []

    def begin_copy(tensor: torch.Tensor) -> HostCopy:
        value = next(each for each in values.values() if each.dtype == tensor.dtype)
        return HostCopy(value, SimpleNamespace(synchronize=lambda: arrived.append(value)))

    live = {"x": [values["a"].to("meta"), {"y": (values["b"].to("meta"), torch.ones(2), "text")}]}
    held = SimpleNamespace(state_dict=lambda: live, load_state_dict=lambda _: None)
    host = HostState(TrackedObjects({}, [], {}), {"held": held}, begin_copy)
    tree = host.take(1, ParameterNames())
    assert not arrived, "the mark waited for the device"
    saved = serialization.from_plain(storable(tree)["state"]["held"])
    assert len(arrived) == 2
    first, rest = saved["x"]
    number, ones, text = rest["y"]
    assert torch.equal(first, values["a"]) and torch.equal(ones, torch.ones(2)) and text == "text"
    assert number.dtype == torch.int32 and int(number) == 4
