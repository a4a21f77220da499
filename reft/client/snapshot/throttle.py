"""Holds back the CPU engine's copy threads until their next task is due.

The pacing plan decides when that is.

    trainer's thread   mark ─► enter(0), begin    hooks ─► enter(phase)    fence ─► lift
    busy threads       open ─► task ─ …waits… ─► task ─► … ─► none left   beside training, or lifted
    idle threads       ─ …waits… ─► task ─► task ─ …waits… ─► none left   in gaps

On the CPU, the host sees at once that a gap ends. Copying stops because no further task is handed
out. A task that has begun goes on; in a gap it runs in an idle thread, which gives way to all
others (client/memory/threads.py). reft.core.pipeline.course decides which task is due when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from reft.core.pipeline.course import CopyTask, PacedCopy, Priority
from reft.core.pipeline.pacing import Tier

Note = Callable[[CopyTask, float, float, bool], None]
SHORTEST_WAIT_S = 100e-6  # what a thread needs to wake up anyway


class CopyThrottle:
    """Hands out the copy tasks of one snapshot at a time, each when due.

    The trainer's thread never waits here for longer than a few instructions.

    Args:
        clock: seconds, as `time.perf_counter` gives them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = {priority: threading.Condition(self._lock) for priority in Priority}
        self._paced_copy: PacedCopy | None = None
        self._mark_s = self._phase_since_s = clock()
        self._index = 0
        self._lifted: Tier | None = None  # the tier of `lift`, if it was called since the mark
        self.tier = Tier.COMPUTE  # what training does now

    def begin(self) -> None:
        """Forgets the snapshot before; its fence has passed, and the next one begins."""
        with self._lock:
            self._paced_copy, self._lifted = None, None

    def enter(self, index: int, tier: Tier) -> float:
        """Notes that training enters a phase; phase 0 begins at the mark. Returns the time."""
        with self._lock:
            self._index, self.tier, self._phase_since_s = index, tier, self._clock()
            if index == 0:
                self._mark_s = self._phase_since_s
            elif self._paced_copy is not None:
                self._paced_copy.enter(self._phase_since_s, index, tier)
                self._wake(self._paced_copy.wanted_priorities)
            return self._phase_since_s

    def lift(self, tier: Tier | None = None) -> None:
        """Makes all tasks of this snapshot due at once.

        Args:
            tier: the tier in which their bytes count; None counts them in the tier that training is
                in.
        """
        with self._lock:
            self._lifted = tier or self.tier
            if self._paced_copy is not None:
                self._paced_copy.lift(tier)
                self._wake(self._paced_copy.wanted_priorities)

    def open(self, paced_copy: PacedCopy) -> None:
        """Starts to hand out the tasks of a snapshot. Training may be well beyond the mark."""
        with self._lock:
            paced_copy.begin(self._mark_s)
            if self._index:
                paced_copy.enter(self._phase_since_s, self._index, self.tier)
            if self._lifted:
                paced_copy.lift(self._lifted)
            self._paced_copy = paced_copy

    def tasks(self, paced_copy: PacedCopy, priority: Priority, note: Note) -> Iterator[CopyTask]:
        """Yields the next tasks for the calling thread, each when it is due.

        Several threads may call.

        Args:
            priority: the priority of the calling thread.
            note: called after each task with the task, its begin and end, and whether training
                stayed in one phase.
        """
        while True:
            with self._lock:
                while (task := paced_copy.take(self._clock(), priority)) is None:
                    if paced_copy.is_done:
                        self._wake(Priority)
                        return
                    # For an idle thread nothing becomes due by time alone: `enter` wakes it.
                    is_idle = priority is Priority.IDLE
                    self._changed[priority].wait(
                        None if is_idle else max(paced_copy.due_s(self._clock()), SHORTEST_WAIT_S)
                    )
            task_began_s = self._clock()
            yield task
            note(task, task_began_s, self._clock(), self._phase_since_s <= task_began_s)

    def abandon(self, paced_copy: PacedCopy) -> None:
        """Drops the tasks of this snapshot that have not begun."""
        with self._lock:
            paced_copy.abandon()
            self._wake(Priority)

    def _wake(self, priorities: Iterable[Priority]) -> None:
        """Wakes only threads that may have a task now: each needless wake-up delays training."""
        for priority in priorities:
            self._changed[priority].notify_all()
