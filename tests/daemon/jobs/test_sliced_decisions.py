"""A decision is taken in slices; what others do between them comes before the decision."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.core.commit.pins import Pins
from reft.core.commit.round import Outcome, Round
from reft.core.commit.version import Version
from reft.errors import AlreadyAttached, AttachError, StaleEpoch
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena import arena as arena_module
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.job_files import CHECKSUM, HEAD, PINS, RECORDS, JobFiles
from reft_daemon.arena.slices import run_at_once, run_in_slices
from reft_daemon.jobs import epochs, leasing, trainers
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import caller_process
from reft_daemon.registry import Registry
from tests.daemon.jobs.test_large_manifests import manifest
from tests.daemon.jobs.test_leases import decide_request, lease_request
from tests.support.instruction_count import counted_callbacks
from tests.support.jobs import decide_now, epoch_of, registry_of


@pytest.fixture
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        arena = Arena(Path(path) / "arena", 64 << 20)
        yield arena
        arena.close()


def request_of(counter: int) -> pb.DecideRequest:
    request = decide_request(counter)
    request.manifest.token = bytes([counter]) * 32
    request.manifest.job_mark = b"m" * 16
    return request


def job_in_epoch(arena: Arena, counter: int = 1) -> JobRecord:
    job = JobRecord(arena, pb.JobRecord(manifest=request_of(counter).manifest), ChangeQueue())
    decide_now(job, request_of(counter))
    return job


def files_of(arena: Arena) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (arena.folder / "job").iterdir()}


def saved(arena: Arena) -> pb.JobRecord:
    """Returns the record as a restarted daemon finds it."""
    (record,) = JobFiles(arena.folder, arena.write_files).read()
    return record


async def lease(job: JobRecord) -> None:
    request = lease_request(job.epoch.counter)
    request.slots = 0
    await leasing.lease(job, request, caller_process(os.getpid()))


def slices_of(arena: Arena) -> int:
    """Returns the number of slices of the decision that the tests below interrupt."""
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        other = Arena(Path(path) / "arena", 64 << 20)
        slices = sum(1 for _ in epochs.decide(job_in_epoch(other), request_of(2)))
        other.close()
    return slices


def test_each_manifest_and_each_part_of_the_files_has_a_slice(arena, monkeypatch):
    job = job_in_epoch(arena)
    for counter in (2, 3):
        request = request_of(counter)
        request.decision.base.CopyFrom(messages.version_to(Version(epoch_of(counter - 1), 3)))
        if counter == 3:
            request.decision.guard.CopyFrom(messages.version_to(Version(epoch_of(1), 2)))
        with monkeypatch.context() as patch:
            patch.setattr(arena_module, "WRITE_SLICE", 64)
            slices = sum(1 for _ in epochs.decide(job, request))
        assert job.epoch == epoch_of(counter)
    assert job.record.HasField("base_manifest") and job.record.HasField("guard_manifest")
    body = len((arena.folder / "job" / RECORDS[0]).read_bytes()) - HEAD.size - CHECKSUM.size
    # three manifests and the record before, then the record's bytes, then both files
    assert slices == 4 + 1 + 2 * (1 + -(-body // 64))


def test_a_large_decision_runs_few_instructions_at_a_time(arena):
    """Its checks and its placement run in a thread. The loop keeps what begins the epoch."""

    def most(world: int) -> int:
        async def run() -> int:
            registry = registry_of(arena)
            described = manifest(world, world, [10] * (world // 10))
            described.job, described.token, described.nodes[0].id = f"job{world}", bytes(31) + b"1", arena.node_id
            decision = pb.Decision(epoch=messages.epoch_to(epoch_of(1)))
            with counted_callbacks() as counts:
                await asyncio.ensure_future(registry.decide(pb.DecideRequest(manifest=described, decision=decision)))
            await registry.close(False)
            return max(counts)

        return asyncio.run(run())

    small, large = most(1000), most(2000)
    assert (large - small) / 1000 < 20, f"{small}, then {large} instructions"


def test_other_work_goes_on_between_the_slices(arena):
    async def run() -> None:
        job, turns, is_over = job_in_epoch(arena), 0, False

        async def count() -> None:
            nonlocal turns
            while not is_over:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        await asyncio.sleep(0)
        assert await run_in_slices(epochs.decide(job, request_of(2))) and job.epoch == epoch_of(2)
        is_over = True
        await counting
        assert turns >= slices_of(arena) > 5

    asyncio.run(run())


def test_a_lease_between_any_two_slices_refuses_the_decision(arena):
    """The trainer could write slots that the new attach reads."""

    async def run() -> None:
        job = job_in_epoch(arena)
        for slices in range(1, slices_of(arena) + 1):
            deciding = epochs.decide(job, request_of(2))
            for _ in range(slices):
                next(deciding)
            await lease(job)
            files, record = {name: files_of(arena)[name] for name in RECORDS}, job.record.SerializeToString()
            assert not run_at_once(deciding), "nothing was taken"
            with pytest.raises(AlreadyAttached):
                run_at_once(epochs.decide(job, request_of(2)))
            assert job.record.SerializeToString() == record and job.epoch == epoch_of(1) and job.is_live
            assert files_of(arena) == files and [each.pid for each in saved(arena).leases] == [os.getpid()]
            job.leases.pop(0).watch.close()

    asyncio.run(run())


def test_what_is_whole_between_two_slices_counts(arena):
    """A new layout must not go back behind a version that others know to be whole."""

    async def run() -> None:
        job = job_in_epoch(arena)
        await lease(job)
        request = request_of(2)
        request.trainers.append(os.getpid())
        request.decision.base.CopyFrom(messages.version_to(Version(epoch_of(1), 3)))
        deciding = epochs.decide(job, request)
        next(deciding)
        job.round = Round(0, 2, frozenset({0}), outcome=Outcome(Pins(whole=4), 4))
        with pytest.raises(AttachError, match="is whole"):
            run_at_once(deciding)
        assert job.epoch == epoch_of(1) and set(files_of(arena)) == set(RECORDS)
        job.leases[0].watch.close()

    asyncio.run(run())


@pytest.mark.parametrize("change", ["a trainer came and went", "pins"])
def test_a_record_that_was_written_between_any_two_slices_is_not_lost(arena, change):
    async def run() -> None:
        job = job_in_epoch(arena)
        for slices in range(1, slices_of(arena) + 1):
            deciding = epochs.decide(job, request_of(2))
            for _ in range(slices):
                next(deciding)
            if change == "pins":
                job.record.pins.whole = slices
                arena_module.write_pins(arena, job.record)
            else:
                await lease(job)
                release = pb.ReleaseRequest(job="job", epoch=job.record.decision.epoch, rank=0, refused=True)
                trainers.release(job, release, os.getpid())
            files = {name: files_of(arena)[name] for name in (*RECORDS, *[PINS] * (change == "pins"))}
            assert not run_at_once(deciding), "nothing was taken"
            assert job.epoch == epoch_of(1) and files_of(arena) == files
            assert saved(arena).decision.epoch.counter == 1
        decide_now(job, request_of(2))
        assert job.epoch == epoch_of(2) and saved(arena).decision.epoch.counter == 2

    asyncio.run(run())


async def begun(registry: Registry, request: pb.DecideRequest) -> asyncio.Task[None]:
    """Begins a decision, and returns while its drafts are being written."""
    task = asyncio.ensure_future(registry.decide(request))
    for _ in range(100_000):
        if list(registry.arena.folder.glob("job/*.new")):
            return task
        await asyncio.sleep(0)
    raise AssertionError("no draft is being written")


def test_the_registry_tries_again_when_the_job_has_changed(arena):
    async def run() -> None:
        registry = registry_of(arena)
        await registry.decide(request_of(1))
        task = await begun(registry, request_of(2))
        job = registry.get("job")
        await lease(job)
        trainers.release(job, pb.ReleaseRequest(job="job", epoch=job.record.decision.epoch, rank=0), os.getpid())
        await task
        assert registry.get("job").epoch == epoch_of(2)
        task = await begun(registry, request_of(3))
        registry.purge("job")
        await task
        assert registry.get("job") is not job and registry.get("job").epoch == epoch_of(3)
        assert saved(arena).before.decision.epoch.counter == 0, "the purged job is forgotten"
        await registry.close(True)

    asyncio.run(run())


def test_a_job_that_changes_all_the_time_is_refused(arena, monkeypatch):
    async def run() -> None:
        registry = registry_of(arena)
        await registry.decide(request_of(1))
        decide, tries = epochs.decide, 0

        def disturbed(job: JobRecord, *arguments: object) -> Iterator[None]:
            nonlocal tries
            tries += 1
            deciding = decide(job, *arguments)  # type: ignore[arg-type]
            next(deciding)
            job.arena.job_files.write(job.record)
            return (yield from deciding)  # type: ignore[return-value]

        monkeypatch.setattr(epochs, "decide", disturbed)
        with pytest.raises(AttachError, match="changes all the time"):
            await registry.decide(request_of(2))
        assert 1 < tries < 100 and registry.get("job").epoch == epoch_of(1)
        await registry.close(True)

    asyncio.run(run())


@pytest.mark.parametrize("counters", [(2, 3), (3, 2), (2, 2)])
def test_two_decisions_at_once_are_taken_one_after_the_other(arena, counters):
    async def run() -> None:
        registry = registry_of(arena)
        await registry.decide(request_of(1))
        results = await asyncio.gather(
            *(registry.decide(request_of(each)) for each in counters), return_exceptions=True
        )
        job = registry.get("job")
        assert job.epoch == epoch_of(max(counters))
        failures = [each for each in results if each is not None]
        assert all(isinstance(each, StaleEpoch) for each in failures) and len(failures) <= (counters[0] != counters[1])
        assert job.record.manifest == request_of(max(counters)).manifest
        assert job.changes is registry.changes and len(registry.changes) == 1
        assert saved(arena).SerializeToString() == job.record.SerializeToString()
        assert {path.name for path in (arena.folder / "job").iterdir()} == set(RECORDS)
        await registry.close(True)

    asyncio.run(run())


def test_a_cancelled_decision_leaves_nothing(arena):
    async def run() -> None:
        registry = registry_of(arena)
        for counter in (1, 2):
            task = await begun(registry, request_of(counter))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert task.cancelled() and not list(arena.folder.glob("job/*.new"))
            assert (arena.folder / "job").exists() == ("job" in registry.jobs) == (counter == 2)
            await registry.decide(request_of(counter))
        assert registry.get("job").epoch == epoch_of(2)
        await registry.close(True)

    asyncio.run(run())
