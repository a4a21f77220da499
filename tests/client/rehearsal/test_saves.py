"""Tests of how the recorder sees calls of torch.save."""

from __future__ import annotations

import io
import os
import re
import threading
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from reft.client.rehearsal import saves
from reft.client.rehearsal.saves import SaveTracer
from reft.client.state import dcp_skeleton
from tests.client.rehearsal.test_tracing import raises

HERE = re.escape(__file__)


@pytest.fixture
def tracer():
    each = SaveTracer(raises)
    each.start()
    yield each
    each.close()


def save(value=None):
    torch.save(torch.ones(2) if value is None else value, buffer := io.BytesIO())  # the line
    return buffer


def line():
    return saves.SourceLine(__file__, save.__code__.co_firstlineno + 1)


def test_a_call_is_named_by_the_users_line(tracer):
    assert tracer.take() == []
    save()
    assert line().code.endswith("# the line") and tracer.take() == [f"torch.save at {__file__}:{line().number}"]
    assert tracer.take() == []


@pytest.mark.parametrize(
    "value", [nn.Linear(1, 1), {"model": nn.Linear(1, 1).state_dict(), "step": 3}, torch.ones(1).to_sparse()]
)
def test_whatever_has_tensors_counts_and_its_file_is_as_without_the_tracer(tracer, value):
    assert save(value).getvalue() and len(tracer.take()) == 1
    tracer.close()
    assert save(value).getvalue() and tracer.take() == []


def test_values_without_tensors_are_no_checkpoint(tracer):
    save({"step": 3})
    assert tracer.take() == []


def test_only_the_first_call_after_a_mark_is_noted(tracer):
    torch.save(torch.ones(1), io.BytesIO())
    first = tracer.take()
    for _ in range(2):
        save()
    assert len(first) == 1 and tracer.take() == [f"torch.save at {__file__}:{line().number}"]


def test_distributed_checkpoints_are_named_as_such(tracer, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process only
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    (call,) = tracer.take()
    assert re.fullmatch(rf"torch\.distributed\.checkpoint at {HERE}:\d+", call)


def test_a_call_on_another_thread_counts(tracer):
    own = threading.Thread(target=save)
    foreign = threading.Thread(target=torch.save, args=(torch.ones(1), io.BytesIO()))
    for thread, words in ((own, f"torch.save at {__file__}:{line().number}"), (foreign, "torch.save")):
        thread.start()
        thread.join()
        assert tracer.take() == [words]


def test_refts_own_calls_do_not_count(tracer, monkeypatch):
    monkeypatch.setitem(save.__globals__, "__name__", dcp_skeleton.__name__)
    save()
    assert tracer.take() == []


def test_a_fork_of_the_trainer_notes_nothing(tracer):
    pid = os.fork()
    if pid == 0:
        save()
        os._exit(len(tracer.take()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_several_tracers_live_in_one_process(tracer):
    other = SaveTracer(raises)
    other.start()
    save()
    assert len(tracer.take()) == len(other.take()) == 1
    other.close()


def test_an_error_never_reaches_the_save(monkeypatch):
    errors = []
    tracer = SaveTracer(errors.append)
    tracer.start()
    monkeypatch.setattr(saves, "saving_call", lambda: 1 / 0)
    assert save().getvalue() and isinstance(errors[0], ZeroDivisionError) and tracer.take() == []
    tracer.close()
