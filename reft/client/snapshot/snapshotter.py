"""Takes the snapshots of one rank: chooses the slot, skips steps, reports to the daemon.

    take(step)  are all leaves where they were? ── yes ─► host state, staged leaves ─► copy engine
                      │ no: new save plan                           │ slot by the reuse rule
                      ▼                                             ▼ none until the fence: void
                does the plan fit into the slots? ── yes ─► as above
                      │ no
                      └► lease larger slots in a thread; void until they are there
    fence()     before anything writes the state again

The trainer's thread calls this module, and no call inside a step waits for another process. A
failure never reaches training. The snapshot is skipped, counted and reported; `TroubleLog` decides
when the log says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from reft.client.link.reports import Reporter
from reft.client.link.slots import MappedSlot, SlotLeases
from reft.client.snapshot.engine import CopyEngine, CopyJob
from reft.client.snapshot.replica_check import samples
from reft.client.snapshot.save_plan import ParityTiling, SavePlan, plan_save
from reft.client.state import serialization
from reft.client.state.host_state import HostState
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.coding.placement import Placement, exposures
from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import choose_slot
from reft.core.commit.version import Epoch, Version
from reft.core.layout.layout import Leaf
from reft.core.membership.log_debounce import TroubleLog
from reft.core.pipeline.course import PacingPlan
from reft.core.text import counted
from reft.errors import ReftError
from reft.failpoints import Failpoints
from reft.wire.slot_format import SlotMap

log = logging.getLogger("reft")


@dataclass
class SnapshotCounts:
    """The sums that `session.stats()` shows; `mark_s` is the time that marks held up training."""

    snapshots: int = 0
    skipped: int = 0
    sealed_step: int = -1
    mark_s: float = 0.0


@dataclass(frozen=True)
class CurrentPlan:
    """The leaves that exist now, and the save plan for them."""

    tensor_index: TensorIndex
    save_plan: SavePlan

    @classmethod
    def of(
        cls, tensor_index: TensorIndex, placement: Placement, rank: int, tiling: ParityTiling, previous: SavePlan | None
    ) -> CurrentPlan:
        """Makes the plan for the leaves in `tensor_index`; reuses the previous plan if possible."""
        leaves = tensor_index.leaves()
        reused = previous.with_tensors(leaves, tensor_index.tensors) if previous else None
        return cls(tensor_index, reused or plan_save(placement, rank, leaves, tensor_index.tensors, tiling))

    def fits(self, slots: Sequence[MappedSlot]) -> bool:
        """Tells whether every slot has room for the data and the leaf table."""
        geometries = [slot.map.header.geometry for slot in slots]
        return bool(geometries) and all(
            g.data_capacity >= self.save_plan.data_bytes and g.table_capacity >= len(self.save_plan.table)
            for g in geometries
        )


@dataclass
class Snapshotter:
    """The snapshots of one rank; see the module.

    Args:
        base: the version that this attach started from; it is known to be whole.
        leases: gets slots that are large enough for the save plan. It blocks, so a thread of its
            own calls it.
        placement: where the bytes of this epoch lie. It stays the same when leaves come and go.
        compares_all_until: up to this step, ranks compare all bytes of their cells; later only a
            window of each.
    """

    tracked: TrackedObjects
    host: HostState
    copy_engine: CopyEngine
    reporter: Reporter
    failpoints: Failpoints
    rank: int
    epoch: Epoch
    base: Version | None
    slots: list[MappedSlot]
    leases: SlotLeases
    placement: Placement
    compares_all_until: int
    counts: SnapshotCounts = field(default_factory=SnapshotCounts)
    _plan: CurrentPlan | None = None
    _predicted_plan: SavePlan | None = None
    _trouble_log: TroubleLog = field(default_factory=TroubleLog)
    _discarded_until: int = -1
    _lease_thread: threading.Thread | None = None
    _new_slots: list[MappedSlot] | None = None
    _old_slots: list[MappedSlot] = field(default_factory=list)
    # Indexes of slots that the copy engine still writes.
    _busy_slots: set[int] = field(default_factory=set)

    def take(self, step: int, is_marked: bool, pacing_plan: PacingPlan | None = None) -> bool:
        """Begins the snapshot of `step`; returns False if it is skipped.

        The state must not change until `fence`.

        Args:
            is_marked: True if a mark counted the step, False if a call of the optimizer did.
            pacing_plan: when in the window the bytes are copied; None copies at once.
        """
        began = time.perf_counter()
        try:
            reason = self._begin(step, is_marked, pacing_plan)
        except Exception as error:
            # A failed snapshot must never end training.
            reason = str(error) if isinstance(error, ReftError) else f"{type(error).__name__}: {error}"
        self.counts.mark_s += time.perf_counter() - began
        if reason:
            self.void(step, reason)
        return not reason

    def expect(self, leaves: Sequence[Leaf]) -> None:
        """Makes the save plan for the leaves that attach predicts, before the first mark."""
        self._predicted_plan = plan_save(self.placement, self.rank, leaves, {}, self.copy_engine.parity_tiling)

    def fence(self) -> None:
        """Returns once no copy reads the live state any more."""
        self.copy_engine.fence()

    def discard(self, until: int) -> None:
        """Drops this epoch's snapshots with wrong step numbers; takes none up to step `until`.

        A new snapshot of the base's own step stays, because that number was right.
        """
        log.warning(
            "rank %d: the optimizer was called %d times before the first mark; snapshots begin after that. Call "
            "session.begin_marking() right after attach: a run that ends before its first mark must be purged otherwise.",
            self.rank,
            until,
        )
        self._discarded_until = until
        start = self.base.step if self.base else 0
        for slot in self.slots:
            version = slot.map.header.version
            if version is not None and version.epoch == self.epoch and version.step > start:
                slot.map.empty()

    def _begin(self, step: int, is_marked: bool, pacing_plan: PacingPlan | None) -> str:
        """Starts the copy; returns why it can't, or an empty string."""
        if self.reporter.is_fenced:
            return str(self.reporter.error)
        if mismatch := self._mismatch():
            # Skip until a re-attach moves these leaves out of their cells. A restore would find the
            # snapshot sealed, and the windows that it compares may happen to be equal.
            return mismatch
        if self.reporter.slots_missing:
            self._return_memory(self.copy_engine.submit)
        if step <= self._discarded_until:
            return f"steps up to {self._discarded_until} were counted by calls of the optimizer."
        plan = self._current_plan()
        if not self._ensure_slots(plan):
            return "slots of the new size are being made."
        host_tree = {**self.host.take(step, plan.tensor_index.names), "marked": is_marked}
        self.copy_engine.begin(self._job(step, plan, host_tree, pacing_plan))
        return ""

    def wait(self, step: int, deadline_s: float) -> bool:
        """Waits until `step` is decided; returns True if it is whole. Not for use inside a step.

        Also returns memfds to a daemon that was restarted meanwhile: perhaps no further mark comes
            that would.
        """
        end = time.monotonic() + deadline_s
        is_whole = self.reporter.wait(step, deadline_s)
        while self.reporter.slots_missing and time.monotonic() < end:
            # In this thread: the copy thread may be blocked until the daemon has the memory.
            self._return_memory(lambda task: task())
            is_whole = self.reporter.wait(step, max(end - time.monotonic(), 0))
        return is_whole

    def _return_memory(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Returns the slots' memfds to a restarted daemon, which does not have them any more.

        Args:
            run: runs the task that returns them, in this thread or in another.
        """
        self.reporter.slots_missing = False
        memfd_slots = [slot for slot in self.slots if slot.descriptor >= 0]

        def give_back() -> None:
            try:
                self.leases.give_back(memfd_slots)
            except Exception as error:
                self._note_trouble(f"the daemon was restarted, and could not be given the memory of its slots: {error}")

        if memfd_slots:
            run(give_back)

    def _open(self, step: int, plan: CurrentPlan, given_up: threading.Event) -> MappedSlot:
        """Returns a slot for `step`, in the state WRITING.

        Waits until the round's outcome frees a slot, or until `given_up` is set.

        Raises:
            ReftError: no slot may be reused.
        """
        self.failpoints.hit("snapshot.begin", **self._facts(step))
        slot = self.reporter.wait_for(lambda: self._free_slot() or given_up.is_set())
        if isinstance(slot, bool):
            raise ReftError("no slot may be reused: the round has not said that a newer step is whole.")
        save_plan = plan.save_plan
        slot.map.begin(Version(self.epoch, step), save_plan.digest, save_plan.table, save_plan.data_bytes)
        self._busy_slots.add(slot.index)
        return slot

    def _free_slot(self) -> MappedSlot | None:
        views = [slot.view() for slot in self.slots if slot.index not in self._busy_slots]
        voids = [view.version for view in views if view.version is not None and self.reporter.voids(view.version)]
        chosen = choose_slot(views, self.whole, voids)
        return None if chosen is None else self.slots[chosen.index]

    def _job(self, step: int, plan: CurrentPlan, tree: Mapping[str, Any], pacing_plan: PacingPlan | None) -> CopyJob:
        """Returns the copy job of `step`; the copy thread completes the host state in `tree`."""
        facts = self._facts(step)
        versions = plan.tensor_index.versions()
        given_up = threading.Event()
        open_slots: list[MappedSlot] = []  # one, once the copy thread has it
        cell_digests: dict[int, int] = {}

        def open_slot(may_wait: bool) -> SlotMap:
            if not may_wait:
                given_up.set()
            open_slots.append(self._open(step, plan, given_up))
            return open_slots[0].map

        def give_up() -> None:
            given_up.set()
            self.reporter.wake()

        def intact() -> None:
            self.failpoints.hit("snapshot.landing", **facts)
            _check_unwritten(plan.tensor_index, versions)

        def landed(inline_leaves: Mapping[str, bytes]) -> None:
            # The tree is a copy, so the copy thread can encode it: at the mark that would take a
            # third longer.
            content = self.host.complete(tree) | {
                "riders": dict(inline_leaves),
                "absent": list(plan.save_plan.absent),
                "compared": dict(cell_digests),
            }
            open_slots[0].map.put_capsule(serialization.encode(content))
            open_slots[0].map.landed()
            self.failpoints.hit("snapshot.landed", **facts)

        def compared(digests: Mapping[int, int]) -> None:
            cell_digests.update(digests)

        def sealed(digests: np.ndarray) -> None:
            open_slots[0].map.sealed(digests)
            self._busy_slots.discard(open_slots[0].index)
            self.failpoints.hit("snapshot.sealed", **facts)
            self.counts.snapshots += 1
            self.counts.sealed_step = step
            mismatch = self._mismatch()
            self._note_trouble(mismatch)
            self.reporter.answer(step, StepAnswer.SEALED, mismatch, cell_digests)

        def failed(error: Exception) -> None:
            self._busy_slots.difference_update(slot.index for slot in open_slots)
            self.void(step, str(error))

        return CopyJob(
            open_slot, give_up, self.slots[0].map.header.geometry.chunk_bytes, plan.save_plan,
            at_chunk=lambda index: self.failpoints.hit("snapshot.chunk", chunk=index, **facts),
            at_parity=lambda index: self.failpoints.hit("snapshot.parity", chunk=index, **facts),
            intact=intact, landed=landed, sealed=sealed, failed=failed, compared=compared, pacing_plan=pacing_plan,
            samples=lambda: samples(
                plan.save_plan.cells, step, self.copy_engine.compares_all and step <= self.compares_all_until
            ),
        )  # fmt: skip

    def _mismatch(self) -> str:
        """Returns which replicas differ, so that no step becomes whole; empty if all are equal."""
        cells = sorted(self.reporter.mismatched)
        if not cells:
            return ""
        leaves = [leaf.name for cell in cells for leaf in self.placement.division.cells[cell].leaves]
        where = f"in {counted(len(leaves), 'leaf', 'leaves')} at most, e.g. {leaves[0]}"
        return (
            f"ranks hold different bytes where they should be replicas: {where}. "
            "Train them alike (DDP does), or attach with protect='none', and each rank keeps its own."
        )

    def _facts(self, step: int) -> dict[str, int]:
        return {"rank": self.rank, "step": step, "epoch": self.epoch.counter}

    def void(self, step: int, reason: str) -> None:
        """Reports that this rank has no snapshot of `step`, and why."""
        self.counts.skipped += 1
        self._note_trouble(reason)
        self.copy_engine.submit(lambda: self.reporter.answer(step, StepAnswer.VOID, reason))

    def _note_trouble(self, reason: str) -> None:
        """Logs when snapshots begin to fail, fail for another reason, or work again ("")."""
        if self._trouble_log.heard(reason, time.monotonic()):
            message = f"skips snapshots: {reason} Training goes on." if reason else "takes snapshots again."
            log.warning("rank %d %s", self.rank, message)

    # Layout

    def _current_plan(self) -> CurrentPlan:
        """Returns the plan for the leaves that exist now. It makes a new one if they changed."""
        if self._plan is None or not self._plan.tensor_index.is_current():
            previous = self._plan.save_plan if self._plan else self._predicted_plan
            self._plan = CurrentPlan.of(
                self.tracked.bind(), self.placement, self.rank, self.copy_engine.parity_tiling, previous
            )
            unplanned = self._plan.save_plan.unplanned
            if self.placement.lanes and unplanned != (previous.unplanned if previous else ()):
                log.warning(
                    "rank %d: attach did not predict %d leaves, e.g. %s. They are lost with their node.",
                    self.rank,
                    len(unplanned),
                    ", ".join(unplanned[:3]),
                )
        return self._plan

    def _ensure_slots(self, plan: CurrentPlan) -> bool:
        """Tells whether the slots are large enough; if not, leases larger ones in a thread."""
        if self._lease_thread is not None and not self._lease_thread.is_alive():
            self._lease_thread = None
            if self._new_slots is not None:
                # The old slots stay mapped: the copy engine may hold views of them until the
                # process ends.
                self._old_slots += self.slots
                self.slots, self._new_slots = self._new_slots, None
        if self._lease_thread is not None:
            # Even if the old slots fit: the daemon frees them once larger ones are made.
            return False
        if plan.fits(self.slots):
            return True
        self._lease_thread = threading.Thread(target=self._lease, args=(plan,), name="reft-lease", daemon=True)
        self._lease_thread.start()
        return False

    def _lease(self, plan: CurrentPlan) -> None:
        try:
            self._new_slots = self.leases.lease(plan.save_plan.data_bytes, len(plan.save_plan.table))
        except Exception as error:
            # If it is not this thread, the session was closed meanwhile.
            if self._lease_thread is threading.current_thread():
                log.warning("rank %d gets no slots for its new layout: %s", self.rank, error)

    def bytes_per_snapshot(self) -> int:
        """Returns the bytes that one snapshot writes: live bytes, parity, and inline leaves."""
        if self._plan is None:
            return 0
        save_plan = self._plan.save_plan
        return save_plan.written_bytes + sum(save_plan.leaves[i].nbytes for i in save_plan.inline_leaves)

    @property
    def whole(self) -> Version | None:
        """The newest version known to be whole: of this epoch and not discarded, or the base."""
        known = self.reporter.whole
        return self.base if known is None or self.is_discarded(known.step) else known

    def newest_known_whole(self) -> int:
        """Returns the newest step known to be whole, of this epoch or its base.

        It is -1 if there is none.
        """
        return self.whole.step if self.whole else -1

    def is_discarded(self, step: int) -> bool:
        """Tells whether `discard` has excluded this step number, which counted optimizer calls."""
        return step <= self._discarded_until

    @cached_property
    def is_protected(self) -> bool:
        """Whether a whole version survives the loss of `tolerate` failure domains."""
        return not exposures(self.placement)

    @property
    def unplanned_leaves(self) -> tuple[str, ...]:
        """Leaves of the last snapshot that attach did not predict: only this rank has them."""
        return self._plan.save_plan.unplanned if self._plan and self.placement.lanes else ()

    def retire(self, deadline_s: float) -> bool:
        """Closes all but the copy engine, which a new session goes on to use.

        Returns:
            False, with nothing closed, if the copy engine does not finish its work in time.
        """
        is_idle = threading.Event()
        self.copy_engine.submit(is_idle.set)
        if not is_idle.wait(deadline_s):
            return False
        self.release()
        self.reporter.close()
        self._unmap()
        return True

    def release(self) -> None:
        """Tells the daemon that the session is closed; ignores slots that are still being made."""
        self._lease_thread = None
        self.reporter.release()

    def close(self) -> None:
        """Ends the copy thread and the connection to the daemon. The slots stay with the daemon."""
        self.copy_engine.close()
        self.reporter.close()
        self._unmap()

    def _unmap(self) -> None:
        for slot in (*self.slots, *self._old_slots, *(self._new_slots or ())):
            slot.close()


def _check_unwritten(tensor_index: TensorIndex, versions: Sequence[int]) -> None:
    """Compares torch's version counters with `versions`, their values at the mark.

    Raises:
        ReftError: a leaf was written in place since the mark; staged leaves may be written.
    """
    versions_now = tensor_index.versions()
    if versions_now == versions:
        return
    for name, before, after in zip(tensor_index.tensors, versions, versions_now, strict=True):
        if before != after and name not in tensor_index.staged:
            raise ReftError(f"{name} was written between the mark and the next optimizer step: torn, not kept.")
