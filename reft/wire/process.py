"""A process as trainers and daemons name it to each other: a pid, and when it started, so that a later one is never meant."""

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
        """Raises OSError: see `stat_of`."""
        facts = stat_of(self.pid)
        return facts is not None and facts.start == self.start and facts.state not in "ZX"

    def is_orphan(self, parent: int) -> bool:
        """Whether it lives on although the agent that started it, `parent`, is gone; 0 means that there was none.

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
    """What tells a process of this pid namespace from every other, of whatever namespace, machine or time; `pid` lives."""
    facts = stat_of(pid)
    return f"{machine()}/{pid}/{facts.start if facts else 0}"


def machine() -> str:
    """This machine since it was booted, and the pid namespace: where a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def stat_of(pid: int) -> Stat | None:
    """What /proc says of a process; None if it is gone.

    Raises:
        OSError: that can't be known now, as where no descriptor is free.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a name may be cut within a character
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[19]))
