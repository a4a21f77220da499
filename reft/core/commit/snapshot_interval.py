"""How often to snapshot: what the measured stall allows, what failures make worth it, and how all ranks take the same steps.

    each rank   stall of a snapshot ÷ (budget × time of a step) ─► every n-th; with a known MTBF at least Daly's optimum ─► wish
    the round   the greatest wish of all ranks rides up with the answers; once a step is whole, the coordinator says
                Pace(start, every), some way ahead, and it rides down with the outcome
    each rank   step s is due iff s is a multiple of `every` of the newest pace that begins at or before s, and no control

Invariants
  1. Whether a step is due follows from its number and the pace alone.
  2. A pace begins LEAD steps after a whole one, so that every rank hears of it in time. A rank that does not, seals steps
     that others leave out: the round calls those void as soon as a later step is answered, so they cost snapshots, never slots.
  3. The frequency is steered by the stall, which is measured in every snapshot. Control steps, left out by their number,
     only bound the whole cost: a difference of 0.1 % under 2 % of noise takes thousands of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from reft.core.pipeline.profile import Estimate

LEAD = 64  # steps between the one that became whole and the start of a new pace
MEASURED = 16  # snapshots before the first wish
SKIPPED = 3  # the first snapshots of a process cut their work and allocate; they are not like the others
MEMORY = 64  # snapshots that the mean stall remembers
CONTROL = 64  # one step in so many is left out
EVERY_MAX = 10_000
PRIOR_S = 24 * 3600.0  # one failure in a day is what is thought of a job before its own failures say more
SAMPLES_MIN = 8  # differences before a bound is given
Z = 1.96  # 95 %


class SnapshotInterval(NamedTuple):
    """From step `start` on, each step that is a multiple of `every` is taken; `every` 0 says nothing."""

    start: int = 0
    every: int = 0


def is_due(step: int, every: int) -> bool:
    """Whether a pace with this interval takes the step."""
    return step % every == 0 and not is_control(step)


def is_control(step: int) -> bool:
    """Whether the step is left out to compare with: one in CONTROL, in no rhythm that a training loop has, never the first."""
    mixed = (step * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed ^= mixed >> 29
    return step >= CONTROL and (mixed * 0xBF58476D1CE4E5B9 >> 32) % CONTROL == 0


def next_interval(pace: SnapshotInterval, requested_every: int, whole: int) -> SnapshotInterval:
    """What the coordinator says when step `whole` has become whole.

    Args:
        requested_every: the greatest of all ranks; 0 if one has none yet.
    """
    every = min(requested_every, EVERY_MAX)
    if every == 0 or every == pace.every or whole < pace.start:
        return pace
    return SnapshotInterval(whole + LEAD, every)


@dataclass
class DueSteps:
    """Which steps one rank takes.

    Args:
        first: each how many-th, until a pace is agreed.
        adapts: whether a pace may be agreed, and control steps are left out.
    """

    first: int
    adapts: bool
    _paces: list[SnapshotInterval] = field(default_factory=list)

    def hear(self, pace: SnapshotInterval) -> bool:
        """Takes the round's pace; True if it is news."""
        known = self._paces[-1] if self._paces else SnapshotInterval()
        if not self.adapts or pace.every == 0 or pace <= known:
            return False
        self._paces = [*self._paces[-3:], pace]
        return True

    def every(self, step: int) -> int:
        """Each how many-th step is taken around `step`."""
        return next((pace.every for pace in reversed(self._paces) if pace.start <= step), self.first)

    def due(self, step: int) -> bool:
        """Whether `step` is to be taken."""
        return is_due(step, self.every(step)) if self.adapts else step % self.first == 0


@dataclass
class IntervalEstimator:
    """One rank's measurements, and what it wishes.

    Args:
        budget: the share of training time that snapshots may hold up.
        mtbf_s: mean time between failures of the job, in seconds, given or measured (`FailureHistory`); 0 if it is not known.
    """

    budget: float
    mtbf_s: float = 0.0
    step_s: Estimate = field(default_factory=Estimate)
    stall_s: float = 0.0
    snapshots: int = 0
    _wish: int = 0

    def observe(self, seconds: float, stall_s: float | None) -> None:
        """Takes one iteration.

        Args:
            seconds: from mark to mark, without the stall.
            stall_s: for how long a snapshot held it up; None if none was taken.
        """
        self.step_s.observe(seconds)
        if stall_s is None:
            return
        self.snapshots += 1
        counted = self.snapshots - SKIPPED
        if counted > 0:
            # Not robust: a long stall now and then is a cost like any other.
            self.stall_s += (stall_s - self.stall_s) / min(counted, MEMORY)

    def needed(self) -> int:
        """The interval that fits the measurements, in steps."""
        step_s = max(self.step_s.mean, 1e-9)
        every = math.ceil(self.stall_s / (self.budget * step_s) * (1 - 1e-9))
        if self.mtbf_s > 0:
            every = max(every, round(daly(self.stall_s, self.mtbf_s) / step_s))
        return min(max(every, 1), EVERY_MAX)

    def requested_every(self) -> int:
        """What this rank asks of the round; 0 until enough was measured. It rises at once, and falls when half would do."""
        if self.snapshots < MEASURED:
            return 0
        needed = self.needed()
        if needed > self._wish or 2 * needed <= self._wish:
            self._wish = needed
        return self._wish


def daly(cost_s: float, mtbf_s: float) -> float:
    """The interval between checkpoints that loses the least time, in seconds (Daly's higher order form of Young's).

    Args:
        cost_s: for how long one of them holds up training.
        mtbf_s: mean time between the failures that it is good for: for snapshots those that leave enough nodes, for
            checkpoints on storage the others. The two levels don't change each other's interval.
    """
    ratio = cost_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


class FailureHistory(NamedTuple):
    """What a job has lived through, over all of its attaches.

    Attributes:
        trained_s: from each attach to its last snapshot: the time between runs is no time without failures.
        failures: attaches that ended because a trainer or a node did.
    """

    trained_s: float = 0.0
    failures: int = 0

    def after(self, trained_s: float, has_failed: bool) -> FailureHistory:
        """With one more attach that is over."""
        return FailureHistory(self.trained_s + trained_s, self.failures + has_failed)

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures, in seconds; 0 before the first one: then nothing is known, and nothing lost.

        The mean of what a Gamma distribution says that began with one failure in PRIOR_S, so that two failures in a bad
        hour don't pass for the rule.
        """
        return (self.trained_s + PRIOR_S) / (self.failures + 1) if self.failures else 0.0


class OverheadEstimate(NamedTuple):
    """The whole cost of snapshots as a share of training time, with a 95 % interval, and what it rests on."""

    mean: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        return (
            f"snapshots cost {100 * self.mean:.2f} % of training time "
            f"(95 %: {100 * self.low:.2f} % to {100 * self.high:.2f} %, from {self.samples} comparisons)"
        )


@dataclass
class OverheadMeter:
    """Compares each iteration with those right before and after it, where they differ in having a snapshot: what drifts
    slowly has no part in the difference."""

    _window: list[tuple[float, bool]] = field(default_factory=list)
    _count: int = 0
    _mean: float = 0.0
    _squares: float = 0.0
    _plain: Estimate = field(default_factory=Estimate)
    _taken: int = 0
    _all: int = 0

    def observe(self, seconds: float, has_snapshot: bool) -> None:
        """Takes one iteration, in order, its stall included."""
        self._all += 1
        self._taken += has_snapshot
        if not has_snapshot:
            self._plain.observe(seconds)
        self._window = [*self._window[-2:], (seconds, has_snapshot)]
        if len(self._window) < 3:
            return
        (before, a), (middle, b), (after, c) = self._window
        if a == c != b:
            difference = (middle - (before + after) / 2) * (1 if b else -1)
            self._count += 1
            error = difference - self._mean
            self._mean += error / self._count
            self._squares += error * (difference - self._mean)

    def overhead(self) -> OverheadEstimate | None:
        """What snapshots cost; None until there is enough to say."""
        if self._count < SAMPLES_MIN or self._plain.mean <= 0:
            return None
        freedom = self._count - 1
        t = Z + (Z**3 + Z) / (4 * freedom)  # Student's, near enough
        margin = t * math.sqrt(self._squares / freedom / self._count)
        scale = self._taken / self._all / self._plain.mean
        return OverheadEstimate(
            self._mean * scale, (self._mean - margin) * scale, (self._mean + margin) * scale, self._count
        )
