"""A job is purged while an attach is under way: one of both is refused, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from reft.errors import ConfigError
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import caller_process
from reft_daemon.registry import Registry, UnknownJob
from reft_daemon.server.callers import Caller, Door
from reft_daemon.server.judge import AdmittedCall
from reft_daemon.server.service import DaemonService
from tests.daemon.jobs import test_leases
from tests.daemon.jobs.test_leases import lease_request, release_request
from tests.support.jobs import Code, Job, refused, registry_of, write

Meanwhile = Callable[[Registry], Awaitable[None]]


@pytest.fixture
def job(daemon) -> Job:
    """A job that has ended, and whose step 3 is sealed."""
    job = Job([(daemon, [0])]).decide()
    write(job.slots(0)[0], job.version(3))
    return job.close()


def decide_request(job: Job, counts_on_slots: bool) -> pb.DecideRequest:
    base = job.version(3, 1)
    job.counter = 2
    return pb.DecideRequest(manifest=job.manifest, decision=job.decision(base), counts_on_slots=counts_on_slots)


def test_a_decision_that_counts_on_purged_slots_is_refused(daemon, job):
    assert job.headers(), "what the attach plans with"
    daemon.call("Purge", pb.PurgeRequest(job="job"))
    request = decide_request(job, counts_on_slots=True)
    with refused(Code.FAILED_PRECONDITION, "was freed on this node while an attach planned its restore"):
        daemon.call("Decide", request)
    with refused(Code.NOT_FOUND):
        daemon.status("job")
    assert not (daemon.folder / "job").exists()
    request.counts_on_slots = False  # the next attach finds no slot here, and counts on other nodes
    daemon.call("Decide", request)
    assert daemon.status("job").base.step == 3 and job.lease(0)


def test_a_decision_that_counts_on_slots_is_taken_while_they_are_held(daemon, job):
    daemon.call("Decide", decide_request(job, counts_on_slots=True))
    assert daemon.status("job").base.step == 3 and job.headers()


def test_after_a_purge_no_rank_of_the_decision_gets_slots(daemon, job):
    daemon.call("Decide", decide_request(job, counts_on_slots=True))
    daemon.call("Purge", pb.PurgeRequest(job="job"))
    for method, request in (
        ("Lease", job.lease_request(0)),
        ("Secure", pb.SecureRequest(job="job", epoch=job.epoch)),
    ):
        with refused(Code.NOT_FOUND, "holds no job"):
            daemon.call(method, request)
    assert not (daemon.folder / "job").exists()


async def attach(registry: Registry, counter: int = 2) -> None:
    request = test_leases.decide_request(counter)
    request.manifest.token = bytes(32)
    await registry.decide(request)


async def attach_and_lease(registry: Registry) -> None:
    await attach(registry)
    await registry.lease(lease_request(2), caller_process(os.getpid()))


async def purge_too(registry: Registry) -> None:
    registry.purge("job")


async def purged_with(
    meanwhile: Meanwhile | None, monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> pb.PurgeReply:
    """Purges an ended job; `meanwhile` happens while storage takes the end of its lineage."""
    await attach(registry, 1)
    await registry.lease(lease_request(1), caller_process(os.getpid()))
    registry.release(release_request(1), os.getpid())

    async def end_lineage(job: JobRecord) -> None:
        if meanwhile is not None:
            await meanwhile(registry)

    monkeypatch.setattr(registry.persists, "end_lineage", end_lineage)
    call = AdmittedCall(Caller(Door.LOCAL, os.getpid()), None)
    return await DaemonService(registry, None, None).Purge(pb.PurgeRequest(job="job"), call)  # type: ignore[arg-type]


@pytest.mark.parametrize("meanwhile", [attach, attach_and_lease])
def test_a_purge_that_waits_for_storage_spares_an_attach_that_comes_meanwhile(monkeypatch, meanwhile):
    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
            registry = registry_of(Arena(Path(path), 64 << 20))
            with pytest.raises(ConfigError, match="was started again while its purge waited for storage"):
                await purged_with(meanwhile, monkeypatch, registry)
            job = registry.get("job")
            assert job.epoch.counter == 2 and len(job.slots.current) == 2 and registry.arena.held_bytes
            assert job.is_live is (meanwhile is attach_and_lease)
            registry.purge("job")

    asyncio.run(run())


def test_a_purge_that_waits_for_storage_ends_as_usual_or_finds_the_job_gone(monkeypatch):
    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
            registry = registry_of(Arena(Path(path), 64 << 20))
            assert (await purged_with(None, monkeypatch, registry)).freed_bytes
            with pytest.raises(UnknownJob):
                await purged_with(purge_too, monkeypatch, registry)
            assert registry.arena.held_bytes == 0 and not registry.jobs

    asyncio.run(run())
