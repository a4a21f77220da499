"""Identifies a process by its pid and start time. A later process with that pid is never meant."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process that can't be mistaken for a later one with the same pid."""

    pid: int
    start: int  # field 22 of /proc/PID/stat, clock ticks since boot

    @property
    def is_alive(self) -> bool:
        """Returns whether the process lives.

        Raises:
            OSError: see `stat_of`.
        """
        facts = stat_of(self.pid)
        return facts is not None and facts.start == self.start and facts.state not in "ZX"

    def is_orphan(self, parent: int) -> bool:
        """Returns whether the process lives on although its agent `parent` is gone.

        Args:
            parent: pid of the agent that started the process; 0: none.

        Raises:
            OSError: see `stat_of`.
        """
        if not parent:
            return False
        facts = stat_of(self.pid)
        return facts is not None and facts.start == self.start and facts.parent != parent


@dataclass(frozen=True)
class Stat:
    state: str
    parent: int
    start: int


def mark_of(pid: int) -> str:
    """Returns a text that identifies a living process among all namespaces, machines and times."""
    facts = stat_of(pid)
    return f"{machine()}/{pid}/{facts.start if facts else 0}"


def machine() -> str:
    """Returns the machine since its boot and the pid namespace: where a pid means one process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def stat_of(pid: int) -> Stat | None:
    """Returns the state of a process from /proc; None if the process is gone.

    Raises:
        OSError: the state can't be read now, for example because no descriptor is free.
    """
    try:
        # The kernel may cut the process's name within a character.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[19]))


_OOM_SCORE = Path("/proc/self/oom_score_adj")


def oom_score() -> int:
    """Returns this process's oom_score_adj; 0 where the kernel does not tell.

    When memory runs out, the kernel ends the process with the highest score first.
    """
    try:
        return int(_OOM_SCORE.read_text())
    except (OSError, ValueError):
        return 0


def set_oom_score(score: int) -> bool:
    """Sets this process's oom_score_adj; returns whether the kernel permits it.

    A score below the one at which the process was started needs CAP_SYS_RESOURCE.
    """
    try:
        _OOM_SCORE.write_text(str(score))
    except OSError:
        return False
    return True
