"""Memory for held state that does not exist yet: made ahead, in time, and only where something is held."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

from reft.client.attach import run as attach_module
from reft.client.memory import prefault as pages_module
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.memory.prefault import BLOCK_BYTES
from reft.client.restore.materialize import live_tensors, room_for
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.layout.layout import Leaf
from tests.scenarios.test_state_kinds import state_bytes, step_once, train
from tests.support.smaps import bytes_of

MIB = 1 << 20


def leaf_of(name: str, elements: int) -> Leaf:
    return Leaf(name, "float32", (elements,), (1,), 4 * elements, False, (elements,), (0,))


def test_pages_exist_before_anything_is_written():
    nbytes = 2 * BLOCK_BYTES + 5 * MIB
    room = HugePageBuffer(nbytes)
    room.make_pages()
    room.wait()
    tensor = room.empty(leaf_of("a", 1000), torch.float32)
    assert bytes_of(tensor.data_ptr(), "Rss") >= nbytes


def test_a_buffer_makes_no_pages_before_it_is_asked_nor_after_close():
    room = HugePageBuffer(64 * MIB)
    tensor = room.empty(leaf_of("a", 1000), torch.float32)
    assert bytes_of(tensor.data_ptr(), "Rss") < 4 * MIB
    left = room.nbytes
    room.close()
    assert left > 63 * MIB and not room.nbytes
    tensor.fill_(3)
    other = room.empty(leaf_of("b", 1000), torch.float32)
    other.fill_(4)
    assert tensor.eq(3).all(), "a closed room hands out no memory of its own"


@pytest.fixture
def rooms(monkeypatch):
    """The rooms that attach makes, in order."""
    made = []

    def noting(*arguments):
        made.append(attach_module_room_for(*arguments))
        return made[-1]

    attach_module_room_for = attach_module.room_for
    monkeypatch.setattr(attach_module, "room_for", noting)
    return made


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_a_restart_makes_the_optimizers_memory_ahead_and_a_fresh_start_makes_none(attach, rooms):
    model, optimizer = make()
    train(attach(model, optimizer), model, optimizer)
    assert not rooms, "nothing was held"

    other, another = make()
    assert attach(other, another).restored_from == "memory"
    assert len(rooms) == 1, "the daemon says that it holds the job, before anybody asks what"
    pages, made = rooms[0]._pages, rooms[0]._bytes
    assert pages is not None
    pages.wait()
    moment = another.state[other[1].weight]["exp_avg"].data_ptr()
    assert made.ctypes.data <= moment < made.ctypes.data + made.nbytes, "state lies where the pages were made"
    assert state_bytes(other, another) == state_bytes(model, optimizer)


@pytest.mark.parametrize("fails_in", ["", "make", "bind"])
def test_no_thread_writes_zeros_into_memory_that_was_handed_out(monkeypatch, fails_in):
    model, optimizer = make()
    tracked = TrackedObjects({"model.0": model}, [optimizer], {})
    before = tracked.bind()
    held = [*before.leaves(), *tracked.predict()]
    began, ended, handed_out = threading.Event(), threading.Event(), threading.Event()

    def slow(block) -> None:
        began.set()
        handed_out.wait(0.3)
        ended.set()

    monkeypatch.setattr(pages_module, "_make", slow)
    room = room_for(held, tracked, before)
    assert began.wait(10)
    if fails_in:
        monkeypatch.setattr(TrackedObjects, fails_in, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails_in else contextlib.nullcontext():
        live_tensors(held, tracked, before, room)
    assert ended.is_set()
    handed_out.set()


def test_tensors_are_indexed_again_only_if_they_moved(monkeypatch):
    model, optimizer = make()
    step_once(model, optimizer)
    tracked = TrackedObjects({"model.0": model}, [optimizer], {})
    before = tracked.bind()
    held = before.leaves()
    state = optimizer.state[model[1].weight]
    state["exp_avg"] = state["exp_avg"].clone()
    found = {id(tensor) for tensor in live_tensors(held, tracked, before).values()}
    assert id(state["exp_avg"]) in found, "what the optimizer has by now, not what was found first"
    before = tracked.bind()
    monkeypatch.setattr(TrackedObjects, "bind", lambda *_: 1 / 0)
    assert live_tensors(held, tracked, before) is before.tensors


def test_close_waits_for_the_threads_that_make_pages(monkeypatch):
    began, ended, closed = threading.Event(), threading.Event(), threading.Event()

    def slow(block) -> None:
        began.set()
        closed.wait(0.3)
        ended.set()

    monkeypatch.setattr(pages_module, "_make", slow)
    room = HugePageBuffer(4 * MIB)
    room.make_pages()
    assert began.wait(10)
    room.close()
    assert ended.is_set()
    closed.set()
