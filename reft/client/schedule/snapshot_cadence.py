"""Which steps the session snapshots, and what that costs: measured from mark to mark, told to the round, heard from it.

    due by its number (core/commit/snapshot_interval.py)? ─► in turn while the round lags (core/commit/lag_backoff.py)? ─► taken
                                                        └► no: void at the fence, unless a `seal` takes it before

    mark ── take: capsule, staging ── forward, backward ── fence: waits? ── optimizer ── mark
     └──────── mark_s ───────┘                            └─ stall_s ─┘

Only with every="auto" anything is measured or agreed; else each n-th step is due, as asked for.
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
    """One rank's part in how often snapshots are taken.

    Args:
        interval: what is wished of the round; its budget counts only if the cadence adapts.
    """

    snapshots: Snapshotter
    due_steps: DueSteps
    interval: IntervalEstimator
    _controls: OverheadMeter = field(default_factory=OverheadMeter)
    _marked_s: float = 0.0
    _held_s: float = 0.0
    _has_snapshot: bool = False
    _first: int | None = None  # the first step that these snapshots were asked for
    _left_out: tuple[int, str] | None = None  # a due step that was not in turn, and why

    def mark(self, snapshots: Snapshotter) -> None:
        """At each mark, after the fence and before the next snapshot.

        Args:
            snapshots: those of another epoch after a review: then all ranks begin to measure and to agree anew.
        """
        if snapshots is not self.snapshots:
            self.snapshots, self._marked_s, self._first = snapshots, 0.0, None
            self.due_steps = DueSteps(self.due_steps.first, self.due_steps.adapts)
        if not self.due_steps.adapts:
            return
        now = time.perf_counter()
        held_s = self.snapshots.counts.mark_s + self.snapshots.copy_engine.copy_stats.stall_s
        seconds, held = now - self._marked_s, held_s - self._held_s
        if self._marked_s:
            self.interval.observe(seconds - held, held if self._has_snapshot else None)
            self._controls.observe(seconds, self._has_snapshot)
        self._marked_s, self._held_s, self._has_snapshot = now, held_s, False
        self.snapshots.reporter.requested_every = self.interval.requested_every()

    def is_due(self, step: int) -> bool:
        """Whether `step` is to be taken now."""
        pace = self.snapshots.reporter.interval
        before = self.due_steps.every(pace.start)
        if self.due_steps.hear(pace) and pace.every != before:
            log.warning(
                "rank %d: from step %d on each %d. step is snapshotted; a snapshot holds up training for %.3f ms here, a "
                "step takes %.1f ms, and the budget is %.2f %%.",
                self.snapshots.rank,
                pace.start,
                pace.every,
                1000 * self.interval.stall_s,
                1000 * self.interval.step_s.mean,
                100 * self.interval.budget,
            )
        if not self.due_steps.due(step):
            return False
        each = self._spacing(step)
        if step // self.every(step) % each == 0:
            return True
        lags = f"the round lags behind training: until it follows, only each {each}. step that is due is taken."
        self._left_out = step, lags
        return False

    def _spacing(self, step: int) -> int:
        every = self.every(step)
        self._first = step if self._first is None else self._first
        since = max(self.snapshots.newest_known_whole(), self._first - every)
        return self.snapshots.reporter.spacing(step, since, every, len(self.snapshots.slots))

    def fence(self) -> None:
        """At the end of each window: a step that was left out is not taken any more, and the others must know."""
        if self._left_out is not None:
            self.snapshots.void(*self._left_out)
            self._left_out = None

    def take(self, step: int, is_marked: bool, pacing_plan: PacingPlan | None) -> bool:
        """See `Snapshotter.take`."""
        self._left_out = None
        self._has_snapshot = self.snapshots.take(step, is_marked, pacing_plan)
        return self._has_snapshot

    def every(self, step: int) -> int:
        """Each how many-th step is taken around `step`."""
        return self.due_steps.every(step)

    def report(self) -> None:
        """Says at the end what snapshots cost, once for the job."""
        found = self.overhead()
        if found is not None and self.snapshots.rank == 0:
            say(str(found))

    def overhead(self) -> OverheadEstimate | None:
        """What snapshots cost in all, from control steps; None until enough were taken."""
        return self._controls.overhead()
