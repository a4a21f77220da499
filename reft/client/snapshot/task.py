"""One snapshot of one rank, as an object with a state.

    OPENING ── a slot ──► COPYING ── all bytes ──► LANDED ── digests ──► SEALED
       │                     │                        │
       └─────────────────────┴──────── a reason ──────┴────────────────► VOID

OPENING   the state is as at the mark; the snapshot has no slot yet.
COPYING   a slot is WRITING; copies read the live state until the fence at the latest.
LANDED    the slot has all bytes and the capsule; no copy reads the live state any more.
SEALED    the slot has its digests, and the daemon was told.
VOID      this rank has no snapshot of the step; the daemon was told the reason.

The trainer's thread makes the task. Once it has handed the task over, the snapshot thread alone
moves it. No other snapshot gets the slot before the task is SEALED or VOID. A task moves along the
arrows only; any other move is a fault of reft, and the error tells the task's story.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum, auto
from typing import Any, NamedTuple

from reft.client.snapshot.turn_meter import TurnMeter
from reft.errors import ReftError

EVENTS_MAX = 20  # the newest events of a task
TASKS_MAX = 64  # the newest tasks of a session


class SnapshotState(Enum):
    """Where a snapshot stands; see the module."""

    OPENING = auto()
    COPYING = auto()
    LANDED = auto()
    SEALED = auto()
    VOID = auto()


MOVES = {
    SnapshotState.OPENING: (SnapshotState.COPYING, SnapshotState.VOID),
    SnapshotState.COPYING: (SnapshotState.LANDED, SnapshotState.VOID),
    SnapshotState.LANDED: (SnapshotState.SEALED, SnapshotState.VOID),
    SnapshotState.SEALED: (),
    SnapshotState.VOID: (),
}


class InvalidMove(ReftError):
    """A snapshot was to make a move that its state does not allow: a fault of reft."""


class TaskEvent(NamedTuple):
    """Something that happened to a snapshot, at a time of `time.perf_counter`."""

    at_s: float
    text: str


class SnapshotTask:
    """One snapshot; see the module.

    Args:
        step: the step.
        now_s: the time of the mark, in seconds of `time.perf_counter`; so are all other times.

    Attributes:
        slot: index of the slot; -1 before there is one.
        reason: why the snapshot is VOID.
        events: the last EVENTS_MAX events.
    """

    def __init__(self, step: int, now_s: float) -> None:
        self.step = step
        self.state = SnapshotState.OPENING
        self.slot = -1
        self.reason = ""
        self.events: deque[TaskEvent] = deque([TaskEvent(now_s, "OPENING")], maxlen=EVENTS_MAX)

    @property
    def is_over(self) -> bool:
        """Whether the snapshot is SEALED or VOID."""
        return not MOVES[self.state]

    def note(self, now_s: float, text: str) -> None:
        """Adds an event without a move."""
        self.events.append(TaskEvent(now_s, text))

    def copying(self, now_s: float, slot: int) -> None:
        """Moves to COPYING, into this slot."""
        self.slot = slot
        self._move(SnapshotState.COPYING, now_s, f"COPYING into slot {slot}")

    def landed(self, now_s: float) -> None:
        """Moves to LANDED."""
        self._move(SnapshotState.LANDED, now_s, "LANDED")

    def sealed(self, now_s: float) -> None:
        """Moves to SEALED."""
        self._move(SnapshotState.SEALED, now_s, "SEALED")

    def void(self, now_s: float, reason: str) -> None:
        """Moves to VOID, for this reason."""
        self._move(SnapshotState.VOID, now_s, "VOID")
        self.reason = reason

    def _move(self, state: SnapshotState, now_s: float, text: str) -> None:
        if state not in MOVES[self.state]:
            raise InvalidMove(f"a snapshot can't go from {self.state.name} to {state.name}: {self.story()}.")
        self.state = state
        self.note(now_s, text)

    def story(self) -> str:
        """Returns the events in one line, with their times since the first one in milliseconds."""
        events = tuple(self.events)  # the snapshot thread adds some meanwhile
        times = (f"{event.text} +{1000 * (event.at_s - events[0].at_s):.1f} ms" for event in events)
        return f"step {self.step}: {', '.join(times)}"

    def facts(self) -> dict[str, Any]:
        """Returns the task in JSON types, for a trace."""
        return {
            "step": self.step, "state": self.state.name, "slot": self.slot, "reason": self.reason, "story": self.story(),
        }  # fmt: skip


class SnapshotHistory:
    """The newest tasks of a session, and the sums over all of them. Any thread may call.

    Attributes:
        sealed: how many snapshots were sealed.
        skipped: how many are VOID.
        sealed_step: the newest sealed step; -1 if there is none.
        mark_s: seconds for which marks held up training.
        turn_meter: how long turns of the exchange last.
    """

    def __init__(self) -> None:
        self._tasks: deque[SnapshotTask] = deque(maxlen=TASKS_MAX)
        self._running: list[SnapshotTask] = []  # also those that `_tasks` has forgotten
        self._lock = threading.Lock()
        self.sealed = self.skipped = 0
        self.sealed_step = -1
        self.mark_s = 0.0
        self.turn_meter = TurnMeter()

    def begin(self, step: int, now_s: float) -> SnapshotTask:
        """Returns a new task, and forgets the oldest one if there are TASKS_MAX."""
        task = SnapshotTask(step, now_s)
        with self._lock:
            self._tasks.append(task)
            self._running.append(task)
        return task

    def ended(self, task: SnapshotTask) -> None:
        """Adds a task that is over to the sums."""
        with self._lock:
            self._running.remove(task)
            if task.state is SnapshotState.SEALED:
                self.sealed += 1
                self.sealed_step = task.step
            else:
                self.skipped += 1

    def busy_slots(self) -> set[int]:
        """Returns the indexes of the slots that a snapshot is being written to."""
        with self._lock:
            return {task.slot for task in self._running}

    def tasks(self) -> list[SnapshotTask]:
        """Returns the newest tasks, oldest first."""
        return list(self._tasks)
