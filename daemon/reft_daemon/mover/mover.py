"""The daemon's side of its mover: sends commands, and awaits their answers.

    daemon                                      mover
      offer   slots of a job, + descriptors ─►    serves these slots
      grant   ticket and pace of a job ──────►    admits one connection with this ticket
      begin   parity slot, + descriptor ─────►    WRITING, zeros
      pull    ranges of one source ──────────►    connects, folds the ranges into the parity slot
      seal    ───────────────────────────────►    digests, SEALED; the parity slot is unmapped
      drop    ───────────────────────────────►    unmaps a parity slot that is given up
      cancel  ───────────────────────────────►    ends a pull
      forget  a job ─────────────────────────►    serves the job no more; its slots are unmapped
              ◄────────────────────────── ready   once, at the start, with the port
              ◄────────────────────────── moved   bytes that a pull has folded, every TELL_BYTES
              ◄─────────────────────────── done   each grant, begin, pull, seal and forget, once

The parity slots of commands that a mover has not answered when it ends stay WRITING, and are begun
anew (`child/child_process.py`). No pull still writes a parity slot that another turn begins.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Sequence
from typing import Final, NamedTuple

from reft.core.budget import format_bytes
from reft.core.coding.exchange import PieceSizes
from reft.core.coding.turn_pace import NO_LIMIT, BandwidthLimit, TurnPace, pace_words, turn_pace
from reft.core.commit.version import Version
from reft.errors import AttachError, ReftError
from reft.wire.tls import Tls
from reft_daemon.arena.arena import SlotFile
from reft_daemon.child.child_process import CANCEL_S, START_S, ChildGone, ChildProcess, RunningProcess
from reft_daemon.child.control_channel import DESCRIPTORS_MAX, ControlMessage, fields_of
from reft_daemon.mover.range_client import RangePull
from reft_daemon.mover.range_protocol import TICKET_BYTES, RangeStatus

log = logging.getLogger("reft.daemon")
SEAL_S: Final = 600.0  # for zeroing or digesting one parity slot


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


class Mover:
    """The mover of this daemon.

    Args:
        settings: how it listens.
    """

    def __init__(self, settings: MoverSettings) -> None:
        self.settings = settings
        self.child = ChildProcess("mover", _command(settings))

    async def port(self) -> int:
        """Returns where the mover listens; starts it if it does not run.

        Raises:
            ChildGone: it does not start.
        """
        return _port_of(await self.child.ensure())

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
            ChildGone: the mover has ended.
        """
        running = await self.child.ensure()
        key = tuple((each.slot.name, each.slot.descriptor, *each[1:]) for each in slots)
        if running.known.get(f"slots of {job}") != key:
            for first in range(0, len(slots) or 1, DESCRIPTORS_MAX):
                batch = slots[first : first + DESCRIPTORS_MAX]
                fields = [
                    (each.slot.rank, each.begin, each.nbytes, each.slot.file_bytes, each.pieces) for each in batch
                ]
                offer = {"do": "offer", "job": job, "anew": not first, "slots": fields}
                await self.child.send(running, offer, [each.slot.descriptor for each in batch])
            running.known[f"slots of {job}"] = key
        pace = self.pace(sent_bytes)
        if running.known.get(f"pace of {job}") != pace:
            running.known[f"pace of {job}"] = pace
            log.info("job=%s a turn sends %s from here, %s", job, format_bytes(sent_bytes), pace_words(pace))
        ticket = secrets.token_bytes(TICKET_BYTES)
        grant = {"do": "grant", "job": job, "ticket": ticket.hex(), "pace": pace.bytes_per_s}
        await self.child.call(running, grant, START_S)
        return ticket, _port_of(running)

    async def forget(self, job: str) -> None:
        """Returns once the mover maps no slot of the job.

        No command of the job may be under way. A mover that does not answer is killed.
        """
        running = self.child.running
        if running is None:
            return
        running.known.pop(f"slots of {job}", None)
        with contextlib.suppress(ChildGone):
            answer = await self.child.call(running, {"do": "forget", "job": job}, CANCEL_S)
            if "error" in answer:
                log.warning("job=%s the mover is ended: %s", job, answer["error"])
                self.child.end(running)
        await self.child.wait_ended()

    async def begin(self, job: str, slot: SlotFile, version: Version, layout: bytes, nbytes: int) -> ParityWriter:
        """Sets a parity slot WRITING and fills it with zeros; returns what fills it.

        Raises:
            ChildGone: the mover has ended.
            AttachError: the slot can't be written.
        """
        running = await self.child.ensure()
        message = {
            "do": "begin", "job": job, "version": fields_of(version), "layout": layout.hex(), "bytes": nbytes,
            "file_bytes": slot.file_bytes,
        }  # fmt: skip
        fold = self.child.next_number()
        writer = ParityWriter(self.child, running, fold)
        try:
            _raise_error(await self.child.call(running, message, SEAL_S, fold, [slot.descriptor]))
        except BaseException:
            await writer.drop()
            raise
        return writer

    async def close(self) -> None:
        """Ends the mover."""
        await self.child.close()


class ParityWriter:
    """Fills one parity slot: pulls ranges into it, and seals it.

    Args:
        child: the daemon's mover.
        running: the process that maps the slot.
        fold: number of the command that began the slot.
    """

    def __init__(self, child: ChildProcess, running: RunningProcess, fold: int) -> None:
        self._child = child
        self._running = running
        self._fold = fold

    async def pull(self, pull: RangePull, deadline_s: float) -> None:
        """Folds the ranges of one source into the slot.

        Raises:
            PullFailed: not all ranges were folded; the slot has those before.
            ChildGone: the mover has ended; the slot must be begun anew.
        """
        message = {
            "do": "pull", "fold": self._fold, "host": pull.source.host, "port": pull.source.port,
            "name": pull.source.name, "ticket": pull.ticket.hex(), "version": fields_of(pull.version),
            "rank": pull.rank, "ranges": pull.ranges, "code": pull.code, "column": pull.column,
            "block": pull.block_bytes,
        }  # fmt: skip
        answer = await self._child.call(self._running, message, deadline_s)
        if "error" in answer:
            status = RangeStatus[answer.get("refused", "OK")]
            raise PullFailed(answer["error"], answer.get("count", 0), status)

    async def seal(self) -> None:
        """Writes the slot's digests, and sets it SEALED.

        Raises:
            ChildGone: the mover has ended; the slot must be begun anew.
            AttachError: the slot can't be read.
        """
        _raise_error(await self._child.call(self._running, {"do": "seal", "fold": self._fold}, SEAL_S))

    async def drop(self) -> None:
        """Gives the slot up; it stays WRITING. After `seal` it changes nothing."""
        with contextlib.suppress(ChildGone):
            await self._child.send(self._running, {"do": "drop", "fold": self._fold})


def _command(settings: MoverSettings) -> list[str]:
    command = ["-m", "reft_daemon.mover", "--host", settings.host, "--port", str(settings.port), "--bytes-per-s",
               str(settings.limit.bytes_per_s)]  # fmt: skip
    if settings.tls:
        command += ["--tls", *(str(path.absolute()) for path in settings.tls.paths)]
    return command


def _port_of(running: RunningProcess) -> int:
    port: int = running.ready.result()["port"]
    return port


def _raise_error(answer: ControlMessage) -> None:
    if "error" in answer:
        raise AttachError(f"the mover can't make the parity: {answer['error']}.")
