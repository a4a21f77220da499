"""A process as trainers and daemons name it to each other: a pid, and when it started, so that a later one is never meant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process that can't be mistaken for a later one with the same pid."""

    pid: int
    start: int  # field 22 of /proc/PID/stat, clock ticks since boot

    @property
    def is_alive(self) -> bool:
        facts = stat_of(self.pid)
        return facts is not None and facts.start == self.start and facts.state not in "ZX"

    def is_orphan(self, parent: int) -> bool:
        """Whether it lives on although the agent that started it, `parent`, is gone; 0 means that there was none."""
        if not parent:
            return False
        facts = stat_of(self.pid)
        return facts is not None and facts.start == self.start and facts.parent != parent


@dataclass(frozen=True)
class Stat:
    state: str
    parent: int
    start: int


def stat_of(pid: int) -> Stat | None:
    """What /proc says of a process; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[19]))
