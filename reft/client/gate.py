"""Where the CPU engine's threads wait until the course lets the next task through (reft.core.course).

    trainer's thread   mark ─► enter(0), begin    hooks ─► enter(stretch)    fence ─► lift
    copy threads       open(passage) ─► task ─► task ─ …waits… ─► task ─► … ─► none left

The host's time is the device's here, so a gap that ends is seen at once: what stops copying is that the next task is not
let through, at most one task of each thread later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from reft.core.course import Passage, Task
from reft.core.pacing import Tier

SHORTEST_WAIT_S = 100e-6  # what a thread needs to wake up anyway


class Gate:
    """See the module. One snapshot at a time; the trainer's thread never waits here for longer than a few instructions.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._passage: Passage | None = None
        self._began_s = self._since_s = clock()
        self._index = 0
        self._lifted: Tier | None = None  # lifted since the mark, and for what
        self.tier = Tier.COMPUTE  # what training does now

    def begin(self) -> None:
        """A snapshot begins; the one before has passed its fence."""
        with self._changed:
            self._passage, self._lifted = None, None

    def enter(self, index: int, tier: Tier) -> float:
        """Training enters a stretch; number 0 begins at the mark. The time of it."""
        with self._changed:
            self._index, self.tier, self._since_s = index, tier, self._clock()
            if index == 0:
                self._began_s = self._since_s
            elif self._passage is not None:
                self._passage.enter(self._since_s, index, tier)
                self._changed.notify_all()
            return self._since_s

    def lift(self, tier: Tier | None = None) -> None:
        """Lets everything of this snapshot go at once.

        Args:
            tier: what it counts as; None for whatever training does meanwhile.
        """
        with self._changed:
            self._lifted = tier or self.tier
            if self._passage is not None:
                self._passage.lift(tier)
                self._changed.notify_all()

    def open(self, passage: Passage) -> None:
        """A snapshot begins to be copied; training may be well beyond the mark already."""
        with self._changed:
            passage.begin(self._began_s)
            if self._index:
                passage.enter(self._since_s, self._index, self.tier)
            if self._lifted:
                passage.lift(self._lifted)
            self._passage = passage

    def tasks(self, passage: Passage, note: Callable[[Task, float, float], None]) -> Iterator[Task]:
        """What the calling thread is to do, one after the other, each when it is due; several threads may ask.

        Args:
            note: told of each task when it is done: from when to when.
        """
        while True:
            with self._changed:
                while (task := passage.take(self._clock())) is None:
                    if passage.is_done:
                        return
                    self._changed.wait(max(passage.due_s(self._clock()), SHORTEST_WAIT_S))
            began_s = self._clock()
            yield task
            note(task, began_s, self._clock())
