"""Serves the line of `reft.wire.line`: takes the reports of this node's ranks, and tells them what became of the round.

A request is answered once, at the latest when its time is over; one reply may answer several. No task and no timer of its
own belongs to a request: a connection looks at what it owes when a report comes, when the round has news, and when the
oldest request has waited long enough.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import NamedTuple

import grpc
from google.protobuf.message import DecodeError

from reft.core.commit.round import Outcome
from reft.errors import ReftError
from reft.wire import handout, messages, rpc
from reft.wire.line import Frames, frame
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon import __version__
from reft_daemon.jobs.job_record import HeldJob
from reft_daemon.registry import NoSuchJob, Registry

log = logging.getLogger("reft.daemon")
WAIT_MAX_S = 10.0


class LineServer:
    """The server.

    Args:
        path: of the socket; its folder is the daemon's own.
        registry: the jobs whose ranks report.
    """

    def __init__(self, path: Path, registry: Registry) -> None:
        self.path = path
        self._registry = registry
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listens."""
        self.path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Caller(self._registry), str(self.path))
        self.path.chmod(0o600)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.path.unlink(missing_ok=True)


class _Owed(NamedTuple):
    """A request that was not answered yet: the newest step that it speaks of, and until when it may wait."""

    step: int
    until_s: float


class _Caller(asyncio.Protocol):
    """One trainer's connection."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._job: HeldJob | None = None
        self._request = pb.ReportRequest()  # the newest
        self._owed: list[_Owed] = []
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if handout.peer(transport.get_extra_info("socket"))[1] != os.getuid():
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._follow(None)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._hear(pb.ReportRequest.FromString(body))
        except (ValueError, DecodeError) as error:
            log.warning("a caller of the line was dropped: %s", error)
            if self._transport is not None:
                self._transport.abort()

    def _hear(self, request: pb.ReportRequest) -> None:
        self._request = request
        wait_s = min(request.wait_ms / 1000, WAIT_MAX_S)
        newest = request.said.until if request.said.HasField("until") else -1
        self._owed.append(_Owed(newest, asyncio.get_running_loop().time() + wait_s))
        try:
            # Its trainer may have said Hello to the daemon before this one, of another reft.
            messages.check_protocol(request.protocol, "you speak", f"this daemon (reft {__version__})")
            job = self._registry.get(request.job)
            self._follow(job)
            job.report(request)
        except ReftError as error:
            self._refuse(error)
            return
        self._tell()

    def _follow(self, job: HeldJob | None) -> None:
        """Hears of that job's news from now on."""
        if job is self._job:
            return
        if self._job is not None:
            self._job.listeners.discard(self._tell)
        if job is not None:
            job.listeners.add(self._tell)
        self._job = job

    def _tell(self) -> None:
        """Answers what can be answered, or has waited for long enough."""
        job = self._job
        if not self._owed or job is None:
            return
        try:
            job.check_epoch(self._request.epoch)
        except ReftError as error:
            self._refuse(error)
            return
        now_s = asyncio.get_running_loop().time()
        outcome = job.round.outcome if job.round else Outcome()
        waiting = [owed for owed in self._owed if not outcome.decides(owed.step) and owed.until_s > now_s]
        calls, self._owed = len(self._owed) - len(waiting), waiting
        if calls:
            self._send(_reply(job, self._request.rank, outcome, calls))
        if waiting and self._timer is None:
            until_s = min(owed.until_s for owed in waiting)
            self._timer = asyncio.get_running_loop().call_at(until_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._tell()

    def _refuse(self, error: ReftError) -> None:
        code = grpc.StatusCode.NOT_FOUND if isinstance(error, NoSuchJob) else rpc.status_of(error)
        calls, self._owed = len(self._owed), []
        self._send(
            pb.ReportReply(whole=-1, calls=calls, status=code.value[0], error=str(error), protocol=messages.PROTOCOL)
        )

    def _send(self, reply: pb.ReportReply) -> None:
        if self._transport is not None:
            self._transport.write(frame(reply))


def _reply(job: HeldJob, rank: int, outcome: Outcome, calls: int) -> pb.ReportReply:
    has_slots = any(slot.rank == rank for slot in job.slots.values())
    return pb.ReportReply(
        whole=outcome.whole, until=outcome.until, open=outcome.open, unlike=outcome.unlike,
        slots_missing=not has_slots, every=outcome.pace.every, pace_start=outcome.pace.start, calls=calls,
        protocol=messages.PROTOCOL,
    )  # fmt: skip
