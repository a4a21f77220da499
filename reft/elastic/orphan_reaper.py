"""`python -m reft.elastic.orphan_reaper`: ends an agent's workers when the agent has ended without doing so.

    agent ──pipe: "PID/START PID/START …", anew each round──► guard ── the pipe's end ──► SIGKILL to those that live, and
                                                                                        to their process groups
torchrun's workers train on when their agent is killed: they would hold devices, ports and ranks. A trainer asks the kernel to
end it with its agent when it attaches; this holds from its start, and for any script.

A worker is any child that the agent has made since the rendezvous handler was made, but for two kinds: a reft-daemon that the
agent started again, which outlives it, and multiprocessing's resource tracker, which cleans up behind it. A worker that leads
a process group, as torchrun's do, is ended with its group; any other one alone, since its group is the agent's.
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


class OrphanReaper:
    """The agent's side. Children that it has already are no workers."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "reft.elastic.orphan_reaper"]
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
        workers = {pid for pid in found if not _outlives_the_agent(pid)}
        assert self._process.stdin is not None
        # Somebody has killed the guard, and the agent is as torch has it; or no descriptor is free, and it knows the last ones.
        with contextlib.suppress(OSError):
            named = [f"{pid}/{facts.start}" for pid in sorted(workers) if (facts := stat_of(pid))]
            self._process.stdin.write(" ".join(named).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the guard and spares the workers: their agent lives."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
        self._process.wait()


def _outlives_the_agent(pid: int) -> bool:
    """Whether a child is a daemon or a resource tracker, or has ended by now."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return True
    return b"reft_daemon" in words or any(b"multiprocessing.resource_tracker" in word for word in words)


def end(workers: Iterable[Process]) -> None:
    """SIGKILLs those that live, with the process groups that they lead."""
    for worker in workers:
        with contextlib.suppress(OSError):  # gone, or not to be known: each of the others all the same
            if worker.is_alive:
                leads = os.getpgid(worker.pid) == worker.pid
                (os.killpg if leads else os.kill)(worker.pid, signal.SIGKILL)


def main() -> None:
    workers: list[Process] = []
    for line in sys.stdin:
        parts = [part.partition("/") for part in line.split()]
        workers = [Process(int(pid), int(start)) for pid, _, start in parts]
    end(workers)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
