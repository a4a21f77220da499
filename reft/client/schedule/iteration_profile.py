"""Profile of an iteration: the phases of a window, their durations, and the pacing plan.

    mark ─► phase 0 │ 1 │ 2 │ 3 … ─► fence      reported by schedule hooks and session.idle()
              │          │
              │          └► copy engine: phase 2 begins, which is a gap: chunks may be copied
              └► next mark: durations ─► expected phases ─► pacing plan of the next snapshot
                                     │                      (core/pipeline/course.py)
                                     └► profile of gaps ─► error of the schedule's closed form
                                        (core/pipeline/profile.py)

The trainer's thread makes all calls, and never waits. Durations are measured on the device: the
engine stamps the beginning of each phase with a time (CPU) or an event (CUDA), and returns the
times once the device has passed the stamps. There is no pacing plan until two windows had the same
phases, nor if no gap was reported. Without a pacing plan copies start at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from reft.client.snapshot.engine import CopyEngine
from reft.client.snapshot.timeline import STEPS, TRAINING, TimelineEvent
from reft.core.pipeline import bubbles, profile
from reft.core.pipeline.actions import ActionKind, Times
from reft.core.pipeline.bubbles import Gap
from reft.core.pipeline.course import PacingPlan, PhaseDurations
from reft.core.pipeline.pacing import Tier
from reft.core.pipeline.profile import GapComparison, StageProfile

GUARD_S = 300e-6
PENDING_MAX = 4  # windows whose times are not known yet
OTHER = "other"  # name of a phase between actions of the schedule
WAIT = "wait"  # name of a wait for a collective, outside of the schedule's actions
Closed = Callable[[Times], Sequence[Gap]]


@dataclass
class _Window:
    """The phases between a mark and the next fence.

    Attributes:
        step: the step that the mark ended.
        tiers, names: tier and name of each phase.
        kinds: kind of action of each phase; None for a phase outside of the schedule's actions.
        stamps: stamp of the beginning of each phase; after the fence one more, for the end.
    """

    step: int
    tiers: list[Tier] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    kinds: list[ActionKind | None] = field(default_factory=list)
    stamps: list[Any] = field(default_factory=list)


class IterationProfiler:
    """Measures the phases of each window, and plans the copies of the next one.

    Args:
        copy_engine: the copy engine; it also measures the times.
        closed: returns the gaps of the schedule by closed form; None if there is no closed form.

    Attributes:
        profile: the measured actions and gaps.
        keeps_host_time: whether the device's time is the host's time, as on the CPU.
    """

    def __init__(self, copy_engine: CopyEngine, closed: Closed | None = None) -> None:
        self.profile = StageProfile()
        self.keeps_host_time = copy_engine.keeps_host_time
        self._copy_engine = copy_engine
        self._closed = closed
        self._durations = PhaseDurations()
        self._window: _Window | None = None
        self._pending: deque[_Window] = deque(maxlen=PENDING_MAX)
        self._action_count = 0  # actions of the schedule in each window of the profile
        self._stages_meet = False  # whether the stages wait for each other between schedule and fence

    @property
    def name(self) -> str:
        """The name of the current phase; empty between fence and mark."""
        return self._window.names[-1] if self._window else ""

    def mark(self, step: int) -> PacingPlan | None:
        """Ends `step`, begins the next window, and returns the pacing plan for its snapshot."""
        self.fence()
        self._window = _Window(step)
        self.enter(Tier.COMPUTE, OTHER)
        while self._pending and self._learn(self._pending[0]):
            self._pending.popleft()
        return self._pacing_plan()

    def enter(self, tier: Tier, name: str, kind: ActionKind | None = None) -> None:
        """Begins a phase.

        Args:
            tier: tier of the copies in this phase.
            name: name of the phase.
            kind: kind of action; None for a phase outside of the schedule's actions.
        """
        window = self._window
        if window is None or self._copy_engine.is_capturing():
            return
        stamp = self._copy_engine.enter(len(window.tiers), tier)
        window.tiers.append(tier)
        window.names.append(name)
        window.kinds.append(kind)
        window.stamps.append(stamp)

    def fence(self) -> None:
        """Ends the window, because the state is about to change."""
        if self._window is not None:
            self._window.stamps.append(self._copy_engine.stamp())
            self._pending.append(self._window)
            self._window = None

    def comparison(self) -> GapComparison | None:
        """Compares the gaps by closed form with the measured gaps.

        None if there is no closed form, or too few measurements.
        """
        times = self.profile.times()
        if self._closed is None or times is None:
            return None
        expected = tuple(self._closed(times))
        if not self._stages_meet:
            expected = bubbles.steady(expected, self._action_count)
        places = {gap.place for gap in expected}
        return profile.compare(expected, [gap for gap in self.profile.gaps() if gap.place in places])

    def gaps(self) -> list[dict[str, float]]:
        """Returns the expected and the measured gaps, in JSON types. Any thread may call it."""
        comparison = self.comparison()
        return [
            {"place": place, "foreseen_ms": 1000 * expected_s, "measured_ms": 1000 * measured_s}
            for place, expected_s, measured_s in (comparison.differences if comparison else ())
        ]

    def _learn(self, window: _Window) -> bool:
        """Adds a window's durations to the profile.

        Returns:
            False if the device has not finished the window yet.
        """
        times = self._copy_engine.times(window.stamps)
        if times is None:
            return False
        self._durations.observe(window.tiers, [end - begin for begin, end in pairwise(times)])
        self._observe_actions(window, times)
        timeline = self._copy_engine.copy_stats.timeline
        timeline.add(TimelineEvent(STEPS, f"after step {window.step}", times[0], times[-1]))
        for name, tier, (begin, end) in zip(window.names, window.tiers, pairwise(times), strict=True):
            timeline.add(TimelineEvent(TRAINING, name, begin, end, None if tier is Tier.COMPUTE else tier))
        return True

    def _observe_actions(self, window: _Window, times: Sequence[float]) -> None:
        """Adds the schedule's actions, and the gaps before and after them, to the profile."""
        works = sum(kind is not None for kind in window.kinds)
        if not works:
            return
        if works != self._action_count:
            self._action_count, self.profile = works, StageProfile()
        idle, starts = [0.0] * (works + 1), [times[0]] * (works + 1)
        place, self._stages_meet = 0, False
        for kind, tier, (begin, end) in zip(window.kinds, window.tiers, pairwise(times), strict=True):
            if kind is not None:
                self.profile.observe_action(kind, end - begin)
                place += 1
                starts[place] = end
            elif tier in (Tier.GAP, Tier.COLLECTIVE):
                idle[place] += end - begin
        for place, (start, seconds) in enumerate(zip(starts, idle, strict=True)):
            self.profile.observe(place, start - times[0], start - times[0] + seconds)
        self._stages_meet = WAIT in window.names or "idle" in window.names

    def _pacing_plan(self) -> PacingPlan | None:
        phases = self._durations.phases()
        if all(phase.tier is Tier.COMPUTE for phase in phases):
            return None
        copy_stats = self._copy_engine.copy_stats
        rates = copy_stats.rate(Tier.GAP), copy_stats.rate(Tier.COMPUTE)
        return PacingPlan(phases, *rates, GUARD_S) if min(rates) > 0 else None
