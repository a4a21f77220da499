"""Measures how fast ranks make steps, and finds ranks that stand still.

A hung worker stands still; a slow worker or a lost node does not count here. A rank stands still if
it has made no step for HUNG_FACTOR times its usual time, and for HUNG_MIN_S at least. In
synchronous training all ranks stand still because of one, the laggard. That is the rank whose
newest step is the oldest. Among equals it is the one whose process is stopped or stuck in the
kernel. Otherwise it can't be seen from outside, and the lowest rank is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

HUNG_FACTOR = 10.0
HUNG_MIN_S = 5.0  # a step of milliseconds that waits for a page or a log line is no hang
GAPS = 8  # the usual time is the median of the last so many steps
GAPS_MIN = 3  # with fewer steps no time is usual yet: the first steps compile and allocate


@dataclass(frozen=True)
class Stall:
    """A rank that stands still.

    Attributes:
        rank: the rank.
        step: its newest step.
        still_s: seconds since that step.
        usual_s: seconds that a step usually takes.
        stopped: whether its process is stopped, or in a system call that can't be interrupted.
    """

    rank: int
    step: int
    still_s: float
    usual_s: float
    stopped: bool = False


@dataclass
class StepProgress:
    """The steps of one rank, and their usual duration."""

    step: int = -1
    since_s: float = 0.0
    _gaps: list[float] = field(default_factory=list)

    def saw(self, step: int, now_s: float) -> None:
        """Notes the rank's newest step; may be called any number of times for one step."""
        if step <= self.step:
            return
        if self.step >= 0:
            self._gaps = [*self._gaps, now_s - self.since_s][-GAPS:]
        self.step, self.since_s = step, now_s

    @property
    def usual_s(self) -> float | None:
        """Returns the seconds that a step usually takes; None if too few were seen."""
        return median(self._gaps) if len(self._gaps) >= GAPS_MIN else None

    def stands_still_s(self, now_s: float) -> float | None:
        """Returns the seconds without a step if they are too many; None otherwise.

        None also if no usual time is known yet.
        """
        usual_s = self.usual_s
        still_s = now_s - self.since_s
        if usual_s is None or still_s <= max(HUNG_FACTOR * usual_s, HUNG_MIN_S):
            return None
        return still_s


def laggard(stalls: Iterable[Stall]) -> Stall | None:
    """Returns the rank that the others wait for; None if no rank stands still."""
    return min(stalls, key=lambda stall: (stall.step, not stall.stopped, stall.rank), default=None)
