"""Copying engines along a course: gaps first, what no stretch holds at the fence; and what happens without the fence."""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch

from reft.client.attach.rank_table import team_facts, team_of
from reft.client.memory.threads import Team, has_idle_cores
from reft.client.snapshot import cpu_plan, cuda_plan
from reft.client.snapshot.cpu_engine import CpuCopier
from reft.client.snapshot.cuda_engine import CudaCopier
from reft.client.state.tensors import Bindings
from reft.core.pipeline.course import Course, Hands, Stretch
from reft.core.pipeline.pacing import Tier
from reft.errors import ReftError
from tests.support.daemons import until
from tests.support.snapshot import Taken, bytes_in, placement_of, tensors_on
from tests.support.streams import Late, Strict


def course_of(*stretches: tuple[Tier, float], bytes_per_s: float = 1e9) -> Course:
    return Course(tuple(Stretch(*each) for each in stretches), bytes_per_s, bytes_per_s, 0.0)


@pytest.mark.parametrize("f", [0, 1])
def test_all_bytes_go_into_a_gap_that_has_room(engine, f):
    copier, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, set(), placement_of(Bindings(tensors, set()), 3, f))
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0), (Tier.COMPUTE, 100.0))
    copier.enter(0, Tier.COMPUTE)
    copier.begin(taken.job)
    assert not taken.chunks and not taken.parity, "before the gap"
    copier.enter(1, Tier.GAP)
    until(lambda: copier.tally.written() == taken.share.written_bytes)
    copier.enter(2, Tier.COMPUTE)
    copier.fence()
    assert taken.ended.wait(20) and taken.error is None and taken.slot.bad_chunks() == []
    assert copier.tally.written(Tier.GAP) == taken.share.written_bytes
    assert sorted(taken.parity) == list(range(len(taken.share.columns)))


def test_what_no_stretch_holds_is_copied_at_the_fence(engine):
    copier, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, {"buffer"})
    before = {name: bytes_in(tensor).tobytes() for name, tensor in tensors.items()}
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
    copier.enter(0, Tier.COMPUTE)
    copier.begin(taken.job)
    copier.fence()
    for name in ("large", "medium"):
        tensors[name].zero_()  # as the optimizer does
    assert taken.ended.wait(20) and taken.error is None
    assert {name: taken.bytes_of(name) for name in before} == before
    assert copier.tally.written(Tier.FENCE) == taken.share.written_bytes


@pytest.mark.parametrize("scratch", [0, 100_000, 10 << 20])
def test_an_overrun_goes_through_scratch_memory_as_far_as_that_goes(scratch, monkeypatch):
    monkeypatch.setattr(cuda_plan, "TRANSFER_BYTES", 50_000)
    device = Strict()
    copier = CudaCopier(device, overrun_scratch_bytes=scratch)
    tensors = tensors_on("cpu")
    for _ in range(2):  # the second one must not overtake the first in the scratch
        taken = Taken(tensors, set(), placement_of(Bindings(tensors, set()), 3, 1))
        before = {name: bytes_in(tensor).tobytes() for name, tensor in tensors.items()}
        taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
        with device.watching:
            copier.begin(taken.job)
            copier.fence()
        for tensor in tensors.values():
            tensor.add_(1)
        assert taken.ended.wait(20) and taken.error is None and taken.slot.bad_chunks() == []
        for run in taken.share.runs:
            name = taken.share.leaves[run.leaf].name
            expected = before[name][run.begin : run.begin + run.nbytes]
            assert taken.slot.data[run.at : run.at + run.nbytes].tobytes() == expected, name
    copier.close()


def test_without_room_for_the_scratch_memory_the_optimizer_waits_and_is_not_ended(monkeypatch, caplog):
    copier = CudaCopier(Late(), overrun_scratch_bytes=10 << 20)
    tensors = tensors_on("cpu")
    empty = torch.empty

    def full(*size, **options):
        if size == (10 << 20,):
            raise torch.OutOfMemoryError
        return empty(*size, **options)

    for _ in range(2):
        taken = Taken(tensors, set())
        taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
        copier.begin(taken.job)
        monkeypatch.setattr(torch, "empty", full)
        copier.fence()
        monkeypatch.undo()
        assert taken.ended.wait(20) and taken.error is None and taken.slot.bad_chunks() == []
    assert sum("REFT_OVERRUN_SCRATCH_BYTES" in message for message in caplog.messages) == 1
    copier.close()


def test_whoever_leaves_the_course_or_waits_for_the_snapshot_gets_it_at_once(engine):
    copier, device = engine
    for leave in (lambda: copier.enter(1, Tier.COLLECTIVE), lambda: copier.enter(5, Tier.COMPUTE), copier.hurry):
        taken = Taken(tensors_on(device), set())
        taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
        copier.enter(0, Tier.COMPUTE)
        copier.begin(taken.job)
        leave()
        assert taken.ended.wait(20) and taken.error is None, "without a fence"
        copier.fence()
    assert copier.tally.written(Tier.FENCE) == 0


def failing(copier, tensors) -> Taken:
    """A snapshot that has begun, and will fail with its first chunk, in the gap or after it."""
    taken = Taken(tensors, set())
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))

    def at_chunk(index: int) -> None:
        raise ReftError("failpoint")

    taken.job.at_chunk = at_chunk
    copier.enter(0, Tier.COMPUTE)
    copier.begin(taken.job)
    return taken


def test_a_failure_in_a_gap_is_reported_and_training_goes_on(engine):
    copier, device = engine
    taken = failing(copier, tensors_on(device))
    copier.enter(1, Tier.GAP)
    copier.enter(2, Tier.COMPUTE)
    copier.fence()
    assert taken.ended.wait(20) and "failpoint" in str(taken.error)
    Taken(tensors_on(device), set()).by(copier)


@pytest.mark.parametrize("cpus", [[], [0, 0]])
def test_on_the_cpu_a_gap_that_ends_stops_copying_within_one_task_of_each_thread(cpus, monkeypatch):
    monkeypatch.setattr(cpu_plan, "TASK_BYTES", 2 * 4096)  # two chunks
    copier = CpuCopier(cpus, clock=lambda: 0.0)
    taken = Taken(tensors_on("cpu"), set())
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0), (Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
    ended, threads = threading.Event(), len(cpus) or 1
    after: list[int] = []

    def at_chunk(index: int) -> None:
        taken.chunks.append(index)
        if ended.is_set():
            after.append(index)
        elif len(taken.chunks) == 5:
            copier.enter(2, Tier.COMPUTE)
            ended.set()

    taken.job.at_chunk = at_chunk
    copier.enter(0, Tier.COMPUTE)
    copier.begin(taken.job)
    copier.enter(1, Tier.GAP)
    for _ in range(2):
        until(lambda: ended.is_set() and len(copier._gate._changed[Hands.IDLE]._waiters) == threads)
        assert len(after) <= 2 * threads - 1
        with copier._gate._lock:
            copier._gate._changed[Hands.IDLE].notify_all()
    copier.enter(3, Tier.GAP)
    until(lambda: copier.tally.written() == taken.share.written_bytes)
    copier.fence()
    assert taken.ended.wait(20) and taken.error is None and len(after) > threads
    copier.close()


@pytest.mark.parametrize("cpus", [[], [0, 0]])
def test_on_the_cpu_copies_in_a_gap_give_way_to_all_others_and_copies_elsewhere_do_not(cpus):
    copier = CpuCopier(cpus)
    for course, tier, policy in [
        (course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)), Tier.GAP, os.SCHED_IDLE),
        (course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0)), Tier.FENCE, os.SCHED_OTHER),
        (None, Tier.COMPUTE, os.SCHED_OTHER),
    ]:
        before = copier.tally.written(tier)
        taken, policies = Taken(tensors_on("cpu"), set()), set()
        taken.job.course = course
        taken.job.at_chunk = lambda _, policies=policies: policies.add(os.sched_getscheduler(0))
        copier.enter(0, Tier.COMPUTE)
        copier.begin(taken.job)
        if tier is Tier.GAP:
            copier.enter(1, tier)
            until(
                lambda taken=taken, before=before: copier.tally.written(Tier.GAP) - before == taken.share.written_bytes
            )
        copier.fence()
        assert taken.ended.wait(20) and taken.error is None and policies == {policy}
    copier.close()


@pytest.mark.parametrize("fails_in", [Tier.GAP, Tier.FENCE])
def test_on_the_cpu_a_failure_leaves_no_thread_waiting_for_its_turn(fails_in, monkeypatch):
    monkeypatch.setattr(cpu_plan, "TASK_BYTES", 4096)  # many tasks
    copier, tensors = CpuCopier([]), tensors_on("cpu")
    taken = failing(copier, tensors)
    if fails_in is Tier.GAP:
        copier.enter(1, Tier.GAP)
        assert taken.ended.wait(20), "without a fence"
    copier.fence()
    assert taken.ended.wait(20) and "failpoint" in str(taken.error)
    Taken(tensors, set()).by(copier)
    copier.close()


@pytest.mark.parametrize("refused", ["sched_setscheduler", "sched_setaffinity"])
def test_where_copy_threads_may_not_choose_how_and_where_they_run_a_snapshot_ends_as_ever(refused, monkeypatch, caplog):
    """Else nobody would take what waits for them, and the fence would hold training up for ever."""

    def refuse(*_: object) -> None:
        raise PermissionError("not for you")

    monkeypatch.setattr(os, refused, refuse)
    copier = CpuCopier([0, 0])
    taken = Taken(tensors_on("cpu"), set())
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
    copier.enter(0, Tier.COMPUTE)
    copier.begin(taken.job)
    copier.enter(1, Tier.GAP)
    assert taken.ended.wait(20) and taken.error is None
    copier.fence()
    assert "(not for you)" in caplog.text
    copier.close()


def test_on_a_crowded_cpu_the_same_threads_copy_in_gaps_too():
    copier = CpuCopier([], has_idle=False)
    taken, policies = Taken(tensors_on("cpu"), set()), set()
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
    taken.job.at_chunk = lambda _: policies.add(os.sched_getscheduler(0))
    copier.enter(0, Tier.COMPUTE)
    copier.begin(taken.job)
    copier.enter(1, Tier.GAP)
    until(lambda: copier.tally.written(Tier.GAP) == taken.share.written_bytes)
    copier.fence()
    assert taken.ended.wait(20) and taken.error is None and policies == {os.SCHED_OTHER}
    copier.close()


@pytest.mark.parametrize(
    "others, threads, cpus, expected",
    [
        ([], 2, {0, 1}, True),
        ([Team(1, frozenset({0, 1}))], 1, {0, 1}, True),
        ([Team(2, frozenset({0, 1}))], 2, {0, 1}, False),
        ([Team(1, frozenset({0, 1}))] * 2, 1, {0, 1}, False),
        ([Team(1, frozenset({1}))], 1, {0}, True),
        ([Team(1, frozenset({0}))], 1, {0}, False),
    ],
)
def test_where_threads_of_ranks_outnumber_cores_no_core_is_idle(others, threads, cpus, expected):
    own = Team(threads, frozenset(cpus))
    assert has_idle_cores(own, [own, *others]) is expected
    assert team_of(json.loads(json.dumps(team_facts(own)))) == own


class Deaf(Late):
    """The mutant: the compute stream does not wait."""

    def compute_waits(self, event):
        pass


class Hasty(CpuCopier):
    """The same on the CPU."""

    def fence(self) -> None:
        pass


@pytest.mark.parametrize("mutant", [lambda: CudaCopier(Deaf()), lambda: Hasty([])])
def test_without_the_wait_of_the_fence_a_snapshot_is_torn(mutant):
    """What test_what_no_stretch_holds_is_copied_at_the_fence would find."""
    copier = mutant()
    tensors = tensors_on("cpu")
    taken = Taken(tensors, set())
    before = bytes_in(tensors["large"]).tobytes()
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
    copier.enter(0, Tier.COMPUTE)
    hold = threading.Event()
    copier.submit(lambda: hold.wait(20) and None)  # the worker, or the first byte, is late
    copier.begin(taken.job)
    copier.fence()
    tensors["large"].zero_()
    copier.hurry()
    hold.set()
    assert taken.ended.wait(20)
    assert taken.bytes_of("large") != before
    copier.close()
