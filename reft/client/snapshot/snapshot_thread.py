"""The thread that brings one snapshot after the other from OPENING to SEALED or VOID.

    trainer's thread         snapshot thread                              engine
    handover ─► (queue) ─►   slot by the reuse rule ─► COPYING ─────────► copies
                             state unwritten? ─► capsule ─► LANDED ◄───── CopiedEvent
                             header ─► SEALED ─► report ◄──────────────── DigestedEvent
    void ─► (queue)
    memory ─► thread of its own ─► restarted daemon

All work lies in one queue with one consumer, so a step's answer never overtakes that of an earlier
step. The queue holds at most one handover: the next mark comes after the fence, and the fence of
the CPU engine opens when the bytes are copied. On CUDA the device's queue bounds the marks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from reft.client.link.reports import Reporter
from reft.client.link.slots import MappedSlot
from reft.client.memory.cuda import HostCopy
from reft.client.memory.threads import TaskThread
from reft.client.snapshot.engine import CopiedEvent, DigestedEvent, RunningCopy
from reft.client.snapshot.rank_slots import RankSlots
from reft.client.snapshot.replica_check import mismatch
from reft.client.snapshot.round_view import RoundView
from reft.client.snapshot.save_plan import SavePlan
from reft.client.snapshot.task import SnapshotHistory, SnapshotTask
from reft.client.snapshot.write_guard import WriteGuard
from reft.client.state import serialization
from reft.client.state.host_state import storable
from reft.core.coding.placement import Placement
from reft.core.commit.round import StepAnswer
from reft.core.commit.version import Epoch, Version
from reft.core.membership.log_debounce import LASTED_S, TroubleLog
from reft.errors import FIX, ReftError, split_remedy
from reft.failpoints import Failpoints
from reft.wire.capsule_format import NameTable

log = logging.getLogger("reft")
# Ranks are a step or two apart when they look for a step that all of them have compared.
LEAF_DIGESTS_MAX = 8
# Where steps take milliseconds this comes now and then, and is over with the next outcome.
NO_SLOT = "all slots are in use: the daemons have not agreed yet that a newer step is whole."


@dataclass(frozen=True)
class SnapshotFacts:
    """What stays the same for all snapshots of one attach.

    Attributes:
        rank: this rank.
        epoch: the epoch of this attach.
        placement: where the bytes of this epoch lie.
        names: this rank's names in the manifest of the epoch; capsules refer to them.
        compares_all_until: up to this step, ranks compare all bytes of their cells; later only a
            window of each.
        failpoints: faults to inject.
        compares_all_for: for a new layout in mid-training, whose first step the round names: for so
            many steps from there on ranks compare all bytes. None: the epoch began with an attach.
    """

    rank: int
    epoch: Epoch
    placement: Placement
    names: NameTable
    compares_all_until: int
    failpoints: Failpoints
    compares_all_for: int | None = None

    def compares_all(self, step: int, start: int) -> bool:
        """Decides whether ranks compare all bytes of a step.

        Args:
            step: the step.
            start: the first step of a new layout.
        """
        return step <= (self.compares_all_until if self.compares_all_for is None else start + self.compares_all_for)

    def at(self, step: int) -> dict[str, int]:
        """Returns the facts of a step that a failpoint may ask for."""
        return {"rank": self.rank, "step": step, "epoch": self.epoch.counter}


@dataclass(frozen=True)
class Handover:
    """A snapshot whose copy has begun, for the snapshot thread.

    Attributes:
        task: the snapshot.
        copy: its copy, as the engine began it.
        save_plan: what it writes.
        tree: the host state at the mark.
        guard: detects writes in the window.
        slot: the slot, already WRITING; None if this thread shall open one.
        skipped: whether the device skipped the step; None if the step surely trained.
        is_fenced: set at the fence: no slot that frees up later is of use.
    """

    task: SnapshotTask
    copy: RunningCopy
    save_plan: SavePlan
    tree: Mapping[str, Any]
    guard: WriteGuard
    slot: MappedSlot | None
    skipped: HostCopy | None
    is_fenced: threading.Event = field(default_factory=threading.Event)


class SnapshotThread:
    """The snapshot thread of one rank; see the module.

    Args:
        facts: see the class.
        slots: the slots to write.
        reporter: tells the daemon each answer.
        round_view: says which slots are free.
        history: knows which slots are being written, and sums up the tasks.
        cpu: the CPU to run on; None leaves the choice to the scheduler.
    """

    def __init__(
        self,
        facts: SnapshotFacts,
        slots: RankSlots,
        reporter: Reporter,
        round_view: RoundView,
        history: SnapshotHistory,
        cpu: int | None,
    ) -> None:
        self._facts = facts
        self._slots = slots
        self._reporter = reporter
        self._round = round_view
        self._history = history
        self._trouble_log = TroubleLog()
        self._thread = TaskThread("reft-copier", cpu)
        self._returning: threading.Thread | None = None  # gives memory back to a restarted daemon
        # step and leaf digests of the newest snapshots of which all bytes were compared
        self.leaf_digests: deque[tuple[int, Mapping[str, str]]] = deque(maxlen=LEAF_DIGESTS_MAX)

    def take(self, handover: Handover) -> None:
        """Brings a snapshot to its end."""
        self._thread.submit(lambda: self._run(handover))

    def void(self, task: SnapshotTask, reason: str) -> None:
        """Ends a task without a snapshot, and reports the step as void, after earlier ones."""
        task.void(time.perf_counter(), reason)
        self._history.ended(task)
        self._note_trouble(reason, task)
        self._thread.submit(lambda: self._reporter.answer(task.step, StepAnswer.VOID, reason))

    def give_back(self) -> None:
        """Passes memory to a restarted daemon, in a thread of its own.

        The daemon may be slow, and the fence of the next snapshot waits for the snapshot thread.
        While it goes on nothing begins. After a failure the next mark tries again.
        """
        if self._returning is None or not self._returning.is_alive():
            self._returning = threading.Thread(target=self._give_back_or_again, name="reft-return", daemon=True)
            self._returning.start()

    def _give_back_or_again(self) -> None:
        if not self.give_back_now():
            self._reporter.reply.slots_missing = True

    def give_back_now(self) -> bool:
        """Does so in the calling thread: the snapshot thread may wait for a slot of this memory.

        Returns whether the daemon has the memory.
        """
        try:
            self._slots.give_back()
        except Exception as error:
            self._note_trouble(f"the daemon was restarted, and could not be given the memory of its slots: {error}")
            return False
        return True

    def idle(self) -> Future[None]:
        """Returns a future that is done once all work of before is done."""
        return self._thread.submit(lambda: None)

    def close(self) -> None:
        """Ends the thread after its last work."""
        self._thread.close()
        if self._returning is not None:
            self._returning.join()  # it uses descriptors that are closed next

    def _free_slot(self) -> MappedSlot | None:
        """Returns the slot to write next, by the reuse rule, or None."""
        return self._slots.choose(self._history.busy_slots(), self._round.kept, self._round.voids)

    def _run(self, handover: Handover) -> None:
        task, slot = handover.task, handover.slot
        try:
            slot = slot or self._open(handover)
            cell_digests: Mapping[int, int] = {}
            with closing(handover.copy.events(slot.map)) as events:
                for event in events:
                    if isinstance(event, CopiedEvent):
                        cell_digests = event.cell_digests
                        self._land(handover, slot, event)
                    else:
                        self._seal(task, slot, event, cell_digests)
        except Exception as error:
            # A failed snapshot must never end training.
            handover.copy.drop()
            if task.is_over:
                self._note_trouble(str(error), task)
            else:
                self.void(task, str(error))

    def _open(self, handover: Handover) -> MappedSlot:
        """Opens a slot once the round's outcome frees one; until the fence at the latest.

        Raises:
            ReftError: no slot may be reused.
        """
        news, slot = self._reporter.news, self._free_slot()
        while slot is None and not handover.is_fenced.is_set():
            self._reporter.wait_news(news)
            news, slot = self._reporter.news, self._free_slot()
        return self._opened(slot, handover.task, handover.save_plan)

    def open(self, task: SnapshotTask, save_plan: SavePlan) -> MappedSlot:
        """Opens a slot at once, in the trainer's thread.

        Raises:
            ReftError: no slot may be reused now.
        """
        return self._opened(self._free_slot(), task, save_plan)

    def _opened(self, slot: MappedSlot | None, task: SnapshotTask, save_plan: SavePlan) -> MappedSlot:
        self._facts.failpoints.hit("snapshot.begin", **self._facts.at(task.step))
        if slot is None:
            raise ReftError(NO_SLOT)
        # First: whatever happens to the header, no other snapshot may get the slot meanwhile.
        task.copying(time.perf_counter(), slot.index)
        slot.map.begin(Version(self._facts.epoch, task.step), save_plan.digest, save_plan.table, save_plan.data_bytes)
        return slot

    def _land(self, handover: Handover, slot: MappedSlot, copied: CopiedEvent) -> None:
        """Checks that nothing wrote the state, and makes the slot LANDED, with its capsule.

        Raises:
            ReftError: the state was written, the capsule is too large, or replicas differ.
        """
        facts = self._facts.at(handover.task.step)
        self._facts.failpoints.hit("snapshot.landing", **facts)
        handover.guard.check()
        if handover.skipped is not None and handover.skipped.is_nonzero():
            raise ReftError("a GradScaler skipped this step, so the step does not count.")
        if copied.leaf_digests:
            self.leaf_digests.append((handover.task.step, copied.leaf_digests))
        if differs := mismatch(self._facts.placement.division, self._reporter.mismatched):
            # Never LANDED: a restore would find the snapshot sealed, and the windows that it
            # compares may happen to be equal.
            raise ReftError(differs)
        # The tree is a copy, so this thread can encode it: at the mark that would take a third
        # longer.
        capsule = {
            **storable(handover.tree),
            "riders": dict(copied.inline_leaves),
            "absent": list(handover.save_plan.absent),
            "compared": dict(copied.cell_digests),
        }
        slot.map.put_capsule(serialization.encode(capsule, self._facts.names))
        slot.map.landed()
        handover.task.landed(time.perf_counter())
        self._facts.failpoints.hit("snapshot.landed", **facts)

    def _seal(
        self, task: SnapshotTask, slot: MappedSlot, event: DigestedEvent, cell_digests: Mapping[int, int]
    ) -> None:
        slot.map.sealed(event.digests)
        self._facts.failpoints.hit("snapshot.sealed", **self._facts.at(task.step))
        task.sealed(time.perf_counter())
        self._history.ended(task)
        trouble = mismatch(self._facts.placement.division, self._reporter.mismatched)
        self._note_trouble(trouble, task)
        self._reporter.answer(task.step, StepAnswer.SEALED, trouble, cell_digests)

    def _note_trouble(self, reason: str, task: SnapshotTask | None = None) -> None:
        """Logs when snapshots begin to fail, fail for another reason, or work again ("")."""
        is_no_slot = reason == NO_SLOT
        if not self._trouble_log.heard(reason, time.monotonic(), LASTED_S if is_no_slot else 0.0):
            return
        if not reason:
            log.warning("rank %d takes snapshots again.", self._facts.rank)
            return
        what, remedy = split_remedy(reason)
        fix = FIX if remedy else ""
        story = f" ({task.story()})" if task and not is_no_slot else ""
        log.warning("rank %d skips snapshots: %s Training goes on.%s%s%s", self._facts.rank, what, story, fix, remedy)
