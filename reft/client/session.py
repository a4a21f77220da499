"""The session that `reft.attach` returns: counts steps, opens and closes the window of a snapshot.

    optimizer.step ─► mark (session.steps, step_end) ─► window ────────────► optimizer's pre-hook:
                      step += 1, snapshot begins        the snapshot reads   fence; the optimizer
                                                        the state beside     changes the state next
                                                        forward, backward

CUDA graphs: capturing an optimizer step trains nothing, and replays of the graph call no hook.
After a capture the window therefore closes right after each mark, and the device waits there until
the state is copied. The same holds until a capturable optimizer is first seen to step.

How steps are counted:
  * Without marks, each call of the last optimizer is a step, and the post-hook is the mark. The
    first call only counts: reft does not know yet whether the loop marks its steps.
  * If the restored step was marked, calls of the optimizer do not count. Otherwise a loop that
    calls its optimizer several times a step would overwrite the restored snapshot before its first
    mark.
  * A mark without a step of a passed optimizer gives no snapshot if gradients exist, or if another
    optimizer has stepped (`reft.client.schedule.foreign_optimizers`).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from reft.client.memory import streaming
from reft.client.schedule import hooks
from reft.client.schedule.foreign_optimizers import ForeignOptimizerGuard
from reft.client.schedule.iteration_profile import OTHER, IterationProfiler
from reft.client.schedule.snapshot_cadence import SnapshotCadence
from reft.client.schedule.step_counting import CallCounting, MarkCounting, ResumedCounting, StepCounting
from reft.client.snapshot.snapshotter import Snapshotter
from reft.client.state.tracked_objects import required_extractor
from reft.core.commit.snapshot_interval import OverheadEstimate
from reft.core.pipeline.course import PacingPlan
from reft.core.pipeline.pacing import Tier
from reft.errors import ForkedSession, RestoreError
from reft.wire import timeline_socket

log = logging.getLogger("reft")

CLOSE_WAIT_S = 2.0
# After so many calls of the optimizer without a mark, in a job that was marked, the log says that
# no snapshots are taken.
CALLS_WITHOUT_MARK = 1000
TIER_BYTES = {f"{tier.name.lower()}_bytes": tier for tier in Tier}


class PlacementReviewer(Protocol):
    """Checks at some steps whether the state still fits the placement.

    See `reft.client.attach.reattach`.
    """

    def at(self, step: int, snapshots: Snapshotter) -> Snapshotter | None:
        """Returns the snapshotter from here on: the same, a new one, or None after a failure."""

    def close(self) -> None:
        """Ends the reviews."""


class _Stepping(Enum):
    """Whether the optimizers' steps call hooks."""

    # A capturable optimizer has called no hook yet: its step may have been captured before attach.
    UNSEEN = auto()
    # Steps call hooks, and the pre-hook closes the window.
    CALLED = auto()
    # A step was captured in a CUDA graph after attach: the replays call no hook.
    REPLAYED = auto()


@dataclass(frozen=True)
class Sealed:
    """The result of `Session.seal`. True in a condition if the newest marked step is whole.

    Attributes:
        whole: every rank has sealed the newest marked step.
        protected: the step also survives the loss of `tolerate` failure domains.
        step: the newest step known to be whole; -1 if none.
    """

    whole: bool
    protected: bool
    step: int

    def __bool__(self) -> bool:
        return self.whole


class Session:
    """One trainer's session. `reft.attach` makes it; only the thread that trains may use it.

    Args:
        snapshots: takes the snapshots; None if reft is switched off. Then steps are only counted.
        optimizers: a step of any of these optimizers closes the window.
        step: completed steps at attach.
        restored_from: None, "memory", "peers" or "storage".
        counts_calls: whether the restored step was counted by calls of the optimizer, not by marks.
        cadence: decides which steps are snapshotted; None if reft is switched off.
        seal_deadline_s: how long `seal` waits by default.
        schedule: copies use the gaps of this schedule; None if there is none, or nothing to hook.

    Attributes:
        reviews: checks at some steps whether the state still fits the placement; None if no node
            could protect another node's state.
    """

    def __init__(
        self, snapshots: Snapshotter | None, optimizers: Sequence[Any], *, step: int,
        restored_from: str | None, counts_calls: bool, cadence: SnapshotCadence | None, seal_deadline_s: float,
        schedule: Any = None,
    ) -> None:  # fmt: skip
        self.step = step
        self.restored_from = restored_from
        self._cadence = cadence
        self._snapshots = snapshots
        self._seal_deadline_s = seal_deadline_s
        self.reviews: PlacementReviewer | None = None
        self._counts_calls = counts_calls
        self._pid = os.getpid()
        self._marks: StepCounting = CallCounting(step)
        self._taken_step = -1  # the newest step that was snapshotted, or given up for `_unheld`
        self._written_step = -1  # the newest step whose state an optimizer has overwritten
        self._skip_reason = ""  # why the newest mark gives no snapshot; empty if it may
        self._window_open = False
        is_capturable = any(g.get("capturable") for each in optimizers for g in getattr(each, "param_groups", ()))
        self._stepping = _Stepping.UNSEEN if is_capturable else _Stepping.CALLED
        self._hooks = []
        for index, optimizer in enumerate(optimizers):
            after = self._after_last if optimizer is optimizers[-1] else _nothing
            self._hooks += required_extractor(optimizer).hook(optimizer, partial(self._before_optimizer, index), after)
        self._profiler: IterationProfiler | None = None
        self._unfollow: Callable[[], None] = lambda: None
        self._timeline_server: timeline_socket.TimelineServer | None = None
        self._foreign_optimizers: ForeignOptimizerGuard | None = None
        if snapshots is not None:
            self._foreign_optimizers = ForeignOptimizerGuard(optimizers, self._holds, self._before_foreign_step)
            self._profiler = IterationProfiler(snapshots.copy_engine, hooks.closed(schedule))
            self._unfollow = hooks.follow(schedule, self._profiler, snapshots.tracked.modules.values())
            self._timeline_server = _timeline_server(snapshots, self._profiler)
            atexit.register(_finish_at_exit, weakref.ref(self))

    # Marks

    def steps(self, total: int) -> Iterator[int]:
        """Yields the remaining steps, `session.step` to `total - 1`, and marks the end of each.

        Ask the data loader for the next batch inside the loop. `zip(loader, session.steps(n))`
        fetches a batch before the mark, and that batch is lost at a restart.
        """
        self._check_process()
        self.begin_marking()
        while self.step < total:
            yield self.step
            self.step_end()

    def step_end(self) -> None:
        """Marks the end of an iteration.

        The snapshot may read the state until the next optimizer step.
        """
        self._check_process()
        self.begin_marking()
        self._mark()

    def begin_marking(self) -> None:
        """Counts only marks from here on, and drops the steps counted from the optimizer's hooks.

        The first mark does the same. Call this method right after attach if the loop calls the
        optimizer before the first mark without training: `torch.distributed.checkpoint` does so to
        read the state of an optimizer.

        Raises:
            RestoreError: the restored step was counted by calls of the optimizer.
        """
        if not isinstance(self._marks, CallCounting):
            self._marks = MarkCounting()
            return
        if self._counts_calls and self._snapshots is not None:
            raise RestoreError(
                "the restored snapshot counted calls of the optimizer as steps, but this loop marks its steps: "
                "the run before ended before its first mark, or had another loop.",
                f"reft-cli purge {self._snapshots.leases.job} to start fresh, and call session.begin_marking() right after "
                "attach to avoid this error; or train without marks; or start under another job name",
            )
        self._close_window()
        if self.step > self._marks.start + 1 and self._snapshots is not None:
            self._snapshots.discard(self.step)
        self.step = self._marks.start
        self._marks = MarkCounting()

    def resume_marking(self) -> None:
        """Ignores all calls of the optimizer, because the restored step was marked."""
        self._marks = ResumedCounting()

    def _mark(self) -> None:
        self._close_window()
        self.step += 1
        self._skip_reason = self._reason_to_skip()
        if self.reviews is not None and self._snapshots is not None:
            self._snapshots = self.reviews.at(self.step, self._snapshots)
        pacing_plan = self._profiler.mark(self.step) if self._profiler else None
        if self._cadence is not None and self._snapshots is not None:
            self._cadence.mark(self._snapshots)
            if self._cadence.is_due(self.step):
                self._take(pacing_plan)

    def _reason_to_skip(self) -> str:
        """Returns why this mark must give no snapshot; empty if reft sees no reason."""
        if self._foreign_optimizers is None or self._snapshots is None or self._stepping is not _Stepping.CALLED:
            return ""
        return self._foreign_optimizers.mark(
            isinstance(self._marks, CallCounting), self._snapshots.tracked.modules.values()
        )

    def _take(self, pacing_plan: PacingPlan | None = None) -> None:
        is_marked = isinstance(self._marks, MarkCounting)
        if self._skip_reason and self._snapshots is not None:
            self._snapshots.void(self.step, self._skip_reason)
        elif self._cadence is not None and self._cadence.take(self.step, is_marked, pacing_plan):
            self._open_window()
        self._taken_step = self.step

    @property
    def every(self) -> int:
        """The current snapshot interval: every n-th step is snapshotted."""
        return self._cadence.every(self.step) if self._cadence else 1

    def protect_again(self, is_marked: bool) -> None:
        """Snapshots the restored state, so that the bytes of a lost node are protected again.

        Attach calls this method before the first step. The snapshot is the first version of this
        epoch. The daemons keep the restored version until the new one is whole.
        """
        if self._snapshots is not None and self._snapshots.take(self.step, is_marked):
            self._open_window()
        self._taken_step = self.step

    def _open_window(self) -> None:
        """Lets the snapshot read the state until the optimizer's pre-hook.

        Closes the window at once if the optimizer's step may call no hook.
        """
        self._window_open = True
        if self._stepping is not _Stepping.CALLED:
            self._fence()

    def _close_window(self) -> None:
        if self._profiler is not None:
            self._profiler.fence()
        if self._cadence is not None:
            self._cadence.fence()
        self._fence()

    def _fence(self) -> None:
        if self._window_open and self._snapshots is not None:
            self._window_open = False
            self._snapshots.fence()

    # Hooks: they run inside the user's optimizer step, in any grad mode

    def _before_optimizer(self, index: int) -> None:
        if os.getpid() != self._pid:
            return
        if self._is_capturing():
            self._on_captured_step()
            return
        if self._stepping is _Stepping.UNSEEN:
            self._stepping = _Stepping.CALLED
        if self._foreign_optimizers is not None:
            self._foreign_optimizers.own_step(index)
        self._written_step = self.step
        self._close_window()

    def _holds(self, parameter: int) -> bool:
        return self._snapshots is not None and self._snapshots.host.holds(parameter)

    def _before_foreign_step(self, trouble: str) -> None:
        if os.getpid() != self._pid or self._is_capturing():
            return
        # With marks, the next mark reports the same trouble.
        if trouble and type(self._marks) is not MarkCounting:
            log.warning("no step is counted: %s", trouble)
        self._written_step = self.step
        self._close_window()

    def _is_capturing(self) -> bool:
        return self._snapshots is not None and self._snapshots.copy_engine.is_capturing()

    def _on_captured_step(self) -> None:
        """Notes that this call of the optimizer is captured in a CUDA graph.

        The call trains nothing. The replays of the graph will train, and call no hook. A snapshot
        in progress is given up: the version counters (`TensorIndex.versions`) count the call as a
        write, although it writes nothing yet.
        """
        assert self._snapshots is not None
        if self._stepping is not _Stepping.REPLAYED:
            log.warning(
                "rank %d: the optimizer's step is captured in a CUDA graph, and replays of the graph call no hook. Mark each "
                "step with session.step_end(); the device waits there until the state is copied.",
                self._snapshots.rank,
            )
        self._stepping = _Stepping.REPLAYED

    def _after_last(self, optimizer: object, *_: object) -> None:
        if os.getpid() != self._pid or self._is_capturing() or _was_skipped(optimizer):
            return
        marks = self._marks
        if isinstance(marks, ResumedCounting) and marks.count() == CALLS_WITHOUT_MARK:
            log.warning(
                "%d calls of the optimizer without a mark: no snapshot is taken, because the restored step was marked. Mark "
                "steps with session.step_end(), or start under another job name.",
                CALLS_WITHOUT_MARK,
            )
        elif not isinstance(marks, CallCounting):
            return
        elif marks.count():
            if self.step == marks.start + 1:
                self._warn_unmarked()
            self._mark()
        else:
            self.step += 1
            if self._foreign_optimizers is not None:
                self._foreign_optimizers.first_call()

    def _warn_unmarked(self) -> None:
        """Warns once that without marks a restart restores some objects one step behind."""
        snapshots = self._snapshots
        if snapshots is not None and (names := _state_names(snapshots)):
            log.warning(
                "no step is marked: a snapshot holds %s as they are when optimizer.step returns. A scheduler, scaler or average "
                "that the loop updates after that comes back one step behind. Mark steps with session.step_end() or "
                "session.steps().",
                ", ".join(names),
            )

    # What users ask

    def seal(self, timeout: float | None = None) -> Sealed:
        """Waits until the newest marked step is whole, so that every rank has sealed it.

        Takes the snapshot first if that step was not due. Call `seal` on all ranks, between a mark
        and the next optimizer step: the optimizer overwrites the marked state, and then a snapshot
        of that step is no longer possible.

        Args:
            timeout: seconds; None means REFT_SEAL_DEADLINE_S.
        """
        self._check_process()
        if self._snapshots is None:
            return Sealed(False, False, -1)
        if self._taken_step != self.step and self.step > 0 and self._written_step != self.step:
            self._take()
        self._snapshots.copy_engine.hurry()
        whole = self._snapshots.newest_known_whole() >= self.step
        if not whole and self._taken_step == self.step and not self._snapshots.is_discarded(self.step):
            deadline = self._seal_deadline_s if timeout is None else timeout
            whole = self._snapshots.wait(self.step, deadline)
        return Sealed(whole, whole and self._snapshots.is_protected, self._snapshots.newest_known_whole())

    def stats(self) -> dict[str, float]:
        """Returns counters since attach, all plain numbers.

        step: completed steps
        sealed_step: newest step that this rank has sealed; -1 if none
        whole_step: newest step known to be whole on all ranks; -1 if none
        snapshots, skipped: number of snapshots taken, and of snapshots given up
        bytes: bytes that one snapshot writes
        stall_ms: mean time that training waits for one snapshot
        bubble_fraction: share of the copied bytes that was copied in gaps of the schedule or in
            `idle()`
        gap_bytes, compute_bytes, collective_bytes, fence_bytes: bytes of all snapshots, by what
            training did when the copy of the bytes began; at the fence training waited
        gap_error, gap_error_worst: relative difference between the gaps by the schedule's closed
            form and the measured gaps, in total and for the worst gap; -1 if they can't be compared
        streaming_copy: 1 if snapshots of host memory bypass the caches, else 0
        """
        if self._snapshots is None:
            numbers = dict.fromkeys(("snapshots", "skipped", "bytes", "stall_ms", "bubble_fraction", *TIER_BYTES), 0.0)
            return {
                "step": self.step,
                "sealed_step": -1,
                "whole_step": -1,
                "gap_error": -1.0,
                "gap_error_worst": -1.0,
                "streaming_copy": int(streaming.is_past_caches),
                **numbers,
            }
        counts, copy_stats = self._snapshots.counts, self._snapshots.copy_engine.copy_stats
        comparison = self._profiler.comparison() if self._profiler else None
        return {
            "step": self.step,
            "sealed_step": counts.sealed_step,
            "whole_step": self._snapshots.newest_known_whole(),
            "snapshots": counts.snapshots,
            "skipped": counts.skipped,
            "bytes": self._snapshots.bytes_per_snapshot(),
            "gap_error": comparison.total if comparison else -1.0,
            "gap_error_worst": comparison.worst if comparison else -1.0,
            "streaming_copy": int(streaming.is_past_caches),
            "stall_ms": 1000 * copy_stats.stall_s / max(counts.snapshots, 1),
            "bubble_fraction": copy_stats.written(Tier.GAP) / max(copy_stats.written(), 1),
            **{name: copy_stats.written(tier) for name, tier in TIER_BYTES.items()},
        }

    def overhead(self) -> OverheadEstimate | None:
        """Returns the total cost of snapshots, as a share of training time.

        The cost comes with a 95 % interval. The estimate needs control steps, which are steps
        without a snapshot. Only `every="auto"` has control steps. None until there are enough: to
        see 0.1 % under 2 % of noise takes thousands of steps.
        """
        return self._cadence.overhead() if self._cadence else None

    def timeline(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Returns a trace of training and copying in the last steps.

        ui.perfetto.dev and chrome://tracing show such a trace.

        Args:
            path: also write the trace to this file.

        Returns:
            The trace, in JSON types: compute, gaps, waits, each chunk with its tier, parity, the
            fence. `otherData` has the expected and the measured gaps of the schedule.
        """
        if self._profiler is None or self._snapshots is None:
            trace: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms", "otherData": {}}
        else:
            trace = self._profiler.trace(self._snapshots.rank)
        if path is not None:
            Path(path).write_text(json.dumps(trace))
        return trace

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Marks a gap, e.g. a wait for a batch: the loop neither computes nor communicates."""
        if self._profiler is None:
            yield
            return
        self._profiler.enter(Tier.GAP, "idle")
        try:
            yield
        finally:
            self._profiler.enter(Tier.COMPUTE, OTHER)

    def close(self) -> None:
        """Finishes the newest snapshot and removes the hooks; the daemon keeps the slots."""
        if self._snapshots is None or os.getpid() != self._pid:
            return
        if self._window_open:
            self._snapshots.copy_engine.hurry()
            # Wait before the fence: the newest snapshot may still wait for a slot.
            self._snapshots.wait(self._taken_step, CLOSE_WAIT_S)
        self._close_window()
        if self._cadence is not None:
            self._cadence.report()
        self._unfollow()
        if self._timeline_server is not None:
            self._timeline_server.close()
        self._profiler = None
        snapshots, self._snapshots = self._snapshots, None
        for hook in self._hooks:
            hook.remove()
        if self._foreign_optimizers is not None:
            self._foreign_optimizers.remove()
        if self.reviews is not None:
            self.reviews.close()
        snapshots.release()
        snapshots.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedSession(
                f"this session was attached by process {self._pid}; process {os.getpid()} is its child.",
                "attach in the process that trains",
            )

    def __getstate__(self) -> Any:
        raise TypeError("a Session can't be copied or sent to another process")


def _timeline_server(snapshots: Snapshotter, profiler: IterationProfiler) -> timeline_socket.TimelineServer | None:
    """Returns the server that answers `reft-cli timeline`.

    None if there is no socket for it; `Session.timeline` works without the server.
    """
    try:
        return timeline_socket.TimelineServer(lambda: profiler.trace(snapshots.rank))
    except OSError as error:
        log.warning("reft-cli timeline will not find rank %d: %s", snapshots.rank, error)
        return None


def _state_names(snapshots: Snapshotter) -> list[str]:
    """Returns the names that the user passed in `state=`."""
    modules = (prefix.removeprefix("state.") for prefix in snapshots.tracked.modules if prefix.startswith("state."))
    return [*snapshots.tracked.scalers, *snapshots.host.objects, *modules]


def _nothing(*_: object) -> None:
    """Does nothing: the post-hook of all optimizers but the last."""


def _was_skipped(optimizer: object) -> bool:
    """Decides whether a fused step was skipped because of infinite gradients.

    False for a tensor on a device: to read such a tensor would wait for the device.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and found_inf.device.type == "cpu" and bool(found_inf)


def _finish_at_exit(reference: weakref.ref[Session]) -> None:
    """Lets the copy thread finish at exit, before the interpreter frees memory that is read."""
    session = reference()
    if session is not None and session._snapshots is not None and session._pid == os.getpid():
        session._close_window()
        if getattr(sys, "last_value", None) is None:
            # A script that ends without an error need not close its session. Without this release
            # the daemon would report the exit as a failure.
            session._snapshots.release()
