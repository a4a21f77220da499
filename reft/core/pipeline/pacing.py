"""When each chunk of a snapshot is copied: in the idle times first, what is left beside compute, the rest beside collectives.

    mark                                                                            fence      optimizer
     │ gap │ forward forward │ gap │ backward │ gap │ backward │ all-reduce │ gap │   │
     │▓▓▓ g│ ▒      ▒      ▒ │▓▓▓ g│ ▒     ▒  │     │ ▒      ▒ │ ░   ░   ░  │▓▓▓ g│   │ never
       1                         2                                3
     1 tier GAP: filled from its start, never beyond its end less the guard time g
     2 tier COMPUTE: what the gaps don't hold, spread evenly, so that memory bandwidth is taken from all of it alike
     3 tier COLLECTIVE: only beside collectives that don't use the copy's wire; what neither of the others holds

Invariants
  1. Each task has one place, or is counted as left over: then the optimizer waits for it, and the plan says how long.
  2. No window is given more than fits between its start and its end (less the guard in a gap) at its tier's rate.
  3. A tier is used only for what does not fit into the tiers before it.
  4. Nothing begins or ends outside the windows: not in the optimizer's step, not beside what uses the copy's wire, not
     after the deadline. Parity, which computes, lies in gaps, or right at the mark; never in tiers 2 and 3.

A gap may keep room for less than its next task, since tasks keep their order. Times are seconds from the mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reft.core.pipeline.bubbles import Gap

Floats = npt.NDArray[np.float64]
Tasks = npt.NDArray[np.intp]  # their numbers
Interval = tuple[float, float]  # start, end
AT_MARK = -1  # the window of parity that no gap holds
LEFT_OVER = -2  # the window of what is not copied before the deadline
ROUNDING_S = 1e-9  # sums of times are off by less; what fits exactly should fit


class Tier(IntEnum):
    """What the device does meanwhile; lower ones are preferred."""

    GAP = 1
    COMPUTE = 2  # or what nobody told
    COLLECTIVE = 3
    FENCE = 4  # the optimizer waits: no place that a plan gives


class CopyWindow(NamedTuple):
    """A time in which copies may run."""

    tier: Tier
    start: float
    end: float


class CopyRates(NamedTuple):
    """Measured bytes per second; 0 means that nothing is placed there.

    Attributes:
        gap, compute, collective: of copies, beside what each tier runs.
        parity: of parity written, its computation included.
    """

    gap: float
    compute: float
    collective: float
    parity: float

    def of(self, tier: Tier) -> float:
        return (self.gap, self.compute, self.collective)[tier - 1]


def windows(
    gaps: Iterable[Gap], deadline: float, *, forbidden: Sequence[Interval] = (), collectives: Sequence[Interval] = ()
) -> tuple[CopyWindow, ...]:
    """Cuts the time from the mark to the deadline.

    Args:
        gaps: idle times, in order, in seconds from the mark.
        forbidden: when nothing may be copied: the optimizer's step, transfers over the copy's own wire.
        collectives: those over other wires, where the device computes nothing else.

    Returns:
        Gaps, and around them collectives and compute, in order of time, without overlap, none in a forbidden time.
    """
    idle = [(gap.start, gap.end) for gap in gaps]
    cuts = sorted({0.0, deadline, *(t for pair in (*idle, *forbidden, *collectives) for t in pair if 0 < t < deadline)})
    inside = [_covered(intervals, cuts) for intervals in (forbidden, idle, collectives)]
    found: list[CopyWindow] = []
    for start, end, is_forbidden, is_idle, is_collective in zip(cuts, cuts[1:], *inside, strict=False):
        if is_forbidden:
            continue
        tier = Tier.GAP if is_idle else Tier.COLLECTIVE if is_collective else Tier.COMPUTE
        if found and found[-1].tier == tier and found[-1].end == start and tier is not Tier.GAP:
            found[-1] = found[-1]._replace(end=end)
        else:
            found.append(CopyWindow(tier, start, end))
    return tuple(found)


def _covered(intervals: Sequence[Interval], cuts: Sequence[float]) -> list[bool]:
    """For each piece between two cuts, whether it lies in one of the intervals."""
    change = dict.fromkeys(cuts, 0)
    for start, end in intervals:
        start, end = max(start, cuts[0]), min(end, cuts[-1])
        if start < end:
            change[start] += 1
            change[end] -= 1
    return [bool(depth) for depth in np.cumsum([change[t] for t in cuts[:-1]], dtype=int)]


@dataclass(frozen=True)
class TaskPlan:
    """Where each task goes. Tasks are the chunks, in their order, then the parity tasks.

    Attributes:
        windows: as they were given.
        window: int32, for each task the index of its window, AT_MARK, or LEFT_OVER.
        start: float64 seconds, when each task may begin; what is left over begins at the deadline.
    """

    windows: tuple[CopyWindow, ...]
    window: npt.NDArray[np.int32]
    start: Floats

    def tasks(self, window: int) -> Tasks:
        """The tasks of a window (or AT_MARK, or LEFT_OVER), int64, in order of their start."""
        found = np.flatnonzero(self.window == window)
        return found[np.argsort(self.start[found], kind="stable")]

    def bytes_by_tier(self, sizes: Sequence[int]) -> dict[Tier, int]:
        """How many of the tasks' bytes each tier takes.

        Args:
            sizes: of all tasks.
        """
        # The last two places: what is left over waits for the fence, what goes at the mark is in no window.
        tiers = np.array([window.tier for window in self.windows] + [Tier.FENCE, 0])[self.window]
        return {tier: int(np.sum(np.asarray(sizes, np.int64)[tiers == tier])) for tier in Tier}


def plan(
    chunks: Sequence[int],
    parity: Sequence[int],
    windows: Sequence[CopyWindow],
    rates: CopyRates,
    guard_s: float,
    deadline: float,
) -> TaskPlan:
    """Places all tasks; linear in their number.

    Args:
        chunks: bytes of each chunk to copy.
        parity: bytes of each parity task's output.
        windows: see `windows`.
        guard_s: kept free at the end of each gap, for what was estimated wrongly.
        deadline: the fence, in seconds from the mark.
    """
    filling = _Filling(
        tuple(windows), np.fromiter(chain(chunks, parity), np.float64, len(chunks) + len(parity)), deadline
    )
    gaps = [_Room(i, w.start, w.end - guard_s) for i, w in enumerate(windows) if w.tier is Tier.GAP]
    computed = np.arange(len(chunks), len(chunks) + len(parity))
    at_mark = filling.greedily(computed, gaps, rates.parity)
    left = filling.greedily(np.arange(len(chunks)), gaps, rates.gap)
    for tier in (Tier.COMPUTE, Tier.COLLECTIVE):
        rooms = [_Room(i, w.start, w.end) for i, w in enumerate(windows) if w.tier is tier]
        left = filling.evenly(left, rooms, rates.of(tier))
    return filling.result(at_mark)


@dataclass
class _Room:
    """What of a window is still free."""

    window: int
    start: float
    end: float


@dataclass
class _Filling:
    """Places tasks, tier by tier."""

    windows: tuple[CopyWindow, ...]
    sizes: Floats
    deadline: float

    def __post_init__(self) -> None:
        self.window = np.full(len(self.sizes), LEFT_OVER, np.int32)
        self.start = np.full(len(self.sizes), self.deadline)

    def greedily(self, tasks: Tasks, rooms: Sequence[_Room], rate: float) -> Tasks:
        """Fills each room from its start; the tasks that none holds."""
        for room, taken, seconds in self._taken(tasks, rooms, rate, None):
            self.window[taken] = room.window
            self.start[taken] = room.start + _before(seconds)
            room.start = float(self.start[taken[-1]] + seconds[-1])
        left: Tasks = tasks[self.window[tasks] == LEFT_OVER]
        return left

    def evenly(self, tasks: Tasks, rooms: Sequence[_Room], rate: float) -> Tasks:
        """Spreads the tasks over the rooms, in proportion to their length; greedily if they fit no other way."""
        durations = np.cumsum([max(room.end - room.start, 0.0) for room in rooms])
        if not len(tasks) or not len(durations) or durations[-1] <= 0:
            return tasks
        targets = durations / durations[-1]
        found = list(self._taken(tasks, rooms, rate, targets))
        if sum(len(taken) for _, taken, _ in found) < len(tasks):
            return self.greedily(tasks, rooms, rate)
        for room, taken, seconds in found:
            pause = (room.end - room.start - float(np.sum(seconds))) / len(taken)
            self.window[taken] = room.window
            self.start[taken] = room.start + _before(seconds + pause)
        return tasks[:0]

    def _taken(
        self, tasks: Tasks, rooms: Sequence[_Room], rate: float, targets: Floats | None
    ) -> Iterator[tuple[_Room, Tasks, Floats]]:
        """For each room the tasks that it holds, and the seconds that each takes.

        Args:
            targets: for each room, which share of all bytes may begin in the rooms up to it; None means all.
        """
        most = max((room.end - room.start for room in rooms), default=0.0)
        seconds = self.sizes[tasks] / rate if rate > 0 else np.full(len(tasks), np.inf)
        fits = seconds <= most + ROUNDING_S  # the others would keep the rooms closed to those behind them
        tasks, seconds = tasks[fits], seconds[fits]
        ends = np.cumsum(seconds)
        at = 0
        for i, room in enumerate(rooms):
            if at == len(tasks):
                return
            begun = float(ends[at - 1]) if at else 0.0
            stop = int(np.searchsorted(ends, begun + room.end - room.start + ROUNDING_S, side="right"))
            if targets is not None:  # at least the task that begins before the target
                stop = min(stop, 1 + int(np.searchsorted(ends, targets[i] * ends[-1], side="left")))
            if stop > at:
                yield room, tasks[at:stop], seconds[at:stop]
                at = stop

    def result(self, at_mark: Tasks) -> TaskPlan:
        self.window[at_mark], self.start[at_mark] = AT_MARK, 0.0
        return TaskPlan(self.windows, self.window, self.start)


def _before(seconds: Floats) -> Floats:
    """What lies before each of a row of times."""
    return np.concatenate(([0.0], np.cumsum(seconds)[:-1]))
