"""What `reft-cli export` needs before it begins: the source, and a bar for its progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

from reft.cli.ask import ask, job_status
from reft.cli.export.command import ExportSource, Show
from reft.cli.export.sources import MemorySource
from reft.cli.export.stored_source import stored_source
from reft.errors import ConfigError, ReftError
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb

HOLD_S: Final = 60.0
RENEW_S: Final = 10.0
CALL_S: Final = 15.0  # a daemon passes the call on to the coordinator's


class StepKeeper:
    """Keeps the newest whole step of a running job; its ranks train on.

    Attributes:
        version: the step.

    Raises:
        ReftError: the job's coordinator can't keep a step now.
    """

    def __init__(self, address: str, job: str) -> None:
        self._address, self._job = address, job
        reply = ask(address, "Hold", pb.HoldRequest(job=job, seconds=HOLD_S), CALL_S)
        self.version = messages.version_from(reply.version)
        self._renewed_s = time.monotonic()

    def renew(self) -> None:
        """Keeps the step longer, now and then.

        Raises:
            ReftError: it is kept no longer.
        """
        if time.monotonic() - self._renewed_s > RENEW_S:
            self._ask(HOLD_S)
            self._renewed_s = time.monotonic()

    def end(self) -> None:
        """Gives the step up. If no daemon answers, it is given up after a minute."""
        with suppress(ReftError):
            self._ask(0.0)

    def _ask(self, seconds: float) -> None:
        version = messages.version_to(self.version)
        ask(self._address, "Hold", pb.HoldRequest(job=self._job, version=version, seconds=seconds), CALL_S)


@contextmanager
def export_source(
    what: str, address: Callable[[], str], step: int, lineage: str, key_file: Path | None = None
) -> Iterator[ExportSource]:
    """Gives the source: JOB in memory, or DIR/JOB on storage.

    Args:
        what: JOB, DIR/JOB or URL/JOB.
        address: returns the address of this node's daemon.
        step: to export; -1: the newest one.
        lineage: of a job on storage.
        key_file: the key of the checkpoints' MACs; None: MACs are not asked for.

    Raises:
        ConfigError: the address of an object store has credentials, or no job; or a lineage of a
            job in memory is meant.
        ReftError: the job trains and can't hold a step, or a daemon does not answer.
    """
    if "/" in what:
        yield stored_source(what, step, lineage, key_file)
        return
    if lineage:
        raise ConfigError(
            f"--lineage {lineage} was given, and job {what} is read from memory: only checkpoints on storage have lineages.",
            f"export DIR/{what}, or leave out --lineage",
        )
    status = job_status(address(), what)[0]
    if not any(rank.alive for rank in status.ranks):
        yield MemorySource(address(), what, step)
        return
    if step >= 0:
        raise ConfigError(
            f"job {what} trains, so only its newest whole step can be kept for an export.",
            "leave out --step, or export a checkpoint: DIR/JOB",
        )
    os.nice(19)  # the job trains on these cores
    hold = StepKeeper(address(), what)
    try:
        yield MemorySource(address(), what, held=hold.version, renew=hold.renew)
    finally:
        hold.end()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal. One that the caller has closed is None."""
    return stream is not None and stream.isatty()


@contextmanager
def progress(as_json: bool) -> Iterator[Show]:
    """Gives a function that shows the progress at a terminal, as a bar."""
    if as_json or not is_terminal(sys.stderr):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
