"""What is said of generators that a restarted loop has moved before its first step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import reft
from reft.client.schedule.generator_guard import ForwardHook, notice, watchable
from reft.client.state import random_state
from reft.config import Config

ITER = lambda: iter(DataLoader(TensorDataset(torch.zeros(4))))  # noqa: E731
NOTHING = lambda: None  # noqa: E731


def objects() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loop(
    session: Any, model: Any, optimizer: torch.optim.Optimizer, draw: Callable[[], object], steps: int = 3
) -> None:
    """Trains in a loop that marks by itself, and may draw before its forward."""
    for _ in range(steps):
        draw()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        session.step_end()
    assert session.seal(timeout=60).whole


@pytest.mark.parametrize(
    ("usual", "moves", "name"),
    [
        (NOTHING, NOTHING, ""),
        (NOTHING, ITER, "the global torch generator moved between attach and the first forward"),
        (NOTHING, lambda: [random.random(), np.random.rand()], "numpy's global generator and Python's"),
        (lambda: torch.rand(()), ITER, ""),
        (lambda: torch.rand(()), random.random, "Python's global generator (random) moved"),
    ],
    ids=["clean", "iter", "others", "usual", "beside the usual"],
)
def test_a_generator_that_moved_is_named_unless_each_step_moves_it(attach, capsys, usual, moves, name):
    loop(attach(*(built := objects())), *built, usual)
    ITER()
    session = attach(*(built := objects()))
    moves()
    loop(session, *built, usual)
    said = capsys.readouterr().err
    assert name in said and said.count("moved between attach") == bool(name)
    assert not built[0]._forward_pre_hooks


def test_nothing_is_said_at_a_fresh_start_or_of_a_deliberate_reseed_or_in_steps(attach, capsys):
    session = attach(*(built := objects()))
    ITER()
    loop(session, *built, NOTHING)
    for generators in ("attach", "user"):
        session = attach(*(built := objects()), config=Config(generators=generators))
        torch.manual_seed(7)
        loop(session, *built, NOTHING)
    model, optimizer = objects()
    session = attach(model, optimizer)
    ITER()
    for _ in session.steps(session.step + 1):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    assert "moved between attach" not in capsys.readouterr().err


def test_nothing_is_said_of_a_loop_around_the_loader_of_reft(attach, capsys):
    for _ in range(2):
        model, optimizer = objects()
        loader = reft.ResumableLoader(DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=2, shuffle=True))
        session = attach(model, optimizer, state={"data": loader})
        ITER()
        for (x,) in islice(loader.endless(), 3):
            model(x).square().mean().backward()
            optimizer.step()
            session.step_end()
        assert session.seal(timeout=60)
    said = capsys.readouterr().err
    assert session.step == 6 and "moved between attach" not in said


def loop_with_validation(session: Any, loader: reft.ResumableLoader, model: Any, optimizer: Any, end: int) -> None:
    """Trains epochs as the README's loop does, and draws behind the last batch of each."""
    for _ in loader.epochs(end):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            session.step_end()
        assert session.seal(timeout=60)
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 4))
        model.train()


def loaded(attach: Callable[..., Any]) -> tuple[Any, ...]:
    model, optimizer = objects()
    loader = reft.ResumableLoader(DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=2, shuffle=True))
    return attach(model, optimizer, state={"data": loader}), loader, model, optimizer


def test_what_runs_at_the_end_of_an_epoch_may_draw(attach, capsys):
    loop_with_validation(*loaded(attach), end=1)
    assert "has completed" not in capsys.readouterr().err
    loop_with_validation(*(again := loaded(attach)), end=2)
    said = capsys.readouterr().err
    assert again[0].step == 6 and "moved between attach" not in said and "has completed" not in said


@pytest.mark.parametrize("end", [1, 2], ids=["the same end", "an earlier end"])
def test_a_finished_loop_over_epochs_says_so_and_nothing_else(attach, capsys, end):
    loop_with_validation(*loaded(attach), end=2)
    assert "has completed" not in capsys.readouterr().err
    loop_with_validation(*(again := loaded(attach)), end=end)
    said = capsys.readouterr().err
    assert again[0].step == 6 and said.count(f"has completed all {end} epochs: nothing is left") == 1
    assert "moved between attach" not in said


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_a_forward_that_does_not_train_is_not_judged(attach, capsys, is_evaluated):
    loop(attach(*(built := objects())), *built, NOTHING)
    session = attach(*(built := objects()))
    built[0].train(not is_evaluated)
    with torch.set_grad_enabled(is_evaluated), torch.random.fork_rng():
        built[0](torch.randn(2, 4))
    built[0].train()
    loop(session, *built, NOTHING)
    assert "moved between attach" not in capsys.readouterr().err


def test_a_capsule_without_the_entry_is_restored_and_nothing_is_said(attach, capsys, monkeypatch):
    from reft.client.state.host_state import HostState

    take = HostState.take
    monkeypatch.setattr(HostState, "take", lambda *rest: {k: v for k, v in take(*rest).items() if k != "moves"})
    loop(attach(*(built := objects())), *built, NOTHING)
    monkeypatch.undo()
    session = attach(*(built := objects()))
    ITER()
    loop(session, *built, NOTHING)
    assert session.step == 6 and "moved between attach" not in capsys.readouterr().err
    session = attach(*(built := objects()))
    ITER()
    loop(session, *built, NOTHING)
    assert "moved between attach" in capsys.readouterr().err, "learned since"


def compiled_inside(model: nn.Module, backend: Any) -> tuple[nn.Module, Any]:
    return model, torch.compile(model, backend=backend, fullgraph=True)


def compiled_outside(model: nn.Module, backend: Any) -> tuple[nn.Module, Any]:
    wrapped = torch.compile(model, backend=backend, fullgraph=True)
    return wrapped, wrapped


def compiled_in_place(model: nn.Module, backend: Any) -> tuple[nn.Module, Any]:
    model.compile(backend=backend, fullgraph=True)
    return model, model


@pytest.mark.parametrize(
    ("compiled", "is_seen"), [(compiled_inside, False), (compiled_outside, True), (compiled_in_place, False)]
)
def test_a_compiled_model_is_compiled_once_and_what_is_not_seen_is_not_said(attach, capsys, compiled, is_seen):
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for _ in range(2):
        torch._dynamo.reset()
        graphs.clear()
        model, optimizer = objects()
        held, called = compiled(model, backend)
        session = attach(held, optimizer)
        ITER()
        loop(session, called, optimizer, NOTHING)
        assert len(graphs) == 1
    assert ("moved between attach" in capsys.readouterr().err) is is_seen


def test_the_first_forward_of_ddp_is_seen(attach, capsys):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            model, optimizer = objects()
            wrapped = nn.parallel.DistributedDataParallel(model)
            session = attach(wrapped, optimizer)
            ITER()
            loop(session, wrapped, optimizer, NOTHING)
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().err.count("moved between attach") == 1


def test_a_copy_of_a_model_has_no_living_hook():
    model, calls = nn.Linear(2, 2), []
    model.register_forward_pre_hook(ForwardHook(lambda: calls.append(1)))
    copy.deepcopy(model)(torch.ones(1, 2))
    assert not calls
    model(torch.ones(1, 2))
    assert calls == [1]


def test_a_forward_whose_generators_cannot_be_read_goes_on(attach, caplog, monkeypatch):
    model, optimizer = objects()
    session = attach(model, optimizer)
    with monkeypatch.context() as broken:
        broken.setattr(random_state, "differing", lambda *_: 1 / 0)
        loop(session, model, optimizer, NOTHING)
    assert "can't be compared: division by zero" in caplog.text


def test_models_on_a_device_get_a_hook_only_inside_a_wrapper():
    class FSDPModule(nn.Linear):
        pass

    plain, wrapped = nn.Linear(1, 1, device="meta"), FSDPModule(1, 1, device="meta")
    modules = {"model.0": plain, "model.1": wrapped, "model.2": nn.Linear(1, 1), "state.average": nn.Linear(1, 1)}
    assert watchable(modules) == [wrapped, modules["model.2"]]


def test_the_notice_does_not_name_the_loader_that_is_used(attach, capsys):
    for _ in range(2):
        session, loader, model, optimizer = loaded(attach)
        batches = loader.endless()
        next(batches)
        ITER() if session.step else None
        loop(session, model, optimizer, NOTHING)
    said = capsys.readouterr().err
    assert "moved between attach" in said and "ResumableLoader" not in said


def test_the_notice_names_the_remedies():
    text = notice(["cpu"])
    assert all(
        word in text for word in ("reft.ResumableLoader", "session.steps", "before attach", "generator of its own")
    )
