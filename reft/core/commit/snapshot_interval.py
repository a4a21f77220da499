"""How often to snapshot, and how all ranks agree on the same steps.

    each rank   requests an interval: stall of a snapshot ÷ (budget × time of a step), rounded up;
                with a known MTBF at least Daly's optimum
    the round   carries the largest request of all ranks up, with the reports; when a step is whole,
                carries SnapshotInterval(start, every) down, with the outcome; start lies ahead
    each rank   takes step s if s is a multiple of `every` and no control step; `every` is that of
                the newest agreed interval that starts at or before s

Invariants
  1. The number of a step and the agreed interval alone decide whether the step is due.
  2. An agreed interval starts LEAD steps after a whole step, so that every rank hears of it in
     time. A rank that does not hear of it seals steps that other ranks leave out. The round
     declares those steps void when a later step is answered. So they cost snapshots, never slots.
  3. The measured stall of each snapshot steers the interval. Control steps, which are left out by
     their number, only bound the total cost: to see a difference of 0.1 % under 2 % of noise takes
     thousands of control steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from reft.core.pipeline.profile import Estimate

LEAD = 64  # steps between the step that became whole and the start of a new interval
MEASURED = 16  # snapshots before the first request
SKIPPED = 3  # not measured: the first snapshots of a process also plan and allocate
MEMORY = 64  # snapshots that the mean stall remembers
CONTROL = 64  # one step out of this many is a control step
EVERY_MAX = 10_000
LEAST_S = 1e-100  # the least share of a step; a smaller one may be 0 as a float
PRIOR_S = 24 * 3600.0  # assumed time between failures, until the job has failures of its own
SAMPLES_MIN = 8  # comparisons before an overhead is reported
Z = 1.96  # 95 %


class SnapshotInterval(NamedTuple):
    """An agreed interval: from step `start` on, take each multiple of `every`; 0 means none yet."""

    start: int = 0
    every: int = 0


def is_due(step: int, every: int) -> bool:
    """Whether the step is taken under this interval."""
    return step % every == 0 and not is_control(step)


def is_control(step: int) -> bool:
    """Whether the step is left out for comparison: one step in CONTROL, never the first ones.

    A hash of the number decides, so control steps follow no period that a training loop may have.
    """
    mixed = (step * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed ^= mixed >> 29
    return step >= CONTROL and (mixed * 0xBF58476D1CE4E5B9 >> 32) % CONTROL == 0


def next_interval(interval: SnapshotInterval, requested_every: int, whole: int) -> SnapshotInterval:
    """Returns the interval that the coordinator announces when step `whole` has become whole.

    Args:
        interval: the one announced last.
        requested_every: the largest request of all ranks; 0 if some rank has none yet.
        whole: the step that has become whole.
    """
    every = min(requested_every, EVERY_MAX)
    if every == 0 or every == interval.every or whole < interval.start:
        return interval
    return SnapshotInterval(whole + LEAD, every)


@dataclass
class DueSteps:
    """The steps that one rank takes.

    Args:
        first: the interval until another one is agreed, in steps.
        adapts: whether the ranks agree on intervals and leave out control steps.
    """

    first: int
    adapts: bool
    _intervals: list[SnapshotInterval] = field(default_factory=list)

    def hear(self, interval: SnapshotInterval) -> bool:
        """Takes an agreed interval from the round; True if it is new."""
        newest = self._intervals[-1] if self._intervals else SnapshotInterval()
        if not self.adapts or interval.every == 0 or interval <= newest:
            return False
        self._intervals = [*self._intervals[-3:], interval]
        return True

    def every(self, step: int) -> int:
        """Returns the interval in force at `step`, in steps."""
        return next((interval.every for interval in reversed(self._intervals) if interval.start <= step), self.first)

    def due(self, step: int) -> bool:
        """Whether to take a snapshot of `step`."""
        return is_due(step, self.every(step)) if self.adapts else step % self.first == 0


@dataclass
class IntervalEstimator:
    """One rank's measurements, and the interval that the rank requests.

    Args:
        budget: the share of training time that snapshots may cost, as a fraction.
        mtbf_s: mean time between failures of the job, in seconds, set by the user or measured
            (`FailureHistory`); 0 if unknown.
    """

    budget: float
    mtbf_s: float = 0.0
    step_s: Estimate = field(default_factory=Estimate)
    stall_s: float = 0.0
    snapshots: int = 0
    _requested: int = 0

    def observe(self, seconds: float, stall_s: float | None) -> None:
        """Takes the measurements of one iteration.

        Args:
            seconds: from mark to mark, without the stall.
            stall_s: how long a snapshot stalled the iteration, in seconds; None if none was taken.
        """
        self.step_s.observe(seconds)
        if stall_s is None:
            return
        self.snapshots += 1
        measured = self.snapshots - SKIPPED
        if measured > 0:
            # A plain mean, not a robust one: a rare long stall is a real cost.
            self.stall_s += (stall_s - self.stall_s) / min(measured, MEMORY)

    def needed(self) -> int:
        """Returns the interval that fits the measurements, in steps."""
        # Bounded before they become whole numbers: a user may give any budget and any MTBF.
        step_s = max(self.step_s.mean, 1e-9)
        share_s = max(self.budget * step_s, LEAST_S)
        every = math.ceil(min(self.stall_s / share_s, EVERY_MAX) * (1 - 1e-9))
        if self.mtbf_s > 0:
            every = max(every, round(min(daly(self.stall_s, self.mtbf_s) / step_s, EVERY_MAX)))
        return min(max(every, 1), EVERY_MAX)

    def requested_every(self) -> int:
        """Returns the interval that this rank requests; 0 until enough snapshots are measured.

        A request rises at once. It falls only when half of it is enough.
        """
        if self.snapshots < MEASURED:
            return 0
        needed = self.needed()
        if needed > self._requested or 2 * needed <= self._requested:
            self._requested = needed
        return self._requested


def daly(cost_s: float, mtbf_s: float) -> float:
    """Returns the interval between checkpoints that loses the least time, in seconds.

    Daly's higher-order form of Young's formula.

    Args:
        cost_s: how long one checkpoint stalls training.
        mtbf_s: mean time between the failures from which this kind of checkpoint recovers: for
            snapshots, failures that leave enough nodes; for checkpoints on storage, all others. The
            two levels don't change each other's interval.
    """
    ratio = cost_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


class FailureHistory(NamedTuple):
    """Training time and failures of a job, summed over its attaches.

    Attributes:
        trained_s: seconds from each attach to its last snapshot. The time between runs does not
            count.
        failures: attaches that ended because a trainer or a node failed.
    """

    trained_s: float = 0.0
    failures: int = 0

    def after(self, trained_s: float, has_failed: bool) -> FailureHistory:
        """Returns the history with one more finished attach."""
        return FailureHistory(self.trained_s + trained_s, self.failures + has_failed)

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures, in seconds; 0 (unknown) before the first failure.

        The mean of a Gamma distribution whose prior is one failure in PRIOR_S. So two failures in
        one bad hour do not count as the usual rate.
        """
        return (self.trained_s + PRIOR_S) / (self.failures + 1) if self.failures else 0.0


class OverheadEstimate(NamedTuple):
    """The total cost of snapshots as a fraction of training time.

    Attributes:
        mean: the estimate.
        low: lower end of the 95 % confidence interval.
        high: upper end.
        samples: number of comparisons behind the estimate.
    """

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
    """Compares each iteration with its two neighbors, if only one side has a snapshot.

    A slow drift of the iteration time cancels out in the difference.
    """

    _window: list[tuple[float, bool]] = field(default_factory=list)
    _count: int = 0
    _mean: float = 0.0
    _squares: float = 0.0
    _plain: Estimate = field(default_factory=Estimate)
    _taken: int = 0
    _all: int = 0

    def observe(self, seconds: float, has_snapshot: bool) -> None:
        """Takes the duration of the next iteration, stall included."""
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
        """Returns the cost of snapshots; None before SAMPLES_MIN comparisons."""
        if self._count < SAMPLES_MIN or self._plain.mean <= 0:
            return None
        freedom = self._count - 1
        t = Z + (Z**3 + Z) / (4 * freedom)  # approximates Student's t
        margin = t * math.sqrt(self._squares / freedom / self._count)
        scale = self._taken / self._all / self._plain.mean
        return OverheadEstimate(
            self._mean * scale, (self._mean - margin) * scale, (self._mean + margin) * scale, self._count
        )
