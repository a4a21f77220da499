"""The session: what `reft.attach` returns. Steps, marks, the window and the fence, without changing the user's loop.

    optimizer.step ─► mark (session.steps, step_end) ─► window: the snapshot may read the state ─► optimizer's pre-hook: fence
                        step += 1, snapshot begins        forward and backward only read it          the next writer

A step that is captured in a CUDA graph is not trained, and its replays call no hook: from then on the window closes right after
its mark, and the device waits there until the state is copied. Likewise until a capturable optimizer is first seen to step.

Where nothing is marked, each call of the (last) optimizer is a step and its post-hook is the mark. The first such call
only counts: whether the loop marks its steps is not known yet then. Where the restored step was marked, calls are none: a loop
that calls its optimizer several times a step would else take the place of what was restored before its first mark.
A mark without a step of a passed optimizer is not taken if something waits for one, or has taken its place (`strangers`).
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
from reft.client.schedule.step_counting import CountByMarks, CountByOptimizer, CountResumed, StepCounting
from reft.client.snapshot.snapshotter import Snapshotter
from reft.client.state.tracked_objects import extractor
from reft.core.commit.snapshot_interval import OverheadEstimate
from reft.core.pipeline.course import PacingPlan
from reft.core.pipeline.pacing import Tier
from reft.errors import ForkedSession, RestoreError
from reft.wire import timeline_socket

log = logging.getLogger("reft")

CLOSE_WAIT_S = 2.0
CALLS_WITHOUT_MARK = 1000  # after a restore of a marked step: then the log says that nothing is taken
TIER_BYTES = {f"{tier.name.lower()}_bytes": tier for tier in Tier}


class PlacementReviewer(Protocol):
    """Looks from time to time whether the state still fits its placement (`reft.client.attach.reattach`)."""

    def at(self, step: int, snapshots: Snapshotter) -> Snapshotter | None:
        """The snapshots from this mark on: the same, new ones, or None if there can be no more."""

    def close(self) -> None:
        """Ends the reviews."""


class _Stepping(Enum):
    """What is known of how the optimizers step."""

    UNSEEN = auto()  # capturable, and no hook was called yet: attach may have come after a capture
    CALLED = auto()  # a hook closes the window
    REPLAYED = auto()  # by a graph that was captured before our eyes: nobody calls a hook


@dataclass(frozen=True)
class Sealed:
    """What `Session.seal` found. True in a condition if the newest marked step is whole.

    Attributes:
        whole: every rank holds the newest marked step, sealed.
        protected: it also survives as many lost nodes as were asked for.
        step: the newest step known to be whole; -1 if none.
    """

    whole: bool
    protected: bool
    step: int

    def __bool__(self) -> bool:
        return self.whole


class Session:
    """A trainer's hold on its snapshots; made by `reft.attach`, used by one thread, the one that trains.

    Args:
        snapshots: None if reft is switched off: then steps are counted, and that is all.
        optimizers: whose steps close the window.
        step: completed steps at attach.
        restored_from: None, "memory", "peers" or "storage".
        counts_calls: whether the restored step was counted by calls of the optimizer, not by marks.
        cadence: which steps are taken; None if reft is switched off.
        schedule: whose gaps are to be used; None if there is none, or nothing to hook.

    Attributes:
        reviews: looks from time to time whether the state still fits its placement; None if that is of no use.
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
        self._marks: StepCounting = CountByOptimizer(step)
        self._taken = self._written = -1  # the newest steps whose state was taken, and has been written since
        self._unheld = ""  # why the newest mark is not to be taken, though all is where it was
        self._window_open = False
        is_capturable = any(g.get("capturable") for each in optimizers for g in getattr(each, "param_groups", ()))
        self._stepping = _Stepping.UNSEEN if is_capturable else _Stepping.CALLED
        self._hooks = []
        for index, optimizer in enumerate(optimizers):
            after = self._after_last if optimizer is optimizers[-1] else _nothing
            self._hooks += extractor(optimizer).hook(optimizer, partial(self._before_optimizer, index), after)
        self._profiler: IterationProfiler | None = None
        self._unfollow: Callable[[], None] = lambda: None
        self._timeline_server: timeline_socket.TimelineServer | None = None
        self._foreign_optimizers: ForeignOptimizerGuard | None = None
        if snapshots is not None:
            self._foreign_optimizers = ForeignOptimizerGuard(optimizers, self._holds, self._before_stranger)
            self._profiler = IterationProfiler(snapshots.copy_engine, hooks.closed(schedule))
            self._unfollow = hooks.follow(schedule, self._profiler, snapshots.tracked.modules.values())
            self._timeline_server = _timeline_server(snapshots, self._profiler)
            atexit.register(_drain, weakref.ref(self))

    # Marks

    def steps(self, total: int) -> Iterator[int]:
        """Iterates over the steps that are left, from `session.step` to `total - 1`, and marks the end of each.

        Ask the data loader for the next batch inside the loop: `zip(loader, session.steps(n))` fetches before the mark
        and loses a batch at a restart.
        """
        self._check_process()
        self.begin_marking()
        while self.step < total:
            yield self.step
            self.step_end()

    def step_end(self) -> None:
        """Marks the end of an iteration: the state is final, and may be read until the next optimizer step."""
        self._check_process()
        self.begin_marking()
        self._mark()

    def begin_marking(self) -> None:
        """From here on only marks count: the first mark does it. What the optimizer's hooks counted before is dropped.

        For loops in which the optimizer steps before the first mark without training, as it does where
        `torch.distributed.checkpoint` reads its state.

        Raises:
            RestoreError: the restored step was counted by calls of the optimizer.
        """
        if not isinstance(self._marks, CountByOptimizer):
            self._marks = CountByMarks()
            return
        if self._counts_calls and self._snapshots is not None:
            raise RestoreError(
                "what was restored was held while calls of the optimizer counted as steps, but this loop marks its steps: the "
                "run before ended ahead of its first mark, or its loop was another.",
                f"reft-cli purge {self._snapshots.leases.job} to start fresh, and session.begin_marking() right after attach, so "
                "that this does not happen again; or train without marks; or start under another job name",
            )
        self._close_window()
        if self.step > self._marks.start + 1 and self._snapshots is not None:
            self._snapshots.discard(self.step)
        self.step = self._marks.start
        self._marks = CountByMarks()

    def resume_marking(self) -> None:
        """The restored step was marked: calls of the optimizer are no steps, from the first one on."""
        self._marks = CountResumed()

    def _mark(self) -> None:
        self._close_window()
        self.step += 1
        self._unheld = self._why_not()
        if self.reviews is not None and self._snapshots is not None:
            self._snapshots = self.reviews.at(self.step, self._snapshots)
        pacing_plan = self._profiler.mark(self.step) if self._profiler else None
        if self._cadence is not None and self._snapshots is not None:
            self._cadence.mark(self._snapshots)
            if self._cadence.is_due(self.step):
                self._take(pacing_plan)

    def _why_not(self) -> str:
        """Why the state at this mark is not all that a restart needs; empty if it is, as far as can be told."""
        if self._foreign_optimizers is None or self._snapshots is None or self._stepping is not _Stepping.CALLED:
            return ""
        return self._foreign_optimizers.mark(
            isinstance(self._marks, CountByOptimizer), self._snapshots.tracked.modules.values()
        )

    def _take(self, pacing_plan: PacingPlan | None = None) -> None:
        is_marked = isinstance(self._marks, CountByMarks)
        if self._unheld and self._snapshots is not None:
            self._snapshots.void(self.step, self._unheld)
        elif self._cadence is not None and self._cadence.take(self.step, is_marked, pacing_plan):
            self._open_window()
        self._taken = self.step

    @property
    def every(self) -> int:
        """Each how many-th step is snapshotted at present."""
        return self._cadence.every(self.step) if self._cadence else 1

    def protect_again(self, is_marked: bool) -> None:
        """Takes the restored state as the first version of this epoch: what a lost node held is spread anew.

        For attach, before the first step; the version that was restored stays held until this one is whole.
        """
        if self._snapshots is not None and self._snapshots.take(self.step, is_marked):
            self._open_window()
        self._taken = self.step

    def _open_window(self) -> None:
        """The snapshot may read the state until the optimizer's hook, or only until now, where none may be called."""
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

    # Hooks: they run inside the user's optimizer step, in whatever grad mode that has

    def _before_optimizer(self, index: int) -> None:
        if os.getpid() != self._pid:
            return
        if self._is_capturing():
            self._captured()
            return
        if self._stepping is _Stepping.UNSEEN:
            self._stepping = _Stepping.CALLED
        if self._foreign_optimizers is not None:
            self._foreign_optimizers.own_step(index)
        self._written = self.step
        self._close_window()

    def _holds(self, parameter: int) -> bool:
        return self._snapshots is not None and self._snapshots.host.holds(parameter)

    def _before_stranger(self, trouble: str) -> None:
        if os.getpid() != self._pid or self._is_capturing():
            return
        if (
            trouble and type(self._marks) is not CountByMarks
        ):  # a mark is void, with these words; without one there is none
            log.warning("no step is counted: %s", trouble)
        self._written = self.step
        self._close_window()

    def _is_capturing(self) -> bool:
        return self._snapshots is not None and self._snapshots.copy_engine.is_capturing()

    def _captured(self) -> None:
        """This call of the optimizer trains nothing; the graph's replays will, unseen.

        A snapshot that is under way is given up: the call counts as a write (`TensorIndex.versions`), though it writes
        nothing yet.
        """
        assert self._snapshots is not None
        if self._stepping is not _Stepping.REPLAYED:
            log.warning(
                "rank %d: the optimizer's step is captured in a CUDA graph, whose replays call no hook. Mark each step with "
                "session.step_end(); the device waits there until the state is copied.",
                self._snapshots.rank,
            )
        self._stepping = _Stepping.REPLAYED

    def _after_last(self, optimizer: object, *_: object) -> None:
        if os.getpid() != self._pid or self._is_capturing() or _was_skipped(optimizer):
            return
        marks = self._marks
        if isinstance(marks, CountResumed) and marks.count() == CALLS_WITHOUT_MARK:
            log.warning(
                "%d calls of the optimizer without a mark: no snapshot is taken, since the restored step was marked. Mark steps "
                "with session.step_end(), or start under another job name.",
                CALLS_WITHOUT_MARK,
            )
        elif not isinstance(marks, CountByOptimizer):
            return
        elif marks.count():
            if self.step == marks.start + 1:
                self._say_unmarked()
            self._mark()
        else:
            self.step += 1
            if self._foreign_optimizers is not None:
                self._foreign_optimizers.first_call()

    def _say_unmarked(self) -> None:
        """Once, when it is clear that nobody marks: what the loop changes behind the optimizer comes back a step late."""
        snapshots = self._snapshots
        if snapshots is not None and (names := _passed_as_state(snapshots)):
            log.warning(
                "no step is marked: %s are held as they are when optimizer.step returns; a scheduler, scaler or average that is "
                "brought up to date after it comes back one step behind. Mark steps with session.step_end() or session.steps().",
                ", ".join(names),
            )

    # What users ask

    def seal(self, timeout: float | None = None) -> Sealed:
        """Waits until the newest marked step is whole: every rank holds it, sealed.

        Takes the snapshot first if that step was not due. Call it on all ranks, between a mark and the next optimizer step:
        behind that the marked state is gone, and a step that was not taken stays so.

        Args:
            timeout: seconds; None means REFT_SEAL_DEADLINE_S.
        """
        self._check_process()
        if self._snapshots is None:
            return Sealed(False, False, -1)
        if self._taken != self.step and self.step > 0 and self._written != self.step:
            self._take()
        self._snapshots.copy_engine.hurry()
        whole = self._snapshots.newest_known_whole() >= self.step
        if not whole and self._taken == self.step and not self._snapshots.leaves_out(self.step):
            deadline = self._seal_deadline_s if timeout is None else timeout
            whole = self._snapshots.wait(self.step, deadline)
        return Sealed(whole, whole and self._snapshots.is_protected, self._snapshots.newest_known_whole())

    def stats(self) -> dict[str, float]:
        """Counters since attach, all plain numbers; units are in the names, bytes are bytes.

        sealed_step: newest step that this rank sealed; whole_step: newest step known to be whole on all ranks; snapshots,
        skipped: counts; bytes: written by one snapshot; stall_ms: mean time for which a snapshot held up training;
        bubble_fraction: share of the snapshots' bytes that was copied in gaps of the schedule or inside `idle()`;
        gap_bytes, compute_bytes, collective_bytes, fence_bytes: of all snapshots, by what training did when their copy
        began; at the fence it waited; gap_error, gap_error_worst: how far the schedule's closed form is off the measured
        idle time, relative, in all and of the worst gap; -1 if nothing can be compared; streaming_copy: 1 if snapshots of
        host memory are copied past the caches, else 0.
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
        """What snapshots cost in all, as a share of training time with a 95 % interval: from control steps, which only
        `every="auto"` leaves out. None until there are enough of them; 0.1 % under 2 % of noise takes thousands of steps.
        """
        return self._cadence.overhead() if self._cadence else None

    def timeline(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """What training and copying did in the last steps, as a trace that ui.perfetto.dev and chrome://tracing show.

        Args:
            path: a file to write it to as well.

        Returns:
            The trace, JSON types: compute, gaps, waits, each chunk with its tier, parity, the fence; `otherData` has the
            gaps that the schedule should have and those that were measured.
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
        """Marks a time in which this loop neither computes nor communicates, e.g. while it waits for a batch."""
        if self._profiler is None:
            yield
            return
        self._profiler.enter(Tier.GAP, "idle")
        try:
            yield
        finally:
            self._profiler.enter(Tier.COMPUTE, OTHER)

    def close(self) -> None:
        """Ends the session: the newest snapshot is finished, the hooks are taken off, the daemon keeps the slots."""
        if self._snapshots is None or os.getpid() != self._pid:
            return
        if self._window_open:
            self._snapshots.copy_engine.hurry()
            # Before the fence: the newest snapshot may still be waiting for a slot.
            self._snapshots.wait(self._taken, CLOSE_WAIT_S)
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
    """Answers `reft-cli timeline`; where no socket can be had, only `Session.timeline` tells."""
    try:
        return timeline_socket.TimelineServer(lambda: profiler.trace(snapshots.rank))
    except OSError as error:
        log.warning("reft-cli timeline will not find rank %d: %s", snapshots.rank, error)
        return None


def _passed_as_state(snapshots: Snapshotter) -> list[str]:
    """Names in `state=`."""
    modules = (prefix.removeprefix("state.") for prefix in snapshots.tracked.modules if prefix.startswith("state."))
    return [*snapshots.tracked.scalers, *snapshots.host.objects, *modules]


def _nothing(*_: object) -> None:
    """After all optimizers but the last."""


def _was_skipped(optimizer: object) -> bool:
    """Whether a fused step was skipped for infinite gradients; on a device that can't be asked without waiting for it."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and found.device.type == "cpu" and bool(found)


def _drain(reference: weakref.ref[Session]) -> None:
    """At the interpreter's end: lets the copy thread finish, so that it does not read memory that is torn down."""
    session = reference()
    if session is not None and session._snapshots is not None and session._pid == os.getpid():
        session._close_window()
        if getattr(sys, "last_value", None) is None:
            # A script that ends without an error need not close its session: its end is no failure of its node.
            session._snapshots.release()
