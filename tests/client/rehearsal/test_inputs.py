"""Tests of the digests of the models' inputs, and of the generators at the first forward."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from reft.client.rehearsal import inputs
from reft.client.rehearsal.digests import generator_digests, tensor_digest
from reft.client.rehearsal.inputs import INPUTS_MAX, ForwardInputs, input_digest, outermost, tensors_in


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x, *rest, **named):
        return self.inner(x)


@dataclass
class Batch:
    pixels: torch.Tensor
    ids: Any


def raises(error):
    raise error


@pytest.fixture
def recorded():
    """A model, its inputs, and how often a first forward came."""
    model, firsts = Model(), []
    forward_inputs = ForwardInputs({"model.0": model}, lambda: firsts.append(generator_digests()), raises)
    yield model, forward_inputs, firsts
    forward_inputs.close()


def test_tensors_in_nested_arguments_are_digested_in_their_order(recorded):
    model, forward_inputs, firsts = recorded
    a, b, c, d, e = torch.randn(5, 1, 2).unbind()
    pair = collections.namedtuple("pair", "one two")(c, 3)
    model(a, [b, (pair, "text")], named=collections.UserDict({"mask": Batch(d, {"deep": [e]})}))
    assert forward_inputs.take() == ([tensor_digest(each) for each in (a, b, c, d, e)], firsts[0])
    assert forward_inputs.take() == ([], None)


def test_the_generators_are_those_of_the_first_forward_after_a_mark(recorded):
    model, forward_inputs, firsts = recorded
    for _ in range(2):
        torch.rand(1)
        at_first = generator_digests()
        model(torch.zeros(1, 2))
        torch.rand(1)
        model(torch.ones(1, 2))
        digests, at_forward = forward_inputs.take()
        assert len(digests) == 2 and at_forward == at_first
    assert len(firsts) == 2


def test_a_mark_has_few_inputs_and_the_last_stands_for_the_rest(recorded):
    model, forward_inputs, _ = recorded
    rest = []
    for last in (1, 2, 2):
        model(torch.zeros(1, 2), [torch.zeros(1)] * (INPUTS_MAX + 3), torch.tensor(last))
        digests, _ = forward_inputs.take()
        assert len(digests) == INPUTS_MAX + 1
        rest.append(digests[-1])
    assert rest[0] != rest[1] == rest[2]


def test_the_hooks_are_on_the_outermost_models_and_go(recorded):
    model = Model()
    modules = {"model.0": model.inner, "model.1": model, "state.ema": Model()}
    assert outermost(modules) == [model]
    forward_inputs = ForwardInputs(modules, lambda: None, raises)
    forward_inputs.close()
    model(torch.zeros(1, 2))
    assert forward_inputs.take() == ([], None)


def test_inputs_of_a_wrapped_model_are_seen_once():
    model, x = Model(), torch.zeros(1, 2)
    wrapper = nn.Sequential(model)
    forward_inputs = ForwardInputs({"model.0": wrapper, "model.1": model}, lambda: None, raises)
    for _ in range(2):
        wrapper(x)
        assert forward_inputs.take()[0] == [tensor_digest(x)]


def test_a_part_that_a_trainer_calls_itself_is_seen(recorded):
    """Lightning calls training_step, which calls the parts."""
    model, forward_inputs, firsts = recorded
    x, y = torch.zeros(1, 2), torch.ones(1, 2)
    model.inner(x)
    model(y)
    model.inner(x)
    assert forward_inputs.take()[0] == [tensor_digest(each) for each in (x, y, x)] and len(firsts) == 1
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 3))
    assert len(forward_inputs.take()[0]) == 1
    model.inner(x)
    assert forward_inputs.take()[0] == [tensor_digest(x)], "the forward that raised is over"


@pytest.mark.parametrize("attached", ["compiled", "original"])
def test_a_compiled_model_has_inputs_if_it_was_attached_itself(attached):
    model = Model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    forward_inputs = ForwardInputs({"model.0": compiled if attached == "compiled" else model}, lambda: None, raises)
    x = torch.ones(1, 2)
    compiled(x)
    assert forward_inputs.take()[0] == ([tensor_digest(x)] if attached == "compiled" else [])


def test_an_error_never_reaches_training(monkeypatch, recorded):
    model, errors = Model(), []
    forward_inputs = ForwardInputs({"model.0": model}, lambda: raises(ValueError("no")), errors.append)
    assert model(torch.zeros(1, 2)).shape == (1, 2) and str(errors[0]) == "no"
    forward_inputs.close()


def test_inputs_that_can_not_be_read_are_named():
    assert input_digest(torch.eye(2).to_sparse()) == "unreadable Tensor"
    assert input_digest(torch.ones(2, device="meta")) != input_digest(torch.ones(2))
    assert input_digest(torch.complex(torch.ones(2), torch.ones(2)).conj()) == input_digest(torch.full((2,), 1 - 1j))
    assert input_digest(torch.ones(3, requires_grad=True)) == tensor_digest(torch.ones(3))


def test_an_object_that_holds_itself_ends():
    circle = []
    circle.append(circle)
    assert list(tensors_in([circle, torch.ones(1)])) == [torch.ones(1)]
    assert inputs.DEPTH_MAX < 100
