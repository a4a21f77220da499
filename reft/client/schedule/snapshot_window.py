"""Marks and windows of a training loop: counts steps, opens and closes the window of a snapshot.

    mark ─────────────► window ─────────────────────► close, before the optimizer writes
    step += 1           the snapshot reads the state  fence
    cadence: take?      beside forward, backward

CUDA graphs: capturing an optimizer step trains nothing, and replays of the graph call no hook.
After a capture the window therefore closes right after each mark, and the device waits there until
the state is copied. The same holds until a capturable optimizer is first seen to step. It also
holds on a device for a mark before which no hook was called: the step may have been a replay.

How steps are counted:
  * Without marks, each call of the last optimizer is a step, and the post-hook is the mark. The
    first call only counts: reft does not know yet whether the loop marks its steps.
  * If the restored step was marked, calls of the optimizer do not count. Otherwise a loop that
    calls its optimizer several times a step would overwrite the restored snapshot before its first
    mark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from reft.client.memory import streaming
from reft.client.memory.cuda import HostCopy
from reft.client.schedule.iteration_profile import IterationProfiler
from reft.client.schedule.step_counting import CallCounting, MarkCounting, ResumedCounting, StepCounting
from reft.client.snapshot.snapshotter import Snapshotter, protection_stats
from reft.client.snapshot.stats import CopyStats
from reft.client.snapshot.task import SnapshotHistory
from reft.client.snapshot.timeline import snapshot_spans
from reft.console import say
from reft.core.commit.snapshot_cadence import SnapshotCadence
from reft.core.commit.snapshot_interval import OverheadEstimate
from reft.core.pipeline.course import PacingPlan
from reft.core.pipeline.pacing import Tier
from reft.core.status.protection import NO_COUNTS
from reft.errors import RestoreError

if TYPE_CHECKING:
    from reft.client.rehearsal.recorder import RehearsalRecorder

log = logging.getLogger("reft")
CLOSE_WAIT_S = 2.0
REHEARSAL_WAIT_S = 1.0
UNPROTECTED = {**NO_COUNTS, "protected_step": -1, "turn_s": -1.0}
NO_RECORDS = {"records": 0, "records_torn": 0, "records_missed": 0, "record_bytes": 0, "recorded_mark": -1}
TIER_BYTES = {f"{tier.name.lower()}_bytes": tier for tier in Tier}


@dataclass(frozen=True)
class Sealed:
    """The result of `Session.seal`. True in a condition if the newest marked step is whole.

    Attributes:
        whole: every rank has sealed the newest marked step.
        protected: the step also survives the loss of `tolerate` failure domains. State that exists
            once does so a while later: once its parity lies on other nodes.
        step: the newest step known to be whole; -1 if none.
    """

    whole: bool
    protected: bool
    step: int

    def __bool__(self) -> bool:
        return self.whole


class PlacementReviewer(Protocol):
    """Checks whether the state still fits the placement, and makes a new layout beside training.

    See `reft.client.attach.reattach`.

    Attributes:
        is_over: whether reviews have ended before the session, because a rank was missing.
    """

    is_over: bool

    def at(self, step: int, snapshots: Snapshotter) -> Snapshotter:
        """Returns the snapshotter from this mark on: the same, or that of a new layout."""

    def end(self, snapshots: Snapshotter) -> Snapshotter:
        """Ends the reviews; returns the snapshotter of the newest layout."""


class Stepping(Enum):
    """Whether the optimizers' steps call hooks."""

    # A capturable optimizer has called no hook yet: its step may have been captured before attach.
    UNSEEN = auto()
    # Steps call hooks, and the pre-hook closes the window.
    CALLED = auto()
    # A step was captured in a CUDA graph after attach: the replays call no hook.
    REPLAYED = auto()


class SnapshotWindow:
    """The steps of one loop, and the window after the newest mark; see the module.

    Args:
        snapshots: takes the snapshots; None if reft is switched off. Then steps are only counted.
        cadence: decides which steps are snapshotted; None if reft is switched off.
        profiler: measures the phases; None if reft is switched off.
        step: completed steps.

    Attributes:
        start: completed steps at attach.
        counting: how steps are counted.
        stepping: whether the optimizers' steps call hooks.
        has_stepped: whether a hook of an optimizer was called since the last mark.
        reviews: checks whether the state still fits the placement; None if no other rank has a part
            of this rank's state.
        written_step: the newest step whose state an optimizer has overwritten.
        skipped: whether the device skips the newest step; None if the step surely trains.
        rehearsal: records each mark; None outside of rehearsals.
    """

    def __init__(
        self,
        snapshots: Snapshotter | None,
        cadence: SnapshotCadence | None,
        profiler: IterationProfiler | None,
        step: int,
    ) -> None:
        self.step = self.start = step
        self.snapshots = snapshots
        self.profiler = profiler
        self.cadence = cadence
        self.counting: StepCounting = CallCounting(step)
        self.stepping = Stepping.CALLED
        self.has_stepped = False
        self.reviews: PlacementReviewer | None = None
        self.rehearsal: RehearsalRecorder | None = None
        self.written_step = -1
        self.skipped: HostCopy | None = None
        self._taken_step = -1  # the newest step that was snapshotted, or given up
        self._skip_reason = ""  # why the newest mark gives no snapshot; empty if it may

    def mark(self, skip_reason: str) -> None:
        """Marks the end of a step, and takes its snapshot if the step is due.

        Args:
            skip_reason: why this mark must give no snapshot; empty if it may.
        """
        self.close()
        self.step += 1
        self._skip_reason = skip_reason
        if self.reviews is not None and self.snapshots is not None:
            reviewed = self.reviews.at(self.step, self.snapshots)
            if reviewed is not self.snapshots and self.cadence is not None:
                self.cadence.restart()
            self.snapshots = reviewed
        if self.rehearsal is not None and self.snapshots is not None:
            # A fast loop would skip snapshots, and no restart could begin near the kill.
            self.snapshots.wait(self._taken_step, REHEARSAL_WAIT_S)
            self.rehearsal.mark(self.step, self.snapshots)
        if self.snapshots is not None and self.snapshots.recorder is not None:
            self.snapshots.recorder.mark(self.step, self.stepping is Stepping.CALLED)
        pacing_plan = self.profiler.mark(self.step) if self.profiler else None
        if self.cadence is None or self.snapshots is None:
            return
        answer = self.cadence.at_mark(self.step, self.snapshots.cadence_facts(self.step))
        self.snapshots.reporter.requested_every = answer.requested_every
        if answer.notice:
            log.warning("rank %d: %s", self.rank, answer.notice)
        if answer.takes:
            self._take(pacing_plan)
        elif answer.left_out:
            self.snapshots.leave_out(self.step, answer.left_out)
        self.has_stepped = False

    def _take(self, pacing_plan: PacingPlan | None = None) -> None:
        if self.snapshots is not None and self._skip_reason:
            self.snapshots.void(self.step, self._skip_reason)
            self._taken_step = self.step
        else:
            self.take(isinstance(self.counting, MarkCounting), pacing_plan)

    def take(self, is_marked: bool, pacing_plan: PacingPlan | None = None) -> None:
        """Takes a snapshot of the current step.

        Closes the window at once if the optimizer's step may call no hook. Attach calls this method
        before the first step, so that the bytes of a lost node are protected again. The snapshot is
        then the first version of this epoch. The daemons keep the restored version until the new
        one is whole.
        """
        self._taken_step = self.step
        if self.snapshots is not None:
            is_open = self.snapshots.take(self.step, is_marked, pacing_plan, self.skipped)
            calls_hooks = self.has_stepped or self.snapshots.engine.keeps_host_time
            if is_open and not (calls_hooks and self.stepping is Stepping.CALLED):
                self.snapshots.fence()

    def close(self) -> None:
        """Ends the window: the state is about to change."""
        if self.profiler is not None:
            self.profiler.fence()
        if self.snapshots is not None:
            self.snapshots.fence()

    # How steps are counted

    def begin_marking(self, counts_calls: bool) -> None:
        """Counts only marks from here on, and drops the steps counted from the optimizer's hooks.

        Args:
            counts_calls: whether the restored step was counted by calls of the optimizer.

        Raises:
            RestoreError: it was.
        """
        if not isinstance(self.counting, CallCounting):
            self.counting = MarkCounting()
            return
        self.skipped = None
        if counts_calls and self.snapshots is not None:
            job = self.snapshots.reporter.facts.job
            raise RestoreError(
                "the restored snapshot counted calls of the optimizer as steps, but this loop marks its steps: "
                "the run before ended before its first mark, or had another loop.",
                f"reft-cli purge {job} to start fresh, and call session.begin_marking() right after "
                "attach to avoid this error; or train without marks; or start under another job name",
            )
        self.close()
        if self.step > self.counting.start + 1 and self.snapshots is not None:
            self.snapshots.discard(self.step)
        self.step = self.counting.start
        self.counting = MarkCounting()

    @property
    def is_marked(self) -> bool:
        """Whether this loop has marked a step."""
        return type(self.counting) is MarkCounting

    def resume_marking(self) -> None:
        """Ignores all calls of the optimizer, because the restored step was marked."""
        self.counting = ResumedCounting()

    # What the session and the hooks ask

    @property
    def rank(self) -> int:
        """This rank; -1 if reft is switched off."""
        return self.snapshots.facts.rank if self.snapshots else -1

    @property
    def every(self) -> int:
        """The current snapshot interval: every n-th step is snapshotted."""
        return self.cadence.every(self.step) if self.cadence else 1

    def seal(self, deadline_s: float) -> Sealed:
        """Waits until the current step is whole; see `Session.seal`.

        Args:
            deadline_s: the longest wait.
        """
        if self.snapshots is None:
            return Sealed(False, False, -1)
        if self._taken_step != self.step and self.step > 0 and self.written_step != self.step:
            self._take()
        self.snapshots.engine.hurry()
        is_whole = self.snapshots.whole_step >= self.step
        if not is_whole and self._taken_step == self.step:
            is_whole = self.snapshots.wait(self.step, deadline_s)
        is_protected = is_whole and self.snapshots.is_protected(self.step)
        return Sealed(is_whole, is_protected, self.snapshots.whole_step)

    def holds(self, parameter: int) -> bool:
        """Returns whether snapshots hold the parameter with this id."""
        return self.snapshots is not None and self.snapshots.host.holds(parameter)

    def is_capturing(self) -> bool:
        """Returns whether training is being captured into a CUDA graph."""
        return self.snapshots is not None and self.snapshots.engine.is_capturing()

    def modules(self) -> Iterable[nn.Module]:
        """Returns the tracked modules."""
        return self.snapshots.planner.tracked.modules.values() if self.snapshots else ()

    def state_names(self) -> list[str]:
        """Returns the names that the user passed in `state=`."""
        if self.snapshots is None:
            return []
        tracked, prefix = self.snapshots.planner.tracked, "state."
        modules = (name.removeprefix(prefix) for name in tracked.modules if name.startswith(prefix))
        return [*dict.fromkeys((*tracked.scalers, *self.snapshots.host.objects, *modules))]

    def overhead(self) -> OverheadEstimate | None:
        """Returns the total cost of snapshots, from control steps; None until there are enough."""
        return self.cadence.overhead() if self.cadence else None

    def stats(self) -> dict[str, float]:
        """Returns the numbers of `Session.stats`."""
        snapshots = self.snapshots
        history = snapshots.history if snapshots else SnapshotHistory()
        copy_stats = snapshots.engine.copy_stats if snapshots else CopyStats()
        comparison = self.profiler.comparison() if self.profiler else None
        return {
            "step": self.step,
            "sealed_step": history.sealed_step,
            "whole_step": snapshots.whole_step if snapshots else -1,
            "snapshots": history.sealed,
            "skipped": history.skipped,
            "bytes": snapshots.planner.bytes_per_snapshot() if snapshots else 0,
            "gap_error": comparison.total if comparison else -1.0,
            "gap_error_worst": comparison.worst if comparison else -1.0,
            "reviews_over": int(self.reviews is not None and self.reviews.is_over),
            "streaming_copy": int(streaming.is_past_caches),
            "stall_ms": 1000 * copy_stats.stall_s / max(history.sealed, 1),
            "bubble_fraction": copy_stats.written(Tier.GAP) / max(copy_stats.written(), 1),
            **{name: copy_stats.written(tier) for name, tier in TIER_BYTES.items()},
            **(protection_stats(snapshots) if snapshots else UNPROTECTED),
            **(snapshots.recorder.stats() if snapshots and snapshots.recorder else NO_RECORDS),
        }

    def trace(self) -> dict[str, Any]:
        """Returns the trace of the last steps and snapshots. Any thread may call it."""
        snapshots, profiler = self.snapshots, self.profiler
        if snapshots is None or profiler is None:
            return {"traceEvents": [], "displayTimeUnit": "ms", "otherData": {}}
        tasks = snapshots.history.tasks()
        spans = [span for task in tasks for span in snapshot_spans(task)]
        return {
            **snapshots.engine.copy_stats.timeline.chrome(snapshots.facts.rank, spans),
            "otherData": {"gaps": profiler.gaps(), "snapshots": [task.facts() for task in tasks]},
        }

    def end_reviews(self) -> None:
        """Makes no new layout any more."""
        if self.reviews is not None and self.snapshots is not None:
            self.snapshots = self.reviews.end(self.snapshots)
        self.reviews = None

    def end(self, failed: bool) -> None:
        """Finishes the newest snapshot; from here on steps are only counted.

        Args:
            failed: whether an exception ends the session.
        """
        if self.rehearsal is not None:
            self.rehearsal.close()
        if self.snapshots is None:
            return
        if self.snapshots.open_guard is not None:
            self.snapshots.engine.hurry()
            # Wait before the fence: the newest snapshot may still wait for a slot.
            self.snapshots.wait(self._taken_step, CLOSE_WAIT_S)
        self.close()
        estimate = self.overhead()
        if estimate is not None and self.rank == 0:
            say(str(estimate))
        self.end_reviews()
        snapshots, self.snapshots, self.profiler = self.snapshots, None, None
        snapshots.release(failed)
        snapshots.close()
