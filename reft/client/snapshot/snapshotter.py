"""One rank's snapshots: which slot, when to skip, what to tell the daemon. The trainer's thread calls; nothing here waits.

    take(step):  leaves still where they were? ─► host state, staged leaves ─► engine: slot by the reuse rule ─► WRITING, copy …
                      │ no: new layout                                            │ none until the fence: void(step)
                      └► fits: use it; else lease larger slots beside training, void(step) until they are there
    fence():     before anything writes the state again

Any failure in here is a snapshot that was not taken: counted, reported, logged as `core.complaints` says, never raised.
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
from reft.core.coding.placement import Placement, exposed
from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import choose
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
    """What `session.stats()` adds up."""

    snapshots: int = 0
    skipped: int = 0
    sealed_step: int = -1
    mark_s: float = 0.0  # training was held up at marks


@dataclass(frozen=True)
class CurrentPlan:
    """The leaves that exist and where their bytes go, as every snapshot needs it."""

    tensor_index: TensorIndex
    save_plan: SavePlan

    @classmethod
    def of(
        cls, tensor_index: TensorIndex, placement: Placement, rank: int, cut: ParityTiling, before: SavePlan | None
    ) -> CurrentPlan:
        leaves = tensor_index.leaves()
        same = before.with_tensors(leaves, tensor_index.tensors) if before else None
        return cls(tensor_index, same or plan_save(placement, rank, leaves, tensor_index.tensors, cut))

    def fits(self, slots: Sequence[MappedSlot]) -> bool:
        """Whether every slot has room for the data and the table."""
        geometries = [slot.map.header.geometry for slot in slots]
        return bool(geometries) and all(
            g.data_capacity >= self.save_plan.data_bytes and g.table_capacity >= len(self.save_plan.table)
            for g in geometries
        )


@dataclass
class Snapshotter:
    """See the module.

    Args:
        leases: gets slots with room for a share; blocks, so it is called in a thread of its own.
        base: the version that this attach started from: known to be whole.
        placement: where the bytes of this epoch lie; it stays when leaves come and go.
        compares_all_until: up to this step ranks compare all of their cells, then a window of them.
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
    _held: CurrentPlan | None = None
    _expected: SavePlan | None = None
    _trouble_log: TroubleLog = field(default_factory=TroubleLog)
    _floor: int = -1
    _leasing: threading.Thread | None = None
    _leased: list[MappedSlot] | None = None
    _outgrown: list[MappedSlot] = field(default_factory=list)
    _under_way: set[int] = field(default_factory=set)  # indexes of slots that the engine has not finished with

    def take(self, step: int, is_marked: bool, pacing_plan: PacingPlan | None = None) -> bool:
        """Begins the snapshot of `step`; False if it is skipped. The state must not change until `fence`.

        Args:
            is_marked: whether the step was counted by a mark; else by a call of the optimizer.
            pacing_plan: where in the window its bytes go; None: at once.
        """
        began = time.perf_counter()
        try:
            reason = self._begin(step, is_marked, pacing_plan)
        except Exception as error:
            # A protector must not be the killer: whatever went wrong, training goes on.
            reason = str(error) if isinstance(error, ReftError) else f"{type(error).__name__}: {error}"
        self.counts.mark_s += time.perf_counter() - began
        if reason:
            self.void(step, reason)
        return not reason

    def expect(self, leaves: Sequence[Leaf]) -> None:
        """Cuts the work for the leaves that attach foresees, so that the first mark finds it done."""
        self._expected = plan_save(self.placement, self.rank, leaves, {}, self.copy_engine.cut)

    def fence(self) -> None:
        """Makes sure that nothing reads the state any more."""
        self.copy_engine.fence()

    def discard(self, until: int) -> None:
        """Drops what was counted wrongly in this epoch, and takes nothing up to step `until`.

        The base's own step was counted before it: taken again to protect it anew, it stays.
        """
        log.warning(
            "rank %d: the optimizer was called %d times before the first mark; snapshots begin after that. Call "
            "session.begin_marking() right after attach: a run that ends before its first mark must be purged otherwise.",
            self.rank,
            until,
        )
        self._floor = until
        start = self.base.step if self.base else 0
        for slot in self.slots:
            version = slot.map.header.version
            if version is not None and version.epoch == self.epoch and version.step > start:
                slot.map.empty()

    def _begin(self, step: int, is_marked: bool, pacing_plan: PacingPlan | None) -> str:
        """Starts the copy; why not, if it can't."""
        if self.reporter.is_fenced:
            return str(self.reporter.error)
        if trouble := self._mismatched():
            return trouble  # until a review moves them out: a restore would find it sealed, and its windows may agree
        if self.reporter.slots_missing:
            self._give_back(self.copy_engine.submit)
        if step <= self._floor:
            return f"steps up to {self._floor} were counted by calls of the optimizer."
        held = self._current()
        if not self._room_for(held):
            return "slots of the new size are being made."
        self.copy_engine.begin(
            self._job(step, held, {**self.host.take(step, held.tensor_index.names), "marked": is_marked}, pacing_plan)
        )
        return ""

    def wait(self, step: int, deadline_s: float) -> bool:
        """Waits until `step` is decided; True if it is whole. Not for use inside a step.

        A daemon that was restarted meanwhile has its memory back then: no mark may follow that would see to it.
        """
        end = time.monotonic() + deadline_s
        whole = self.reporter.wait(step, deadline_s)
        while self.reporter.slots_missing and time.monotonic() < end:
            self._give_back(lambda give_back: give_back())  # the engine may be waiting for what follows from it
            whole = self.reporter.wait(step, max(end - time.monotonic(), 0))
        return whole

    def _give_back(self, run: Callable[[Callable[[], None]], None]) -> None:
        """A daemon that was restarted knows nothing of memfds: it gets them back from us, in what `run` runs in."""
        self.reporter.slots_missing = False
        kept = [slot for slot in self.slots if slot.descriptor >= 0]

        def give_back() -> None:
            try:
                self.leases.give_back(kept)
            except Exception as error:
                self._settle(f"the daemon was restarted, and could not be given the memory of its slots: {error}")

        if kept:
            run(give_back)

    def _open(self, step: int, held: CurrentPlan, given_up: threading.Event) -> MappedSlot:
        """The slot for `step`, WRITING; waits for the round's news until it is given up.

        Raises:
            ReftError: no slot may be reused.
        """
        self.failpoints.hit("snapshot.begin", **self._facts(step))
        slot = self.reporter.wait_for(lambda: self._free_slot() or given_up.is_set())
        if isinstance(slot, bool):
            raise ReftError("no slot may be reused: the round has not said that a newer step is whole.")
        save_plan = held.save_plan
        slot.map.begin(Version(self.epoch, step), save_plan.digest, save_plan.table, save_plan.data_bytes)
        self._under_way.add(slot.index)
        return slot

    def _free_slot(self) -> MappedSlot | None:
        views = [slot.view() for slot in self.slots if slot.index not in self._under_way]
        voids = [view.version for view in views if view.version is not None and self.reporter.voids(view.version)]
        chosen = choose(views, self.whole, voids)
        return None if chosen is None else self.slots[chosen.index]

    def _job(self, step: int, held: CurrentPlan, tree: Mapping[str, Any], pacing_plan: PacingPlan | None) -> CopyJob:
        facts = self._facts(step)
        versions = held.tensor_index.versions()
        given_up = threading.Event()
        opened: list[MappedSlot] = []
        cells: dict[int, int] = {}

        def open_slot(may_wait: bool) -> SlotMap:
            if not may_wait:
                given_up.set()
            opened.append(self._open(step, held, given_up))
            return opened[0].map

        def give_up() -> None:
            given_up.set()
            self.reporter.wake()

        def intact() -> None:
            self.failpoints.hit("snapshot.landing", **facts)
            now = held.tensor_index.versions()
            if now == versions:
                return
            for name, before, after in zip(held.tensor_index.tensors, versions, now, strict=True):
                if before != after and name not in held.tensor_index.staged:
                    raise ReftError(f"{name} was written between the mark and the next optimizer step: torn, not kept.")

        def landed(inline_leaves: Mapping[str, bytes]) -> None:
            # The tree is a copy, so the engine's thread can make the capsule of it: that takes the mark a third longer.
            whole = self.host.complete(tree)
            whole |= {"riders": dict(inline_leaves), "absent": list(held.save_plan.absent), "compared": dict(cells)}
            opened[0].map.put_capsule(serialization.encode(whole))
            opened[0].map.landed()
            self.failpoints.hit("snapshot.landed", **facts)

        def compared(found: Mapping[int, int]) -> None:
            cells.update(found)

        def sealed(digests: np.ndarray) -> None:
            opened[0].map.sealed(digests)
            self._under_way.discard(opened[0].index)
            self.failpoints.hit("snapshot.sealed", **facts)
            self.counts.snapshots += 1
            self.counts.sealed_step = step
            trouble = self._mismatched()
            self._settle(trouble)
            self.reporter.answer(step, StepAnswer.SEALED, trouble, cells)

        def failed(error: Exception) -> None:
            self._under_way.difference_update(slot.index for slot in opened)
            self.void(step, str(error))

        return CopyJob(
            open_slot, give_up, self.slots[0].map.header.geometry.chunk_bytes, held.save_plan,
            at_chunk=lambda index: self.failpoints.hit("snapshot.chunk", chunk=index, **facts),
            at_parity=lambda index: self.failpoints.hit("snapshot.parity", chunk=index, **facts),
            intact=intact, landed=landed, sealed=sealed, failed=failed, compared=compared, pacing_plan=pacing_plan,
            samples=lambda: samples(
                held.save_plan.cells, step, self.copy_engine.compares_all and step <= self.compares_all_until
            ),
        )  # fmt: skip

    def _mismatched(self) -> str:
        """Why nothing becomes whole although every rank seals; empty if replicas are alike."""
        cells = sorted(self.reporter.mismatched)
        if not cells:
            return ""
        leaves = [leaf.name for cell in cells for leaf in self.placement.division.cells[cell].leaves]
        found = f"in {counted(len(leaves), 'leaf', 'leaves')} at most, e.g. {leaves[0]}"
        return (
            f"ranks hold different bytes where they should be replicas: {found}. "
            "Train them alike (DDP does), or attach with protect='none', and each rank keeps its own."
        )

    def _facts(self, step: int) -> dict[str, int]:
        return {"rank": self.rank, "step": step, "epoch": self.epoch.counter}

    def void(self, step: int, reason: str) -> None:
        """Says that this rank has no snapshot of `step`, and why."""
        self.counts.skipped += 1
        self._settle(reason)
        self.copy_engine.submit(lambda: self.reporter.answer(step, StepAnswer.VOID, reason))

    def _settle(self, reason: str) -> None:
        """Logs when snapshots begin to fail, fail for another reason, or work again."""
        if self._trouble_log.heard(reason, time.monotonic()):
            what = f"skips snapshots: {reason} Training goes on." if reason else "takes snapshots again."
            log.warning("rank %d %s", self.rank, what)

    # Layout

    def _current(self) -> CurrentPlan:
        if self._held is None or not self._held.tensor_index.is_current():
            before = self._held.save_plan if self._held else self._expected
            self._held = CurrentPlan.of(self.tracked.bind(), self.placement, self.rank, self.copy_engine.cut, before)
            extra = self._held.save_plan.unplanned
            if self.placement.lanes and extra != (before.unplanned if before else ()):
                log.warning(
                    "rank %d: %d leaves were not foreseen by attach and are lost with their node, e.g. %s.",
                    self.rank,
                    len(extra),
                    ", ".join(extra[:3]),
                )
        return self._held

    def _room_for(self, held: CurrentPlan) -> bool:
        """Whether the slots are large enough; if not, larger ones are leased beside training."""
        if self._leasing is not None and not self._leasing.is_alive():
            self._leasing = None
            if self._leased is not None:
                # The outgrown slots stay mapped: the engine may hold views of them until the process ends.
                self._outgrown += self.slots
                self.slots, self._leased = self._leased, None
        if self._leasing is not None:
            return False  # even if the old slots fit: the daemon frees them once larger ones are made
        if held.fits(self.slots):
            return True
        self._leasing = threading.Thread(target=self._lease, args=(held,), name="reft-lease", daemon=True)
        self._leasing.start()
        return False

    def _lease(self, held: CurrentPlan) -> None:
        try:
            self._leased = self.leases.lease(held.save_plan.data_bytes, len(held.save_plan.table))
        except Exception as error:
            if self._leasing is threading.current_thread():  # else the session was closed meanwhile
                log.warning("rank %d gets no slots for its new layout: %s", self.rank, error)

    def bytes_per_snapshot(self) -> int:
        """Bytes that one snapshot writes into its slot: live ones, parity, and the capsule's riders."""
        if self._held is None:
            return 0
        save_plan = self._held.save_plan
        return save_plan.written_bytes + sum(save_plan.leaves[i].nbytes for i in save_plan.inline_leaves)

    @property
    def whole(self) -> Version | None:
        """The newest version known to be whole, of this epoch and not discarded, or as its base."""
        known = self.reporter.whole
        return self.base if known is None or self.leaves_out(known.step) else known

    def newest_known_whole(self) -> int:
        """The newest step known to be whole, in this epoch or as its base; -1 if none."""
        return self.whole.step if self.whole else -1

    def leaves_out(self, step: int) -> bool:
        """Whether no snapshot of this step is ever taken: the number was used for a call of the optimizer, and discarded."""
        return step <= self._floor

    @cached_property
    def is_protected(self) -> bool:
        """Whether a whole version survives as many lost failure domains as were asked for."""
        return not exposed(self.placement)

    @property
    def unforeseen(self) -> tuple[str, ...]:
        """Leaves of the last snapshot that the placement does not know: this rank keeps them, and nobody else."""
        return self._held.save_plan.unplanned if self._held and self.placement.lanes else ()

    def retire(self, deadline_s: float) -> bool:
        """Ends these snapshots for others that go on with the engine; False if it does not end its work in time."""
        ended = threading.Event()
        self.copy_engine.submit(ended.set)
        if not ended.wait(deadline_s):
            return False
        self.release()
        self.reporter.close()
        self._unmap()
        return True

    def release(self) -> None:
        """Tells the daemon that the session was closed; slots that are still being made are not wanted any more."""
        self._leasing = None
        self.reporter.release()

    def close(self) -> None:
        """Ends the engine's thread and the connection to the daemon; the slots stay with the daemon."""
        self.copy_engine.close()
        self.reporter.close()
        self._unmap()

    def _unmap(self) -> None:
        for slot in (*self.slots, *self._outgrown, *(self._leased or ())):
            slot.close()
