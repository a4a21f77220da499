"""Where the CPU engine's threads wait until the course lets the next task through (reft.core.pipeline.course).

    trainer's thread   mark ─► enter(0), begin    hooks ─► enter(stretch)    fence ─► lift
    busy threads       open(passage) ─► task ─ …waits… ─► task ─► … ─► none left      beside training, and once lifted
    idle threads       ─ …waits… ─► task ─► task ─ …waits… ─► task ─► … ─► none left      in gaps

The host's time is the device's here, so a gap that ends is seen at once: what stops copying is that the next task is not
let through. The one under way goes on; in a gap it is a thread's that gives way to all others (client/memory/threads.py).
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
    """See the module. One snapshot at a time; the trainer's thread never waits here for longer than a few instructions.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = {hands: threading.Condition(self._lock) for hands in Priority}
        self._paced_copy: PacedCopy | None = None
        self._began_s = self._since_s = clock()
        self._index = 0
        self._lifted: Tier | None = None  # lifted since the mark, and for what
        self.tier = Tier.COMPUTE  # what training does now

    def begin(self) -> None:
        """A snapshot begins; the one before has passed its fence."""
        with self._lock:
            self._paced_copy, self._lifted = None, None

    def enter(self, index: int, tier: Tier) -> float:
        """Training enters a stretch; number 0 begins at the mark. The time of it."""
        with self._lock:
            self._index, self.tier, self._since_s = index, tier, self._clock()
            if index == 0:
                self._began_s = self._since_s
            elif self._paced_copy is not None:
                self._paced_copy.enter(self._since_s, index, tier)
                self._wake(self._paced_copy.wanted)
            return self._since_s

    def lift(self, tier: Tier | None = None) -> None:
        """Lets everything of this snapshot go at once.

        Args:
            tier: what it counts as; None for whatever training does meanwhile.
        """
        with self._lock:
            self._lifted = tier or self.tier
            if self._paced_copy is not None:
                self._paced_copy.lift(tier)
                self._wake(self._paced_copy.wanted)

    def open(self, paced_copy: PacedCopy) -> None:
        """A snapshot begins to be copied; training may be well beyond the mark already."""
        with self._lock:
            paced_copy.begin(self._began_s)
            if self._index:
                paced_copy.enter(self._since_s, self._index, self.tier)
            if self._lifted:
                paced_copy.lift(self._lifted)
            self._paced_copy = paced_copy

    def tasks(self, paced_copy: PacedCopy, hands: Priority, note: Note) -> Iterator[CopyTask]:
        """What the calling thread is to do, one after the other, each when it is due; several threads may ask.

        Args:
            hands: the calling thread's.
            note: told of each task when it is done: from when to when, and whether training did one thing meanwhile.
        """
        while True:
            with self._lock:
                while (task := paced_copy.take(self._clock(), hands)) is None:
                    if paced_copy.is_done:
                        self._wake(Priority)
                        return
                    # Time alone brings nothing for idle hands.
                    is_idle = hands is Priority.IDLE
                    self._changed[hands].wait(
                        None if is_idle else max(paced_copy.due_s(self._clock()), SHORTEST_WAIT_S)
                    )
            began_s = self._clock()
            yield task
            note(task, began_s, self._clock(), self._since_s <= began_s)

    def abandon(self, paced_copy: PacedCopy) -> None:
        """Nothing more of this snapshot is to be copied."""
        with self._lock:
            paced_copy.abandon()
            self._wake(Priority)

    def _wake(self, wanted: Iterable[Priority]) -> None:
        """Not those who have nothing to do now: who wakes up for nothing delays training."""
        for hands in wanted:
            self._changed[hands].notify_all()
