"""Tests of a rank's reporter with a fake daemon: lost reports are repeated, and no step waits."""

from __future__ import annotations

import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from reft.client.link import reports as reporting
from reft.client.link.reports import CALLS_MAX, Reporter, ReporterFacts
from reft.core.commit.pins import Pins
from reft.core.commit.round import StepReport
from reft.core.commit.version import Epoch, Version
from reft.errors import DaemonUnavailable, StaleEpoch
from reft.failpoints import Failpoints
from reft.wire import messages
from reft.wire.local_socket import FrameReader, frame
from reft.wire.messages import OLDEST, PROTOCOL, report_from
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import until
from tests.support.saying import SEALED, VOID, report_of

EPOCH = Epoch(1, b"e" * 16)


class Played:
    """The daemon's end of the connection."""

    def __init__(self, path) -> None:
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.settimeout(20)
        self.listening.bind(str(path))
        self.listening.listen(4)
        self.there: socket.socket | None = None
        self.frames = FrameReader()
        self.waiting: list[bytes] = []

    def next(self) -> StepReport:
        """Returns the next report."""
        if self.there is None:
            self.there, _ = self.listening.accept()
            self.there.settimeout(20)
            self.frames = FrameReader()
        while not self.waiting:
            data = self.there.recv(1 << 16)
            assert data, "the connection ended"
            self.waiting += self.frames.feed(data)
        request = pb.LocalRequest.FromString(self.waiting.pop(0))
        assert request.protocol == PROTOCOL
        return report_from(request.report.steps)

    def say(self, calls: int = 1, whole: int = -1, protocol: int = PROTOCOL, **facts) -> None:
        pins = messages.pins_to(Pins(whole=whole))
        report = pb.ReportReply(**{"pins": pins, "until": whole, **facts})
        self.there.sendall(frame(pb.LocalReply(report=report, calls=calls, protocol=protocol)))

    def refuse(self, status: int, error: str, protocol: int = PROTOCOL) -> None:
        self.there.sendall(frame(pb.LocalReply(calls=1, status=status, error=error, protocol=protocol)))

    def end(self) -> None:
        self.there.close()
        self.there = None


@pytest.fixture
def played(tmp_path):
    daemon = Played(tmp_path / "local")
    yield daemon
    daemon.listening.close()
    if daemon.there is not None:
        daemon.there.close()


@pytest.fixture
def reporter(played, tmp_path):
    found = Reporter(
        ReporterFacts(f"unix:{tmp_path}/none", str(tmp_path / "local"), "job", EPOCH, 0, 20.0), Failpoints()
    )
    yield found
    found.close()


def whole(reporter) -> int:
    return reporter.pins.whole


def test_each_report_covers_all_undecided_steps(reporter, played):
    reporter.answer(1, SEALED)
    assert played.next() == report_of({1: SEALED})
    reporter.answer(2, VOID)
    assert played.next() == report_of({1: SEALED, 2: VOID})
    reporter.answer(4, SEALED)
    assert played.next() == report_of({1: SEALED, 4: SEALED}), "what is not named is void"
    played.say(3, whole=1, until=4, open=[4])
    until(lambda: whole(reporter) == 1)
    reporter.answer(5, VOID)
    assert played.next() == report_of({4: SEALED, 5: VOID}, since=1)
    assert reporter._undecided.delays.last_void is None
    played.say(whole=1, until=5)
    until(lambda: reporter.voids(Version(EPOCH, 4)))
    assert reporter._undecided.delays.last_void == 5 and not reporter.voids(Version(EPOCH, 1))
    assert not reporter.voids(Version(Epoch(2, b"o" * 16), 4))


def test_a_later_reply_does_not_undo_a_decision(reporter, played):
    for step in (1, 2):
        reporter.answer(step, SEALED)
        played.next()
    played.say(2, whole=1, until=2)
    until(lambda: whole(reporter) == 1)
    reporter.answer(3, SEALED)
    assert played.next() == report_of({3: SEALED}, since=1)
    played.say(whole=-1, until=2, open=[1, 2])
    until(lambda: reporter._unanswered == 0)
    assert whole(reporter) == 1 and reporter.voids(Version(EPOCH, 2))


def test_a_step_older_than_the_last_report_stays_void(reporter, played):
    """The report of a newer step made the step void. A later report must not call it sealed."""
    reporter.answer(5, VOID)
    assert played.next() == report_of({5: VOID})
    reporter.answer(4, SEALED)
    assert played.next() == report_of({5: VOID})


def test_unanswered_reports_are_limited_and_the_next_reply_triggers_the_held_back_one(reporter, played):
    for step in range(1, CALLS_MAX + 3):
        reporter.answer(step, SEALED)
    for _ in range(CALLS_MAX):
        last = played.next()
    assert last.sealed == set(range(1, CALLS_MAX + 1))
    played.say(CALLS_MAX, whole=-1)
    assert played.next().sealed == set(range(1, CALLS_MAX + 3)), "also if no step follows"
    played.say(1, whole=-1)
    until(lambda: reporter._unanswered == 0)
    reporter.answer(CALLS_MAX + 3, SEALED)
    assert played.next().sealed == set(range(1, CALLS_MAX + 4))


def test_a_restarted_daemon_gets_the_report_again(reporter, played, caplog):
    for step in range(1, CALLS_MAX + 1):
        reporter.answer(step, SEALED)
        played.next()
    played.end()
    until(lambda: isinstance(reporter.error, DaemonUnavailable))
    assert "no snapshot becomes whole now" in caplog.text
    reporter.answer(CALLS_MAX + 1, SEALED)
    assert played.next().sealed == set(range(1, CALLS_MAX + 2))
    played.say(whole=CALLS_MAX + 1)
    until(lambda: whole(reporter) == CALLS_MAX + 1 and reporter.error is None)
    assert "answers again" in caplog.text


def test_memfds_are_given_back_to_each_daemon_that_answers_again(reporter, played):
    """A restarted daemon does not know of memfds beside the slots that it has."""
    reporter.answer(1, SEALED)
    played.next()
    played.say(whole=1)
    until(lambda: reporter.pins.whole == 1, what="the first reply")
    assert not reporter.reply.slots_missing
    played.end()
    until(lambda: reporter.error is not None, what="the end of the connection")
    for step in (2, 3):  # a later reply keeps the flag: no memory was given back
        reporter.answer(step, SEALED)
        played.next()
        played.say(whole=step, slots_missing=False)
        until(lambda step=step: reporter.pins.whole == step, what="the reply")
        assert reporter.reply.slots_missing
    reporter.reply.slots_missing = False
    reporter.answer(4, SEALED)
    played.next()
    played.say(whole=4)
    until(lambda: reporter.pins.whole == 4, what="the reply")
    assert not reporter.reply.slots_missing


def test_sealed_steps_are_reported_after_a_long_absence_of_the_daemon(tmp_path):
    reporter = Reporter(ReporterFacts("unix:/none", str(tmp_path / "local"), "job", EPOCH, 0, 20.0), Failpoints())
    for step in range(1, 200):
        reporter.answer(step, SEALED if step in (3, 5) else VOID)
    daemon = Played(tmp_path / "local")
    reporter.answer(200, VOID)
    assert daemon.next() == report_of({3: SEALED, 5: SEALED, 200: VOID})
    reporter.close()
    daemon.end()
    daemon.listening.close()


def test_a_missing_daemon_gives_an_error_at_once(tmp_path):
    reporter = Reporter(ReporterFacts("unix:/none", str(tmp_path / "none"), "job", EPOCH, 0, 20.0), Failpoints())
    reporter.answer(1, SEALED)
    assert isinstance(reporter.error, DaemonUnavailable) and reporter._unanswered == 0
    reporter.close()


def test_a_silent_daemon_gives_an_error_after_the_deadline(reporter, played, monkeypatch):
    reporter.answer(1, SEALED)
    now = reporting.time.monotonic()
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now + 10)  # the test may have taken seconds
    reporter.answer(2, SEALED)
    assert reporter.error is None
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now + 22)
    reporter.answer(3, SEALED)
    assert isinstance(reporter.error, DaemonUnavailable) and "in time" in str(reporter.error)


@pytest.mark.parametrize("protocol", [0, OLDEST - 1, PROTOCOL + 1])
def test_a_daemon_with_another_protocol_is_refused(reporter, played, protocol):
    reporter.answer(1, SEALED)
    played.next()
    played.say(whole=1, protocol=protocol)
    until(lambda: reporter.error is not None)
    assert f"now speaks protocol {protocol}" in str(reporter.error) and whole(reporter) == -1


def test_a_reply_of_the_protocol_before_the_envelopes_is_understood(reporter, played):
    """An old daemon reads the report as its ReportRequest, and answers with its ReportReply."""
    reporter.answer(1, SEALED)
    played.next()
    body = b"\x08" + b"\xff" * 9 + b"\x01"  # its field `whole`: -1
    body += pb.LocalReply(calls=1, status=9, error="you speak protocol 7", protocol=6).SerializeToString()
    played.there.sendall(len(body).to_bytes(4, "little") + body)
    until(lambda: reporter.error is not None)
    assert "you speak protocol 7" in str(reporter.error) and reporter._unanswered == 0


def test_a_stale_rank_stays_stale(reporter, played):
    reporter.answer(1, SEALED)
    played.next()
    played.refuse(10, "epoch 1 is over")
    until(lambda: reporter.is_stale)
    assert isinstance(reporter.error, StaleEpoch)
    played.end()
    until(lambda: reporter._connection is None)
    assert reporter.is_stale, "the end of the connection is no news for a stale rank"
    reporter.answer(2, SEALED)
    played.next()
    played.say(whole=1)
    until(lambda: whole(reporter) == 1)
    assert reporter.is_stale


def test_an_unreadable_reply_ends_the_connection(reporter, played):
    reporter.answer(1, SEALED)
    played.next()
    played.there.sendall(b"\3\0\0\0\xff\xff\xff")
    until(lambda: isinstance(reporter.error, DaemonUnavailable))
    assert "can't be read" in str(reporter.error)


def test_wait_returns_the_outcome(reporter, played):
    reporter.answer(1, SEALED)
    played.next()
    played.say(whole=1)
    assert reporter.wait(1, 20)
    assert not reporter.wait(2, 0.0)


def test_wait_ends_when_a_new_layout_closes_the_connection(reporter, played, caplog):
    """The daemon would call a further report that of an old start, and say: end this process."""
    reporter.answer(1, SEALED)
    played.next()
    played.say()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reporter.wait, 1, 20)
        played.next()  # it waits, and asks again
        reporter.close()
        assert not waiting.result(20)
    played.listening.setblocking(False)
    with pytest.raises(BlockingIOError):
        played.listening.accept()
    assert not caplog.messages


def test_wait_does_not_ask_after_each_reply(reporter, played):
    """The daemon answers at once if all reported steps are decided.

    Asking again after each answer would keep both processes busy.
    """
    reporter.answer(1, SEALED)
    played.next()
    played.say(whole=1)
    assert reporter.wait(1, 20)
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(reporter.wait, 2, 20)
        for _ in range(3):
            assert played.next().until == 1
            played.say(whole=1)
        assert time.monotonic() - began >= 3 * reporting.AGAIN_S
        reporter.answer(2, SEALED)
        assert played.next().sealed == {2}
        played.say(whole=2)
        assert waiting.result()


def test_wait_reports_to_a_restarted_daemon(reporter, played):
    reporter.answer(1, SEALED)
    played.next()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reporter.wait, 1, 20)
        played.end()
        assert played.next() == report_of({1: SEALED})
        played.say(whole=1)
        assert waiting.result()


def test_a_session_closes_without_its_daemon(reporter, caplog):
    with caplog.at_level(logging.INFO, "reft"):
        reporter.release()
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "could not be told that the session was closed" in record.message
