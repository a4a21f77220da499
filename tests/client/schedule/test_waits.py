"""Tests of waits of DDP and FSDP2: they are gaps exactly while they last."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from reft import schedules
from reft.client.schedule import hooks
from reft.client.schedule.hooks import waits
from reft.client.schedule.iteration_profile import OTHER, WAIT, IterationProfiler
from reft.client.snapshot.cpu_engine import CpuCopyEngine
from tests.support.daemons import until


@pytest.fixture
def alone(tmp_path):
    """A process group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make_rhythm():
    copiers = []

    def make():
        copiers.append(CpuCopyEngine([]))
        made = IterationProfiler(copiers[-1])
        made.mark(1)
        return made

    yield make
    for copy_engine in copiers:
        copy_engine.close()


@pytest.fixture
def profiler(make_rhythm):
    return make_rhythm()


def names(profiler):
    """Returns the phases of the window since its mark."""
    return profiler._window.names[1:]


class Held(DistributedDataParallel):
    """A DDP whose only bucket is reduced when the test calls `let_go`."""

    def hold(self):
        self.futures = []
        self.register_comm_hook(None, self._reduce)
        return self

    def _reduce(self, _, bucket):
        self.futures.append((torch.futures.Future(), bucket.buffer()))
        return self.futures[-1][0]

    def let_go(self):
        future, gradients = self.futures.pop()
        future.set_result(gradients)


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: {"loss": y}, lambda y: (None, [y])])
def test_the_wait_for_ddps_buckets_is_a_gap(alone, profiler, wrap):
    class Model(nn.Linear):
        def forward(self, x):
            return wrap(super().forward(x))

    model = Held(Model(4, 4)).hold()
    stop = hooks.follow(schedules.Custom(), profiler, [nn.Sequential(model)])
    seen = []

    def let_go():
        until(lambda: model.futures)
        try:
            until(lambda: profiler.name == WAIT, 10)
            seen.append(profiler.name)
        finally:
            model.let_go()  # in any case: backward waits for it

    for _ in range(2):
        found = model(torch.ones(2, 4))
        y = found if isinstance(found, torch.Tensor) else found["loss"] if isinstance(found, dict) else found[1][0]
        other = threading.Thread(target=let_go)
        other.start()
        assert profiler.name == OTHER, "forward is no wait"
        try:
            y.sum().backward()
        finally:
            other.join()
        assert profiler.name == OTHER
    assert seen == [WAIT] * 2
    assert names(profiler) == [WAIT, OTHER] * 2
    assert model.module.weight.grad is not None
    stop()
    model(torch.ones(2, 4))
    assert not model._forward_hooks and names(profiler) == [WAIT, OTHER] * 2


def test_an_error_in_a_backward_pass_reaches_the_user(alone, profiler):
    model = DistributedDataParallel(nn.Linear(4, 4))
    stop = hooks.follow(schedules.Custom(), profiler, [model])

    def fail(_):
        raise ValueError("no gradient")

    y = model(torch.ones(2, 4))
    y.register_hook(fail)
    with pytest.raises(ValueError, match="no gradient"):
        y.sum().backward()
    assert profiler.name == OTHER
    stop()


def test_waits_of_fsdp2_are_gaps(profiler, monkeypatch):
    """In torch's fake group of two ranks only waits for gathers and reductions are gaps."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        inside = []
        wait = dist.Work.wait
        monkeypatch.setattr(
            dist.Work, "wait", lambda *args, **kwargs: (inside.append(profiler.name), wait(*args, **kwargs))
        )
        # Works of the fake group have another `wait`; works of gloo and NCCL have the wrapped one.
        monkeypatch.setattr(FakeWork, "wait", lambda self, *args, **kwargs: dist.Work.wait(self, *args, **kwargs))
        mesh = init_device_mesh("cpu", (2,))  # also where there is a GPU: its waits are not followed
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh)
        stop = hooks.follow(schedules.Custom(), profiler, [model])
        computing = []
        model[1].register_forward_hook(lambda *_: computing.append(profiler.name))
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        assert computing == [OTHER] * 2 and len(inside) >= 4 and set(inside) == {WAIT}
        assert names(profiler) == [WAIT, OTHER] * len(inside)
        stop()
    finally:
        dist.destroy_process_group()


def test_without_a_description_nothing_is_followed(alone, profiler):
    call = dist.Work.wait
    model = DistributedDataParallel(nn.Linear(4, 4))
    stop = hooks.follow(None, profiler, [model])
    model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    assert names(profiler) == [] and dist.Work.wait is call
    stop()


def barrier_in_another_thread():
    thread = threading.Thread(target=dist.barrier)
    thread.start()
    thread.join()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]])
def test_followers_share_one_wrapper_until_the_last_one_stops(alone, make_rhythm, order):
    call = dist.Work.wait
    rhythms = [make_rhythm() for _ in range(3)]
    stops = [waits.follow(rhythms[0])]
    wrapped = dist.Work.wait
    stops += [waits.follow(profiler) for profiler in rhythms[1:]]
    assert dist.Work.wait is wrapped is not call
    expected = [[], [], []]
    for index in order:
        dist.barrier()
        barrier_in_another_thread()
        for i in order[order.index(index) :]:
            expected[i] += [WAIT, OTHER]
        assert [names(each) for each in rhythms] == expected
        stops[index]()
        stops[index]()  # once more does nothing
        assert dist.Work.wait is (call if index == order[-1] else wrapped)
    dist.barrier()
    assert [names(each) for each in rhythms] == expected


@pytest.mark.parametrize("wraps", [functools.wraps, lambda _: lambda wrapper: wrapper])
def test_a_foreign_wrapper_stays_and_each_wait_is_reported_once(alone, make_rhythm, monkeypatch, wraps):
    monkeypatch.setattr(dist.Work, "wait", dist.Work.wait)  # puts the original back at the end
    first, second = make_rhythm(), make_rhythm()
    stop = waits.follow(first)
    ours, theirs = dist.Work.wait, []
    dist.Work.wait = other = wraps(ours)(lambda work, *args: theirs.append(1) or ours(work, *args))
    stop()
    assert dist.Work.wait is other, "it was not ours to take off"
    dist.barrier()
    assert not names(first)
    stop = waits.follow(second)
    dist.barrier()
    assert names(second) == [WAIT, OTHER] and not names(first) and len(theirs) == 2
    stop()
    assert dist.Work.wait is other


def test_an_exception_ends_a_wait(alone, profiler, monkeypatch):
    monkeypatch.setattr(dist.Work, "wait", lambda _: 1 / 0)
    stop = waits.follow(profiler)
    with pytest.raises(ZeroDivisionError):
        dist.Work.wait(None)
    assert profiler.name == OTHER and names(profiler) == [WAIT, OTHER]
    stop()
