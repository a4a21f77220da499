"""Decides which steps are snapshotted, and measures the cost of snapshots.

    is the step due? (core/commit/snapshot_interval.py)
      └► yes: does the backoff allow it while the round lags? (core/commit/lag_backoff.py)
           ├► yes: take the snapshot
           └► no: report the step as void at the fence, unless `seal` takes it before

    mark ── take: capsule, staging ── forward, backward ── fence: waits? ── optimizer ── mark
     └──────── mark_s ───────┘                            └─ stall_s ─┘

With every="auto" the cost is measured from mark to mark, the requested interval is sent to the
round, and the round returns the agreed interval. With every=n nothing is measured: every n-th step
is due.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from reft.client.snapshot.snapshotter import Snapshotter
from reft.console import say
from reft.core.commit.snapshot_interval import DueSteps, IntervalEstimator, OverheadEstimate, OverheadMeter
from reft.core.pipeline.course import PacingPlan

log = logging.getLogger("reft")


@dataclass
class SnapshotCadence:
    """One rank's choice of steps to snapshot.

    Args:
        snapshots: takes the snapshots.
        due_steps: the due steps, by the agreed interval.
        interval: computes the requested interval; used only with every="auto".
    """

    snapshots: Snapshotter
    due_steps: DueSteps
    interval: IntervalEstimator
    _controls: OverheadMeter = field(default_factory=OverheadMeter)
    _last_mark_s: float = 0.0
    _last_stall_s: float = 0.0
    _has_snapshot: bool = False
    _first_due: int | None = None  # the first due step of `snapshots`
    _left_out: tuple[int, str] | None = None  # a due step that the backoff left out, and the reason

    def mark(self, snapshots: Snapshotter) -> None:
        """Measures the step that ended.

        Called at each mark, after the fence and before the next snapshot.

        Args:
            snapshots: the current snapshotter. After a re-attach the snapshotter is a new one: then
                all ranks start again to measure and to agree.
        """
        if snapshots is not self.snapshots:
            self.snapshots, self._last_mark_s, self._first_due = snapshots, 0.0, None
            self.due_steps = DueSteps(self.due_steps.first, self.due_steps.adapts)
        if not self.due_steps.adapts:
            return
        now = time.perf_counter()
        held_s = self.snapshots.counts.mark_s + self.snapshots.copy_engine.copy_stats.stall_s
        seconds, held = now - self._last_mark_s, held_s - self._last_stall_s
        if self._last_mark_s:
            self.interval.observe(seconds - held, held if self._has_snapshot else None)
            self._controls.observe(seconds, self._has_snapshot)
        self._last_mark_s, self._last_stall_s, self._has_snapshot = now, held_s, False
        self.snapshots.reporter.requested_every = self.interval.requested_every()

    def is_due(self, step: int) -> bool:
        """Decides whether to snapshot `step` now."""
        interval = self.snapshots.reporter.interval
        before = self.due_steps.every(interval.start)
        if self.due_steps.hear(interval) and interval.every != before:
            log.warning(
                "rank %d: from step %d on one step in %d is snapshotted; a snapshot delays training by %.3f ms here, a step "
                "takes %.1f ms, and the budget is %.2f %%.",
                self.snapshots.rank,
                interval.start,
                interval.every,
                1000 * self.interval.stall_s,
                1000 * self.interval.step_s.mean,
                100 * self.interval.budget,
            )
        if not self.due_steps.due(step):
            return False
        backoff = self._backoff(step)
        if step // self.every(step) % backoff == 0:
            return True
        reason = f"the round lags behind training: until it catches up, only one of {backoff} due steps is snapshotted."
        self._left_out = step, reason
        return False

    def _backoff(self, step: int) -> int:
        every = self.every(step)
        self._first_due = step if self._first_due is None else self._first_due
        since = max(self.snapshots.newest_known_whole(), self._first_due - every)
        return self.snapshots.reporter.spacing(step, since, every, len(self.snapshots.slots))

    def fence(self) -> None:
        """Reports a left-out step as void; called at the end of each window.

        From here on `seal` can't take that step any more, and the other ranks must know.
        """
        if self._left_out is not None:
            self.snapshots.void(*self._left_out)
            self._left_out = None

    def take(self, step: int, is_marked: bool, pacing_plan: PacingPlan | None) -> bool:
        """Takes the snapshot of `step`; see `Snapshotter.take`."""
        self._left_out = None
        self._has_snapshot = self.snapshots.take(step, is_marked, pacing_plan)
        return self._has_snapshot

    def every(self, step: int) -> int:
        """Returns the snapshot interval at `step`."""
        return self.due_steps.every(step)

    def report(self) -> None:
        """Prints the cost of snapshots at the end, on rank 0."""
        estimate = self.overhead()
        if estimate is not None and self.snapshots.rank == 0:
            say(str(estimate))

    def overhead(self) -> OverheadEstimate | None:
        """Returns the total cost of snapshots, from control steps; None until there are enough."""
        return self._controls.overhead()
