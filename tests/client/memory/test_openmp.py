"""One more team of OpenMP threads: those of torch's that wait sleep soon, only while it lasts, and nothing is left of it."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest
import torch

from reft.client.memory.openmp import _libgomp, oversubscribed
from reft.client.memory.threads import copy_cpus
from reft.client.snapshot.cpu_engine import CpuCopier
from tests.support.daemons import until
from tests.support.snapshot import Taken, tensors_on

LATE_S = 0.02  # of one thread of a team; libgomp's own patience is some 10 ms
needs_libgomp = pytest.mark.skipif(_libgomp() is None, reason="torch computes with another OpenMP than GNU's")
needs_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="libgomp has more threads than cores anyway")


def threads() -> set[str]:
    return {each.name for each in threading.enumerate()}


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def team():
    """Runs a team of as many threads as there are cores, one of them late; CPU seconds that another one waited with."""
    libgomp, size = ctypes.CDLL(None), len(os.sched_getaffinity(0))
    ids: dict[int, int] = {}

    def body(_: object) -> None:
        number = libgomp.omp_get_thread_num()
        ids[number] = threading.get_native_id()
        if number == 0:
            threading.Event().wait(LATE_S)

    kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body)

    def used() -> float:
        return int(Path(f"/proc/self/task/{ids[1]}/schedstat").read_text().split()[0]) / 1e9

    def run() -> float:
        libgomp.GOMP_parallel(kept, None, size, 0)  # which makes it, or wakes it up
        before = used()
        libgomp.GOMP_parallel(kept, None, size, 0)
        return used() - before

    return run


@needs_libgomp
@needs_cores
def test_who_waits_for_a_late_thread_sleeps_as_long_as_it_lasts(team):
    before = team()
    with oversubscribed():
        during = team()
    after = team()
    assert 5 * during < before and 5 * during < after, (before, during, after)


@needs_libgomp
def test_nothing_is_left_of_it():
    before = tasks()
    for _ in range(50):
        with oversubscribed():
            assert "reft-team" in threads()
    with pytest.raises(ZeroDivisionError), oversubscribed():
        raise ZeroDivisionError
    until(lambda: tasks() <= before, what="the end of its threads")
    assert not threads() & {"reft-team", "reft-spare"}


@pytest.mark.parametrize("last", ["reft-spare", "reft-team"])
def test_without_another_thread_the_copy_goes_on(monkeypatch, last):
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == last:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with oversubscribed():
        assert "reft-team" not in threads()
    for thread in threading.enumerate():
        if thread.name == "reft-spare":
            thread.join(10)
    assert "reft-spare" not in threads()


@needs_libgomp
@pytest.mark.parametrize("shares_cores", [True, False])
def test_it_lasts_as_long_as_bytes_are_copied_where_copy_threads_share_torchs_cores(shares_cores):
    copier = CpuCopier(sorted(os.sched_getaffinity(0))[:1] if shares_cores else [])
    taken = Taken(tensors_on(torch.device("cpu")), set())
    seen, after = [], []
    taken.job.at_chunk = lambda _: seen.append("reft-team" in threads())
    taken.job.intact = lambda: after.append("reft-team" in threads())
    taken.by(copier)
    copier.close()
    assert set(seen) == {shares_cores} and after == [False]


def test_copy_threads_share_cores_only_where_torch_computes_on_all(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert bool(copy_cpus()) == (cores > 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores - 1)
    assert copy_cpus() == []
