"""Sealed slots are read in the background, at a bounded rate, and damaged ones count as lost."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.core.commit.version import Version
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena, SlotFile
from reft_daemon.arena.headers import header_messages, header_of, sealed_versions
from reft_daemon.jobs import leasing, scrub
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import caller_process
from reft_daemon.jobs.scrub import ScrubCounts, SlotProgress, is_idle, next_slot, pause_s, take_turn
from tests.daemon.jobs.test_leases import decide_request, lease_request
from tests.support.jobs import epoch_of, write
from tests.support.parity import fill, memory_slot

OLD, NEW = Version(epoch_of(1), 3), Version(epoch_of(1), 4)
CHUNK = 4096  # of the slots of `lease_request`


@pytest.fixture
def job() -> Iterator[JobRecord]:
    """A job whose two slots hold steps 3 and 4."""
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        request = decide_request(1)
        record = pb.JobRecord(manifest=request.manifest, decision=request.decision)
        job = JobRecord(Arena(Path(path), 64 << 20), record, ChangeQueue())

        async def lease() -> None:
            request = lease_request(1)
            request.data_bytes = 2 * CHUNK
            await leasing.lease(job, request, caller_process(os.getpid()))

        asyncio.run(lease())
        for slot, version in zip(job.slots.all.values(), (OLD, NEW), strict=True):
            write(slot.map, version, nbytes=CHUNK)
        yield job


def slot_of(job: JobRecord, version: Version) -> SlotFile:
    return next(slot for slot in job.slots.all.values() if slot.map.header.version == version)


def flip(slot: SlotFile, offset: int) -> None:
    at = slot.map.header.geometry.data_offset + offset
    byte = os.pread(slot.descriptor, 1, at)
    os.pwrite(slot.descriptor, bytes([byte[0] ^ 1]), at)


def turns(job: JobRecord, counts: ScrubCounts, count: int, idle_s: float = 2 * scrub.IDLE_S) -> list[int]:
    """Returns what each of some turns has read, so long after the newest seal."""

    async def run() -> list[int]:
        return [await take_turn({"job": job}, counts, time.monotonic() + idle_s) for _ in range(count)]

    return asyncio.run(run())


def test_a_changed_byte_is_found_and_the_slot_counts_as_lost(job, caplog):
    slot = slot_of(job, NEW)
    flip(slot, CHUNK - 1)
    counts = ScrubCounts()
    assert turns(job, counts, 3) == [CHUNK, CHUNK, 0]
    assert (counts.read_bytes, counts.damaged) == (2 * CHUNK, 1)
    assert sealed_versions("job", job.slots.all.values()) == [OLD]
    assert len(header_messages("job", job.slots.all.values())) == 1
    assert "has changed in memory: chunk 0" in caplog.text
    write(slot.map, Version(epoch_of(1), 5), nbytes=CHUNK)
    assert header_of("job", slot) is not None, "a slot that is written again is sound"


@pytest.mark.parametrize("part", ["leaf table", "capsule"])
def test_a_changed_byte_beside_the_data_is_found_too(job, caplog, part):
    slot = slot_of(job, NEW)
    geometry = slot.map.header.geometry
    part_offset = {"leaf table": geometry.table_offset, "capsule": geometry.capsule_offset}[part]
    flip(slot, part_offset - geometry.data_offset)
    counts = ScrubCounts()
    turns(job, counts, 3)
    assert counts.damaged == 1 and slot.damaged == NEW
    assert f"the {part} of rank 0" in caplog.text and "has a wrong digest" in caplog.text


def test_sound_slots_are_read_once_and_then_after_hours(job):
    counts = ScrubCounts()
    assert turns(job, counts, 4) == [CHUNK, CHUNK, 0, 0] and not counts.damaged
    assert turns(job, counts, 1, scrub.AGAIN_S + 2 * scrub.IDLE_S) == [CHUNK]


def test_nothing_is_read_while_steps_are_sealed(job):
    job.sealed_s[0] = time.monotonic()
    assert turns(job, ScrubCounts(), 1, idle_s=1.0) == [0]
    assert turns(job, ScrubCounts(), 1) == [CHUNK]


def test_a_large_slot_is_read_in_turns(job, monkeypatch):
    monkeypatch.setattr(scrub, "TURN_BYTES", CHUNK)
    write(slot_of(job, NEW).map, NEW, nbytes=2 * CHUNK)
    assert turns(job, ScrubCounts(), 4) == [CHUNK, CHUNK, CHUNK, 0]


def test_a_slot_that_is_written_meanwhile_is_not_damaged(job, monkeypatch):
    slot = slot_of(job, OLD)

    def read(_: SlotFile, first: int):
        write(slot.map, NEW, nbytes=CHUNK)
        return 1, CHUNK, ["chunk 0"]

    monkeypatch.setattr(scrub, "_read_chunks", read)
    job.slots.current = {slot.name: slot}
    counts = ScrubCounts()
    turns(job, counts, 1)
    assert not counts.damaged and slot.damaged is None


def test_a_slot_that_is_freed_meanwhile_is_not_damaged(job, monkeypatch):
    slot = slot_of(job, OLD)
    monkeypatch.setattr(scrub, "_read_chunks", lambda *_: (slot.free(), slot.map)[0])
    job.slots.current = {slot.name: slot}
    counts = ScrubCounts()
    turns(job, counts, 1)
    assert not counts.damaged


def test_slots_that_were_begun_and_new_ones_go_first():
    a, b, c = (("job", name) for name in "abc")
    versions = {a: NEW, b: NEW, c: NEW}
    now = 10 * scrub.AGAIN_S
    assert next_slot(versions, {a: SlotProgress(NEW, 0, now), b: SlotProgress(NEW, 5, None)}, now) == b
    assert next_slot(versions, {a: SlotProgress(NEW, 0, now), b: SlotProgress(NEW, 0, now)}, now) == c
    read = {a: SlotProgress(NEW, 0, 2.0), b: SlotProgress(NEW, 0, 1.0), c: SlotProgress(NEW, 0, now)}
    assert next_slot(versions, read, now) == b
    assert next_slot(versions, {**read, a: SlotProgress(OLD, 0, 2.0)}, now) == a, "another version is new"
    assert next_slot(versions, dict.fromkeys(versions, SlotProgress(NEW, 0, now)), now) is None
    assert next_slot({}, {}, now) is None


def test_the_rate_is_bounded():
    assert pause_s(scrub.BYTES_PER_S, 0.25) == pytest.approx(0.75)
    assert pause_s(scrub.TURN_BYTES, 3.0) == 3.0, "on a slow machine at most every second moment"
    assert pause_s(0, 0.0) == scrub.NOTHING_S
    assert is_idle(scrub.IDLE_S + 1) and not is_idle(scrub.IDLE_S - 1)


def test_parity_is_read_like_a_slot_though_it_has_no_capsule(job):
    slot = memory_slot("parity-0.slot-0", 0, 2 * CHUNK)
    fill(slot, NEW, os.urandom(2 * CHUNK))
    job.slots.add([slot])
    counts = ScrubCounts()
    turns(job, counts, 6)
    assert counts.damaged == 0 and slot.damaged is None
    slot.damaged = None
    flip(slot, CHUNK)
    counts = ScrubCounts()
    turns(job, counts, 3)
    assert counts.damaged == 1 and slot.damaged == NEW
