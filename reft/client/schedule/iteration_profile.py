"""The rhythm of training: which stretches a window has, how long each lasts, and so where the next snapshot's bytes go.

    mark ─► stretch 0 │ 1 │ 2 │ 3 … ─► fence      told by hooks of the schedule (hooks) and by session.idle()
              │          │
              │          └► engine: enters stretch 2, which is a gap: chunks may go
              └► next mark: lengths ─► what to expect ─► course of the next snapshot (core/pipeline/course.py)
                                    └► profile of gaps (core/pipeline/profile.py) ─► how far the closed form was off

The trainer's thread calls, and waits for nothing. Lengths are the device's: the engine stamps the beginning of each stretch
with a time (CPU) or an event (CUDA) and tells what lay between when the device has passed. Until two windows had the same
stretches there is no course, and copies go at once; likewise if nobody told of a gap.
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
from reft.core.pipeline.actions import ActionKind, ActionTimes
from reft.core.pipeline.bubbles import Gap
from reft.core.pipeline.course import PacingPlan, PhaseDurations
from reft.core.pipeline.pacing import Tier
from reft.core.pipeline.profile import GapComparison, StageProfile

GUARD_S = 300e-6
PENDING_MAX = 4  # windows whose lengths the device has not told yet
OTHER = "other"
WAIT = "wait"  # for a collective, outside of the schedule's work
Closed = Callable[[ActionTimes], Sequence[Gap]]


@dataclass
class _Window:
    """What was told between a mark and the next fence."""

    step: int
    tiers: list[Tier] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    kinds: list[ActionKind | None] = field(default_factory=list)  # of the schedule's work
    stamps: list[Any] = field(default_factory=list)  # one more than the others once it is over


class IterationProfiler:
    """See the module.

    Args:
        copy_engine: the engine; it also keeps the time.
        closed: the idle times that the schedule should have, if somebody knows.
    """

    def __init__(self, copy_engine: CopyEngine, closed: Closed | None = None) -> None:
        self.profile = StageProfile()
        self.keeps_host_time = copy_engine.keeps_host_time
        self._copy_engine = copy_engine
        self._closed = closed
        self._lengths = PhaseDurations()
        self._window: _Window | None = None
        self._pending: deque[_Window] = deque(maxlen=PENDING_MAX)
        self._works = 0  # pieces of the schedule's work in each window of the profile
        self._meets = False  # whether the stages wait for one another between the schedule and the fence

    @property
    def name(self) -> str:
        """Of the stretch that training is in; empty between fence and mark."""
        return self._window.names[-1] if self._window else ""

    def mark(self, step: int) -> PacingPlan | None:
        """The end of step `step`, and the beginning of the next window; the course that its snapshot is to take."""
        self.fence()
        self._window = _Window(step)
        self.enter(Tier.COMPUTE, OTHER)
        while self._pending and self._learn(self._pending[0]):
            self._pending.popleft()
        return self._pacing_plan()

    def enter(self, tier: Tier, name: str, kind: ActionKind | None = None) -> None:
        """A stretch begins here: what training does from now on.

        Args:
            kind: if it is a piece of the schedule's work.
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
        """The window ends: something is about to write the state."""
        if self._window is not None:
            self._window.stamps.append(self._copy_engine.stamp())
            self._pending.append(self._window)
            self._window = None

    def comparison(self) -> GapComparison | None:
        """How far the schedule's closed form is off what was measured; None if there is none, or too little was measured."""
        times = self.profile.times()
        if self._closed is None or times is None:
            return None
        foreseen = tuple(self._closed(times))
        if not self._meets:
            foreseen = bubbles.steady(foreseen, self._works)
        places = {gap.place for gap in foreseen}
        return profile.compare(foreseen, [gap for gap in self.profile.gaps() if gap.place in places])

    def trace(self, rank: int) -> dict[str, Any]:
        """The timeline, and the gaps as they were foreseen and measured. Any thread may ask."""
        comparison = self.comparison()
        gaps = [
            {"place": place, "foreseen_ms": 1000 * foreseen, "measured_ms": 1000 * measured}
            for place, foreseen, measured in (comparison.differences if comparison else ())
        ]
        return {**self._copy_engine.copy_stats.timeline.chrome(rank), "otherData": {"gaps": gaps}}

    def _learn(self, window: _Window) -> bool:
        """Takes a window's lengths into account; False if the device has not been through it yet."""
        times = self._copy_engine.times(window.stamps)
        if times is None:
            return False
        self._lengths.observe(window.tiers, [end - begin for begin, end in pairwise(times)])
        self._observe_work(window, times)
        timeline = self._copy_engine.copy_stats.timeline
        timeline.add(TimelineEvent(STEPS, f"after step {window.step}", times[0], times[-1]))
        for name, tier, (begin, end) in zip(window.names, window.tiers, pairwise(times), strict=True):
            timeline.add(TimelineEvent(TRAINING, name, begin, end, None if tier is Tier.COMPUTE else tier))
        return True

    def _observe_work(self, window: _Window, times: Sequence[float]) -> None:
        """The idle time before each piece of the schedule's work, and after the last."""
        works = sum(kind is not None for kind in window.kinds)
        if not works:
            return
        if works != self._works:
            self._works, self.profile = works, StageProfile()
        idle, starts = [0.0] * (works + 1), [times[0]] * (works + 1)
        place, self._meets = 0, False
        for kind, tier, (begin, end) in zip(window.kinds, window.tiers, pairwise(times), strict=True):
            if kind is not None:
                self.profile.observe_action(kind, end - begin)
                place += 1
                starts[place] = end
            elif tier in (Tier.GAP, Tier.COLLECTIVE):
                idle[place] += end - begin
        for place, (start, seconds) in enumerate(zip(starts, idle, strict=True)):
            self.profile.observe(place, start - times[0], start - times[0] + seconds)
        self._meets = WAIT in window.names or "idle" in window.names

    def _pacing_plan(self) -> PacingPlan | None:
        phases = self._lengths.phases()
        if all(stretch.tier is Tier.COMPUTE for stretch in phases):
            return None
        copy_stats = self._copy_engine.copy_stats
        rates = copy_stats.rate(Tier.GAP), copy_stats.rate(Tier.COMPUTE)
        return PacingPlan(phases, *rates, GUARD_S) if min(rates) > 0 else None
