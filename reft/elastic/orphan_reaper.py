"""`python -m reft.elastic.orphan_reaper`: kills an agent's workers if the agent was killed.

    agent ── pipe: "PID/START PID/START …", once each round ──► reaper
    the pipe closes ──► SIGKILL to the workers that live, and to their process groups

If torchrun's agent is killed, its workers continue and hold devices, ports and ranks. A trainer
asks the kernel to be killed with its agent, but only from attach on. The reaper works from the
start of the worker, and for any script.

A worker is any child that the agent started after the rendezvous handler was made, with two
exceptions: a reft-daemon that the agent started again must outlive the agent, and multiprocessing's
resource tracker cleans up after the agent. A worker that leads a process group, as torchrun's
workers do, is killed with its group. Any other worker is killed alone: its group is the agent's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from reft.config import child_environment
from reft.wire.process import Process, stat_of


class OrphanReaper:
    """The agent's side: starts the reaper process. Earlier children of the agent are no workers."""

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
        self._earlier_children = _children()

    def look(self) -> None:
        """Sends the reaper the workers that this agent has now."""
        assert self._process.stdin is not None
        # Errors are ignored. If the reaper was killed, the agent behaves as torch's own. If no file
        # descriptor is free, the reaper keeps the list of the last round.
        with contextlib.suppress(OSError):
            workers = {pid for pid in _children() - self._earlier_children if not _outlives_the_agent(pid)}
            marks = [f"{pid}/{facts.start}" for pid in sorted(workers) if (facts := stat_of(pid))]
            self._process.stdin.write(" ".join(marks).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the reaper and keeps the workers: their agent lives."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
        self._process.wait()


def _children() -> set[int]:
    """Returns the pids of this process's children.

    Raises:
        OSError: they can't be read now, for example because no descriptor is free.
    """
    children = set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        # With hidepid=1 other users' processes are listed, and can't be read. They are no children.
        with contextlib.suppress(PermissionError):
            facts = stat_of(pid)
            if facts and facts.parent == os.getpid():
                children.add(pid)
    return children


def _outlives_the_agent(pid: int) -> bool:
    """Returns whether a child is a daemon or a resource tracker, or has ended.

    Raises:
        OSError: it can't be read now.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return b"reft_daemon" in words or any(b"multiprocessing.resource_tracker" in word for word in words)


def end(workers: Iterable[Process]) -> None:
    """Sends SIGKILL to the workers that live, and to the process groups that they lead."""
    for worker in workers:
        with contextlib.suppress(OSError):  # ended, or not readable: continue with the next worker
            if worker.is_alive:
                is_group_leader = os.getpgid(worker.pid) == worker.pid
                (os.killpg if is_group_leader else os.kill)(worker.pid, signal.SIGKILL)


def main() -> None:
    """Reads lists of workers until stdin closes, then kills the last list."""
    workers: list[Process] = []
    for line in sys.stdin:
        marks = [mark.partition("/") for mark in line.split()]
        workers = [Process(int(pid), int(start)) for pid, _, start in marks]
    end(workers)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
