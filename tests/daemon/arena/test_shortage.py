"""Tests the daemon without free descriptors or threads: processes and files that can't be examined.

They count neither as dead nor as damaged, and the daemon's loops go on.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.round import Outcome
from reft.core.commit.version import Version
from reft.core.membership.failure_detector import AgentPhase
from reft.errors import AttachError
from reft.wire import messages, rpc
from reft.wire.process import Process, stat_of
from reft.wire.slot_format import Geometry
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon import main
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.pool import SpareFiles, SparePool
from reft_daemon.jobs import capsules, leasing, scrub
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import FENCE_DEADLINE_S, ProcessWatch, caller_process
from reft_daemon.membership.job_monitor import JobMonitor, MembershipView
from reft_daemon.server import socket_keeper
from tests.daemon.jobs.test_leases import decide_request, lease_request
from tests.support.daemons import DaemonProcess
from tests.support.descriptors import await_closed, descriptors_of, own_descriptors
from tests.support.jobs import Code, Job, decide_now, epoch_of, refused, registry_of
from tests.support.trainer_forks import Trainer

FULL = OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        yield Arena(Path(path), 64 << 20)


def fail(*_: object, **__: object) -> object:
    raise FULL


def raise_no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def itself() -> Process:
    return Process(os.getpid(), stat_of(os.getpid()).start)


@pytest.mark.parametrize("call", ["pidfd_open", "read_text"])
def test_a_trainer_that_can_not_be_examined_does_not_count_as_dead(arena, monkeypatch, call):
    async def run() -> None:
        job = JobRecord(arena, pb.JobRecord(manifest=decide_request(1).manifest), ChangeQueue())
        decide_now(job, decide_request(1))
        before = own_descriptors()
        request = lease_request(1)
        with monkeypatch.context() as patch:
            patch.setattr(*((os, call) if call == "pidfd_open" else (Path, call)), fail)
            with pytest.raises(OSError, match="Too many open files"):
                await leasing.lease(job, request, caller_process(os.getpid()))
        assert not job.leases and not job.has_failed
        for slot in list(job.slots.current.values()):
            arena.free(job.slots.current.pop(slot.name))
        await_closed(before)
        await leasing.lease(job, request, caller_process(os.getpid()))
        assert job.is_live

    asyncio.run(run())


def test_a_failed_watch_keeps_no_descriptor(monkeypatch):
    async def run() -> None:
        process, before = itself(), own_descriptors()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", fail)
            with pytest.raises(OSError, match="Too many"):
                ProcessWatch(process, lambda: None)
        await_closed(before)

    asyncio.run(run())


def test_a_lack_of_descriptors_is_an_error_that_may_be_retried(daemon, trainer):
    pid = daemon.process.pid
    first = descriptors_of(pid)
    job = Job([(daemon, [0])]).decide()
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    request = job.lease_request(0, slots=0, data_bytes=0, table_bytes=0)
    with rpc.channel(daemon.address) as channel:
        stub = pb_grpc.DaemonStub(channel)
        stub.Status(pb.StatusRequest(), timeout=10)  # the connection is open now
        # Those that stay: earlier connections may just be closing theirs.
        taken = {int(number) for number, _ in first & descriptors_of(pid)}
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(taken) + 1)) - taken), limits[1]))
        with refused(Code.INTERNAL, "Too many open files"):
            stub.Lease(request, timeout=10)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        stub.Lease(request, timeout=10)
    assert daemon.status("job").ranks[0].alive


def test_a_daemon_raises_its_limit_of_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = len(os.listdir("/proc/self/fd"))  # a worker of xdist has hundreds after many tests
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(own + 256, soft), hard))
    try:
        daemon = DaemonProcess()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        daemon.close()


@pytest.mark.parametrize("what", ["slot", "record", "capsule"])
def test_files_that_can_not_be_opened_for_now_are_not_renamed(arena, monkeypatch, what):
    async def run() -> None:
        request = decide_request(1)
        job = JobRecord(arena, pb.JobRecord(manifest=request.manifest), ChangeQueue())
        decide_now(job, request)
        await leasing.lease(job, lease_request(1), caller_process(os.getpid()))
        version = messages.version_to(Version(epoch_of(1), 3))
        job.capsule_replication.store.keep(pb.CapsuleRecord(version=version), Decision(epoch_of(1), None), Outcome(), 1)
        names = set(os.listdir(arena.folder / "job"))
        opened, read_bytes = os.open, Path.read_bytes
        is_one = {"slot": "rank-", "record": "record", "capsule": "capsule-"}[what]

        def read(path: Path) -> bytes:
            return fail() if path.name.startswith(is_one) else read_bytes(path)  # type: ignore[return-value]

        def opening(path: str | Path, *arguments: int) -> int:
            return fail() if Path(path).name.startswith(is_one) else opened(path, *arguments)  # type: ignore[return-value]

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", read)
            patch.setattr(os, "open", opening)
            with pytest.raises(OSError, match="Too many"):
                registry_of(arena).adopt()
        assert set(os.listdir(arena.folder / "job")) == names
        assert capsules.capsule(job, 0, Version(epoch_of(1), 3)) is not None

    asyncio.run(run())


def test_an_agent_is_watched_once_the_system_allows_it(arena, monkeypatch):
    async def run() -> None:
        agent = Trainer()
        registry = registry_of(arena)
        registry.keep_for_agent(agent.pid)
        monitor = JobMonitor("job", "n", MembershipView("l", 1, bytes(32), {"n": pb.Node(id="n")}), ChangeQueue())
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", fail)
            monitor.agent_beat(agent.pid, AgentPhase.TRAINING, None)
            registry.idle_since_s = float("-inf")
            expiring = asyncio.ensure_future(registry.expire_for_ever(1e-3))
            await asyncio.sleep(0)
            assert not expiring.done(), "the daemon would have exited"
        assert not monitor.has_other_agent(0)
        monitor.agent_beat(agent.pid, AgentPhase.TRAINING, None)
        assert monitor.has_other_agent(0)
        agent.kill()
        await asyncio.wait_for(expiring, 20)
        monitor.close()

    asyncio.run(run())


def test_killing_a_reaped_process_is_no_error():
    async def run() -> None:
        child = Trainer()
        watch = ProcessWatch(Process(child.pid, stat_of(child.pid).start), lambda: None)
        child.kill()  # ended and reaped; the event loop has not noticed yet
        assert await watch.kill()

    asyncio.run(run())


def test_kill_returns_when_the_session_is_closed_meanwhile(monkeypatch):
    # a process that has closed its session may live on
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)

    async def run() -> None:
        watch = ProcessWatch(itself(), lambda: None)
        killing = asyncio.ensure_future(watch.kill())
        await asyncio.sleep(0)
        watch.close()
        assert await asyncio.wait_for(killing, FENCE_DEADLINE_S / 2)
        assert await watch.kill(), "the process is not signalled either"

    asyncio.run(run())


def test_slots_leave_nothing_behind_if_no_thread_can_be_started(arena, monkeypatch):
    geometry, start_thread = Geometry(4096, 8 << 20, 4096), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if (arena.folder / "job/rank-0.slot-0").exists():  # an idle thread of a pool saves a start: no count tells
            raise_no_thread(thread)
        start_thread(thread)

    before = own_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(AttachError, match=r"for slot rank-0.slot-1 can't be allocated: can't start new thread"):
            arena.create("job", 0, {"rank-0.slot-0": geometry, "rank-0.slot-1": geometry}, [])
    assert arena.held_bytes == 0 and not list((arena.folder / "job").iterdir())
    await_closed(before)
    assert len(arena.create("job", 0, {"rank-0.slot-0": geometry}, [])) == 1


def test_a_slot_without_a_free_descriptor_names_the_limit(arena, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(AttachError, match=r"can't be allocated: .*Too many open files") as caught:
            arena.create("job", 0, {"rank-0.slot-0": Geometry(4096, 8 << 20, 4096)}, [])
    assert "ulimit -n" in caught.value.hint and arena.held_bytes == 0


def test_the_scrub_goes_on_if_no_thread_can_be_started(monkeypatch, caplog):
    monkeypatch.setattr(scrub, "NOTHING_S", 0)
    outcomes = iter((RuntimeError("can't start new thread"), 0))

    async def run() -> None:
        has_gone_on = asyncio.Event()

        async def take_turn(*_: object) -> int:
            if isinstance(outcome := next(outcomes, 0), RuntimeError):
                raise outcome
            has_gone_on.set()
            return outcome

        monkeypatch.setattr(scrub, "take_turn", take_turn)
        scrubbing = asyncio.ensure_future(scrub.scrub_for_ever({}, scrub.ScrubCounts()))
        going_on = asyncio.ensure_future(has_gone_on.wait())
        await asyncio.wait({scrubbing, going_on}, return_when=asyncio.FIRST_COMPLETED)
        assert has_gone_on.is_set() and not scrubbing.done()
        scrubbing.cancel()

    asyncio.run(run())
    assert caplog.text.count("a turn of the scrub failed") == 1 and "can't start new thread" in caplog.text


@pytest.mark.parametrize("what", ["expiry", "hold"])
def test_a_bug_that_one_job_meets_stops_no_other_job(arena, monkeypatch, caplog, what):
    async def run() -> None:
        registry, looked = registry_of(arena, ttl_s=0.0), asyncio.Event()
        for name in ("first", "second"):
            registry.jobs[name] = JobRecord(arena, pb.JobRecord(manifest=pb.Manifest(job=name)), ChangeQueue())

        def look(job: JobRecord, *_: object) -> None:
            if job.id == "first":
                raise RuntimeError("a bug")
            looked.set()

        monkeypatch.setattr(registry, "_free", look)
        monkeypatch.setattr(registry.persists.holds, "look", look)
        loop = registry.expire_for_ever(0.0) if what == "expiry" else registry.persists.run()
        looping = asyncio.ensure_future(loop)
        await asyncio.wait({looping, asyncio.ensure_future(looked.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert looked.is_set() and not looping.done()
        looping.cancel()

    asyncio.run(run())
    assert "job=first" in caplog.text and "a bug" in caplog.text


def test_loops_go_on_if_no_thread_can_be_started(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(socket_keeper, "LOOK_S", 0)
    monkeypatch.setattr(main, "SPARE_S", 0)
    pool = SparePool(SpareFiles(1, 4096), tmp_path, lambda: 0, list)

    async def run() -> None:
        place = socket_keeper.SocketKeeper(tmp_path / "d.sock")
        loops = [asyncio.ensure_future(each) for each in (place.watch(), main._refill_spare_files(pool))]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", raise_no_thread)
            for _ in range(10):
                await asyncio.sleep(0)
        assert not any(loop.done() for loop in loops)
        for loop in loops:
            loop.cancel()
        place.release()

    asyncio.run(run())
    assert (
        caplog.text.count("sockets at") == 1
        and "spare files can't be made" in caplog.text
        and "can't start new thread" in caplog.text
    )
