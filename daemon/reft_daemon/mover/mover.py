"""The daemon's side of its mover: starts the process, sends commands, awaits their answers.

    no process ──first command──► starting ──port──► running ──it ends──► no process
                                                        every command without an answer fails

A new process is started at most once in PAUSE_S, and ever more rarely if processes end early. Each
command gets its answer before its caller goes on, also if the caller is cancelled. So no pull still
writes a parity slot that another turn begins. A mover that does not answer in time is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from reft.config import child_environment
from reft.core.budget import format_bytes
from reft.core.coding.exchange import PieceSizes
from reft.core.coding.turn_pace import NO_LIMIT, BandwidthLimit, TurnPace, pace_words, turn_pace
from reft.core.commit.version import Version
from reft.errors import AttachError, ReftError
from reft.wire.tls import Tls
from reft_daemon.arena.arena import SlotFile
from reft_daemon.mover.child import fields_of
from reft_daemon.mover.control_channel import DESCRIPTORS_MAX, ControlMessage, receive_message, send_message
from reft_daemon.mover.range_client import RangePull
from reft_daemon.mover.range_protocol import TICKET_BYTES, RangeStatus

log = logging.getLogger("reft.daemon")
START_S: Final = 20.0
SEND_S: Final = 5.0
CANCEL_S: Final = 10.0  # an answer after `cancel`; longer than any wait in the mover that `cancel` does not end
PAUSE_S: Final = 0.2  # between two starts; twice as long after each process that ended early
PAUSE_MAX_S: Final = 30.0
EARLY_S: Final = 60.0
SEAL_S: Final = 600.0  # for zeroing or digesting one parity slot


class MoverGone(AttachError):
    """The mover ended before it answered."""


class PullFailed(ReftError):
    """A pull has ended early.

    Args:
        message: why.
        folded: ranges that were folded before.
        status: what the source has answered; OK: the connection failed.
    """

    def __init__(self, message: str, folded: int, status: RangeStatus) -> None:
        super().__init__(message)
        self.folded = folded
        self.status = status


class MoverSettings(NamedTuple):
    """How a mover listens.

    Attributes:
        host: name or address that it binds.
        port: 0: any free one.
        limit: on what it sends.
        tls: the daemon's certificates; None: plain TCP.
        advertised: what other nodes call instead of the daemon's own host; empty: that host.
    """

    host: str = "127.0.0.1"
    port: int = 0
    limit: BandwidthLimit = NO_LIMIT
    tls: Tls | None = None
    advertised: str = ""


class SourceSlot(NamedTuple):
    """A slot that the mover serves, its unreplicated section, and how this is cut.

    `pieces` is None if the section has no coded pieces.
    """

    slot: SlotFile
    begin: int
    nbytes: int
    pieces: PieceSizes | None = None


@dataclass
class MoverProcess:
    """One process of the mover.

    Attributes:
        port: where it listens.
        waiting: command → its answer.
        progress: pull → bytes that it has folded.
        offers: job → what it serves.
        paces: job → how fast it sends.
    """

    process: subprocess.Popen[bytes]
    channel: socket.socket
    port: asyncio.Future[int]
    waiting: dict[int, asyncio.Future[ControlMessage]] = field(default_factory=dict)
    progress: dict[int, int] = field(default_factory=dict)
    offers: dict[str, tuple[object, ...]] = field(default_factory=dict)
    paces: dict[str, TurnPace] = field(default_factory=dict)


class Mover:
    """The mover of this daemon.

    Args:
        settings: how it listens.
    """

    def __init__(self, settings: MoverSettings) -> None:
        self.settings = settings
        self.moved_bytes = 0  # folded since this daemon started
        self._running: MoverProcess | None = None
        self._ended: subprocess.Popen[bytes] | None = None  # killed, and perhaps not yet dead
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._started_s = -EARLY_S
        self._pause_s = PAUSE_S

    async def port(self) -> int:
        """Returns where the mover listens; starts it if it does not run.

        Raises:
            MoverGone: it does not start.
        """
        return (await self._ensure()).port.result()

    def pace(self, sent_bytes: int) -> TurnPace:
        """Returns how fast this node sends so many bytes of a turn."""
        return turn_pace(self.settings.limit, sent_bytes)

    async def grant(self, job: str, slots: Sequence[SourceSlot], sent_bytes: int = 0) -> tuple[bytes, int]:
        """Offers a job's slots; returns a new ticket to them, and the mover's port.

        Args:
            job: the job.
            slots: what is served.
            sent_bytes: that this node sends in a turn of the job; they decide its pace.

        Raises:
            MoverGone: the mover has ended.
        """
        running = await self._ensure()
        key = tuple((each.slot.name, each.slot.descriptor, *each[1:]) for each in slots)
        if running.offers.get(job) != key:
            for first in range(0, len(slots) or 1, DESCRIPTORS_MAX):
                batch = slots[first : first + DESCRIPTORS_MAX]
                fields = [
                    (each.slot.rank, each.begin, each.nbytes, each.slot.file_bytes, each.pieces) for each in batch
                ]
                offer = {"do": "offer", "job": job, "anew": not first, "slots": fields}
                await self._send(running, offer, [each.slot.descriptor for each in batch])
            running.offers[job] = key
        pace = self.pace(sent_bytes)
        if running.paces.get(job) != pace:
            running.paces[job] = pace
            log.info("job=%s a turn sends %s from here, %s", job, format_bytes(sent_bytes), pace_words(pace))
        ticket = secrets.token_bytes(TICKET_BYTES)
        grant = {"do": "grant", "job": job, "ticket": ticket.hex(), "pace": pace.bytes_per_s}
        await self._call(running, grant, START_S)
        return ticket, running.port.result()

    async def forget(self, job: str) -> None:
        """Returns once the mover maps no slot of the job.

        No command of the job may be under way. A mover that does not answer is killed.
        """
        running = self._running
        if running is None:
            return
        running.offers.pop(job, None)
        with contextlib.suppress(MoverGone):
            answer = await self._call(running, {"do": "forget", "job": job}, CANCEL_S)
            if "error" in answer:
                log.warning("job=%s the mover is ended: %s", job, answer["error"])
                self._end(running)
        await self._await_end()

    async def begin(self, job: str, slot: SlotFile, version: Version, layout: bytes, nbytes: int) -> ParityWriter:
        """Sets a parity slot WRITING and fills it with zeros; returns what fills it.

        Raises:
            MoverGone: the mover has ended.
            AttachError: the slot can't be written.
        """
        running = await self._ensure()
        message = {
            "do": "begin", "job": job, "version": fields_of(version), "layout": layout.hex(), "bytes": nbytes,
            "file_bytes": slot.file_bytes,
        }  # fmt: skip
        fold = next(self._numbers)
        writer = ParityWriter(self, running, fold)
        try:
            _raise_error(await self._call(running, message, SEAL_S, fold, [slot.descriptor]))
        except BaseException:
            await writer.drop()
            raise
        return writer

    async def close(self) -> None:
        """Ends the mover."""
        if self._running is not None:
            self._end(self._running)
        await self._await_end()

    # The process

    async def _ensure(self) -> MoverProcess:
        async with self._starting:
            if self._running is None:
                now = time.monotonic()
                early = now - self._started_s < EARLY_S
                self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S) if early else PAUSE_S
                await asyncio.sleep(max(self._started_s + self._pause_s - now, 0))
                await self._await_end()  # it must write no slot that the next one begins
                self._running = self._start()
            running = self._running
            try:
                await asyncio.wait_for(asyncio.shield(running.port), START_S)
            except asyncio.TimeoutError:
                self._end(running)
                raise MoverGone(f"the mover did not start in {START_S:g} s.", "look at this daemon's log") from None
            return running

    def _start(self) -> MoverProcess:
        self._started_s = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = self.settings
        command = [sys.executable, "-m", "reft_daemon.mover", "--channel", str(theirs.fileno()), "--host", settings.host,
                   "--port", str(settings.port), "--bytes-per-s", str(settings.limit.bytes_per_s)]  # fmt: skip
        if settings.tls:
            command += ["--tls", *(str(path.absolute()) for path in settings.tls.paths)]
        # The path is this process's own: the child must import the same reft.
        path = os.pathsep.join(os.path.abspath(each) for each in sys.path if each)
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, cwd="/",
                env=child_environment(PYTHONPATH=path, REFT_FAILPOINTS=""),
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        running = MoverProcess(process, ours, loop.create_future())
        loop.add_reader(ours, self._read, running)
        log.info("mover pid=%d started", process.pid)
        return running

    def _read(self, running: MoverProcess) -> None:
        """Takes the mover's messages; at their end the mover has ended."""
        try:
            while received := receive_message(running.channel):
                self._take(running, received[0])
        except BlockingIOError:
            return
        except OSError:
            pass
        log.warning("mover pid=%d has ended", running.process.pid)
        self._end(running)

    def _take(self, running: MoverProcess, message: ControlMessage) -> None:
        if "port" in message and not running.port.done():
            running.port.set_result(message["port"])
        if "folded" in message:
            running.progress[message["folded"]] = running.progress.get(message["folded"], 0) + message["bytes"]
            self.moved_bytes += message["bytes"]
        answer = running.waiting.pop(message.get("done", 0), None)
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _await_end(self) -> None:
        """Returns once the process that was killed last maps nothing."""
        if (ended := self._ended) is not None:
            await asyncio.to_thread(ended.wait)

    def _end(self, running: MoverProcess) -> None:
        """Kills the process, and fails its commands."""
        if running is not self._running:
            return
        self._running, self._ended = None, running.process
        asyncio.get_running_loop().remove_reader(running.channel)
        running.channel.close()
        running.process.kill()
        gone = MoverGone("the mover ended before it answered.", "look at this daemon's log")
        waiting: list[asyncio.Future[Any]] = [running.port, *running.waiting.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(gone)
                answer.exception()  # marks it as retrieved: nobody may wait for it
        running.waiting.clear()
        asyncio.get_running_loop().run_in_executor(None, running.process.wait)

    # Commands

    async def _send(self, running: MoverProcess, message: ControlMessage, descriptors: Sequence[int] = ()) -> None:
        end = time.monotonic() + SEND_S
        while running is self._running:
            try:
                send_message(running.channel, message, descriptors)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    self._end(running)
                await asyncio.sleep(0.01)  # the mover reads its commands at once, unless it is stopped
            except OSError:
                self._end(running)
        raise MoverGone("the mover has ended.", "look at this daemon's log")

    async def _call(
        self, running: MoverProcess, message: Mapping[str, Any], deadline_s: float,
        ident: int = 0, descriptors: Sequence[int] = (),
    ) -> ControlMessage:  # fmt: skip
        """Sends a command; returns its answer.

        If the caller is cancelled, the command is cancelled, and its answer awaited, first.

        Raises:
            MoverGone: the mover has ended, or was killed because it did not answer in time.
        """
        ident = ident or next(self._numbers)
        answer = running.waiting[ident] = asyncio.get_running_loop().create_future()
        try:
            await self._send(running, {**message, "id": ident}, descriptors)
            try:
                return await asyncio.wait_for(asyncio.shield(answer), deadline_s)
            except asyncio.TimeoutError:
                self._end(running)
                raise MoverGone(f"the mover did not answer in {deadline_s:g} s, and was killed.") from None
        except asyncio.CancelledError:
            await self._cancel(running, ident, answer)
            raise
        finally:
            running.waiting.pop(ident, None)
            running.progress.pop(ident, None)

    async def _cancel(self, running: MoverProcess, ident: int, answer: asyncio.Future[ControlMessage]) -> None:
        with contextlib.suppress(MoverGone):
            await self._send(running, {"do": "cancel", "pull": ident})
            done, _ = await asyncio.wait({answer}, timeout=CANCEL_S)
            if not done:
                self._end(running)


class ParityWriter:
    """Fills one parity slot: pulls ranges into it, and seals it.

    Args:
        mover: the daemon's mover.
        running: the process that maps the slot.
        fold: number of the command that began the slot.
    """

    def __init__(self, mover: Mover, running: MoverProcess, fold: int) -> None:
        self._mover = mover
        self._running = running
        self._fold = fold

    async def pull(self, pull: RangePull, deadline_s: float) -> None:
        """Folds the ranges of one source into the slot.

        Raises:
            PullFailed: not all ranges were folded; the slot has those before.
            MoverGone: the mover has ended; the slot must be begun anew.
        """
        message = {
            "do": "pull", "fold": self._fold, "host": pull.source.host, "port": pull.source.port,
            "name": pull.source.name, "ticket": pull.ticket.hex(), "version": fields_of(pull.version),
            "rank": pull.rank, "ranges": pull.ranges, "code": pull.code, "column": pull.column,
            "block": pull.block_bytes,
        }  # fmt: skip
        answer = await self._mover._call(self._running, message, deadline_s)
        if "error" in answer:
            status = RangeStatus[answer.get("refused", "OK")]
            raise PullFailed(answer["error"], answer.get("count", 0), status)

    async def seal(self) -> None:
        """Writes the slot's digests, and sets it SEALED.

        Raises:
            MoverGone: the mover has ended; the slot must be begun anew.
            AttachError: the slot can't be read.
        """
        _raise_error(await self._mover._call(self._running, {"do": "seal", "fold": self._fold}, SEAL_S))

    async def drop(self) -> None:
        """Gives the slot up; it stays WRITING. After `seal` it changes nothing."""
        with contextlib.suppress(MoverGone):
            await self._mover._send(self._running, {"do": "drop", "fold": self._fold})


def _raise_error(answer: ControlMessage) -> None:
    if "error" in answer:
        raise AttachError(f"the mover can't make the parity: {answer['error']}.")
