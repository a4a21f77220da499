"""Plans when each chunk is copied: in gaps first, then beside compute, the rest beside collectives.

    mark                                                                            fence
     │ gap │ forward forward │ gap │ backward │ gap │ backward │ all-reduce │ gap │   │ optimizer
     │▓▓▓ g│ ▒      ▒      ▒ │▓▓▓ g│ ▒     ▒  │     │ ▒      ▒ │ ░   ░   ░  │▓▓▓ g│   │ never
       1                         2                                3
     1 tier GAP: filled from its start, up to the guard time g before its end 2 tier COMPUTE: bytes
     that the gaps don't hold, spread evenly over all compute, like their memory traffic 3 tier
     COLLECTIVE: bytes that the others don't hold; only beside collectives on another wire

Invariants
  1. Each task has one place, or counts as left over. Then the optimizer waits for it, and the plan
     says how long.
  2. A window gets only the tasks that fit between its start and its end at its tier's rate. In a
     gap the guard time is left free.
  3. A tier is used only for tasks that do not fit into the tiers before it.
  4. Nothing begins or ends outside the windows. So nothing runs in the optimizer's step, beside
     transfers on the copy's own wire, or after the deadline. Parity needs computation: it lies in
     gaps or right at the mark, never in tiers 2 and 3.

Tasks keep their order, so a gap may stay partly free although a later task would fit. Times are
seconds from the mark.
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
AT_MARK = -1  # window number of parity that no gap holds
LEFT_OVER = -2  # window number of tasks that are not copied before the deadline
ROUNDING_S = 1e-9  # above the rounding error of sums of times, so that a task that fits exactly does fit


class Tier(IntEnum):
    """The device's work during a copy. Lower tiers are preferred."""

    GAP = 1
    COMPUTE = 2  # also any unknown phase
    COLLECTIVE = 3
    FENCE = 4  # the optimizer waits; a plan never puts a task here


class CopyWindow(NamedTuple):
    """A time in which copies may run."""

    tier: Tier
    start: float
    end: float


class CopyRates(NamedTuple):
    """Measured rates in bytes per second; 0 means that nothing is placed there.

    Attributes:
        gap: of copies in gaps.
        compute: of copies beside compute.
        collective: of copies beside collectives.
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
    """Splits the time from the mark to the deadline into windows.

    Args:
        gaps: idle times, in order, in seconds from the mark.
        deadline: the fence, in seconds from the mark.
        forbidden: when nothing may be copied: the optimizer's step, transfers over the copy's own
            wire.
        collectives: those over other wires, during which the device computes nothing else.

    Returns:
        Gaps, and between them collectives and compute, in order of time, without overlap, none in a
        forbidden time.
    """
    idle = [(gap.start, gap.end) for gap in gaps]
    cuts = sorted({0.0, deadline, *(t for pair in (*idle, *forbidden, *collectives) for t in pair if 0 < t < deadline)})
    inside = [_covered(intervals, cuts) for intervals in (forbidden, idle, collectives)]
    windows: list[CopyWindow] = []
    for start, end, is_forbidden, is_idle, is_collective in zip(cuts, cuts[1:], *inside, strict=False):
        if is_forbidden:
            continue
        tier = Tier.GAP if is_idle else Tier.COLLECTIVE if is_collective else Tier.COMPUTE
        if windows and windows[-1].tier == tier and windows[-1].end == start and tier is not Tier.GAP:
            windows[-1] = windows[-1]._replace(end=end)
        else:
            windows.append(CopyWindow(tier, start, end))
    return tuple(windows)


def _covered(intervals: Sequence[Interval], cuts: Sequence[float]) -> list[bool]:
    """Returns for each piece between two cuts whether it lies in one of the intervals."""
    change = dict.fromkeys(cuts, 0)
    for start, end in intervals:
        start, end = max(start, cuts[0]), min(end, cuts[-1])
        if start < end:
            change[start] += 1
            change[end] -= 1
    return [bool(depth) for depth in np.cumsum([change[t] for t in cuts[:-1]], dtype=int)]


@dataclass(frozen=True)
class TaskPlan:
    """The place of each task. Tasks are the chunks, in their order, then the parity tasks.

    Attributes:
        windows: the windows of the plan.
        window: int32, for each task the index of its window, AT_MARK, or LEFT_OVER.
        start: float64 seconds, when each task may begin; left-over tasks begin at the deadline.
    """

    windows: tuple[CopyWindow, ...]
    window: npt.NDArray[np.int32]
    start: Floats

    def tasks(self, window: int) -> Tasks:
        """Returns the tasks of a window, AT_MARK or LEFT_OVER; int64, in order of start."""
        tasks = np.flatnonzero(self.window == window)
        return tasks[np.argsort(self.start[tasks], kind="stable")]

    def bytes_by_tier(self, sizes: Sequence[int]) -> dict[Tier, int]:
        """Returns how many of the tasks' bytes each tier takes.

        Args:
            sizes: bytes of all tasks.
        """
        # The last two entries are for LEFT_OVER (-2), which waits for the fence, and AT_MARK (-1),
        # which is in no window.
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
    """Places all tasks; takes time linear in their number.

    Args:
        chunks: bytes of each chunk to copy.
        parity: bytes of each parity task's output.
        windows: from `windows`.
        rates: bytes per second of each tier.
        guard_s: kept free at the end of each gap, to cover estimation errors.
        deadline: the fence, in seconds from the mark.
    """
    placer = _TaskPlacer(
        tuple(windows), np.fromiter(chain(chunks, parity), np.float64, len(chunks) + len(parity)), deadline
    )
    gaps = [_FreeTime(i, w.start, w.end - guard_s) for i, w in enumerate(windows) if w.tier is Tier.GAP]
    computed = np.arange(len(chunks), len(chunks) + len(parity))
    at_mark = placer.greedily(computed, gaps, rates.parity)
    left = placer.greedily(np.arange(len(chunks)), gaps, rates.gap)
    for tier in (Tier.COMPUTE, Tier.COLLECTIVE):
        free_times = [_FreeTime(i, w.start, w.end) for i, w in enumerate(windows) if w.tier is tier]
        left = placer.evenly(left, free_times, rates.of(tier))
    return placer.result(at_mark)


@dataclass
class _FreeTime:
    """The free part of a window."""

    window: int
    start: float
    end: float


@dataclass
class _TaskPlacer:
    """Places tasks, tier by tier."""

    windows: tuple[CopyWindow, ...]
    sizes: Floats
    deadline: float

    def __post_init__(self) -> None:
        self.window = np.full(len(self.sizes), LEFT_OVER, np.int32)
        self.start = np.full(len(self.sizes), self.deadline)

    def greedily(self, tasks: Tasks, free_times: Sequence[_FreeTime], rate: float) -> Tasks:
        """Fills each free time from its start; returns the tasks that fit into none."""
        for free_time, taken, seconds in self._fit(tasks, free_times, rate, None):
            self.window[taken] = free_time.window
            self.start[taken] = free_time.start + _sums_before(seconds)
            free_time.start = float(self.start[taken[-1]] + seconds[-1])
        left: Tasks = tasks[self.window[tasks] == LEFT_OVER]
        return left

    def evenly(self, tasks: Tasks, free_times: Sequence[_FreeTime], rate: float) -> Tasks:
        """Spreads the tasks over the free times in proportion to their length; returns the rest.

        If not all tasks fit this way, fills the free times greedily.
        """
        durations = np.cumsum([max(free_time.end - free_time.start, 0.0) for free_time in free_times])
        if not len(tasks) or not len(durations) or durations[-1] <= 0:
            return tasks
        targets = durations / durations[-1]
        placements = list(self._fit(tasks, free_times, rate, targets))
        if sum(len(taken) for _, taken, _ in placements) < len(tasks):
            return self.greedily(tasks, free_times, rate)
        for free_time, taken, seconds in placements:
            pause = (free_time.end - free_time.start - float(np.sum(seconds))) / len(taken)
            self.window[taken] = free_time.window
            self.start[taken] = free_time.start + _sums_before(seconds + pause)
        return tasks[:0]

    def _fit(
        self, tasks: Tasks, free_times: Sequence[_FreeTime], rate: float, targets: Floats | None
    ) -> Iterator[tuple[_FreeTime, Tasks, Floats]]:
        """Yields for each free time its tasks, and the seconds that each takes.

        Args:
            tasks: the tasks to place.
            free_times: in order of time.
            rate: bytes per second.
            targets: for each free time, the fraction of all bytes that may begin in the free times
                up to it; None means all.
        """
        most = max((free_time.end - free_time.start for free_time in free_times), default=0.0)
        seconds = self.sizes[tasks] / rate if rate > 0 else np.full(len(tasks), np.inf)
        fits = seconds <= most + ROUNDING_S  # a task that fits nowhere would block all tasks behind it
        tasks, seconds = tasks[fits], seconds[fits]
        ends = np.cumsum(seconds)
        at = 0
        for i, free_time in enumerate(free_times):
            if at == len(tasks):
                return
            begun = float(ends[at - 1]) if at else 0.0
            stop = int(np.searchsorted(ends, begun + free_time.end - free_time.start + ROUNDING_S, side="right"))
            if targets is not None:  # at least the task that begins before the target
                stop = min(stop, 1 + int(np.searchsorted(ends, targets[i] * ends[-1], side="left")))
            if stop > at:
                yield free_time, tasks[at:stop], seconds[at:stop]
                at = stop

    def result(self, at_mark: Tasks) -> TaskPlan:
        self.window[at_mark], self.start[at_mark] = AT_MARK, 0.0
        return TaskPlan(self.windows, self.window, self.start)


def _sums_before(seconds: Floats) -> Floats:
    """Returns for each duration the sum of the durations before it."""
    return np.concatenate(([0.0], np.cumsum(seconds)[:-1]))
