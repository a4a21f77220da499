"""Tests which process is a rank's trainer. A closed session stays closed."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.core.commit.round import StepAnswer
from reft.errors import AttachError, NoRoom, StaleEpoch
from reft.wire import messages
from reft.wire import process as wire_process
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon import registry as registry_module
from reft_daemon.arena.arena import Arena
from reft_daemon.jobs import leasing, trainers
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease, caller_process, end_orphans
from tests.support.daemons import until
from tests.support.jobs import Code, Job, decide_now, epoch_of, refused, registry_of


@pytest.fixture
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        yield Arena(Path(path), 64 << 20)


def decide_request(counter: int) -> pb.DecideRequest:
    epoch = messages.epoch_to(epoch_of(counter))
    manifest = pb.Manifest(job="job", world=1, nodes=[pb.Node(name="n", id="n", ranks=[0])])
    return pb.DecideRequest(manifest=manifest, decision=pb.Decision(epoch=epoch))


def lease_request(counter: int) -> pb.LeaseRequest:
    epoch = messages.epoch_to(epoch_of(counter))
    return pb.LeaseRequest(
        job="job", epoch=epoch, rank=0, slots=2, data_bytes=4096, table_bytes=4096, chunk_bytes=4096
    )  # fmt: skip


def release_request(counter: int) -> pb.ReleaseRequest:
    return pb.ReleaseRequest(job="job", epoch=messages.epoch_to(epoch_of(counter)), rank=0)


def test_a_process_that_closed_its_session_gets_no_lease_in_that_epoch(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer)
    daemon.call("Release", pb.ReleaseRequest(job="job", epoch=job.epoch))
    with refused(Code.FAILED_PRECONDITION, "has closed its session"):
        job.lease(0, trainer)
    assert not daemon.status("job").ranks[0].alive
    assert job.decide().lease(0, trainer) == names, "the same process may attach again"


@pytest.mark.parametrize("event", ["closed", "attached anew"])
def test_a_slow_lease_undoes_no_close_and_no_new_attach(arena, monkeypatch, event):
    """Slots for a larger layout are leased during training. The session may close meanwhile."""

    async def run() -> None:
        job = JobRecord(arena, pb.JobRecord(manifest=decide_request(1).manifest), ChangeQueue())
        decide_now(job, decide_request(1))
        await leasing.lease(job, lease_request(1), caller_process(os.getpid()))
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def slowly(job: JobRecord, request: pb.LeaseRequest) -> list:
            begun.set()
            await goes_on.wait()
            return []

        monkeypatch.setattr(leasing, "slots_for", slowly)
        late = asyncio.ensure_future(leasing.lease(job, lease_request(1), caller_process(os.getpid())))
        await begun.wait()
        trainers.release(job, release_request(1), os.getpid())
        if event == "attached anew":
            decide_now(job, decide_request(2))
        goes_on.set()
        with pytest.raises(AttachError if event == "closed" else StaleEpoch):
            await late
        assert not any(lease.watch for lease in job.leases.values())

    asyncio.run(run())


def test_a_decision_is_refused_while_a_new_trainer_lives(daemon, trainer):
    """Two launches of a job start at once.

    The first trainer registers after the second launch has found no orphans.
    """
    job = Job([(daemon, [0])]).decide()
    daemon.call("Inventory", pb.InventoryRequest(job="job", launch="other", pids=[os.getpid()], end_orphans=True))
    job.lease(0, trainer)
    with refused(Code.ALREADY_EXISTS, f"process {trainer.pid}, which lives"):
        job.decide()
    job.counter -= 1
    job.report(0, {1: StepAnswer.SEALED})
    assert daemon.status("job").ranks[0].alive
    trainer.kill()
    until(lambda: not daemon.status("job").ranks[0].alive, what="the news of its death")
    job.decide().lease(0)


def test_the_rank_of_a_living_trainer_is_leased_to_no_other_process(daemon, trainer):
    """Otherwise two processes would write the same slots."""
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer)
    with refused(Code.ALREADY_EXISTS, f"is already attached by process {trainer.pid}"):
        job.lease(0)
    trainer.kill()
    until(lambda: not daemon.status("job").ranks[0].alive, what="the news of its death")
    assert job.lease(0) == names


def test_an_orphan_that_does_not_die_fails_the_attach():
    class Undying:
        async def kill(self, **facts: object) -> bool:
            return False

    orphan = Lease(Process(7, 70), 1, Undying())
    with pytest.raises(AttachError, match="process 7, an orphan of rank 3, does not die"):
        asyncio.run(end_orphans("job", {3: orphan}, True, [], "launch", "pid 1"))


@pytest.mark.parametrize("same_machine", [True, False])
def test_pids_of_another_boot_are_nobody(arena, monkeypatch, same_machine):
    """After a reboot, or in another pid namespace, other processes have the recorded pids."""

    async def run() -> None:
        registry = registry_of(arena)
        request = decide_request(1)
        request.manifest.token = bytes(31) + b"1"
        await registry.decide(request)
        await registry.lease(lease_request(1), caller_process(os.getpid()))
        if not same_machine:
            monkeypatch.setattr("reft_daemon.jobs.epochs.machine", lambda: "another boot")
        restarted = registry_of(arena)
        restarted.adopt()
        assert (restarted.jobs["job"].leases[0].watch is not None) is same_machine
        assert wire_process.machine() == restarted.jobs["job"].record.machine

    asyncio.run(run())


def test_a_later_process_with_a_recorded_pid_is_nobody(arena):
    """The trainer ended while no daemon ran, and this process has its pid now."""

    async def run() -> None:
        registry = registry_of(arena)
        request = decide_request(1)
        request.manifest.token = bytes(31) + b"1"
        await registry.decide(request)
        await registry.lease(lease_request(1), caller_process(os.getpid()))
        record = registry.jobs["job"].record
        record.leases[0].pid_start -= 1
        arena.job_files.write(record)
        restarted = registry_of(arena)
        restarted.adopt()
        lease = restarted.jobs["job"].leases[0]
        assert (lease.process.pid, lease.watch) == (os.getpid(), None), "so a fence ends nobody"

    asyncio.run(run())


def test_a_daemon_holds_no_more_jobs_than_its_limit(arena, monkeypatch):
    monkeypatch.setattr(registry_module, "JOBS_MAX", 2)

    async def run() -> None:
        registry = registry_of(arena)
        for number, name in enumerate(("a", "b", "c")):
            request = decide_request(1)
            request.manifest.job, request.manifest.token = name, bytes(32)
            if number < 2:
                await registry.decide(request)
                continue
            with pytest.raises(NoRoom, match=r"holds 2 jobs; the limit is 2[\s\S]*reft-cli purge"):
                await registry.decide(request)
        assert set(registry.jobs) == {"a", "b"} and not (arena.folder / "c").exists()
        await registry.decide(decide_again("a"))

    asyncio.run(run())


def test_ended_jobs_without_a_name_make_place_for_another_job(arena, monkeypatch):
    """As in a search over many short runs: else the next run could not begin for half an hour."""
    monkeypatch.setattr(registry_module, "JOBS_MAX", 2)

    async def run() -> None:
        registry = registry_of(arena)

        async def begin(name: str, named: bool) -> None:
            request = decide_request(1)
            request.manifest.job, request.manifest.named, request.manifest.token = name, named, bytes(32)
            await registry.decide(request)
            lease = lease_request(1)
            lease.job = name
            await registry.lease(lease, caller_process(os.getpid()))
            trainers.release(registry.jobs[name], pb.ReleaseRequest(job=name, epoch=lease.epoch), os.getpid())

        await begin("named", True)
        for name in ("first", "second", "third"):
            await begin(name, False)
            assert set(registry.jobs) == {"named", name}

    asyncio.run(run())


def decide_again(job: str) -> pb.DecideRequest:
    """Returns the decision of the next attach of a job."""
    request = decide_request(2)
    request.manifest.job, request.manifest.token = job, bytes(32)
    return request
