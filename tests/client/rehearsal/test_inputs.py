"""Tests of the digests of inputs, and of the generators at the first batch and forward."""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

from reft.client.rehearsal import inputs
from reft.client.rehearsal.digests import generator_digests, tensor_digest
from reft.client.rehearsal.inputs import (
    INPUTS_MAX,
    ForwardInputs,
    compiled_around,
    input_digest,
    outermost,
    tensors_in,
)
from reft.core.rehearsal.records import ForwardKind


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
    assert forward_inputs.take() == (
        [tensor_digest(each) for each in (a, b, c, d, e)],
        None,
        firsts[0],
        {ForwardKind.TRAINING},
    )
    assert forward_inputs.take() == ([], None, None, set())


def test_the_generators_are_those_of_the_first_forward_after_a_mark(recorded):
    model, forward_inputs, firsts = recorded
    for _ in range(2):
        torch.rand(1)
        at_first = generator_digests()
        model(torch.zeros(1, 2))
        torch.rand(1)
        model(torch.ones(1, 2))
        digests, _, at_forward, _ = forward_inputs.take()
        assert len(digests) == 2 and at_forward == at_first
    assert len(firsts) == 2


def test_the_first_batch_counts_if_it_comes_before_the_forward(recorded):
    model, forward_inputs, _ = recorded
    at_batch = generator_digests()
    forward_inputs.batch()
    torch.rand(1)
    forward_inputs.batch()  # a second one
    model(torch.zeros(1, 2))
    assert forward_inputs.take().at_batch == at_batch
    model(torch.zeros(1, 2))
    forward_inputs.batch()  # of the next step
    assert forward_inputs.take().at_batch is None
    fetching = threading.Thread(target=forward_inputs.batch)
    fetching.start()
    fetching.join()
    assert forward_inputs.take() == ([], None, None, set())


def test_a_mark_has_few_inputs_and_the_last_stands_for_the_rest(recorded):
    model, forward_inputs, _ = recorded
    rest = []
    for last in (1, 2, 2):
        model(torch.zeros(1, 2), [torch.zeros(1)] * (INPUTS_MAX + 3), torch.tensor(last))
        digests = forward_inputs.take().digests
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
    assert forward_inputs.take() == ([], None, None, set())


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


@pytest.mark.parametrize("part", ["model", "inner"])  # Lightning calls children
def test_each_way_to_call_the_model_is_told_once(recorded, part):
    model, forward_inputs, _ = recorded
    called = {"model": model, "inner": model.inner}[part]
    called(torch.ones(1, 2)), called(torch.ones(1, 2))
    assert forward_inputs.take().forwards == {ForwardKind.TRAINING}
    model.eval()
    called(torch.ones(1, 2))
    assert forward_inputs.take().forwards == {ForwardKind.EVAL_WITH_GRADIENTS}
    with torch.inference_mode():
        called(torch.ones(1, 2))
        model.train()
        called(torch.ones(1, 2))
    assert forward_inputs.take().forwards == {ForwardKind.EVAL, ForwardKind.WITHOUT_GRADIENTS}
    assert forward_inputs.take().forwards == set()


def test_a_part_in_eval_mode_is_not_the_model(recorded):
    """A frozen part stays in eval mode."""
    model, forward_inputs, _ = recorded
    model.inner.eval()
    model.inner(torch.ones(1, 2))
    assert forward_inputs.take().forwards == {ForwardKind.TRAINING}


def test_activation_checkpointing_trains(recorded):
    model, forward_inputs, _ = recorded
    x = torch.ones(1, 2, requires_grad=True)
    for called in (model, model.inner):
        checkpoint(called, x, use_reentrant=True).sum().backward()
        assert forward_inputs.take().forwards == {ForwardKind.TRAINING}


@pytest.mark.parametrize("attached", ["compiled", "original", "inner"])
def test_a_compiled_model_has_inputs(attached):
    model, x = Model(), torch.ones(1, 2)
    compiled = torch.compile(nn.Sequential(model), backend="eager", fullgraph=True)
    models = {"compiled": compiled, "original": compiled._orig_mod, "inner": model}
    forward_inputs = ForwardInputs({"model.0": models[attached]}, lambda: None, raises)
    for call in (compiled, compiled, models[attached]):
        call(x)
        assert forward_inputs.take()[0] == [tensor_digest(x)]
    assert compiled_around([models[attached]]) == [compiled][attached == "compiled" :]
    assert compiled_around([torch.compile(compiled, backend="eager")]) == []


def test_a_compiled_model_that_runs_uncompiled_has_its_inputs_once():
    model, x = Model(), torch.ones(1, 2)
    compiled = torch.compile(model, backend="eager")
    forward_inputs = ForwardInputs({"model.0": model}, lambda: None, raises)
    with torch.compiler.set_stance("force_eager"):
        compiled(x)
    assert forward_inputs.take()[0] == [tensor_digest(x)]


def test_a_model_that_is_compiled_in_place_has_no_inputs():
    model = Model()
    model.compile(backend="eager", fullgraph=True)
    forward_inputs = ForwardInputs({"model.0": model}, lambda: None, raises)
    model(torch.ones(1, 2))
    assert forward_inputs.take() == ([], None, None, set())


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_pipeline_stage_that_learns_shapes_gets_no_input(alone):
    """Before the first step the second stage runs on memory that nothing has written."""
    models, firsts = [nn.Linear(2, 2), nn.Linear(2, 2)], []
    forward_inputs = ForwardInputs(
        {f"model.{i}": each for i, each in enumerate(models)}, lambda: firsts.append(1), raises
    )
    stages = [PipelineStage(each, index, 2, torch.device("cpu")) for index, each in enumerate(models)]
    schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=nn.functional.mse_loss)
    for count in (1, 2):
        x = torch.randn(2, 2)
        schedule.step(x, target=torch.randn(2, 2))
        weight, bias = models[0].weight, models[0].bias  # no step of an optimizer changes them here
        batches = [each for row in x.split(1) for each in (row, nn.functional.linear(row, weight, bias))]
        assert forward_inputs.take()[0] == [tensor_digest(each) for each in batches]
        assert len(firsts) == count


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
    one, other = (torch.quantize_per_tensor(torch.full((4,), value), 0.1, 0, torch.quint8) for value in (1.0, 2.0))
    assert input_digest(one) == input_digest(one.clone()) != input_digest(other)


def test_an_object_that_holds_itself_ends():
    circle = []
    circle.append(circle)
    assert list(tensors_in([circle, torch.ones(1)])) == [torch.ones(1)]
    assert inputs.DEPTH_MAX < 100
