"""The session that `reft.attach` returns: what the user holds.

    step_end, steps ─► marks              schedule/optimizer_hooks, schedule/snapshot_window
    seal, stats     ─► the window, and the tasks of its snapshots
    idle, timeline  ─► the profile of iterations

A mark without a step of a passed optimizer gives no snapshot if gradients exist or can't be seen,
or if another optimizer has stepped (`reft.client.schedule.foreign_optimizers`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reft.client.schedule import hooks
from reft.client.schedule.generator_guard import GeneratorGuard, watchable
from reft.client.schedule.iteration_profile import OTHER, IterationProfiler
from reft.client.schedule.optimizer_hooks import OptimizerHooks
from reft.client.schedule.snapshot_window import PlacementReviewer, Sealed, SnapshotWindow
from reft.client.snapshot.snapshotter import Snapshotter
from reft.client.state.restored_generators import RestoredGenerators
from reft.console import say
from reft.core.commit.snapshot_cadence import SnapshotCadence
from reft.core.commit.snapshot_interval import OverheadEstimate
from reft.core.pipeline.pacing import Tier
from reft.errors import ForkedSession, ReftError
from reft.wire import timeline_socket

if TYPE_CHECKING:
    from reft.client.rehearsal.recorder import RehearsalRecorder

log = logging.getLogger("reft")
EXIT_WAIT_S = 60.0  # a device that hangs must not keep the process


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
        ask_persist: asks the daemon for a checkpoint; None if reft is switched off.
        rehearsal: records each mark; None outside of rehearsals.
        generators: put back before the first of `steps`; None if nothing was restored, or if
            REFT_GENERATORS says so.
    """

    def __init__(
        self, snapshots: Snapshotter | None, optimizers: Sequence[Any], *, step: int,
        restored_from: str | None, counts_calls: bool, cadence: SnapshotCadence | None, seal_deadline_s: float,
        schedule: Any = None, ask_persist: Callable[[], object] | None = None,
        generators: RestoredGenerators | None = None, rehearsal: RehearsalRecorder | None = None,
    ) -> None:  # fmt: skip
        profiler = IterationProfiler(snapshots.engine, hooks.closed(schedule)) if snapshots else None
        self.restored_from = restored_from
        self._generators = generators
        self._ask_persist = ask_persist
        self._window = SnapshotWindow(snapshots, cadence, profiler, step)
        self._window.rehearsal = rehearsal
        self._seal_deadline_s = seal_deadline_s
        self._counts_calls = counts_calls
        self._pid = os.getpid()
        self._hooks = OptimizerHooks(optimizers, self._window)
        self._unfollow: Callable[[], None] = lambda: None
        self._timeline_server: timeline_socket.TimelineServer | None = None
        if snapshots is not None and profiler is not None:
            self._unfollow = hooks.follow(schedule, profiler, self._window.modules())
            self._timeline_server = _timeline_server(self._window)
            guard = GeneratorGuard(snapshots.host, self._window, None if self._window.rank else generators)
            guard.watch(watchable(snapshots.planner.tracked.modules))
            atexit.register(_finish_at_exit, weakref.ref(self))

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self._window.step

    # Marks

    def steps(self, total: int) -> Iterator[int]:
        """Yields the remaining steps, `session.step` to `total - 1`, and marks the end of each.

        Ask the data loader for the next batch inside the loop. `zip(loader, session.steps(n))`
        fetches a batch before the mark, and that batch is lost at a restart.

        After a restore the first `next()` puts the default random generators back, so the loop may
        draw between attach and here: `iter(loader)` does. REFT_GENERATORS turns that off.
        """
        self._check_process()
        self.begin_marking()
        if self.restored_from and self.step >= total:
            _say_all_done(self._window, total)
        if self._generators is not None:
            self._generators.put_back()
        while self.step < total:
            yield self.step
            self.step_end()

    def step_end(self) -> None:
        """Marks the end of an iteration.

        Call it last in the body of the loop: a restart from this mark does not run what follows it
        there. The snapshot may read the state until the next optimizer step. Within the capture of
        a CUDA graph nothing is counted: that work trains nothing yet.

        Raises:
            UnsupportedState: at the first mark, if `reft.Values` have a value that can't be held.
        """
        self._check_process()
        if self._window.is_capturing():
            log.warning(
                "rank %d: session.step_end() is captured in a CUDA graph, where it marks nothing, and replays do not call it. "
                "Call it after each replay.",
                self._window.rank,
            )
            return
        if not self._window.is_marked:
            self.begin_marking()
        if self._window.step == self._window.start:
            _check_values(self._window)
        self._hooks.mark()

    def begin_marking(self) -> None:
        """Counts only marks from here on, and drops the steps counted from the optimizer's hooks.

        The first mark does the same. Call this method right after attach if the loop calls the
        optimizer before the first mark without training: `torch.distributed.checkpoint` does so to
        read the state of an optimizer.

        Raises:
            RestoreError: the restored step was counted by calls of the optimizer.
        """
        self._window.begin_marking(self._counts_calls)

    def resume_marking(self) -> None:
        """Ignores all calls of the optimizer, because the restored step was marked."""
        self._window.resume_marking()

    @property
    def every(self) -> int:
        """The current snapshot interval: every n-th step is snapshotted."""
        return self._window.every

    def protect_again(self, is_marked: bool) -> None:
        """Snapshots the restored state, so that the bytes of a lost node are protected again.

        Attach calls this method before the first step.
        """
        self._window.take(is_marked)

    def review(self, reviews: PlacementReviewer) -> None:
        """Reviews the placement at each mark; attach calls this method."""
        self._window.reviews = reviews

    # What users ask

    def seal(self, timeout: float | None = None) -> Sealed:
        """Waits until the newest marked step is whole, so that every rank has sealed it.

        Takes the snapshot first if that step was not due. Call `seal` on all ranks, between a mark
        and the next optimizer step: the optimizer overwrites the marked state, and then a snapshot
        of that step is no longer possible. While a new layout is being made, no step becomes whole.

        Args:
            timeout: seconds; None means REFT_SEAL_DEADLINE_S.
        """
        self._check_process()
        return self._window.seal(self._seal_deadline_s if timeout is None else timeout)

    def persist(self) -> None:
        """Asks for a checkpoint of the newest whole step; does not wait for it.

        One rank is enough; more of them change nothing. For a checkpoint of the step that was just
        marked, call `seal` before. Training goes on if there is no storage, or if it fails: that is
        logged, and `reft-cli status` shows it.
        """
        self._check_process()
        if self._ask_persist is not None:
            threading.Thread(target=_ask_or_log, args=(self._ask_persist,), name="reft-persist", daemon=True).start()

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
        reviews_over: 1 if no new layout is made until the job restarts, because a rank was missing
            in a review of the placement; else 0
        records: number of gradient records taken; with protect="aor", else 0
        records_torn, records_missed: marks without a record, because a gradient was overwritten
            before the record had it, or for another reason, which the log names
        record_bytes: bytes of one record
        recorded_mark: mark of the newest record; -1 if there is none
        streaming_copy: 1 if snapshots of host memory bypass the caches, else 0

        On the job's protection; bytes of the job's state count once:

        aec_bytes: replicas that are kept with parity
        arc_bytes: replicas that are kept as copies
        exchange_bytes: bytes with one holder, of which other nodes keep parity
        aor_bytes: bytes with one holder, of which other nodes keep copies
        none_bytes: bytes that a lost node takes away: the settings ask for no more, all holders
            are on one node, or a rank has no partner to exchange with
        turn_bytes: bytes of this rank that its node sends in one turn of the exchange
        parity_bytes: memory for parity that the node keeps on behalf of this rank
        extra_slot_bytes: memory for this rank's slots beyond three, which the exchange needs
        protected_step: newest step of this attach known to survive lost nodes; -1 if none, or if
            some of its state lacks parity. With `exchange_bytes` or `aor_bytes` this is learnt
            with the snapshots of later steps
        turn_s: seconds of the last turn, as seen at snapshots; -1 if no turn was seen to end
        """
        return self._window.stats()

    def overhead(self) -> OverheadEstimate | None:
        """Returns the total cost of snapshots, as a share of training time.

        The cost comes with a 95 % interval. The estimate needs control steps, which are steps
        without a snapshot. Only `every="auto"` has control steps. None until there are enough: to
        see 0.1 % under 2 % of noise takes thousands of steps.
        """
        return self._window.overhead()

    def timeline(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Returns a trace of training and copying in the last steps.

        ui.perfetto.dev and chrome://tracing show such a trace.

        Args:
            path: also write the trace to this file.

        Returns:
            The trace, in JSON types: compute, gaps, waits, each chunk with its tier, parity, the
            fence, and the states of each snapshot. `otherData` has the expected and the measured
            gaps of the schedule, and where each of the newest snapshots stands: step, state, slot,
            reason, and its last 20 events with their times.
        """
        trace = self._window.trace()
        if path is not None:
            Path(path).write_text(json.dumps(trace))
        return trace

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Marks a gap, e.g. a wait for a batch: the loop neither computes nor communicates."""
        profiler = self._window.profiler
        if profiler is None:
            yield
            return
        profiler.enter(Tier.GAP, "idle")
        try:
            yield
        finally:
            profiler.enter(Tier.COMPUTE, OTHER)

    def close(self) -> None:
        """Finishes the newest snapshot and removes the hooks; the daemon keeps the slots.

        Called while an exception is handled, as by `with` or `finally`, it counts as the end of a
        failed run: the daemon keeps the slots of a named job for --ttl-failed.
        """
        if self._window.snapshots is None or os.getpid() != self._pid:
            return
        self._unfollow()
        if self._timeline_server is not None:
            self._timeline_server.close()
        self._hooks.remove()
        error = sys.exc_info()[1]
        ended_well = error is None or (isinstance(error, SystemExit) and not error.code)
        self._window.end(failed=not ended_well)

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


def _check_values(window: SnapshotWindow) -> None:
    """Raises UnsupportedState if `reft.Values` have a value that can't be held."""
    if window.snapshots is not None:
        for values in window.snapshots.planner.tracked.held_values().values():
            values.check()


def _say_all_done(window: SnapshotWindow, total: int) -> None:
    """Says, on rank 0, that the restored step is the last one.

    Args:
        window: of the session.
        total: how many steps the loop asks for.
    """
    if window.snapshots is not None and window.rank == 0:
        job = window.snapshots.reporter.facts.job
        say(
            f"job {job} has completed all {total} steps of this loop: step {window.step} was restored, and the loop trains "
            f"nothing. To train from step 0: reft-cli purge {job}, or another job name (--rdzv-id, REFT_JOB)."
        )


def _timeline_server(window: SnapshotWindow) -> timeline_socket.TimelineServer | None:
    """Returns the server that answers `reft-cli timeline`.

    None if there is no socket for it; `Session.timeline` works without the server.
    """
    try:
        return timeline_socket.TimelineServer(window.trace)
    except OSError as error:
        log.warning("reft-cli timeline will not find rank %d: %s", window.rank, error)
        return None


def _ask_or_log(ask: Callable[[], object]) -> None:
    try:
        ask()
    except ReftError as error:
        log.warning("no checkpoint was begun: %s", error)


def _finish_at_exit(reference: weakref.ref[Session]) -> None:
    """Lets the copies finish at exit, before the interpreter frees memory that is read."""
    session = reference()
    if session is None or session._pid != os.getpid():
        return
    session._window.close()
    if session._window.snapshots is not None:
        # torch ends the process with SIGABRT if a thread returns from a wait for a device while the
        # interpreter ends. On a device the fence does not wait for the copies.
        with contextlib.suppress(FutureTimeout):
            session._window.snapshots.thread.idle().result(EXIT_WAIT_S)
    if session._window.snapshots is not None and getattr(sys, "last_value", None) is None:
        session._window.end_reviews()
        # A script that ends without an error need not close its session. Without this release the
        # daemon would report the exit as a failure.
        session._window.snapshots.release()
