"""Tests the daemon's end of the local socket: a bad caller delays no other caller."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from reft.core.commit.pins import Pins
from reft.core.commit.round import Outcome
from reft.wire import local_socket
from reft.wire.local_socket import READ_BYTES, FrameReader, frame
from reft.wire.messages import OLDEST, PROTOCOL
from reft.wire.process import Process, stat_of
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.child.refusals import RefusalCounts
from reft_daemon.jobs import rounds
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease
from reft_daemon.server import local_socket as served
from reft_daemon.server.callers import OTHER_USER
from reft_daemon.server.local_socket import WAITING_MAX, LocalSocket
from tests.support.descriptors import await_closed, own_descriptors
from tests.support.jobs import Code

WHO = frame(pb.LocalRequest(who=True, protocol=PROTOCOL))
SLOTS = frame(pb.LocalRequest(slots=pb.SlotsRequest(slots=["rank-0.slot-0"]), protocol=PROTOCOL))


def report(step: int = 0, wait_ms: int = 10_000) -> bytes:
    said = pb.ReportRequest(steps=pb.StepReport(until=step), wait_ms=wait_ms)
    return frame(pb.LocalRequest(report=said, protocol=PROTOCOL))


class PlayedJob:
    """A job of a child node: it takes reports, and a step is decided when a test says so."""

    def __init__(self) -> None:
        manifest = pb.Manifest(job="job", world=2, nodes=[pb.Node(name="p", ranks=[1]), pb.Node(name="c", ranks=[0])])
        record = pb.JobRecord(manifest=manifest, node_index=1, decision=pb.Decision(), had_whole=True)
        self.record = JobRecord(SimpleNamespace(), record, ChangeQueue())
        rounds.start(self.record)
        self.record.leases[0] = Lease(Process(1, 1), 1)
        self.record.slots.current["rank-0.slot-0"] = SimpleNamespace(rank=0, descriptor=0)

    def decide(self, step: int) -> None:
        rounds.hear_outcome(self.record, Outcome(Pins(whole=step), until=step))
        self.record.wake_waiting_reports()

    def begin_epoch(self, counter: int) -> None:
        self.record.record.decision.epoch.counter = counter
        self.record.wake_waiting_reports()


def following() -> list[asyncio.Task]:
    """Returns the tasks of connections whose reports wait."""
    return [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_answer_at_news"]


async def turns(until: Callable[[], object]) -> None:
    """Runs the event loop until a condition is true."""
    for _ in range(1_000_000):
        if until():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition did not become true")


class Asking:
    """One caller."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.connect(path)
        self._frames = FrameReader()
        self._replies: list[bytes] = []

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def reply(self) -> pb.LocalReply | None:
        """Returns the next reply; None if the daemon has closed the connection."""
        while not self._replies:
            data = await asyncio.get_running_loop().sock_recv(self.socket, READ_BYTES)
            if not data:
                return None
            self._replies += self._frames.feed(data)
        return pb.LocalReply.FromString(self._replies.pop(0))

    async def ask(self, data: bytes) -> pb.LocalReply | None:
        await self.send(data)
        return await self.reply()


class Place:
    """A daemon's local socket with one job, and its callers."""

    def __init__(self, path) -> None:
        self.job = PlayedJob()
        registry = SimpleNamespace(jobs={"job": self.job.record}, get=lambda name: self.job.record)
        self.server = LocalSocket(path, registry, RefusalCounts())
        self.callers: list[Asking] = []

    def caller(self) -> Asking:
        self.callers.append(Asking(str(self.server.path)))
        return self.callers[-1]

    async def newcomer(self) -> tuple[Asking, served._Connection]:
        """Returns a caller, and the daemon's end of its connection."""
        caller, before = self.caller(), set(self.server._newcomers)
        await turns(lambda: self.server._newcomers - before)
        (connection,) = self.server._newcomers - before
        return caller, connection


@pytest.fixture
def run(tmp_path):
    """Runs a scenario with a server; checks that no connection and no descriptor is left."""

    def running(scenario: Callable[[Place], Awaitable[None]]) -> None:
        async def main() -> None:
            place = Place(tmp_path / "s")
            try:
                await asyncio.wait_for(scenario(place), 60)
            finally:
                for caller in place.callers:
                    caller.socket.close()
                await turns(lambda: not place.server._newcomers and not following())
                place.server.close()

        before = own_descriptors()
        asyncio.run(main())
        await_closed(before)

    return running


def test_a_caller_of_another_user_is_refused(run, monkeypatch):
    async def scenario(place: Place) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(local_socket, "peer", lambda connection: (os.getpid(), os.getuid() + 1))
            for _ in range(3):
                assert await place.caller().reply() is None
        assert (await place.caller().ask(WHO)).caller.pid == os.getpid()
        (refused,) = place.server.refusals.status(0).reasons
        assert (refused.reason, refused.total) == (OTHER_USER, 3)
        assert list(refused.addresses) == [f"uid {os.getuid() + 1}"]

    run(scenario)


def test_only_the_user_can_open_the_socket(run):
    async def scenario(place: Place) -> None:
        assert place.server.path.stat().st_mode & 0o777 == 0o600

    run(scenario)


def test_a_caller_gets_its_process_as_the_kernel_knows_it(run):
    async def scenario(place: Place) -> None:
        reply = await place.caller().ask(WHO)
        seen = pb.Caller(pid=os.getpid(), pid_start=stat_of(os.getpid()).start, parent=os.getppid())
        assert reply == pb.LocalReply(caller=seen, calls=1, protocol=PROTOCOL, oldest=OLDEST)

    run(scenario)


def test_silent_callers_make_others_wait_until_their_deadline(run, monkeypatch):
    monkeypatch.setattr(served, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(served, "DEADLINE_S", 0.3)

    async def scenario(place: Place) -> None:
        silent, half = place.caller(), place.caller()
        await half.send(WHO[:5])
        assert (await place.caller().ask(WHO)).caller.pid == os.getpid()
        for each in (silent, half):
            assert "no request arrived within 0.3 s" in (await each.reply()).error
            assert await each.reply() is None
        assert place.server.refusals.totals == {served.SILENT: 2}

    run(scenario)


def test_further_newcomers_wait_in_the_kernel(run, monkeypatch):
    monkeypatch.setattr(served, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(served, "DEADLINE_S", 3600.0)

    async def scenario(place: Place) -> None:
        first, *_, last = [place.caller() for _ in range(3)]
        await turns(lambda: len(place.server._newcomers) == 2)
        for _ in range(10):  # lets the daemon's event loop run
            await asyncio.sleep(0)
        assert len(place.server._newcomers) == 2
        for each in (first, last):
            assert (await each.ask(WHO)).caller.pid == os.getpid()

    run(scenario)


def test_trainers_that_report_are_no_newcomers_and_have_no_deadline(run, monkeypatch):
    monkeypatch.setattr(served, "CONNECTIONS_MAX", 2)

    async def scenario(place: Place) -> None:
        place.job.decide(1)
        trainers = [place.caller() for _ in range(5)]
        for trainer in trainers:
            assert (await trainer.ask(report(1))).report.pins.whole == 1
        place.job.begin_epoch(1)
        assert (await trainers[0].ask(report(1))).status == Code.ABORTED.value[0]
        place.job.begin_epoch(0)
        monkeypatch.setattr(served, "DEADLINE_S", 0.3)  # not earlier: the trainers come one after another
        silent = place.caller()
        assert (await place.caller().ask(WHO)).caller.pid == os.getpid()
        assert (await silent.reply()).status and await silent.reply() is None, "its deadline is over"
        for trainer in trainers:
            assert (await trainer.ask(report(1))).report.pins.whole == 1

    run(scenario)


def test_one_reply_answers_all_reports_that_were_decided(run):
    async def scenario(place: Place) -> None:
        trainer, connection = await place.newcomer()
        for step in (1, 2, 3):
            await trainer.send(report(step))
        await turns(lambda: len(connection._waiting) == 3)
        place.job.decide(2)
        reply = await trainer.reply()
        assert (reply.calls, reply.report.pins.whole) == (2, 2)
        place.job.begin_epoch(1)
        reply = await trainer.reply()
        assert (reply.calls, reply.status) == (1, Code.ABORTED.value[0])
        assert reply.error.startswith("job job was started again (epoch 1)")

    run(scenario)


def test_a_connection_follows_the_job_of_its_newest_report(run):
    """The job was purged and attached again under its name."""

    async def scenario(place: Place) -> None:
        trainer, connection = await place.newcomer()
        await trainer.send(report(1))
        await turns(following)
        earlier, place.job = place.job, PlayedJob()
        await trainer.send(report(2))
        await turns(lambda: len(connection._waiting) == 2)
        earlier.decide(2)
        for _ in range(10):  # lets the daemon's event loop run
            await asyncio.sleep(0)
        assert len(connection._waiting) == 2 and len(following()) == 1
        place.job.decide(2)
        assert (await trainer.reply()).calls == 2

    run(scenario)


def test_a_report_is_answered_after_its_requested_wait(run):
    async def scenario(place: Place) -> None:
        trainer = place.caller()
        assert not (await trainer.ask(report(1, wait_ms=0))).report.pins.HasField("whole")
        began = asyncio.get_running_loop().time()
        await trainer.send(report(2, wait_ms=100))
        assert (await trainer.ask(report(3, wait_ms=2000))).calls == 1
        assert 0.1 <= asyncio.get_running_loop().time() - began
        assert (await trainer.reply()).calls == 1
        assert 2.0 <= asyncio.get_running_loop().time() - began

    run(scenario)


def test_no_report_waits_longer_than_the_daemon_allows(run, monkeypatch):
    monkeypatch.setattr(served, "WAIT_MAX_S", 0.05)

    async def scenario(place: Place) -> None:
        assert not (await place.caller().ask(report(1, wait_ms=3_600_000))).report.pins.HasField("whole")

    run(scenario)


def test_too_many_unanswered_reports_end_the_connection(run):
    async def scenario(place: Place) -> None:
        trainer = place.caller()
        await trainer.send(b"".join(report(step) for step in range(WAITING_MAX + 1)))
        assert f"{WAITING_MAX} of its reports wait" in (await trainer.reply()).error
        assert await trainer.reply() is None
        assert place.server.refusals.totals == {served.NO_REQUEST: 1}

    run(scenario)


@pytest.mark.parametrize("data", [b"\3\0\0\0\xff\xff\xff" * 3, frame(pb.LocalRequest(protocol=PROTOCOL)) * 3])
def test_bytes_that_are_no_request_are_counted_once(run, caplog, data):
    async def scenario(place: Place) -> None:
        caller = place.caller()
        assert (await caller.ask(data)).status == Code.INVALID_ARGUMENT.value[0]
        assert await caller.reply() is None
        assert place.server.refusals.totals == {served.NO_REQUEST: 1}

    run(scenario)
    assert not caplog.text, "a line for each of them would flood the log"


def test_the_daemon_does_not_read_from_a_caller_that_does_not_read(run):
    count = 50_000

    async def scenario(place: Place) -> None:
        greedy, connection = await place.newcomer()
        sending = asyncio.ensure_future(greedy.send(WHO * count))
        await turns(lambda: connection._unsent)
        unsent = len(connection._unsent)
        for _ in range(100):  # lets the daemon's event loop run
            await asyncio.sleep(0)
        assert len(connection._unsent) == unsent < 10 * READ_BYTES and not sending.done()
        assert (await place.caller().ask(WHO)).caller.pid == os.getpid()
        for _ in range(count):
            assert (await greedy.reply()).caller.pid == os.getpid()
        await sending
        assert not (await greedy.ask(report(1, wait_ms=0))).report.pins.HasField("whole"), "after all earlier requests"

    run(scenario)


def test_descriptors_are_not_buffered_for_a_caller_that_does_not_read(run):
    async def scenario(place: Place) -> None:
        caller = place.caller()
        await caller.send(WHO * 3000 + SLOTS)
        await turns(lambda: place.server.refusals.totals == {served.UNSENT: 1})

    run(scenario)


def test_descriptors_that_no_request_takes_are_closed(run):
    async def scenario(place: Place) -> None:
        caller, connection = await place.newcomer()
        for data in (WHO, report(1, wait_ms=0), SLOTS):
            socket.send_fds(caller.socket, [data], [0, 0])
            assert (await caller.reply()).calls == 1
            assert not connection._received

    run(scenario)


def test_a_trainer_of_protocol_6_can_read_why_it_is_refused(run, monkeypatch):
    """It sends a bare ReportRequest with its protocol in field 90.

    It reads calls, status and error in fields 65 to 67.
    """
    monkeypatch.setattr(served, "DEADLINE_S", 0.3)

    async def scenario(place: Place) -> None:
        older = place.caller()
        body = pb.ReportRequest(
            job="job", epoch=pb.Epoch(counter=1), rank=3, steps=pb.StepReport(until=1), trouble="none"
        )
        body = body.SerializeToString() + pb.LocalRequest(protocol=6).SerializeToString()
        for _ in range(2):
            reply = await older.ask(len(body).to_bytes(4, "little") + body)
            assert "the trainer speaks protocol 6, this daemon" in reply.error
            assert (reply.calls, reply.protocol) == (1, PROTOCOL)
            silent = place.caller()
            assert (await silent.reply()).error and await silent.reply() is None, (
                "it is still served after the deadline"
            )
        numbers = {each.name: each.number for each in pb.LocalReply.DESCRIPTOR.fields}
        assert [numbers[name] for name in ("calls", "status", "error", "protocol")] == [65, 66, 67, 90]

    run(scenario)


def test_an_error_in_the_daemon_ends_the_connection(run, monkeypatch):
    async def scenario(place: Place) -> None:
        unhandled: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
        bug = RuntimeError("a bug")
        monkeypatch.setattr(rounds, "report", lambda *_: (_ for _ in ()).throw(bug))
        assert await place.caller().ask(report(1)) is None
        assert [context["exception"] for context in unhandled] == [bug]

    run(scenario)


def test_an_error_of_the_daemons_files_refuses_the_report_and_not_the_caller(run, monkeypatch):
    async def scenario(place: Place) -> None:
        trainer = place.caller()
        with monkeypatch.context() as patch:
            patch.setattr(rounds, "report", lambda *_: (_ for _ in ()).throw(OSError("no file")))
            reply = await trainer.ask(report(1))
        assert (reply.status, reply.calls) == (Code.FAILED_PRECONDITION.value[0], 1) and "no file" in reply.error
        assert not place.server.refusals.status(time.monotonic()).reasons, "the caller has done nothing wrong"
        place.job.decide(1)
        assert (await trainer.ask(report(1))).report.pins.whole == 1

    run(scenario)


def test_closing_the_socket_keeps_open_connections(run):
    async def scenario(place: Place) -> None:
        place.job.decide(1)
        trainer = place.caller()
        assert (await trainer.ask(report(1))).report.pins.whole == 1
        for _ in range(2):
            place.server.close()
        assert not place.server.path.exists()
        assert (await trainer.ask(report(1))).report.pins.whole == 1

    run(scenario)


def test_a_lack_of_descriptors_is_logged_once_and_survived(run, monkeypatch, caplog):
    monkeypatch.setattr(served, "RETRY_S", 0.01)

    class Listener:
        def __init__(self, listener: socket.socket) -> None:
            self._listener, self.refusals = listener, 3

        def __getattr__(self, name: str) -> object:
            return getattr(self._listener, name)

        def accept(self) -> tuple[socket.socket, object]:
            if self.refusals:
                self.refusals -= 1
                raise OSError(24, "Too many open files")
            return self._listener.accept()

    async def scenario(place: Place) -> None:
        asyncio.get_running_loop().remove_reader(place.server._listener)
        place.server._listener = Listener(place.server._listener)
        place.server._listen()
        assert (await place.caller().ask(WHO)).caller.pid == os.getpid()
        assert not place.server._listener.refusals

    run(scenario)
    assert caplog.text.count("can't accept") == 1


def test_without_a_descriptor_the_listener_pauses(run, monkeypatch):
    """Else the loop would try again as fast as it can."""
    monkeypatch.setattr(served, "RETRY_S", 3600.0)

    class Listener:
        def __init__(self, listener: socket.socket) -> None:
            self._listener, self.tries = listener, 0

        def __getattr__(self, name: str) -> object:
            return getattr(self._listener, name)

        def accept(self) -> tuple[socket.socket, object]:
            self.tries += 1
            raise OSError(24, "Too many open files")

    async def scenario(place: Place) -> None:
        served_before = place.caller()
        await served_before.ask(WHO)
        asyncio.get_running_loop().remove_reader(place.server._listener)
        place.server._listener = Listener(place.server._listener)
        place.server._listen()
        place.caller()
        for _ in range(5):
            await served_before.ask(WHO)
        assert place.server._listener.tries == 1

    run(scenario)
