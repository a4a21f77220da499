"""Decides at each mark whether to snapshot the step, and measures the cost of snapshots.

    is the step due? (snapshot_interval.py)
      └► yes: do the backoff, while the round lags (lag_backoff.py), and the cost of extra state
              (cost_spacing.py) allow it?
           ├► yes: take the snapshot
           └► no: leave the step out: it is void at the fence, unless `seal` takes it before

    mark ── take: capsule, staging ── forward, backward ── fence: waits? ── optimizer ── mark
     └──────── held up ──────┘                            └─ held up ─┘

The trainer asks once at each mark, and gets an answer. With every="auto" the cost is measured from
mark to mark, the requested interval is sent to the round, and the round returns the agreed
interval. With every=n every n-th step is due, and only the cost of extra state is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from reft.core.commit.cost_spacing import CostSpacing, ExtraStateCost
from reft.core.commit.lag_backoff import backoff_interval
from reft.core.commit.snapshot_interval import (
    DueSteps,
    IntervalEstimator,
    OverheadEstimate,
    OverheadMeter,
    SnapshotInterval,
)


class CadenceFacts(NamedTuple):
    """What one rank knows at a mark.

    Attributes:
        now_s: the time, in seconds of any one clock.
        held_s: seconds for which snapshots have held up training until now.
        has_snapshot: whether a snapshot was taken in the window that ends.
        interval: the agreed interval, by the newest outcome.
        whole_step: the newest step known to be whole; -1 if there is none.
        last_void: the newest step when this rank last heard that a step it had sealed is void; None
            if never.
        delay: the longest delay of an outcome, in steps.
        slots: number of this rank's slots that pins leave; see `backoff_interval`.
        extra_state: what the modules' extra state cost in the window that ends; None if no module
            was asked.
    """

    now_s: float
    held_s: float
    has_snapshot: bool
    interval: SnapshotInterval
    whole_step: int
    last_void: int | None
    delay: int
    slots: int
    extra_state: ExtraStateCost | None = None


class CadenceAnswer(NamedTuple):
    """What to do at a mark.

    Attributes:
        takes: whether to take a snapshot of the step.
        left_out: why a due step is left out; empty if the step is taken, or not due.
        requested_every: the interval that this rank requests; 0 if none.
        notice: text for the log; empty if there is no news.
    """

    takes: bool
    left_out: str
    requested_every: int
    notice: str


@dataclass
class SnapshotCadence:
    """One rank's choice of steps to snapshot.

    Args:
        due_steps: the due steps, by the agreed interval.
        interval: computes the requested interval; used only with every="auto".
    """

    due_steps: DueSteps
    interval: IntervalEstimator
    _controls: OverheadMeter = field(default_factory=OverheadMeter)
    _costs: CostSpacing = field(default_factory=CostSpacing)
    _last_mark_s: float = 0.0
    _last_held_s: float = 0.0
    _first_due: int | None = None  # the first due step since attach, or since the last re-attach

    def at_mark(self, step: int, facts: CadenceFacts) -> CadenceAnswer:
        """Decides about `step`, which this mark has ended; measures the iteration."""
        requested_every = self._measure(facts) if self.due_steps.adapts else 0
        notice = self._hear(facts.interval)
        if not self.due_steps.adapts and facts.extra_state is not None:
            notice = self._costs.observe(facts.extra_state, self.every(step))
        if not self.due_steps.due(step):
            return CadenceAnswer(False, "", requested_every, notice)
        backoff = self._backoff(step, facts)
        due = step // self.every(step)
        if due % backoff == 0 and due % self._costs.spacing == 0:
            return CadenceAnswer(True, "", requested_every, notice)
        why = (
            "the round lags behind training: until it catches up"
            if due % backoff
            else "extra state costs more than its budget: until it costs less"
        )
        left_out = f"{why}, only one of {max(backoff, self._costs.spacing)} due steps is snapshotted."
        return CadenceAnswer(False, left_out, requested_every, notice)

    def _measure(self, facts: CadenceFacts) -> int:
        """Takes the measurements of the iteration; returns the requested interval."""
        seconds, held_s = facts.now_s - self._last_mark_s, facts.held_s - self._last_held_s
        if self._last_mark_s:
            self.interval.observe(seconds - held_s, held_s if facts.has_snapshot else None)
            self._controls.observe(seconds, facts.has_snapshot)
        self._last_mark_s, self._last_held_s = facts.now_s, facts.held_s
        return self.interval.requested_every()

    def _hear(self, interval: SnapshotInterval) -> str:
        """Takes the agreed interval; returns a notice if another one is in force."""
        before = self.due_steps.every(interval.start)
        if not self.due_steps.hear(interval) or interval.every == before:
            return ""
        return (
            f"from step {interval.start} on one step in {interval.every} is snapshotted; a snapshot delays training by "
            f"{1000 * self.interval.stall_s:.3f} ms here, a step takes {1000 * self.interval.step_s.mean:.1f} ms, and the "
            f"budget is {100 * self.interval.budget:.2f} %."
        )

    def _backoff(self, step: int, facts: CadenceFacts) -> int:
        every = self.every(step)
        self._first_due = step if self._first_due is None else self._first_due
        since = max(facts.whole_step, self._first_due - every)
        in_vain = None if facts.last_void is None else (step - facts.last_void) // every
        return backoff_interval(step // every - since // every, in_vain, facts.delay // every, facts.slots)

    def restart(self) -> None:
        """Begins anew to measure and to agree, as all ranks do after a re-attach."""
        self._last_mark_s, self._first_due = 0.0, None
        self.due_steps = DueSteps(self.due_steps.first, self.due_steps.adapts)

    def every(self, step: int) -> int:
        """Returns the snapshot interval at `step`."""
        return self.due_steps.every(step)

    def overhead(self) -> OverheadEstimate | None:
        """Returns the total cost of snapshots, from control steps; None until there are enough."""
        return self._controls.overhead()
