"""`reft.Values`: used by attribute, held as leaves and small state, restored bit for bit."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import reft
from reft.client.state.host_state import HostState
from reft.client.state.serialization import finished, to_plain
from reft.client.state.tensors import leaf_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.client.state.values import LARGE, PLAIN_MAX, Values
from reft.core.layout.layout import Leaf
from reft.errors import LayoutChanged, UnsupportedState
from reft.wire import capsule_format
from tests.scenarios.test_state_kinds import step_once, train

CPU = torch.device("cpu")
BIG = LARGE // 4 + 1  # elements of float32 in the smallest large tensor


class Point(NamedTuple):
    x: int


def tracked(values: Values) -> TrackedObjects:
    return TrackedObjects({"state.loop": values.reft_held}, (), {})


def leaves(values: Values) -> list[Leaf]:
    values.reft_held.refresh()
    return tracked(values).bind().leaves()


def round_trip(values: Values, other: Values) -> None:
    """Holds values as a mark does, and restores them into others as attach does."""
    saved_leaves = leaves(values)
    data = capsule_format.encode(finished(to_plain(values.reft_held.held())))
    held = other.reft_held
    held.fit(saved_leaves, "state.loop.")
    for key, tensor in values.reft_held.tensors.items():
        held.tensors[key].copy_(tensor)
    held.restore(capsule_format.decode(data), CPU)


def test_values_are_attributes():
    loop = Values(best=1e9, batch=None)
    loop.best, loop.epoch = 0.5, 3
    del loop.batch
    assert loop.state_dict() == {"best": 0.5, "epoch": 3} and "epoch" in dir(loop)
    assert repr(loop) == "reft.Values(best=0.5, epoch=3)" == repr(copy.copy(loop))
    with pytest.raises(AttributeError, match="no value 'batch'"):
        _ = loop.batch
    with pytest.raises(AttributeError, match="no value 'batch'"):
        del loop.batch
    loop.load_state_dict({"best": 1})
    assert loop.state_dict() == {"best": 1}


@pytest.mark.parametrize("name", ["_scale", "state_dict", "load_state_dict", "reft_held", "__class__"])
def test_a_name_that_would_hide_a_method_or_a_leaf_is_refused(name):
    with pytest.raises(AttributeError, match="can't be the name of a value"):
        setattr(Values(), name, 1)


def test_import_reft_loads_no_torch():
    code = "import sys, reft; assert 'torch' not in sys.modules; reft.Values; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert reft.Values is Values


def test_every_kind_of_value_comes_back():
    many = torch.arange(float(BIG)).sqrt()
    loop = Values(
        best=float("-inf"), name="run", data=b"\0x", nothing=None, flag=True, count=2**80, array=np.arange(5.0),
        loss=torch.tensor(3.5, requires_grad=True), batch=(many, {"y": [many.int(), torch.ones(3, dtype=torch.bool)]}),
        order=OrderedDict(b=1, a=2), large=many.bfloat16().repeat(2),
    )  # fmt: skip
    other = Values(batch=torch.zeros(3 * BIG), large=many, gone=many)
    other.reft_held.refresh()
    round_trip(loop, other)
    assert list(other.state_dict()) == list(loop.state_dict())
    for name in ("best", "name", "data", "nothing", "flag", "count", "order"):
        assert getattr(other, name) == getattr(loop, name) and type(getattr(other, name)) is type(getattr(loop, name))
    assert np.array_equal(other.array, loop.array) and torch.equal(other.loss, torch.tensor(3.5))
    x, rest = other.batch
    assert (
        torch.equal(x, many) and torch.equal(rest["y"][0], many.int()) and torch.equal(rest["y"][1], torch.ones(3) > 0)
    )
    assert other.large.dtype is torch.bfloat16 and torch.equal(other.large, loop.large)
    assert not other.loss.requires_grad and set(other.reft_held.tensors) == {"batch/0", "batch/1", "large"}
    x.zero_()
    assert torch.equal(other.reft_held.tensors["batch/0"], many), "the loop writes its own tensor, not the stage"


@pytest.mark.parametrize("size", [2, BIG])
def test_lazy_views_come_back_with_the_values_that_the_loop_sees(size):
    numbers = torch.complex(torch.arange(float(size)), torch.arange(float(size)) - 1)
    loop = Values(conjugate=numbers.conj(), negative=numbers.conj().imag, pair=[numbers.conj()])
    assert loop.conjugate.is_conj() and loop.negative.is_neg()
    other = Values(conjugate=torch.zeros(size, dtype=torch.complex64), negative=torch.zeros(size), pair=[])
    round_trip(loop, other)
    assert torch.equal(other.conjugate, loop.conjugate) and torch.equal(other.pair[0], loop.pair[0])
    assert torch.equal(other.negative, loop.negative) and other.negative.dtype is torch.float32


def test_large_tensors_are_staged_leaves_of_each_rank():
    loop = Values(small=torch.zeros(LARGE // 4), large=torch.zeros(BIG), pair=[torch.zeros(BIG, 2)])
    found = {leaf.name: leaf for leaf in leaves(loop)}
    assert set(found) == {"state.loop.large", "state.loop.pair/0"}
    assert all(leaf.staged for leaf in found.values()) and found["state.loop.pair/0"].shape == (BIG, 2)


def test_a_rebound_value_keeps_its_place_and_another_shape_gets_another_one():
    loop = Values(batch=torch.zeros(BIG))
    loop.reft_held.refresh()
    index = tracked(loop).bind()
    for change, is_current in [(torch.ones(BIG), True), (torch.ones(BIG + 1), False)]:
        loop.batch = change
        loop.reft_held.refresh()
        assert index.is_current() is is_current
        assert torch.equal(loop.reft_held.tensors["batch"], change)
    index = tracked(loop).bind()
    loop.batch = loop.batch.double()
    loop.reft_held.refresh()
    assert not index.is_current()
    index = tracked(loop).bind()
    loop.batch = None
    loop.reft_held.refresh()
    assert not index.is_current() and not loop.reft_held.tensors


def test_a_rebound_batch_is_freed_at_once_and_not_when_python_collects():
    """Objects in cycles wait for the collector, which a few large tensors do not wake."""
    values = Values(best=1.0, batch=torch.ones(BIG), pair=[torch.ones(BIG)])
    gc.collect()
    gc.disable()
    try:
        held_leaves = leaves(values)
        values.reft_held.held()
        batches = [weakref.ref(values.batch), weakref.ref(values.pair[0])]
        values.batch, values.pair = torch.zeros(BIG), []
        assert [batch() for batch in batches] == [None, None] and len(held_leaves) == 2
    finally:
        gc.enable()


def test_stages_are_made_like_the_leaves_of_a_snapshot():
    loop = Values(same=torch.zeros(BIG), other=torch.zeros(BIG), gone=torch.zeros(BIG))
    held = loop.reft_held
    held.refresh()
    same = held.tensors["same"]
    wanted = {"same": same, "other": torch.zeros(2, BIG, dtype=torch.int8), "new/1": torch.zeros(BIG)}
    found = [leaf_of(f"state.loop.{key}", tensor, True) for key, tensor in wanted.items()]
    held.fit([*found, leaf_of("state.looped.x", same, True)], "state.loop.")
    assert {key: (each.dtype, each.shape) for key, each in held.tensors.items()} == {
        key: (each.dtype, each.shape) for key, each in wanted.items()
    }
    assert held.tensors["same"] is same


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Point(1), "Point"),
        ({"a": [object()]}, "builtins.object"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.sparse_coo_tensor(size=(2, 2)), "torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "meta"),
        (nn.UninitializedParameter(), "UninitializedParameter"),
        (np.array([object()]), "object"),
        (1 << 5000, "5001 bits"),
        ({Point(1): 1, frozenset(): 2}, "key of type"),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, str) else each.replace(" ", "-"),
)
def test_a_value_that_cannot_be_held_is_refused_by_its_name(value, text):
    with pytest.raises(UnsupportedState, match=r"^value 'bad(/0)?' of reft.Values can't be held: ") as refused:
        Values(good=1, bad=value).reft_held.check()
    assert text in str(refused.value) and "pass the object itself in state=" in refused.value.hint


def test_too_many_bytes_are_refused_with_the_largest_value():
    Values(large=torch.zeros(PLAIN_MAX), text="x" * (PLAIN_MAX // 2)).reft_held.check()
    with pytest.raises(UnsupportedState, match=rf"limit is {PLAIN_MAX}. The largest is 'text'"):
        Values(text="x" * PLAIN_MAX, data=b"x" * 10).reft_held.check()


def test_values_of_another_number_of_ranks_must_be_the_same():
    loop = Values()
    loop.load_state_dicts([{"best": 1.5, "batch": torch.ones(2)}, {"best": 1.5, "batch": torch.ones(2)}])
    assert loop.best == 1.5 and torch.equal(loop.batch, torch.ones(2))
    for states in ([{"best": 1}, {"best": 2}], [{"best": 1}, {"best": 1, "batch": None}]):
        with pytest.raises(LayoutChanged, match="differs among 2 ranks"):
            loop.load_state_dicts(states)


@pytest.mark.parametrize("best", [2.5, 3.5])
def test_a_capsule_of_each_old_rank_gives_the_values_of_another_number_of_ranks(best):
    trees = []
    for each in (2.5, best):
        values = Values(best=each, batch=torch.ones(3))
        host = HostState(tracked(values), {"loop": values})
        trees.append(capsule_format.decode(capsule_format.encode(host.capture(7))))
    loop = Values()
    host = HostState(tracked(loop), {"loop": loop})
    states = {"loop": [tree["state"]["loop"] for tree in trees]}
    if best != 2.5:
        with pytest.raises(LayoutChanged, match=r"value 'best' .* differs among 2 ranks"):
            host.restore(trees[0], states)
        return
    host.restore({**trees[0], "state": {"loop": None}}, states)
    assert loop.best == 2.5 and torch.equal(loop.batch, torch.ones(3))


# With a daemon


def objects() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def steps_of(session: Any, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Values, total: int) -> None:
    """Trains with a value that is another tensor at each step, and of another shape at step 3."""
    for step in session.steps(total):
        loop.batch = torch.full((BIG + (step == 3),), float(step))
        loop.best = min(loop.best, 1 / (1 + step))
        step_once(model, optimizer)


@pytest.mark.parametrize("total", [2, 4, 6])
def test_a_loop_goes_on_with_its_values(attach, total):
    loop = Values(best=1e9, batch=None)
    steps_of(session := attach(*(built := objects()), state={"loop": loop}), *built, loop, total)
    while not session.seal(timeout=60):  # larger slots are being made
        steps_of(session, *built, loop, session.step + 1)
    again = Values(best=0.0, batch=torch.zeros(7))
    session = attach(*objects(), state={"loop": again})
    assert again.best == loop.best and torch.equal(again.batch, loop.batch)


def test_a_value_that_cannot_be_held_ends_the_first_mark_and_no_later_one(attach, caplog):
    loop = Values(best=1e9)
    session = attach(*(built := objects()), state={"loop": loop})
    loop.metric = object()
    with pytest.raises(UnsupportedState, match="value 'metric' of"):
        steps_of(session, *built, loop, 1)
    loop.metric = None
    train(session, *built, steps=2)
    loop.metric = object()
    for _ in session.steps(session.step + 2):
        step_once(*built)
    assert not session.seal(timeout=60).whole and "metric" in caplog.text


def test_values_that_cannot_be_held_are_refused_at_attach(attach):
    with pytest.raises(UnsupportedState, match="value 'model'"):
        attach(*objects(), state={"loop": Values(model=nn.Linear(1, 1))})
