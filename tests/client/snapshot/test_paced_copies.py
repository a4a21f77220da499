"""Copy engines with a pacing plan: gaps first, the rest at the fence.

And why the fence must wait.
"""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch

from reft.client.attach.rank_table import ProcessFacts
from reft.client.link.exchange import from_json, to_json
from reft.client.memory.threads import ComputeThreads, has_idle_cores
from reft.client.snapshot import cpu_plan, cuda_plan
from reft.client.snapshot.cpu_engine import CpuCopyEngine
from reft.client.snapshot.cuda_engine import CudaCopyEngine
from reft.client.state.tensors import TensorIndex
from reft.core.pipeline.course import PacingPlan, Phase, Priority
from reft.core.pipeline.pacing import Tier
from reft.errors import ReftError
from tests.support.daemons import until
from tests.support.snapshot import Taken, bytes_in, placement_of, tensors_on
from tests.support.streams import Late, Strict


def pacing_of(*phases: tuple[Tier, float], bytes_per_s: float = 1e9) -> PacingPlan:
    return PacingPlan(tuple(Phase(*each) for each in phases), bytes_per_s, bytes_per_s, 0.0)


@pytest.mark.parametrize("f", [0, 1])
def test_all_bytes_are_copied_in_a_gap_that_is_long_enough(engine, f):
    copy_engine, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, set(), placement_of(TensorIndex(tensors, set()), 3, f))
    taken.paced(pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0), (Tier.COMPUTE, 100.0)))
    copy_engine.enter(0, Tier.COMPUTE)
    taken.start(copy_engine)
    assert not taken.chunks and not taken.parity, "copied before the gap"
    at_mark = copy_engine.copy_stats.written()
    assert at_mark == (tensors["on host"].nbytes if device == "cuda" else 0), "leaves of the host beside a device"
    copy_engine.enter(1, Tier.GAP)
    until(lambda: copy_engine.copy_stats.written() == taken.save_plan.written_bytes)
    copy_engine.enter(2, Tier.COMPUTE)
    copy_engine.fence()
    assert taken.ended.wait(20) and taken.error is None and taken.slot.bad_chunks() == []
    assert copy_engine.copy_stats.written(Tier.GAP) == taken.save_plan.written_bytes - at_mark
    assert sorted(taken.parity) == list(range(len(taken.save_plan.columns)))


def test_bytes_that_fit_into_no_phase_are_copied_at_the_fence(engine):
    copy_engine, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, {"buffer"})
    before = {name: bytes_in(tensor).tobytes() for name, tensor in tensors.items()}
    taken.paced(pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)))
    copy_engine.enter(0, Tier.COMPUTE)
    taken.start(copy_engine)
    copy_engine.fence()
    for name in ("large", "medium"):
        tensors[name].zero_()  # as the optimizer does
    assert taken.ended.wait(20) and taken.error is None
    assert {name: taken.bytes_of(name) for name in before} == before
    assert copy_engine.copy_stats.written(Tier.FENCE) == taken.save_plan.written_bytes


@pytest.mark.parametrize("scratch", [0, 100_000, 10 << 20])
def test_an_overrun_goes_through_scratch_memory_until_that_is_full(scratch, monkeypatch):
    monkeypatch.setattr(cuda_plan, "TRANSFER_BYTES", 50_000)
    device = Strict()
    copy_engine = CudaCopyEngine(device, overrun_scratch_bytes=scratch)
    tensors = tensors_on("cpu")
    for _ in range(2):  # the second snapshot must not overwrite the first one in the scratch memory
        taken = Taken(tensors, set(), placement_of(TensorIndex(tensors, set()), 3, 1))
        before = {name: bytes_in(tensor).tobytes() for name, tensor in tensors.items()}
        taken.paced(pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)))
        with device.watching:
            taken.start(copy_engine)
            copy_engine.fence()
        for tensor in tensors.values():
            tensor.add_(1)
        assert taken.ended.wait(20) and taken.error is None and taken.slot.bad_chunks() == []
        for run in taken.save_plan.runs:
            name = taken.save_plan.leaves[run.leaf].name
            expected = before[name][run.begin : run.begin + run.nbytes]
            assert taken.slot.data[run.at : run.at + run.nbytes].tobytes() == expected, name
    copy_engine.close()


def test_if_scratch_memory_cannot_be_allocated_the_optimizer_waits(monkeypatch, caplog):
    copy_engine = CudaCopyEngine(Late(), overrun_scratch_bytes=10 << 20)
    tensors = tensors_on("cpu")
    empty = torch.empty

    def full(*size, **options):
        if size == (10 << 20,):
            raise torch.OutOfMemoryError
        return empty(*size, **options)

    for _ in range(2):
        taken = Taken(tensors, set())
        taken.paced(pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)))
        taken.start(copy_engine)
        monkeypatch.setattr(torch, "empty", full)
        copy_engine.fence()
        monkeypatch.undo()
        assert taken.ended.wait(20) and taken.error is None and taken.slot.bad_chunks() == []
    assert sum("REFT_OVERRUN_SCRATCH_BYTES" in message for message in caplog.messages) == 1
    copy_engine.close()


def test_everything_is_copied_at_once_if_training_leaves_the_plan_or_waits(engine):
    copy_engine, device = engine
    for leave in (
        lambda: copy_engine.enter(1, Tier.COLLECTIVE),
        lambda: copy_engine.enter(5, Tier.COMPUTE),
        copy_engine.hurry,
    ):
        taken = Taken(tensors_on(device), set())
        taken.paced(pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)))
        copy_engine.enter(0, Tier.COMPUTE)
        taken.start(copy_engine)
        leave()
        assert taken.ended.wait(20) and taken.error is None, "without a fence"
        copy_engine.fence()
    assert copy_engine.copy_stats.written(Tier.FENCE) == 0


def failing(copy_engine, tensors) -> Taken:
    """Begins a snapshot that will fail with its first chunk. It fails in the gap or after it."""
    taken = Taken(tensors, set())
    taken.paced(pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)))

    def at_chunk(index: int) -> None:
        raise ReftError("failpoint")

    taken.at_chunk = at_chunk
    copy_engine.enter(0, Tier.COMPUTE)
    taken.start(copy_engine)
    return taken


def test_a_failure_in_a_gap_is_reported_and_training_goes_on(engine):
    copy_engine, device = engine
    taken = failing(copy_engine, tensors_on(device))
    copy_engine.enter(1, Tier.GAP)
    copy_engine.enter(2, Tier.COMPUTE)
    copy_engine.fence()
    assert taken.ended.wait(20) and "failpoint" in str(taken.error)
    Taken(tensors_on(device), set()).by(copy_engine)


@pytest.mark.parametrize("cpus", [[], [0, 0]])
def test_on_the_cpu_each_thread_copies_at_most_one_task_after_a_gap_ends(cpus, monkeypatch):
    monkeypatch.setattr(cpu_plan, "TASK_BYTES", 2 * 4096)  # two chunks
    copy_engine = CpuCopyEngine(cpus, clock=lambda: 0.0)
    taken = Taken(tensors_on("cpu"), set())
    taken.paced(pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0), (Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)))
    ended, threads = threading.Event(), len(cpus) or 1
    after: list[int] = []

    def at_chunk(index: int) -> None:
        taken.chunks.append(index)
        if ended.is_set():
            after.append(index)
        elif len(taken.chunks) == 5:
            copy_engine.enter(2, Tier.COMPUTE)
            ended.set()

    taken.at_chunk = at_chunk
    copy_engine.enter(0, Tier.COMPUTE)
    taken.start(copy_engine)
    copy_engine.enter(1, Tier.GAP)
    for _ in range(2):
        until(lambda: ended.is_set() and len(copy_engine._throttle._changed[Priority.IDLE]._waiters) == threads)
        assert len(after) <= 2 * threads - 1
        with copy_engine._throttle._lock:
            copy_engine._throttle._changed[Priority.IDLE].notify_all()
    copy_engine.enter(3, Tier.GAP)
    until(lambda: copy_engine.copy_stats.written() == taken.save_plan.written_bytes)
    copy_engine.fence()
    assert taken.ended.wait(20) and taken.error is None and len(after) > threads
    copy_engine.close()


@pytest.mark.parametrize("cpus", [[], [0, 0]])
def test_on_the_cpu_idle_threads_copy_in_gaps_and_only_there(cpus):
    copy_engine = CpuCopyEngine(cpus)
    for pacing_plan, tier, policy in [
        (pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)), Tier.GAP, os.SCHED_IDLE),
        (pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)), Tier.FENCE, os.SCHED_OTHER),
        (None, Tier.COMPUTE, os.SCHED_OTHER),
    ]:
        before = copy_engine.copy_stats.written(tier)
        taken, policies = Taken(tensors_on("cpu"), set()), set()
        taken.paced(pacing_plan)
        taken.at_chunk = lambda _, policies=policies: policies.add(os.sched_getscheduler(0))
        copy_engine.enter(0, Tier.COMPUTE)
        taken.start(copy_engine)
        if tier is Tier.GAP:
            copy_engine.enter(1, tier)
            until(
                lambda taken=taken, before=before: (
                    copy_engine.copy_stats.written(Tier.GAP) - before == taken.save_plan.written_bytes
                )
            )
        copy_engine.fence()
        assert taken.ended.wait(20) and taken.error is None and policies == {policy}
    copy_engine.close()


@pytest.mark.parametrize("fails_in", [Tier.GAP, Tier.FENCE])
def test_on_the_cpu_a_failure_leaves_no_thread_waiting(fails_in, monkeypatch):
    monkeypatch.setattr(cpu_plan, "TASK_BYTES", 4096)  # many tasks
    copy_engine, tensors = CpuCopyEngine([]), tensors_on("cpu")
    taken = failing(copy_engine, tensors)
    if fails_in is Tier.GAP:
        copy_engine.enter(1, Tier.GAP)
        assert taken.ended.wait(20), "without a fence"
    copy_engine.fence()
    assert taken.ended.wait(20) and "failpoint" in str(taken.error)
    Taken(tensors, set()).by(copy_engine)
    copy_engine.close()


@pytest.mark.parametrize("refused", ["sched_setscheduler", "sched_setaffinity"])
def test_without_permission_for_affinity_or_idle_priority_snapshots_still_end(refused, monkeypatch, caplog):
    """Else no thread would take the waiting tasks, and the fence would wait for ever."""

    def refuse(*_: object) -> None:
        raise PermissionError("not for you")

    monkeypatch.setattr(os, refused, refuse)
    copy_engine = CpuCopyEngine([0, 0])
    taken = Taken(tensors_on("cpu"), set())
    taken.paced(pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)))
    copy_engine.enter(0, Tier.COMPUTE)
    taken.start(copy_engine)
    copy_engine.enter(1, Tier.GAP)
    assert taken.ended.wait(20) and taken.error is None
    copy_engine.fence()
    assert "(not for you)" in caplog.text
    copy_engine.close()


def test_without_idle_threads_the_busy_threads_copy_in_gaps_too():
    copy_engine = CpuCopyEngine([], has_idle=False)
    taken, policies = Taken(tensors_on("cpu"), set()), set()
    taken.paced(pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)))
    taken.at_chunk = lambda _: policies.add(os.sched_getscheduler(0))
    copy_engine.enter(0, Tier.COMPUTE)
    taken.start(copy_engine)
    copy_engine.enter(1, Tier.GAP)
    until(lambda: copy_engine.copy_stats.written(Tier.GAP) == taken.save_plan.written_bytes)
    copy_engine.fence()
    assert taken.ended.wait(20) and taken.error is None and policies == {os.SCHED_OTHER}
    copy_engine.close()


@pytest.mark.parametrize(
    "others, threads, cpus, expected",
    [
        ([], 2, {0, 1}, True),
        ([ComputeThreads(1, frozenset({0, 1}))], 1, {0, 1}, True),
        ([ComputeThreads(2, frozenset({0, 1}))], 2, {0, 1}, False),
        ([ComputeThreads(1, frozenset({0, 1}))] * 2, 1, {0, 1}, False),
        ([ComputeThreads(1, frozenset({1}))], 1, {0}, True),
        ([ComputeThreads(1, frozenset({0}))], 1, {0}, False),
    ],
)
def test_no_core_is_idle_if_the_ranks_have_more_threads_than_cores(others, threads, cpus, expected):
    own = ComputeThreads(threads, frozenset(cpus))
    assert has_idle_cores(own, [own, *others]) is expected
    assert from_json(ProcessFacts, json.loads(json.dumps(to_json(ProcessFacts.of(1, own))))).team == own


class NoWaitDevice(Late):
    """A mutant device: the compute stream does not wait."""

    def compute_waits(self, event):
        pass


class NoWaitCpuEngine(CpuCopyEngine):
    """A mutant CPU engine: the fence does not wait."""

    def fence(self) -> None:
        pass


@pytest.mark.parametrize("mutant", [lambda: CudaCopyEngine(NoWaitDevice()), lambda: NoWaitCpuEngine([])])
def test_without_the_fences_wait_a_snapshot_is_torn(mutant):
    """Shows that test_bytes_that_fit_into_no_phase_are_copied_at_the_fence finds a missing wait."""
    copy_engine = mutant()
    tensors = tensors_on("cpu")
    taken = Taken(tensors, set())
    before = bytes_in(tensors["large"]).tobytes()
    taken.paced(pacing_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)))
    copy_engine.enter(0, Tier.COMPUTE)
    hold = threading.Event()
    taken.start(copy_engine, after=hold)  # so that the first byte, or the wait for the device, is late
    copy_engine.fence()
    tensors["large"].zero_()
    copy_engine.hurry()
    hold.set()
    assert taken.ended.wait(20)
    assert taken.bytes_of("large") != before
    copy_engine.close()
