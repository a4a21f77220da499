"""Memory for state that a restore makes: its pages are made ahead, if there is any to restore."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

from reft.client.attach import local_state
from reft.client.memory import prefault as pages_module
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.memory.prefault import BLOCK_BYTES
from reft.client.restore.materialize import live_index, missing_state_buffer
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.layout.layout import Leaf
from tests.scenarios.test_state_kinds import state_bytes, step_once, train
from tests.support.smaps import bytes_of

MIB = 1 << 20


def leaf_of(name: str, elements: int) -> Leaf:
    return Leaf(name, "float32", (elements,), (1,), 4 * elements, False, (elements,), (0,))


def test_pages_exist_before_anything_is_written():
    nbytes = 2 * BLOCK_BYTES + 5 * MIB
    buffer = HugePageBuffer(nbytes)
    buffer.make_pages()
    buffer.wait()
    tensor = buffer.empty(leaf_of("a", 1000), torch.float32)
    assert bytes_of(tensor.data_ptr(), "Rss") >= nbytes


def test_a_buffer_makes_no_pages_before_it_is_asked_nor_after_close():
    buffer = HugePageBuffer(64 * MIB)
    tensor = buffer.empty(leaf_of("a", 1000), torch.float32)
    assert bytes_of(tensor.data_ptr(), "Rss") < 4 * MIB
    left = buffer.nbytes
    buffer.close()
    assert left > 63 * MIB and not buffer.nbytes
    tensor.fill_(3)
    other = buffer.empty(leaf_of("b", 1000), torch.float32)
    other.fill_(4)
    assert tensor.eq(3).all(), "a closed buffer hands out no memory of its own"


@pytest.fixture
def buffers(monkeypatch):
    """The buffers that attach makes, in order."""
    made = []

    def record(*arguments):
        made.append(missing_state_buffer(*arguments))
        return made[-1]

    missing_state_buffer = local_state.missing_state_buffer
    monkeypatch.setattr(local_state, "missing_state_buffer", record)
    return made


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_a_restart_makes_the_optimizers_memory_ahead_and_a_fresh_start_makes_none(attach, buffers):
    model, optimizer = make()
    train(attach(model, optimizer), model, optimizer)
    assert not buffers, "there was nothing to restore"

    other, another = make()
    assert attach(other, another).restored_from == "memory"
    assert len(buffers) == 1, "the daemon has the job, so the pages are made before the inventory"
    pages, made = buffers[0]._pages, buffers[0]._bytes
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
    leaves = [*before.leaves(), *tracked.predict(tracked.names())]
    began, ended, handed_out = threading.Event(), threading.Event(), threading.Event()

    def slow(block) -> None:
        began.set()
        handed_out.wait(0.3)
        ended.set()

    monkeypatch.setattr(pages_module, "_make", slow)
    buffer = missing_state_buffer(leaves, before)
    assert began.wait(10)
    if fails_in:
        monkeypatch.setattr(TrackedObjects, fails_in, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails_in else contextlib.nullcontext():
        live_index(leaves, tracked, before, buffer)
    assert ended.is_set()
    handed_out.set()


def test_tensors_are_indexed_again_only_if_they_moved(monkeypatch):
    model, optimizer = make()
    step_once(model, optimizer)
    tracked = TrackedObjects({"model.0": model}, [optimizer], {})
    before = tracked.bind()
    leaves = before.leaves()
    state = optimizer.state[model[1].weight]
    state["exp_avg"] = state["exp_avg"].clone()
    live = {id(tensor) for tensor in live_index(leaves, tracked, before).tensors.values()}
    assert id(state["exp_avg"]) in live, "the tensor that the optimizer has now, not the first one"
    before = tracked.bind()
    monkeypatch.setattr(TrackedObjects, "bind", lambda *_: 1 / 0)
    assert live_index(leaves, tracked, before) is before


def test_close_waits_for_the_threads_that_make_pages(monkeypatch):
    began, ended, closed = threading.Event(), threading.Event(), threading.Event()

    def slow(block) -> None:
        began.set()
        closed.wait(0.3)
        ended.set()

    monkeypatch.setattr(pages_module, "_make", slow)
    buffer = HugePageBuffer(4 * MIB)
    buffer.make_pages()
    assert began.wait(10)
    buffer.close()
    assert ended.is_set()
    closed.set()
