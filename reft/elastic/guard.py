"""`python -m reft.elastic.guard`: ends an agent's workers when the agent has ended without doing so.

    agent ──pipe: "PID/START PID/START …", anew each round──► guard ── the pipe's end ──► SIGKILL to those that live, and
                                                                                        to their process groups
torchrun's workers have sessions of their own, and train on when their agent is killed: they would hold devices, ports and
ranks. A trainer asks the kernel to end it with its agent when it attaches; this holds from its start, and for any script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

from reft.config import child_environment
from reft.wire.process import Process, stat_of


class Guard:
    """The agent's side. Children that it has already are no workers."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "reft.elastic.guard"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=child_environment(),
        )
        self._others = {child.pid for child in psutil.Process().children()}

    def look(self) -> None:
        """Tells the guard of the workers that this agent has now."""
        found = {child.pid for child in psutil.Process().children()} - self._others
        workers = {pid for pid in found if _leads_a_session(pid) and not _is_daemon(pid)}
        assert self._process.stdin is not None
        # Somebody has killed the guard, and the agent is as torch has it; or no descriptor is free, and it knows the last ones.
        with contextlib.suppress(OSError):
            named = [f"{pid}/{facts.start}" for pid in sorted(workers) if (facts := stat_of(pid))]
            self._process.stdin.write(" ".join(named).encode() + b"\n")
            self._process.stdin.flush()


def _leads_a_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False


def _is_daemon(pid: int) -> bool:
    """Whether it is the daemon that this agent has started again: that one stays when the agent ends."""
    try:
        return b"reft_daemon" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def end(workers: Iterable[Process]) -> None:
    """SIGKILLs those that live, with their process groups."""
    for worker in workers:
        with contextlib.suppress(OSError):  # gone, or not to be known: each of the others all the same
            if worker.is_alive:
                os.killpg(worker.pid, signal.SIGKILL)


def main() -> None:
    workers: list[Process] = []
    for line in sys.stdin:
        parts = [part.partition("/") for part in line.split()]
        workers = [Process(int(pid), int(start)) for pid, _, start in parts]
    end(workers)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
