"""Tests that a rank loses nothing while it trains and requests larger slots."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.errors import AttachError, FormatError, NoRoom
from reft.wire import messages
from reft.wire.slot_format import Geometry
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena import allocator
from reft_daemon.arena import arena as arena_module
from reft_daemon.arena.arena import Arena
from reft_daemon.jobs import leasing, persistence, rounds, slot_reads, trainers
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import caller_process
from tests.daemon.jobs.test_leases import decide_request, lease_request, release_request
from tests.support.daemons import until
from tests.support.descriptors import await_closed, own_descriptors
from tests.support.jobs import CHUNK, Code, Job, decide_now, epoch_of, refused, write
from tests.support.saying import report_of


@pytest.fixture
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        yield Arena(Path(path), 64 << 20)


def seal(job: Job, slot, step: int) -> None:
    write(slot, job.version(step))
    job.report(0, {step: StepAnswer.SEALED})


@pytest.mark.parametrize("filled", [0, 2])
def test_a_refused_lease_takes_nothing_from_the_trainer(start, trainer, filled):
    daemon = start("--memory", "8MiB")
    job = Job([(daemon, [0])]).decide()
    one, two = job.slots(0, trainer)
    for step, slot in list(enumerate((one, two), 1))[:filled]:
        seal(job, slot, step)
    with refused(Code.RESOURCE_EXHAUSTED):
        job.lease(0, trainer, data_bytes=64 << 20)
    for step, slot in ((3, one), (4, two), (5, one)):
        seal(job, slot, step)
    daemon.kill()
    daemon.start()
    assert sorted(job.headers().values()) == [(SlotState.SEALED, 4), (SlotState.SEALED, 5)]


@pytest.mark.parametrize("filled", [0, 2])
def test_steps_written_while_larger_slots_are_made_are_kept(daemon, trainer, filled):
    job = Job([(daemon, [0])]).decide()
    old = job.slots(0, trainer)
    for step, slot in list(enumerate(old, 1))[:filled]:
        seal(job, slot, step)
    new = job.slots(0, trainer, data_bytes=8 * CHUNK)
    seal(job, old[0], 3)
    assert (SlotState.SEALED, 3) in job.headers().values() and job.whole() == 3
    seal(job, new[0], 4)
    seal(job, new[1], 5)
    assert len(job.headers()) == 2, "once the new slots are written, the old ones go"


def test_a_landed_step_in_a_replaced_slot_is_sealed_too(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    old, _ = job.slots(0, trainer)
    job.lease(0, trainer, data_bytes=8 * CHUNK)
    write(old, job.version(1), SlotState.LANDED)  # the trainer has not mapped the new slots yet
    trainer.kill()
    until(lambda: (SlotState.SEALED, 1) in job.headers().values(), what="the seal")
    until(lambda: job.whole() == 1, what="the outcome of the round")


def test_a_retired_slot_that_was_cut_does_not_stop_the_round(arena):
    async def run() -> None:
        job = JobRecord(arena, pb.JobRecord(manifest=decide_request(1).manifest), ChangeQueue())
        decide_now(job, decide_request(1))
        one, _ = await leasing.lease(job, lease_request(1), caller_process(os.getpid()))
        write(one.map, Version(epoch_of(1), 1), nbytes=4096)
        trainers.release(job, release_request(1), os.getpid())
        from_one = decide_request(2)
        from_one.decision.base.CopyFrom(messages.version_to(Version(epoch_of(1), 1)))
        decide_now(job, from_one)
        larger = lease_request(2)
        larger.data_bytes = 3 * 4096
        await leasing.lease(job, larger, caller_process(os.getpid()))
        assert job.slots.retired
        os.truncate(arena.folder / "job" / one.name, 100)
        said = messages.report_to(report_of({1: StepAnswer.SEALED}))
        rounds.report(job, pb.ReportRequest(job="job", epoch=messages.epoch_to(epoch_of(2)), rank=0, steps=said))
        assert job.record.had_whole

    asyncio.run(run())


def test_slots_of_a_cancelled_lease_are_kept_for_the_next_try(arena, monkeypatch):
    async def run() -> None:
        job = JobRecord(arena, pb.JobRecord(manifest=decide_request(1).manifest), ChangeQueue())
        decide_now(job, decide_request(1))
        begun, goes_on = threading.Event(), threading.Event()
        create, calls = arena.create, []

        def slowly(*arguments: object) -> list:
            calls.append(arguments)
            begun.set()
            goes_on.wait(20)
            return create(*arguments)

        monkeypatch.setattr(arena, "create", slowly)
        first = asyncio.ensure_future(leasing.lease(job, lease_request(1), caller_process(os.getpid())))
        await asyncio.to_thread(begun.wait, 20)
        first.cancel()
        second = asyncio.ensure_future(leasing.lease(job, lease_request(1), caller_process(os.getpid())))
        for _ in range(10):
            await asyncio.sleep(0)  # the second request runs until it must wait
        goes_on.set()
        assert {slot.name for slot in await second} == set(job.slots.current)
        assert len(calls) == 1 and len(job.slots.current) == 2 and arena.held_bytes == job.held_bytes

    asyncio.run(run())


def test_slots_of_a_job_that_is_dropped_meanwhile_are_freed(arena, monkeypatch):
    async def run() -> None:
        job = JobRecord(arena, pb.JobRecord(manifest=decide_request(1).manifest), ChangeQueue())
        decide_now(job, decide_request(1))
        begun, goes_on = threading.Event(), threading.Event()
        create = arena.create

        def slowly(*arguments: object) -> list:
            slots = create(*arguments)
            begun.set()
            goes_on.wait(20)
            return slots

        monkeypatch.setattr(arena, "create", slowly)
        lease = asyncio.ensure_future(leasing.lease(job, lease_request(1), caller_process(os.getpid())))
        await asyncio.to_thread(begun.wait, 20)
        persistence.free(job)
        with pytest.raises(AttachError, match="was dropped"):
            await lease
        freed: asyncio.Queue[object] = asyncio.Queue()
        free = arena.free
        monkeypatch.setattr(arena, "free", lambda slot: freed.put_nowait(free(slot)))
        goes_on.set()
        for _ in range(2):
            await asyncio.wait_for(freed.get(), 20)
        assert not job.slots.all and arena.held_bytes == 0

    asyncio.run(run())


def test_only_a_lack_of_memory_raises_no_room(arena, monkeypatch):
    def refuse(number: int) -> None:
        monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))))

    before = own_descriptors()
    for number, kind in ((errno.EMFILE, AttachError), (errno.ENOSPC, NoRoom)):
        refuse(number)
        with pytest.raises(AttachError) as raised:
            arena.create("job", 0, {"rank-0.slot-0": Geometry(4096, 4096, 4096)}, [])
        assert type(raised.value) is kind
    assert arena.held_bytes == 0
    await_closed(before)


def test_a_file_that_is_cut_while_it_becomes_a_slot_leaves_nothing_behind(arena, monkeypatch):
    def cut(descriptor: int, *_: object) -> None:
        os.ftruncate(descriptor, 4096)

    before = own_descriptors()
    monkeypatch.setattr(arena_module, "_make_pages", cut)
    with pytest.raises(AttachError, match="the file ends after"):
        arena.create("job", 0, {"rank-0.slot-0": Geometry(4096, 4096, 4096)}, [])
    assert arena.held_bytes == 0 and not list((arena.folder / "job").iterdir())
    gc.collect()  # the error's traceback has the frame of the constructor
    await_closed(before)


def job_of(arena: Arena, name: str = "job") -> JobRecord:
    request = decide_request(1)
    request.manifest.job = name
    job = JobRecord(arena, pb.JobRecord(manifest=request.manifest), ChangeQueue())
    decide_now(job, request)
    return job


def test_two_leases_at_once_do_not_take_the_same_memory(arena, monkeypatch):
    begin, makers = allocator.begin_in_thread, []

    def counted(*arguments: object) -> object:
        makers.append(arguments)
        return begin(*arguments)

    async def run() -> None:
        checked, goes_on = threading.Event(), threading.Event()
        check = arena.check_room
        monkeypatch.setattr(arena, "check_room", lambda *need: (check(*need), checked.set(), goes_on.wait(20)))
        monkeypatch.setattr(allocator, "begin_in_thread", counted)
        request = lease_request(1)
        request.data_bytes, request.chunk_bytes = 16 << 20, 256 << 10
        leases = [
            asyncio.ensure_future(leasing.lease(job_of(arena, name), request, caller_process(os.getpid())))
            for name in ("one", "other")
        ]
        await asyncio.to_thread(checked.wait, 20)
        assert len(makers) == 1, "no other request checks for memory before the first one has taken it"
        goes_on.set()
        found = await asyncio.gather(*leases, return_exceptions=True)
        assert [type(each) for each in found] == [list, NoRoom] and arena.held_bytes <= arena.budget_bytes

    asyncio.run(run())


def test_a_job_that_comes_again_waits_for_slots_of_the_dropped_job(arena, monkeypatch):
    async def run() -> None:
        create, begun, goes_on = arena.create, threading.Event(), threading.Event()

        def slowly(*arguments: object) -> list:
            begun.set()
            goes_on.wait(20)
            return create(*arguments)

        monkeypatch.setattr(arena, "create", slowly)
        dropped = job_of(arena)
        first = asyncio.ensure_future(leasing.lease(dropped, lease_request(1), caller_process(os.getpid())))
        await asyncio.to_thread(begun.wait, 20)
        persistence.free(dropped)
        with pytest.raises(AttachError, match="was dropped"):
            await first
        again = job_of(arena)
        begun.clear()
        second = asyncio.ensure_future(leasing.lease(again, lease_request(1), caller_process(os.getpid())))
        for _ in range(10):
            await asyncio.sleep(0)  # the request runs until it must wait
        assert not begun.is_set()
        goes_on.set()
        assert {slot.backing for slot in await second} == {"tmpfs"}
        assert arena.held_bytes == again.held_bytes

    asyncio.run(run())


def test_slots_count_as_held_before_they_are_made(arena, monkeypatch):
    """Another thread makes spare files.

    They lie in the memory that the arena does not count as held.
    """
    make_slot, held = arena._make_slot, []

    def look(*arguments: object) -> object:
        held.append(arena.held_bytes)
        return make_slot(*arguments)

    monkeypatch.setattr(arena, "_make_slot", look)
    slots = arena.create("job", 0, dict.fromkeys(("rank-0.slot-0", "rank-0.slot-1"), Geometry(4096, 4096, 4096)), [])
    assert held == [sum(slot.file_bytes for slot in slots)] * 2


def test_a_read_of_a_slot_that_is_freed_meanwhile_reaches_no_other_file(arena):
    async def run() -> None:
        job, request, version = job_of(arena), lease_request(1), Version(epoch_of(1), 1)
        request.data_bytes = 2 * slot_reads.READ_CHUNK
        slot, _ = await leasing.lease(job, request, caller_process(os.getpid()))
        write(slot.map, version, nbytes=request.data_bytes)
        ask = pb.ReadRequest(job="job", slot=slot.name, version=messages.version_to(version), size=slot.file_bytes)
        pieces, number = slot_reads.read(job, ask), slot.descriptor
        await anext(pieces)
        persistence.free(job)
        other = os.dup2(arena._lock, number)  # the descriptor's number is in use again
        with pytest.raises(FormatError, match="can't be read"):
            await anext(pieces)
        with pytest.raises(FormatError, match="was freed"):
            slot.check_size()
        os.close(other)

    asyncio.run(run())


class SlowSum(dict[str, int]):
    """Sizes of slots of another format, that take a while to sum up: a thread counts its slots."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    def values(self):
        self._arena.held_bytes += 1 << 20
        return super().values()


def test_memory_that_a_thread_takes_while_a_job_is_freed_stays_counted(arena):
    job = JobRecord(arena, pb.JobRecord(manifest=decide_request(1).manifest), ChangeQueue())
    decide_now(job, decide_request(1))
    job.slots.unreadable = SlowSum(arena)
    freed_bytes = persistence.free(job)
    assert (freed_bytes, arena.held_bytes) == (0, 2 << 20), "once for what is held, once for what is freed"


def test_memory_that_is_taken_while_slots_can_not_be_made_stays_counted(arena, monkeypatch):
    capsules = [1000]

    class SlowSlot:
        """A slot whose size takes a while to be read: the event loop counts a capsule."""

        @property
        def file_bytes(self) -> int:
            arena.held_bytes += capsules.pop() if capsules else 0
            return 2 * CHUNK

        def free(self) -> None:
            pass

    made = iter([SlowSlot()])

    def make_slot(*_: object) -> SlowSlot:
        try:
            return next(made)
        except StopIteration:
            raise OSError(errno.ENOSPC, "No space left on device") from None

    monkeypatch.setattr(arena, "_make_slot", make_slot)
    with pytest.raises(NoRoom):
        arena.create("job", 0, dict.fromkeys(("rank-0.slot-0", "rank-0.slot-1"), Geometry(CHUNK, CHUNK, CHUNK)), [])
    assert arena.held_bytes == 1000
