"""Forms make missing state again; what they could not make is refused; no foreign step runs."""

from __future__ import annotations

import dataclasses
import pickletools

import pytest
import torch
from torch import nn

from reft.client.restore.materialize import live_index
from reft.client.state.extract.dtensor import Region
from reft.client.state.extract.foreseen import can_foresee
from reft.client.state.extract.state_forms import DTensorWrapper, EntryWrapper, StateForm, SubclassWrapper, assemble
from reft.client.state.inner_tensors import inner_region
from reft.client.state.parameters import NamedParameter
from reft.client.state.tensors import leaf_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.errors import FormatError, LayoutChanged, UnsupportedState
from tests.scenarios.test_state_kinds import step_once
from tests.support.foreign_optimizers import BlockTensor, Lion, Lion8, Shampoo

KIND = f"{BlockTensor.__module__}.BlockTensor"
CONTEXT = ("list", ("dtype", "float32"), ("Size", 4, 8))


def named(parameter: torch.Tensor) -> NamedParameter:
    return NamedParameter("model.0.w", parameter, parameter, None)


def leaf(form: str):
    return dataclasses.replace(leaf_of("optimizer.0.m.model.0.w", torch.zeros(4, 8), False), form=form)


@pytest.mark.parametrize(
    "form",
    [
        StateForm(),
        StateForm(tag="[of 0:4,0:8]", on_host=True),
        StateForm((EntryWrapper("3"), DTensorWrapper(("S0", "R"), (8, 8), (8, 1)))),
        StateForm((DTensorWrapper(()), SubclassWrapper(KIND, "codes", CONTEXT, (4, 8), (8, 1)))),
    ],
)
def test_a_form_is_the_same_after_its_way_through_a_manifest(form):
    assert StateForm.of(leaf(form.text())) == form
    assert bool(form.text()) == (form != StateForm())


@pytest.mark.parametrize("text", ["{", "[]", '[[["unknown"]],"",null]', '[[["entry"]],"",null]', "7"])
def test_a_damaged_form_is_refused(text):
    with pytest.raises(FormatError, match=r"the form of leaf 'optimizer\.0\.m\.model\.0\.w' can't be read"):
        StateForm.of(leaf(text))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no_such_module.Tensor", "has not imported"),
        (f"{pickletools.__name__}.dis", "has not imported"),
        ("torch.Tensor", "has not imported"),
        (KIND, "can't be made from its inner tensors"),
    ],
)
def test_only_a_class_of_tensors_that_was_imported_is_made(kind, reason):
    part = (SubclassWrapper(kind, "codes", CONTEXT, (4, 8), (8, 1)),), torch.zeros(4, 8)
    with pytest.raises(LayoutChanged, match=reason):
        assemble([part], named(torch.zeros(4, 8)))


class Restless(Lion):
    def step(self, closure=None):
        raise AssertionError("reft runs nobody's step")


class Derived(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_only_the_steps_of_torch_itself_are_foreseen():
    model = nn.Linear(4, 4)
    optimizer = Restless(model.parameters())
    tracked = TrackedObjects({"model.0": model}, [optimizer], {})
    assert tracked.predict(tracked.names()) == []
    assert not can_foresee(optimizer) and not can_foresee(Derived(model.parameters()))
    assert can_foresee(torch.optim.AdamW(model.parameters())) and can_foresee(torch.optim.LBFGS(model.parameters()))


def test_the_state_of_sparse_adam_is_foreseen():
    """It refuses dense gradients. Unforeseen, its state is lost with a node until a review."""
    model = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    tracked = TrackedObjects({"model.0": model}, [optimizer], {})
    predicted = {leaf.name: leaf.describe() for leaf in tracked.predict(tracked.names())}
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    leaves = tracked.bind().leaves()
    assert predicted == {leaf.name: leaf.describe() for leaf in leaves if leaf.name.startswith("optimizer.")}
    assert len(predicted) == 2


@pytest.mark.parametrize("kind", [Shampoo, Lion8, torch.optim.Adafactor])
def test_rollback_removes_containers_and_subclasses_that_a_restore_has_made(kind):
    trained = nn.Linear(4, 4)
    optimizer = kind(trained.parameters())
    step_once(trained, optimizer)
    saved_leaves = TrackedObjects({"model.0": trained}, [optimizer], {}).bind().leaves()
    model = nn.Linear(4, 4)
    fresh = kind(model.parameters())
    tracked = TrackedObjects({"model.0": model}, [fresh], {})
    before = tracked.bind()
    live_index(saved_leaves, tracked, before)
    assert fresh.state
    tracked.bind().rollback_to(before)
    assert before.is_current() and not fresh.state


class Tied(Lion):
    """Keeps one tensor in the lists of all parameters."""

    shared = torch.zeros(3)

    def update(self, parameter, gradient, state, lr):
        state["shared"] = [self.shared]


def test_a_tensor_in_two_lists_is_refused_by_name():
    model = nn.Linear(4, 4)
    optimizer = Tied(model.parameters())
    step_once(model, optimizer)
    with pytest.raises(UnsupportedState, match=r"optimizer\.0\.shared\.model\.0\.bias/0 shares memory"):
        TrackedObjects({"model.0": model}, [optimizer], {}).bind()


@pytest.mark.parametrize(
    ("inner", "region"),
    [
        (torch.zeros(4), Region((4,), (0,), "[of 4:8,0:8]")),
        (torch.zeros(4, 8, dtype=torch.int8), Region((4, 8), (0, 0), "[of 4:8,0:8]")),
        (torch.zeros(4, 8), Region((8, 8), (4, 0))),
    ],
    ids=["scales", "codes", "the elements themselves"],
)
def test_an_inner_tensor_of_a_piece_is_named_by_the_piece(inner, region):
    assert inner_region(torch.zeros(4, 8), Region((8, 8), (4, 0)), inner) == region
    assert inner_region(torch.zeros(4, 8), None, inner) is None


def test_a_replaced_inner_tensor_and_a_replaced_list_are_noticed():
    model = nn.Linear(4, 4)
    optimizer = Lion8(model.parameters())
    step_once(model, optimizer)
    index = TrackedObjects({"model.0": model}, [optimizer], {}).bind()
    assert index.is_current()
    block = optimizer.state[model.weight]["exp_avg"]
    block.scale = block.scale.clone()
    assert not index.is_current()
    optimizer = Shampoo(model.parameters())
    step_once(model, optimizer)
    index = TrackedObjects({"model.0": model}, [optimizer], {}).bind()
    assert index.is_current()
    state = optimizer.state[model.weight]
    state["preconditioners"] = [*state["preconditioners"]]
    assert not index.is_current()
