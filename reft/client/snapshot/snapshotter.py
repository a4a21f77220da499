"""Takes the snapshots of one rank, in the trainer's thread.

    take(step)  save plan of the leaves that exist ─► do the slots fit? ─► host state, staged leaves
                                                            │ no              ─► snapshot thread
                                                            └► larger slots in a thread; void
    fence()     before anything writes the state again

Each snapshot is a `SnapshotTask` (task.py); `snapshot_thread.py` brings the task to its end. No
call inside a step waits for another process. A failure never reaches training: the snapshot is
VOID, counted and reported.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace

from reft.client.link.reports import Reporter
from reft.client.memory.cuda import HostCopy
from reft.client.records.recorder import GradientRecorder
from reft.client.snapshot.engine import CopyEngine, CopyOrder
from reft.client.snapshot.rank_slots import RankSlots
from reft.client.snapshot.round_view import RoundView
from reft.client.snapshot.save_planner import SavePlanner
from reft.client.snapshot.snapshot_thread import Handover, SnapshotFacts, SnapshotThread
from reft.client.snapshot.task import SnapshotHistory, SnapshotState, SnapshotTask
from reft.client.snapshot.write_guard import WriteGuard
from reft.client.state.host_state import HostState
from reft.core.coding.placement import exposures
from reft.core.commit.decision import Decision
from reft.core.commit.relayout import holds_at
from reft.core.commit.snapshot_cadence import CadenceFacts
from reft.core.pipeline.course import PacingPlan
from reft.core.status.protection import protection_counts
from reft.errors import ReftError

log = logging.getLogger("reft")
HELD = "a new layout is being agreed on."


class Snapshotter:
    """The snapshots of one rank and one attach; see the module.

    Args:
        facts: see the class.
        base: the version that this attach started from; it is known to be whole.
        planner: makes the save plans.
        host: the host state.
        engine: copies the bytes; it may outlive this object.
        reporter: this rank's reports to its daemon.
        slots: the slots of this rank.
        history: the tasks of the session; it may outlive this object.
        recorder: records gradients; None if this node copies no other rank's state.

    Attributes:
        is_held: whether no snapshot begins, because a new layout is being decided.
    """

    def __init__(
        self, facts: SnapshotFacts, decision: Decision, planner: SavePlanner, host: HostState, engine: CopyEngine,
        reporter: Reporter, slots: RankSlots, history: SnapshotHistory, recorder: GradientRecorder | None = None,
    ) -> None:  # fmt: skip
        self.facts = facts
        self.planner = planner
        self.host = host
        self.engine = engine
        self.reporter = reporter
        self.slots = slots
        self.history = history
        self.recorder = recorder
        self.round = RoundView(reporter, decision)
        self.thread = SnapshotThread(facts, slots, reporter, self.round, history, engine.copy_cpu)
        self._open: Handover | None = None  # the snapshot that may read the live state
        self._begun_step = -1  # the newest step whose copy was begun
        # A due step that was left out, and the reason: VOID at the fence, unless `seal` takes it.
        self._left_out: tuple[SnapshotTask, str] | None = None
        self._begin_lock = threading.Lock()  # held while a snapshot begins, or is reported void
        self.is_held = False

    def take(
        self, step: int, is_marked: bool, pacing_plan: PacingPlan | None = None, skipped: HostCopy | None = None
    ) -> bool:
        """Begins the snapshot of `step`; returns False if it is VOID at once.

        The state must not change until `fence`.

        Args:
            step: the step that the last mark has ended.
            is_marked: True if a mark counted the step, False if a call of the optimizer did.
            pacing_plan: when in the window the bytes are copied; None copies at once.
            skipped: whether the device skips the step, which then has no snapshot; None if the step
                surely trains.
        """
        began_s = time.perf_counter()
        task = self._left_out[0] if self._left_out else self.history.begin(step, began_s)
        self._left_out = None
        with self._begin_lock:
            try:
                with self.engine.behind_writer():
                    reason = HELD if self.is_held else self._begin(task, is_marked, pacing_plan, skipped)
            except Exception as error:
                # A failed snapshot must never end training.
                reason = str(error) if isinstance(error, ReftError) else f"{type(error).__name__}: {error}"
        self.history.turn_meter.note(self.reporter.pins, began_s)
        self.history.mark_s += time.perf_counter() - began_s
        if reason:
            self._void(task, reason)
        return not reason

    def _void(self, task: SnapshotTask, reason: str) -> None:
        """Ends a task without a snapshot, and reports the step as void."""
        with self._begin_lock:
            if not self.is_held:
                self.thread.void(task, reason)
                return
        # Not reported: the daemon may have the decision that ends this epoch.
        task.void(time.perf_counter(), reason)
        self.history.ended(task)

    def _begin(
        self, task: SnapshotTask, is_marked: bool, pacing_plan: PacingPlan | None, skipped: HostCopy | None
    ) -> str:
        """Starts the copy; returns why it can't, or an empty string."""
        if self.reporter.is_stale:
            return str(self.reporter.error)
        if self.reporter.reply.slots_missing:
            self.reporter.reply.slots_missing = False
            self.thread.give_back()
        if self.round.is_discarded(task.step):
            return f"steps up to {self.round.discarded_until} were counted by calls of the optimizer."
        plan = self.planner.current()
        if plan.unrestorable:
            return plan.unrestorable
        if not self.slots.prepare(plan.save_plan, self.round.kept):
            return "slots of the new size are being made."
        if self.facts.compares_all_for is not None and self.reporter.layout_report.ready < 0:
            self.reporter.layout_report = replace(self.reporter.layout_report, ready=task.step)
        if self.facts.compares_all_for is not None and not holds_at(task.step, self.reporter.layout.start):
            return "not all ranks are ready for the new layout."
        tree = {**self.host.take(task.step, plan.tensor_index.names), "marked": is_marked}
        guard = WriteGuard(plan.tensor_index, plan.versions)
        # While replicas differ, the digests of all bytes tell which leaves do.
        compares_all = self.facts.compares_all(task.step, self.reporter.layout.start) or bool(self.reporter.mismatched)
        order = CopyOrder(
            plan.save_plan, self.slots.chunk_bytes, task.step, compares_all, pacing_plan, self.facts.failpoints,
            self.facts.at(task.step),
        )  # fmt: skip
        slot = self.thread.open(task, plan.save_plan) if self.engine.needs_slot_at_mark else None
        copy = self.engine.begin(order, slot.map if slot else None)
        self._open = Handover(task, copy, plan.save_plan, tree, guard, slot, skipped)
        self.thread.take(self._open)
        self._begun_step = task.step
        return ""

    def leave_out(self, step: int, reason: str) -> None:
        """Leaves out a due step: it is VOID at the fence, unless `take` takes it before."""
        self._left_out = self.history.begin(step, time.perf_counter()), reason

    def void(self, step: int, reason: str) -> None:
        """Reports that this rank has no snapshot of `step`, and why."""
        self._void(self.history.begin(step, time.perf_counter()), reason)

    def fence(self) -> None:
        """Returns once no copy reads the live state any more."""
        if self._left_out is not None:
            # `seal` can't take the step any more, and the other ranks must know.
            self._void(*self._left_out)
            self._left_out = None
        handover, self._open = self._open, None
        if handover is None:
            return
        handover.is_fenced.set()
        if handover.task.state is SnapshotState.OPENING:
            self.reporter.wake()  # the snapshot thread may wait for a slot
        self.engine.fence()
        handover.guard.close()

    @property
    def whole_step(self) -> int:
        """The newest step that is known to be whole; -1 if there is none."""
        return self.round.whole_step

    @property
    def open_guard(self) -> WriteGuard | None:
        """The guard of the snapshot that may read the live state, or None."""
        return self._open.guard if self._open else None

    def discard(self, until: int) -> None:
        """Drops this epoch's snapshots with wrong step numbers; takes none up to step `until`.

        A new snapshot of the base's own step stays, because that number was right.
        """
        log.warning(
            "rank %d: the optimizer was called %d times before the first mark; snapshots begin after that. Call "
            "session.begin_marking() right after attach: a run that ends before its first mark must be purged otherwise.",
            self.facts.rank,
            until,
        )
        self.round.discarded_until = until
        self.slots.empty(self.facts.epoch, after=self.round.base.step if self.round.base else 0)

    def wait(self, step: int, deadline_s: float) -> bool:
        """Waits until `step` is decided; returns True if it is whole. Not for use inside a step.

        A step whose number counted calls of the optimizer never is. Also returns memfds to a daemon
        that was restarted meanwhile: perhaps no further mark comes that would.
        """
        if self.round.is_discarded(step) or self.is_held:
            return False
        end = time.monotonic() + deadline_s
        is_whole, is_given = self.reporter.wait(step, deadline_s), True
        while self.reporter.reply.slots_missing and time.monotonic() < end:
            self.reporter.reply.slots_missing = False
            is_given = self.thread.give_back_now()
            is_whole = self.reporter.wait(step, max(end - time.monotonic(), 0))
        if not is_given:
            self.reporter.reply.slots_missing = True  # the next mark tries again
        return is_whole

    def cadence_facts(self, step: int) -> CadenceFacts:
        """Returns what the cadence must know at the mark of `step`, after the fence."""
        last_void, delay = self.reporter.outcome_delays(step)
        kept = self.round.kept
        return CadenceFacts(
            now_s=time.perf_counter(),
            held_s=self.history.mark_s + self.engine.copy_stats.stall_s,
            has_snapshot=self._begun_step == step - 1,
            interval=self.reporter.interval,
            whole_step=kept.whole.step if kept.whole else -1,
            last_void=last_void,
            delay=delay,
            # The pins are the same on all ranks, also on one whose slots lack a pinned version.
            slots=len(self.slots) - len(kept.pinned - {kept.whole}),
            extra_state=self.host.extra_state_cost(),
        )

    def is_protected(self, step: int) -> bool:
        """Whether a whole step survives the loss of `tolerate` failure domains now.

        State that exists once does so from the end of the step's turn on, unless a lane was left
        out of the turn.
        """
        placement, pins = self.facts.placement, self.reporter.pins
        is_guarded = not placement.guard_lanes or (pins.protected >= step and not pins.is_exposed)
        return is_guarded and not exposures(placement)

    def misfits(self) -> bool:
        """Decides whether this rank's state misfits the placement, by the last snapshot."""
        return bool(self.planner.unplanned_leaves or self.reporter.mismatched)

    # A new layout; a thread beside training calls these

    def hold(self, deadline_s: float) -> None:
        """Begins no more snapshots, and waits until the last one has ended.

        Raises:
            ReftError: the last one does not end in time; snapshots go on.
        """
        with self._begin_lock:
            self.is_held = True
        try:
            self.thread.idle().result(deadline_s)
            if self.recorder is not None:
                self.recorder.hold(deadline_s)
        except FutureTimeout:
            self.resume()
            raise ReftError(f"the last snapshot of this rank did not end within {deadline_s:.0f} s.") from None
        self.reporter.close()  # the daemon refuses reports of this epoch once it has the decision

    def resume(self) -> None:
        """Lets snapshots begin again: the new layout was given up."""
        self.reporter.reply.slots_missing = True  # the daemon may have been restarted meanwhile
        with self._begin_lock:
            self.is_held = False
        if self.recorder is not None:
            self.recorder.resume()

    def retire(self) -> None:
        """Closes all but the copy engine and the registration, which the new layout keeps."""
        self.slots.forget_lease()
        self._close()

    def release(self, failed: bool = False) -> None:
        """Tells the daemon that the session is closed; ignores slots that are still being made.

        Args:
            failed: whether an exception is the reason.
        """
        self.slots.forget_lease()
        if self.recorder is not None:
            self.recorder.close()
        self.reporter.release(failed)

    def close(self) -> None:
        """Ends all threads and the connection to the daemon. The slots stay with the daemon."""
        self._close()
        self.engine.close()

    def _close(self) -> None:
        self.thread.close()
        if self.recorder is not None:
            self.recorder.close()
        self.reporter.close()
        self.slots.unmap()


def protection_stats(snapshots: Snapshotter) -> dict[str, float]:
    """Returns the numbers of `Session.stats` on the job's protection."""
    placement, pins = snapshots.facts.placement, snapshots.reporter.pins
    if exposures(placement) or (placement.guard_lanes and pins.is_exposed):
        protected_step = -1
    else:
        protected_step = pins.protected if placement.guard_lanes else snapshots.whole_step
    return {
        **protection_counts(placement, snapshots.facts.rank),
        "protected_step": protected_step,
        "turn_s": snapshots.history.turn_meter.last_s,
    }
