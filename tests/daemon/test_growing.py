"""A rank that asks for larger slots while it trains: what it writes meanwhile into those that it has is not lost."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.core.round import Answer
from reft.core.slots import SlotState
from reft.core.version import Version
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena import Arena
from reft_daemon.job import HeldJob
from tests.daemon.jobs import CHUNK, Code, Job, epoch_of, refused, write
from tests.daemon.test_leases import decide_request, lease_request
from tests.support.saying import says


@pytest.fixture
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        yield Arena(Path(path), 64 << 20)


def seal(job: Job, slot, step: int) -> None:
    write(slot, job.version(step))
    job.report(0, {step: Answer.SEALED})


@pytest.mark.parametrize("filled", [0, 2])
def test_a_refused_lease_takes_nothing_from_the_trainer(start, trainer, filled):
    daemon = start("--memory", "8MiB")
    job = Job([(daemon, [0])]).decide()
    one, two = job.slots(0, trainer.pid)
    for step, slot in list(enumerate((one, two), 1))[:filled]:
        seal(job, slot, step)
    with refused(Code.RESOURCE_EXHAUSTED):
        job.lease(0, trainer.pid, data_bytes=64 << 20)
    for step, slot in ((3, one), (4, two), (5, one)):
        seal(job, slot, step)
    daemon.kill()
    daemon.start()
    assert sorted(job.headers().values()) == [(SlotState.SEALED, 4), (SlotState.SEALED, 5)]


@pytest.mark.parametrize("filled", [0, 2])
def test_what_is_under_way_while_larger_slots_are_made_is_kept(daemon, trainer, filled):
    job = Job([(daemon, [0])]).decide()
    old = job.slots(0, trainer.pid)
    for step, slot in list(enumerate(old, 1))[:filled]:
        seal(job, slot, step)
    new = job.slots(0, trainer.pid, data_bytes=8 * CHUNK)
    seal(job, old[0], 3)
    assert (SlotState.SEALED, 3) in job.headers().values() and job.whole() == 3
    seal(job, new[0], 4)
    seal(job, new[1], 5)
    assert len(job.headers()) == 2, "once the new slots are written, the old ones go"


def test_a_retired_slot_that_was_cut_does_not_stop_the_round(arena):
    async def run() -> None:
        job = HeldJob(arena, pb.JobRecord(manifest=decide_request(1).manifest), lambda _: None)
        job.decide(decide_request(1), [])
        one, _ = await job.lease(lease_request(1))
        write(one.map, Version(epoch_of(1), 1), nbytes=4096)
        job.decide(decide_request(2), [])
        larger = lease_request(2)
        larger.data_bytes = 3 * 4096
        await job.lease(larger)
        assert job.retired
        os.truncate(arena.folder / "job" / one.name, 100)
        said = messages.said_to(says({1: Answer.SEALED}))
        job.report(pb.ReportRequest(job="job", epoch=messages.epoch_to(epoch_of(2)), rank=0, said=said))
        assert job.record.had_whole

    asyncio.run(run())
