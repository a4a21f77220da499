"""Tests that a daemon reports only steps that a restore could use. They are steps of a slot."""

from __future__ import annotations

import asyncio
import os

from reft.core.commit.round import StepReport
from reft.core.commit.version import Version
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.jobs import leasing
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import caller_process
from tests.daemon.jobs.test_leases import decide_request, lease_request
from tests.support.jobs import decide_now, epoch_of, write


def test_a_slot_with_a_damaged_capsule_is_not_reported_as_sealed(tmp_path, caplog):
    async def run() -> None:
        job = JobRecord(
            Arena(tmp_path / "arena", 64 << 20), pb.JobRecord(manifest=decide_request(1).manifest), ChangeQueue()
        )
        decide_now(job, decide_request(1))
        slots = await leasing.lease(job, lease_request(1), caller_process(os.getpid()))
        for step, slot in enumerate(slots, 1):
            write(slot.map, Version(epoch_of(1), step), nbytes=4096, compared={7: 10 * step})
        assert job.capsule_replication.cell_digests(slots, epoch_of(1)) == {1: {7: 10}, 2: {7: 20}}
        assert job.capsule_replication.cell_digests(slots, epoch_of(2)) == {}
        slots[1].map.put_capsule(b"no capsule")
        assert job.capsule_replication.cell_digests(slots, epoch_of(1)) == {1: {7: 10}}
        for cells in ({-1: 1}, {1 << 32: 1}, {1: -1}, {1: 1 << 63, 2: (1 << 64) - 1, (1 << 64) - 1: 1}):
            write(slots[1].map, Version(epoch_of(1), 2), nbytes=4096, compared=cells)
            said = job.capsule_replication.cell_digests(slots, epoch_of(1))
            assert said == {1: {7: 10}}, "no report could carry the others"
            messages.report_to(StepReport(until=2, sealed=frozenset({1})), said)
        assert f"slot={slots[1].name} is damaged" in caplog.text

    asyncio.run(run())
