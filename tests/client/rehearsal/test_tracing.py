"""Tests of the tracing that finds the lines at which generators move."""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from reft.client.data.loader import ResumableLoader
from reft.client.rehearsal import tracing
from reft.client.rehearsal.digests import generator_digests
from reft.client.rehearsal.tracing import GeneratorTracer, SourceLine
from reft.client.rehearsal.user_code import is_users


def raises(error):
    raise error


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.zeros(4, 1)


@pytest.fixture
def tracer():
    each = GeneratorTracer(raises, lambda: None)
    yield each
    each.close()
    assert sys.gettrace() is None


def found(tracer):
    moves, reason = tracer.stop()
    assert not reason
    return [(move.generator, move.line.code) for move in moves]


def draws_deep():
    torch.rand(1)  # deep
    return sorted([2, 1], key=lambda value: value + 0 * random.random())


def test_each_generator_is_found_at_the_line_that_moves_it(tracer):
    dataset = TensorDataset(torch.zeros(4, 1))
    assert not tracer.start()
    unmoved = [value + 1 for value in range(3)]
    random.random()  # python's
    np.random.rand()  # numpy's
    loader = DataLoader(dataset, shuffle=True)
    batches = iter(loader)  # torch's
    assert found(tracer) == [
        ("python", "random.random()  # python's"),
        ("numpy", "np.random.rand()  # numpy's"),
        ("torch", "batches = iter(loader)  # torch's"),
    ]
    assert unmoved and batches


def test_a_loop_over_a_loader_is_named_by_its_own_line(tracer):
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)
    tracer.start()
    for (batch,) in loader:  # the loop
        assert batch.shape == (2, 1)
        break
    assert found(tracer) == [("torch", "for (batch,) in loader:  # the loop")]


def test_a_line_in_a_function_of_the_user_counts_and_not_its_caller(tracer):
    tracer.start()
    draws_deep()  # calls
    random.random()  # after
    assert found(tracer) == [
        ("torch", "torch.rand(1)  # deep"),
        ("python", "return sorted([2, 1], key=lambda value: value + 0 * random.random())"),
        ("python", "random.random()  # after"),
    ]


def test_what_the_rest_of_a_line_moves_after_a_call_is_that_lines(tracer):
    tracer.start()
    pair = (len("x"), is_even(2), random.random())  # the rest
    assert found(tracer) == [("python", 'pair = (len("x"), is_even(2), random.random())  # the rest')] and pair


def is_even(number):
    return number % 2 == 0


def test_what_moves_in_the_last_line_is_found_at_the_end(tracer):
    tracer.start()
    moves = (random.random(), tracer.stop())[1][0]
    assert [move.generator for move in moves] == ["python"]


def test_an_exception_passes_and_later_lines_are_right(tracer):
    tracer.start()
    try:
        raises(ValueError("x"))
    except ValueError:
        random.random()  # handled
    assert found(tracer) == [("python", "random.random()  # handled")]


def test_a_generator_that_is_put_back_has_not_moved(tracer):
    saved = torch.get_rng_state()
    tracer.start()
    torch.rand(1)
    random.random()  # stays
    torch.set_rng_state(saved)
    assert found(tracer) == [("python", "random.random()  # stays")]


def test_a_loop_that_draws_nothing_has_no_moves(tracer):
    sampler = RandomSampler(range(4), generator=torch.Generator())
    tracer.start()
    for _ in range(3):
        torch.ones(2).sum()
    assert list(sampler) and found(tracer) == []


ROWS = TensorDataset(torch.zeros(4, 1))


@pytest.mark.parametrize(
    ("make", "times"),
    [
        (lambda: DataLoader(ROWS, batch_size=2), 2),
        (lambda: DataLoader(ROWS, batch_size=2, num_workers=1), 2),
        (lambda: pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(ROWS, batch_size=4), 1),
        (lambda: range(3), 0),
    ],
)
def test_a_batch_is_seen_where_a_loader_of_torch_hands_it_out(make, times):
    loader, seen = make(), []
    tracer = GeneratorTracer(raises, lambda: seen.append(generator_digests()))
    tracer.start()
    for _ in loader:
        if seen:
            assert seen[-1] == generator_digests()
    tracer.stop()
    assert len(seen) == times
    assert [*loader] and len(seen) == times, "the tracing has ended"


@pytest.mark.parametrize("dataset", [ROWS, Stream()])
def test_the_loader_below_refts_is_not_the_one_that_hands_a_batch_out(dataset):
    """It makes batches with generators of the batch's own."""
    seen = []
    loader = ResumableLoader(DataLoader(dataset, batch_size=2))
    tracer = GeneratorTracer(raises, lambda: seen.append(1))
    tracer.start()
    next(loader.endless())
    tracer.stop()
    assert seen == []


def test_it_can_begin_again_and_the_caller_is_traced_too(tracer):
    tracer.start()
    tracer.stop()

    def begin():
        tracer.start()
        random.random()  # inner

    begin()
    random.random()  # outer
    assert [code for _, code in found(tracer)] == ["random.random()  # inner", "random.random()  # outer"]


def test_no_more_than_so_many_lines_are_looked_at(monkeypatch, tracer):
    monkeypatch.setattr(tracing, "LINES_MAX", 50)
    tracer.start()
    random.random()  # early
    for _ in range(100):
        pass
    random.random()  # late
    moves, reason = tracer.stop()
    assert [move.line.code for move in moves] == [
        "random.random()  # early"
    ] and "ran before the first forward" in reason


def test_no_more_than_so_many_moves_are_returned(monkeypatch, tracer):
    monkeypatch.setattr(tracing, "MOVES_MAX", 1)
    tracer.start()
    random.random()  # first
    random.random()  # second
    assert found(tracer) == [("python", "random.random()  # first")]


def test_the_tracing_of_others_is_left_alone(tracer):
    own = lambda *_: None  # noqa: E731
    sys.settrace(own)
    try:
        assert "debugger" in tracer.start()
        assert tracer.stop() == ([], "") and sys.gettrace() is own
        tracer.close()
        assert sys.gettrace() is own
    finally:
        sys.settrace(None)


def test_an_error_never_reaches_the_traced_code(monkeypatch):
    errors = []
    tracer = GeneratorTracer(errors.append, lambda: None)
    tracer.start()
    monkeypatch.setattr(tracing, "generator_digests", lambda: 1 / 0)
    assert sys.gettrace() is None and isinstance(errors[0], ZeroDivisionError)


def test_a_fork_of_the_trainer_is_not_traced(tracer):
    """Workers of a loader are forks."""
    tracer.start()
    pid = os.fork()
    if pid == 0:
        is_even(2)
        os._exit(0 if sys.gettrace() is None and not tracer.stop()[0] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    random.random()  # the parent's
    assert found(tracer) == [("python", "random.random()  # the parent's")]


def test_code_of_packages_and_of_reft_is_not_the_users():
    assert is_users(__file__)
    for file in (torch.__file__, random.__file__, np.__file__, tracing.__file__, pytest.__file__, "<string>", ""):
        assert not is_users(file), file


def test_the_file_of_a_line_is_named_from_the_folder_of_the_script(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("first\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    assert SourceLine(str(script), 1).short_file == "train.py" and SourceLine(str(script), 1).code == "first"
    assert SourceLine(str(tmp_path / "lib/data.py"), 3).short_file == "lib/data.py"
    assert SourceLine(__file__, 3).short_file == __file__
    assert is_users(str(script))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", torch.__file__)
    assert is_users(torch.__file__), "a script that lies in a package"
