"""How fast ranks make steps, and which of them stand still: a hung worker, as opposed to a slow one or a lost node.

A rank stands still when it has made no step for HUNG_FACTOR times as long as it usually takes, and HUNG_MIN_S at least.
In synchronous training all ranks stand still because of one. The laggard is the one with the oldest newest step; among
equals one whose process is stopped or stuck in the kernel; else nobody can say from outside, and the lowest is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

HUNG_FACTOR = 10.0
HUNG_MIN_S = 5.0  # a step of milliseconds that waits for a page or a log line is no hang
GAPS = 8  # that make what is usual
GAPS_MIN = 3  # before which nothing is usual yet: the first steps compile and allocate


@dataclass(frozen=True)
class Stall:
    """A rank that stands still.

    Attributes:
        step: its newest.
        still_s: how long it has made none.
        usual_s: how long one usually takes.
        stopped: whether its process is stopped, or in a system call that can't be interrupted.
    """

    rank: int
    step: int
    still_s: float
    usual_s: float
    stopped: bool = False


@dataclass
class StepProgress:
    """The steps of one rank."""

    step: int = -1
    since_s: float = 0.0
    _gaps: list[float] = field(default_factory=list)

    def saw(self, step: int, now_s: float) -> None:
        """The rank's newest step, as often as one looks."""
        if step <= self.step:
            return
        if self.step >= 0:
            self._gaps = [*self._gaps, now_s - self.since_s][-GAPS:]
        self.step, self.since_s = step, now_s

    @property
    def usual_s(self) -> float | None:
        """The time that a step usually takes; None if too few were seen."""
        return median(self._gaps) if len(self._gaps) >= GAPS_MIN else None

    def stands_still_s(self, now_s: float) -> float | None:
        """How long there was no step, if that is too long; None if it is not, or nothing is usual yet."""
        usual_s = self.usual_s
        still_s = now_s - self.since_s
        if usual_s is None or still_s <= max(HUNG_FACTOR * usual_s, HUNG_MIN_S):
            return None
        return still_s


def laggard(stalls: Iterable[Stall]) -> Stall | None:
    """Whom the others wait for; None if nobody stands still."""
    return min(stalls, key=lambda stall: (stall.step, not stall.stopped, stall.rank), default=None)
