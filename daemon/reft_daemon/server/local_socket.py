"""Serves the local socket of a node: reports, slot descriptors, and who the caller is.

The protocol is in `reft.wire.local_socket`.

    listener ── accept, own user only ──► newcomer ── first request ──► caller ──► it leaves
                                             └── DEADLINE_S ──► dropped

Requests are handled in callbacks of the event loop on raw sockets: asyncio's transports can't pass
descriptors. No callback waits.

* A connection's requests are handled in order. There are three kinds: "report", "slots" and "who".
  "who" asks for the caller's pid as this daemon sees it; in a container the caller knows another.
  "slots" and "who" are answered at once.
* A report is answered once: when its newest step is decided, or when its waiting time is over. A
  step is decided once the round has said that the step is whole or void. One reply may answer
  several reports. A connection checks its waiting reports when a report arrives, when its job has
  news (see `reft_daemon.jobs.changes`), and when the oldest report's time is over. For the news a
  connection has one task, from its first report that must wait.
* There are at most CONNECTIONS_MAX newcomers. More callers wait in the kernel. A newcomer that
  sends nothing is dropped after DEADLINE_S, and the next caller gets its place. A trainer that has
  reported is no newcomer. So only the limit of descriptors bounds the number of trainers.
* While replies wait to be sent, no request is read. So at most the replies to one read of
  READ_BYTES and to WAITING_MAX reports are buffered. Descriptors are never buffered: a caller that
  does not read is dropped, and has to ask again.
* A caller is dropped, and counted as refused, if it is of another user, or if its bytes are no
  request. The same happens above a limit: MESSAGE_MAX, REQUEST_MAX, DESCRIPTORS_MAX or WAITING_MAX.
* If no descriptor is free, the listener pauses for RETRY_S; open connections go on.

`reft.wire.local_socket` says what happens to lost, late or repeated messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
from google.protobuf.message import DecodeError

from reft.core.commit.round import Outcome
from reft.errors import AttachError, ReftError
from reft.wire import local_socket, messages, rpc
from reft.wire.local_socket import DESCRIPTORS_MAX, REQUEST_MAX, close_all, frame
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon import __version__
from reft_daemon.arena import shortage
from reft_daemon.child.refusals import RefusalCounts
from reft_daemon.jobs import gradient_records, rounds, trainers
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import caller_process
from reft_daemon.registry import Registry, UnknownJob
from reft_daemon.server.callers import OTHER_USER

log = logging.getLogger("reft.daemon")
DEADLINE_S = 5.0
CONNECTIONS_MAX = 64
# Reports of one connection that wait for a reply. A trainer has at most 4: CALLS_MAX in
# reft/client/link/reports.py.
WAITING_MAX = 64
WAIT_MAX_S = 10.0
RETRY_S = 0.1
# Why callers are dropped, for the log.
SILENT = "they sent no request to the local socket in time"
NO_REQUEST = "what they sent to the local socket is no request, or too many"
UNSENT = "they could not receive descriptors"


class LocalSocket:
    """Accepts callers at the local socket.

    Args:
        path: of the socket; the daemon owns its folder.
        registry: the jobs of the reports and slots.
        refusals: counts the callers that are dropped.
    """

    def __init__(self, path: Path, registry: Registry, refusals: RefusalCounts) -> None:
        self.path, self.registry, self.refusals = path, registry, refusals
        self._newcomers: set[_Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._is_failing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(socket.SOMAXCONN)
        self._listen()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0 and len(self._newcomers) < CONNECTIONS_MAX:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # Mostly no descriptor is free. The daemon must go on, and accept later.
            if not self._is_failing:
                log.error("the local socket can't accept connections now: %s", error)
            self._is_failing = True
            self._loop.remove_reader(self._listener)
            self._loop.call_later(RETRY_S, self._listen)
            return
        self._is_failing = False
        pid, uid = local_socket.peer(connection)
        if uid != os.getuid():
            self.refusals.count(OTHER_USER, f"uid {uid}")
            return connection.close()
        self._newcomers.add(_Connection(self, connection, pid))
        if len(self._newcomers) >= CONNECTIONS_MAX:
            self._loop.remove_reader(self._listener)

    def remove_newcomer(self, connection: _Connection) -> None:
        """Removes a connection from the newcomers: it has sent a request, or has ended."""
        self._newcomers.discard(connection)
        self._listen()

    def close(self) -> None:
        """Accepts no more connections; open connections go on."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
        self._listener.close()
        self.path.unlink(missing_ok=True)


class _WaitingReport(NamedTuple):
    """A report that waits for its reply.

    Attributes:
        step: the newest step of the report.
        until_s: when the report must be answered at the latest.
    """

    step: int
    until_s: float


class _Connection:
    """Answers the requests of one caller."""

    def __init__(self, server: LocalSocket, connection: socket.socket, pid: int) -> None:
        connection.setblocking(False)
        self._server, self._socket, self._pid = server, connection, pid
        self._loop = asyncio.get_running_loop()
        self._frames = local_socket.FrameReader()
        self._received: list[int] = []  # descriptors of the request that is being received
        self._unsent = bytearray()
        self._job: JobRecord | None = None
        self._report = pb.ReportRequest()  # the newest report
        self._waiting: list[_WaitingReport] = []
        self._timer: asyncio.TimerHandle | None = None
        self._following: asyncio.Task[None] | None = None  # from the first report that waits
        why = f"no request arrived within {DEADLINE_S:g} s"
        self._deadline: asyncio.TimerHandle | None = self._loop.call_later(DEADLINE_S, self._drop, why, SILENT)
        self._loop.add_reader(connection, self._read)

    # The connection

    def _read(self) -> None:
        try:
            data, descriptors = local_socket.receive(self._socket)
        except BlockingIOError:
            return
        except OSError as error:
            return self._drop(str(error), NO_REQUEST) if error.errno == errno.EMFILE else self._end()
        self._received += descriptors
        try:
            if len(self._received) > DESCRIPTORS_MAX:
                raise ValueError(f"more than {DESCRIPTORS_MAX} descriptors arrived")
            for body in self._frames.feed(data):
                if self._socket.fileno() >= 0:
                    self._handle(body)
            if not data:
                self._end()
        except (ValueError, DecodeError) as error:
            self._drop(str(error), NO_REQUEST)
        except Exception:
            self._end()  # the trainer connects again and repeats what was lost
            raise

    def _send(self, reply: pb.LocalReply, descriptors: Sequence[int] = ()) -> None:
        """Sends as much of a reply as the caller takes now. The rest is sent later."""
        reply.protocol, reply.oldest = messages.PROTOCOL, messages.OLDEST
        data, sent = frame(reply), 0
        try:
            if not self._unsent:
                sent = socket.send_fds(self._socket, [data], list(descriptors))
        except BlockingIOError:
            pass
        except OSError as error:  # the caller is gone, or the kernel can't pass descriptors now
            return self._drop(str(error), UNSENT) if descriptors else self._end()
        if descriptors and not sent:
            return self._drop("it does not read, and descriptors can't be buffered", UNSENT)
        self._unsent += data[sent:]
        if self._unsent:
            self._loop.remove_reader(self._socket)
            self._loop.add_writer(self._socket, self._flush)

    def _flush(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            return self._end()
        if not self._unsent:
            self._loop.remove_writer(self._socket)
            self._loop.add_reader(self._socket, self._read)

    def _drop(self, why: str, reason: str) -> None:
        """Ends the connection.

        Args:
            why: for the caller.
            reason: for the log, without anything that the caller has sent.
        """
        self._server.refusals.count(reason, f"pid {self._pid}")
        if not self._unsent:
            with contextlib.suppress(OSError):
                code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
                reply = pb.LocalReply(status=code, error=why, protocol=messages.PROTOCOL, oldest=messages.OLDEST)
                self._socket.send(frame(reply))
        self._end()

    def _end(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        close_all(self._received)
        self._waiting.clear()
        self._follow(None)
        for timer in (self._timer, self._deadline):
            if timer is not None:
                timer.cancel()
        self._server.remove_newcomer(self)

    # Requests

    def _handle(self, body: bytes) -> None:
        """Handles one request.

        Raises:
            ValueError, DecodeError: the bytes are no request.
        """
        request = pb.LocalRequest.FromString(body)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._server.remove_newcomer(self)
        kind = request.WhichOneof("what")
        if kind != "report" and len(body) > REQUEST_MAX:
            raise ValueError(f"a request of {len(body)} bytes; the limit is {REQUEST_MAX}")
        try:
            self._check_protocol(request, "you speak" if kind == "who" else "the trainer speaks")
            if kind == "report":
                self._handle_report(request.report)
            elif kind == "slots":
                self._handle_slots(request.slots)
            elif kind == "who":
                self._send(pb.LocalReply(calls=1, caller=_caller_of(self._pid)))
            else:
                raise ValueError("no request")
        except ReftError as error:
            self._refuse(error, 1)
        except OSError as error:  # of this daemon's own files: the caller has sent a right request
            log.error("a request of pid %d can't be handled: %s", self._pid, error)
            self._refuse(shortage.shortage_error(error), 1)
        finally:
            close_all(self._received)  # descriptors that no handler took

    def _check_protocol(self, request: pb.LocalRequest, who: str) -> None:
        """Refuses a trainer that said Hello to an earlier daemon, of another version of reft.

        Raises:
            AttachError: the sides have no protocol in common. `status` says so, too.
        """
        try:
            messages.check_protocol(request.protocol, request.oldest, who, f"this daemon (reft {__version__})")
        except AttachError as error:
            trainers.note_trouble(self._server.registry.jobs.values(), self._pid, str(error))
            raise

    def _refuse(self, error: ReftError, requests: int) -> None:
        """Refuses `requests` requests, and all reports that wait for a reply.

        `calls` tells the caller how many of its requests this reply answers. The waiting reports
        are of the same job and epoch, so the same error refuses them.
        """
        calls, self._waiting = requests + len(self._waiting), []
        code = grpc.StatusCode.NOT_FOUND if isinstance(error, UnknownJob) else rpc.status_of(error)
        self._send(pb.LocalReply(calls=calls, status=code.value[0], error=str(error)))

    def _handle_slots(self, request: pb.SlotsRequest) -> None:
        job = self._server.registry.get(request.job)
        job.check_epoch(request.epoch)
        if request.returned:
            return self._take_back(job, request)
        # A lease says that this trainer is the rank's trainer now. With a lease, the trainer may
        # also read the slots of its job's other ranks on this node; else only its own rank's.
        slots = {**job.slots.files, **job.slots.stored}
        ranks = {slot.rank for slot in slots.values()} if request.rank in job.leases else {request.rank}
        unknown = [name for name in request.slots if name not in slots or slots[name].rank not in ranks]
        if unknown or not 0 < len(request.slots) <= DESCRIPTORS_MAX:
            raise AttachError(f"rank {request.rank} of job {job.id} can't have slots {unknown} here.")
        descriptors = [slots[name].descriptor for name in request.slots]
        self._send(pb.LocalReply(calls=1, descriptors=len(descriptors)), descriptors)

    def _take_back(self, job: JobRecord, request: pb.SlotsRequest) -> None:
        """Takes back the memfds that a trainer returns to a restarted daemon.

        A memfd has no name in any folder. The old daemon's descriptors ended with that daemon, and
        the trainer still has the slots open.
        """
        if len(self._received) != len(request.returned):
            raise AttachError(f"{len(self._received)} descriptors arrived for {len(request.returned)} slots.")
        for name in request.returned:
            slot = self._server.registry.arena.take_back(job.id, request.rank, name, self._received[0])
            self._received.pop(0)
            trainers.take_back(job, slot)
        self._send(pb.LocalReply(calls=1, descriptors=0))

    # Reports

    def _handle_report(self, report: pb.ReportRequest) -> None:
        if len(self._waiting) >= WAITING_MAX:
            raise ValueError(f"{WAITING_MAX} of its reports wait for a reply")
        job = self._server.registry.get(report.job)
        rounds.report(job, report)
        self._follow(job)
        self._report = report
        # -1: the report names no step. Such a report is answered at once.
        newest = report.steps.until if report.steps.HasField("until") else -1
        self._waiting.append(_WaitingReport(newest, self._loop.time() + min(report.wait_ms / 1000, WAIT_MAX_S)))
        self._answer_reports()
        if self._waiting and self._following is None:
            self._following = asyncio.ensure_future(self._answer_at_news(job, job.news))

    def _follow(self, job: JobRecord | None) -> None:
        """Waits for the news of that job from now on, and of no other."""
        if job is not self._job and self._following is not None:
            self._following.cancel()
            self._following = None
        self._job = job

    async def _answer_at_news(self, job: JobRecord, news: asyncio.Event) -> None:
        """Checks the waiting reports at all news of a job that come from now on.

        Args:
            job: the job.
            news: the job's event at the time of the call. When the task begins to run, the event
                may be set and replaced already.
        """
        while True:
            await news.wait()
            news = job.news
            try:
                self._answer_reports()
            except Exception:
                self._end()  # the trainer connects again and repeats what was lost
                raise

    def _answer_reports(self) -> None:
        """Answers the reports whose newest step is decided, or whose waiting time is over."""
        job = self._job
        if not self._waiting or job is None:
            return
        try:
            job.check_epoch(self._report.epoch)
        except ReftError as error:
            return self._refuse(error, 0)
        now_s = self._loop.time()
        outcome = job.round.outcome if job.round else Outcome()
        waiting = [each for each in self._waiting if not outcome.decides(each.step) and each.until_s > now_s]
        calls, self._waiting = len(self._waiting) - len(waiting), waiting
        if waiting and self._timer is None:
            self._timer = self._loop.call_at(min(each.until_s for each in waiting), self._wait_is_over)
        if calls:
            self._send(pb.LocalReply(calls=calls, report=_report_reply(job, self._report.rank, outcome)))

    def _wait_is_over(self) -> None:
        self._timer = None
        self._answer_reports()


def _report_reply(job: JobRecord, rank: int, outcome: Outcome) -> pb.ReportReply:
    has_slots = bool(job.slots.current_of_rank(rank))
    return pb.ReportReply(
        until=outcome.until, open=outcome.open, mismatched=outcome.mismatched,
        slots_missing=not has_slots, every=outcome.interval.every, interval_start=outcome.interval.start,
        layout=messages.layout_outcome_to(outcome.layout), pins=messages.pins_to(outcome.pins),
        records_over=bool(gradient_records.given_up(job)),
    )  # fmt: skip


def _caller_of(pid: int) -> pb.Caller:
    """Returns the caller's process, as this daemon sees it.

    Raises:
        AttachError: this daemon can't see the process, or can't examine it now.
    """
    try:
        own = caller_process(pid)
    except OSError as error:
        raise shortage.shortage_error(error) from error
    return pb.Caller(pid=own.process.pid, pid_start=own.process.start, parent=own.parent)
