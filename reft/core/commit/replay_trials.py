"""When a copy lane is recomputed again, after its recomputed copies differed from the owners'.

recompute ── differs, FAILURES_MAX times in a row ──► 1, 2, 4, … turns by the exchange
    ▲ │                                                  │
    │ └─ equal: forgets the failures                     ▼
    └──────────────────────────────────────── one more attempt; differs: twice as many turns

With protect="auto" the user did not ask for copies. A `ReplayMeter` counts the first turns. The
exchange makes the lane for good in three cases: replays fail FAILURES_MAX times in a row; too few
turns are recomputed; a replay needs more than a core, or more time than two whole steps are apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

FAILURES_MAX = 3  # in a row, before turns are left to the exchange
LEFT_OUT_MAX = 64  # turns


@dataclass(frozen=True)
class ReplayTrials:
    """What a node remembers of a lane's attempts.

    Attributes:
        failures: attempts in a row that gave no copies, or wrong ones.
        left_out: turns that the exchange still makes without an attempt.
    """

    failures: int = 0
    left_out: int = 0

    def skip(self) -> ReplayTrials:
        """Returns the trials after a turn without an attempt."""
        return ReplayTrials(self.failures, max(self.left_out - 1, 0))

    def fail(self) -> ReplayTrials:
        """Returns the trials after an attempt that failed."""
        failures = self.failures + 1
        over = failures - FAILURES_MAX
        return ReplayTrials(failures, min(1 << over, LEFT_OUT_MAX) if over >= 0 else 0)

    def succeed(self) -> ReplayTrials:
        """Returns the trials after an attempt that gave the owners' bytes."""
        return ReplayTrials()


JUDGED_TURNS = 20
RECOMPUTED_MIN = 15  # of them


@dataclass(frozen=True)
class ReplayMeter:
    """How many of a lane's first turns were recomputed, and what that took.

    Under protect="auto" they decide whether the lane goes on to be recomputed. Later turns are not
    counted: there may be a million.

    Attributes:
        turns: turns that were counted.
        costs: of each turn that was recomputed: CPU seconds and seconds a mark.
        began: step and time at the end of the first turn.
        ended: step and time at the end of the newest turn.
    """

    turns: int = 0
    costs: tuple[tuple[float, float], ...] = ()
    began: tuple[int, float] = (-1, 0.0)
    ended: tuple[int, float] = (-1, 0.0)

    def exchanged(self, step: int, now_s: float) -> ReplayMeter:
        """Returns the meter after a turn that the exchange makes."""
        if self.is_over:
            return self
        began = self.began if self.turns else (step, now_s)
        return replace(self, turns=self.turns + 1, began=began, ended=(step, now_s))

    def replayed(self, step: int, now_s: float, marks: int, cpu_s: float, took_s: float) -> ReplayMeter:
        """Returns the meter after a turn that was recomputed.

        Args:
            step: the step of the turn.
            now_s: when the turn ended.
            marks: records that were folded.
            cpu_s: CPU seconds of the replay.
            took_s: seconds of the replay.
        """
        if self.is_over:
            return self
        return replace(self.exchanged(step, now_s), costs=(*self.costs, (cpu_s / marks, took_s / marks)))

    @property
    def is_over(self) -> bool:
        """Whether the lane can be judged."""
        return self.turns >= JUDGED_TURNS

    @property
    def refusal(self) -> str:
        """Why the lane should not be recomputed any more; empty: it should."""
        if len(self.costs) < RECOMPUTED_MIN:
            return f"{len(self.costs)} of {self.turns} turns could be recomputed; at least {RECOMPUTED_MIN} should be."
        (began, began_s), (ended, ended_s) = self.began, self.ended
        step_s = (ended_s - began_s) / max(ended - began, 1)
        cpu_s, took_s = self._cost
        if cpu_s > step_s:
            return f"a step takes {step_s:.3g} s, and to recompute one takes {cpu_s:.3g} CPU seconds: more than a core has."
        if took_s > step_s:
            return f"a step takes {step_s:.3g} s, and to recompute one takes {took_s:.3g} s."
        return ""

    @property
    def verdict(self) -> str:
        """What is said of a lane that goes on to be recomputed."""
        return f"recomputed: {len(self.costs)} of {self.turns} turns were verified, {self._cost[0]:.2g} CPU s a step"

    @property
    def _cost(self) -> tuple[float, float]:
        """CPU seconds and seconds of a typical mark. The first replay loads parts of torch."""
        cpu_s, took_s = (median(each) for each in zip(*self.costs, strict=True))
        return cpu_s, took_s
