"""Tests which slots a daemon holds while a job goes on in another shape.

No more than the base and two new slots of each rank, until a version of the new shape is whole.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.client.link.slots import SlotLeases
from reft.config import Config
from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.errors import StaleEpoch
from reft.wire import messages, rpc
from reft.wire.slot_format import Geometry
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena, SlotFile
from reft_daemon.jobs import leasing, trainers
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import caller_process
from tests.daemon.jobs.test_leases import decide_request, lease_request, release_request
from tests.support.daemons import DaemonProcess
from tests.support.jobs import CHUNK, Code, Job, decide_now, epoch_of, refused, write

LARGE = 8 * CHUNK
OWN = caller_process(os.getpid())
SMALL_BYTES, LARGE_BYTES = (Geometry(CHUNK, size, CHUNK).file_bytes for size in (2 * CHUNK, LARGE))
SEALED = SlotState.SEALED


def trained(daemon: DaemonProcess, ranks: list[int], slots: int = 3) -> Job:
    """Returns a job that has written steps 1 to 3 and has closed its sessions."""
    job = Job([(daemon, ranks)]).decide()
    maps = {rank: job.slots(rank, slots=slots) for rank in ranks}
    for step in (1, 2, 3):
        for rank in ranks:
            write(maps[rank][step % slots], job.version(step))
            job.report(rank, {step: StepAnswer.SEALED})
    assert job.whole() == 3
    return job.close()


def reshaped(before: Job, ranks: list[int]) -> Job:
    """Returns the job after the decision of an attach that goes on from step 3."""
    job = Job([(before.daemons[0], ranks)])
    job.counter = before.counter
    return job.decide(base=before.version(3))


def held(daemon: DaemonProcess) -> int:
    return daemon.call("Status", pb.StatusRequest()).held_bytes


def peak(daemon: DaemonProcess) -> int:
    status = daemon.status("job")
    assert status.held_bytes == held(daemon)
    return status.peak_bytes


def of_base(job: Job) -> list[str]:
    return [name for name, header in job.headers().items() if header == (SEALED, 3)]


def test_two_ranks_become_one(daemon):
    before = trained(daemon, [0, 1])
    assert held(daemon) == peak(daemon) == 6 * SMALL_BYTES
    job = reshaped(before, [0])
    job.lease(0, slots=0)
    assert len(job.headers()) == 6, "a registered rank may still read all slots"
    names = job.lease(0, slots=3, data_bytes=LARGE)
    assert len(names) == 2
    assert sorted(set(job.headers()) - set(names)) == sorted(of_base(job)) and len(of_base(job)) == 2
    assert held(daemon) == peak(daemon) == 2 * SMALL_BYTES + 2 * LARGE_BYTES
    assert job.lease(0, slots=3, data_bytes=LARGE) == names, "no third slot while the base is held"
    status = daemon.status("job").ranks[0]
    assert (status.slots, status.wanted_slots) == (2, 3)
    write(job.maps(0, names)[0], job.version(4), nbytes=LARGE)
    job.report(0, {4: StepAnswer.SEALED})
    assert set(job.headers()) == set(names) and held(daemon) == 2 * LARGE_BYTES
    assert job.lease(0, slots=3, data_bytes=LARGE)[:2] == names
    assert held(daemon) == peak(daemon) == 3 * LARGE_BYTES
    assert daemon.status("job").ranks[0].slots == 3


def test_one_rank_becomes_two(daemon):
    before = trained(daemon, [0])
    job = reshaped(before, [0, 1])
    names = {0: job.lease(0, slots=3, data_bytes=LARGE)}
    assert held(daemon) == SMALL_BYTES + 2 * LARGE_BYTES
    names[1] = job.lease(1, slots=3, data_bytes=LARGE)
    assert [len(each) for each in names.values()] == [2, 2] and len(of_base(job)) == 1
    assert held(daemon) == SMALL_BYTES + 4 * LARGE_BYTES
    assert peak(daemon) == 6 * LARGE_BYTES
    for rank in (0, 1):
        write(job.maps(rank, names[rank])[0], job.version(4), nbytes=LARGE)
    job.report(0, {4: StepAnswer.SEALED})
    assert len(of_base(job)) == 1, "one rank has not sealed the version yet"
    job.report(1, {4: StepAnswer.SEALED})
    assert held(daemon) == 4 * LARGE_BYTES
    assert [len(job.lease(rank, slots=3, data_bytes=LARGE)) for rank in (0, 1)] == [3, 3]
    assert held(daemon) == peak(daemon) == 6 * LARGE_BYTES


def test_two_slots_stay_two(daemon):
    before = trained(daemon, [0], slots=2)
    assert (held(daemon), peak(daemon)) == (2 * SMALL_BYTES, 3 * SMALL_BYTES)
    job = reshaped(before, [0])
    names = job.lease(0, data_bytes=LARGE)
    assert held(daemon) == SMALL_BYTES + 2 * LARGE_BYTES
    write(job.maps(0, names)[0], job.version(4), nbytes=LARGE)
    job.report(0, {4: StepAnswer.SEALED})
    assert job.lease(0, data_bytes=LARGE) == names and held(daemon) == 2 * LARGE_BYTES


def test_memory_for_the_base_and_two_slots_is_enough(start):
    daemon = start("--memory", str(SMALL_BYTES + 2 * LARGE_BYTES))
    job = reshaped(trained(daemon, [0]), [0])
    first, second = job.slots(0, slots=3, data_bytes=LARGE)
    assert held(daemon) == SMALL_BYTES + 2 * LARGE_BYTES
    write(first, job.version(4))
    job.report(0, {4: StepAnswer.SEALED})
    with refused(Code.RESOURCE_EXHAUSTED, "--memory leaves"):
        job.lease(0, slots=3, data_bytes=LARGE)
    write(second, job.version(5))
    job.report(0, {5: StepAnswer.SEALED})
    assert job.whole() == 5, "the rank goes on with two slots"
    status = daemon.status("job").ranks[0]
    assert (status.slots, status.wanted_slots) == (2, 3)


def test_a_refused_change_keeps_the_base(start):
    daemon = start("--memory", str(6 * SMALL_BYTES))
    job = reshaped(trained(daemon, [0, 1]), [0])
    with refused(Code.RESOURCE_EXHAUSTED, "the slots need"):
        job.lease(0, slots=3, data_bytes=16 << 20)
    assert sorted(job.headers()) == sorted(of_base(job)) and len(of_base(job)) == 2


def test_slots_of_the_same_shape_are_used_again(daemon):
    job = reshaped(trained(daemon, [0, 1]), [0])
    old = [name for name in job.headers() if name.startswith("rank-0.")]
    assert sorted(job.lease(0, slots=3)) == sorted(old)
    assert [name for name in job.headers() if name.startswith("rank-1.")] == [
        name for name in of_base(job) if name.startswith("rank-1.")
    ], "rank 1 does not train here: only its part of the base is needed"


def test_only_a_missing_slot_is_made(daemon):
    """The user asks for one slot more than in the run before."""
    before = trained(daemon, [0], slots=2)
    job = reshaped(before, [0])
    old = set(job.headers())
    assert set(job.lease(0, slots=3)) > old and held(daemon) == 3 * SMALL_BYTES


def test_the_slots_of_a_living_trainer_stay(daemon, trainer):
    """It may write its old slots until it has written a new one."""
    job = reshaped(trained(daemon, [0]), [0])
    old = job.lease(0, trainer, slots=3)
    new = job.lease(0, trainer, slots=3, data_bytes=LARGE)
    assert len(new) == 2 and set(job.headers()) == {*old, *new}


def test_older_slots_of_another_rank_here_take_no_slot_from_a_rank(daemon, trainer):
    job = Job([(daemon, [0, 1])]).decide()
    write(job.slots(0, trainer)[0], job.version(1))
    job.lease(0, trainer, data_bytes=LARGE)
    assert len(job.lease(1, slots=3)) == 3


def test_a_client_maps_only_the_slot_that_it_lacks(daemon):
    job = reshaped(trained(daemon, [0]), [0])
    settings = Config(slots=3, chunk_bytes=CHUNK)
    calls = rpc.DaemonCalls()
    leases = SlotLeases(
        daemon.address, job.local_socket(), "job", epoch_of(job.counter), 0, settings, under_agent=False, pins_for=None,
        calls=calls,
    )  # fmt: skip
    slots = leases.lease(LARGE, CHUNK)
    assert [slot.index for slot in slots] == [0, 1]
    write(slots[0].map, job.version(4))
    job.report(0, {4: StepAnswer.SEALED})
    (third,) = leases.lease_further(slots)
    assert third.index == 2 and third.map.header.geometry == slots[0].map.header.geometry
    assert set(job.headers()) == {slot.name for slot in (*slots, third)}
    assert leases.lease_further([*slots, third]) == []
    for slot in (*slots, third):
        slot.close()
    calls.close()


# In one process


@pytest.fixture
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        yield Arena(Path(path), 64 << 20)


def two_rank_request(counter: int, base: Version | None = None) -> pb.DecideRequest:
    request = decide_request(counter)
    request.manifest.world = 2
    request.manifest.nodes[0].ranks[:] = [0, 1]
    if base:
        request.decision.base.CopyFrom(messages.version_to(base))
    return request


def request_of(counter: int, rank: int, data_bytes: int = CHUNK) -> pb.LeaseRequest:
    request = lease_request(counter)
    request.rank, request.data_bytes, request.slots = rank, data_bytes, 3
    return request


async def job_after_a_run(arena: Arena) -> JobRecord:
    """Returns a job of two ranks whose slots hold steps 1 to 3, with the decision to begin at 3."""
    job = JobRecord(arena, pb.JobRecord(manifest=two_rank_request(1).manifest), ChangeQueue())
    decide_now(job, two_rank_request(1))
    for rank in (0, 1):
        for step, slot in enumerate(await leasing.lease(job, request_of(1, rank), OWN), 1):
            write(slot.map, Version(epoch_of(1), step), nbytes=CHUNK)
        release = release_request(1)
        release.rank = rank
        trainers.release(job, release, os.getpid())
    decide_now(job, two_rank_request(2, Version(epoch_of(1), 3)))
    return job


def test_ranks_that_lease_at_once_keep_their_new_slots(arena):
    async def run() -> None:
        job = await job_after_a_run(arena)
        slots = await asyncio.gather(*(leasing.lease(job, request_of(2, rank, LARGE), OWN) for rank in (0, 1)))
        names = {slot.name for each in slots for slot in each}
        assert len(names) == 4 and names <= set(job.slots.current)
        assert len(job.slots.all) == 6 and all(slot.descriptor >= 0 for slot in job.slots.all.values())

    asyncio.run(run())


def test_memory_is_free_before_new_memory_is_taken(arena, monkeypatch):
    """An object of a freed slot would hold the pages of the file."""

    async def run() -> None:
        job = await job_after_a_run(arena)
        files: list[weakref.ref[SlotFile]] = [weakref.ref(slot) for slot in job.slots.all.values()]
        create, alive = arena.create, []

        def counted(*arguments: object) -> list[SlotFile]:
            alive.append(sum(file() is not None for file in files))
            return create(*arguments)

        monkeypatch.setattr(arena, "create", counted)
        await leasing.lease(job, request_of(2, 0, LARGE), OWN)
        assert alive == [2], "the slots of the base, one of each rank"

    asyncio.run(run())


def test_a_lease_that_a_newer_attach_overtakes_frees_nothing(arena):
    """The ranks of the newer attach have not restored yet."""

    async def run() -> None:
        job = await job_after_a_run(arena)
        goes_on = asyncio.Event()
        first = asyncio.ensure_future(job.allocator.run_alone(goes_on.wait))
        late = asyncio.ensure_future(leasing.lease(job, request_of(2, 0, LARGE), OWN))
        for _ in range(10):
            await asyncio.sleep(0)  # the lease runs until it must wait
        decide_now(job, two_rank_request(3, Version(epoch_of(1), 2)))
        goes_on.set()
        await first
        with pytest.raises(StaleEpoch):
            await late
        assert len(job.slots.all) == 6

    asyncio.run(run())
