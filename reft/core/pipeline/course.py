"""Decides when bytes are copied: in gaps, then beside compute, last beside collectives. Pure.

    plan       compute │ gap │ compute │ gap │ compute │ collective │    phases, measured durations
    room                9 MB            7 MB
     6 MB left  ·········████······································ fence  only the longest gap
    16 MB left  ·········████···········████······················· fence  only the gaps
    20 MB left  ··█···█··████·█···█···█·████···█···█··············· fence  4 MB spread over compute

If a gap was shorter than usual, the remaining bytes are spread over the time that is left. As few
gaps are used as hold the bytes, the longest first. Each copy by a host pushes training's data out
of its caches.

A `PacedCopy` is one snapshot that is copied by a pacing plan, for an engine that can stop. A copy
thread asks it for the next task, and gets a task or the time until one may be due. While a gap is
open, tasks are given out, however long the gap lasts. An engine that enqueues ahead of its device
can't take back copies that do not fit into a gap. Such an engine follows a task plan
(core/pipeline/pacing.py).

A host may have copy threads of two priorities. Threads of priority IDLE run only while no other
thread wants their core. They copy in gaps, and only there.

Invariants
  1. Nothing begins in a gap shorter than the guard time, nor in a phase that is not in the plan.
  2. Parity is computed in gaps. Parity that the gaps ahead can't hold is computed right after the
     step.
  3. IDLE threads get nothing once all copies may go at once. A caller that waits then must not wait
     for them.
  4. Once the fence asks, or training has left the plan, all copies may go at once. No byte waits
     for a gap that does not come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from reft.core.pipeline import profile
from reft.core.pipeline.pacing import Tier


class Phase(NamedTuple):
    """A part of a window in which training does one thing. `seconds` is its expected duration."""

    tier: Tier
    seconds: float


class Priority(Enum):
    """The priority of the thread that asks for a task."""

    ALL = auto()  # there is only one kind of thread
    IDLE = auto()
    BUSY = auto()


class PhaseDurations:
    """The durations of a window's phases, for each of the last few kinds of window.

    A loop that sometimes does something more (logs, evaluates) has windows of two kinds. The
    expected kind is the newest one that came at least twice.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[Tier, ...], list[profile.Estimate]] = {}  # the newest last

    def observe(self, tiers: Sequence[Tier], seconds: Sequence[float]) -> None:
        """Takes one window into account."""
        kind = self._kinds.pop(tuple(tiers), None) or [profile.Estimate() for _ in tiers]
        for estimate, value in zip(kind, seconds, strict=True):
            estimate.observe(value)
        self._kinds[tuple(tiers)] = kind
        while len(self._kinds) > KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]

    def phases(self) -> tuple[Phase, ...]:
        """Returns the expected phases of the next window; empty until a kind came twice."""
        for tiers, kind in reversed(self._kinds.items()):
            if kind[0].count >= WINDOWS_MIN:
                return tuple(Phase(tier, estimate.mean) for tier, estimate in zip(tiers, kind, strict=True))
        return ()


class CopyTask(NamedTuple):
    """The next task to copy, and the tier that its bytes count in."""

    number: int
    tier: Tier


WINDOWS_MIN = 2  # windows of one kind before there is an estimate
KINDS_MAX = 4
GAP_MARGIN = 1.25  # the chosen gaps hold so many times the bytes to copy
USABLE_TIME = 0.9  # copies beside training shall be done in this part of the time that is left
# A window has left its plan if it lasts longer than LATE_FACTOR times its expected duration plus
# LATE_S.
LATE_FACTOR = 2.0
LATE_S = 1.0


@dataclass(frozen=True)
class PacingPlan:
    """The measured phases of a window, and how many bytes fit into them.

    Attributes:
        phases: from the mark to the fence, in order; the first is compute, whatever follows the
            mark.
        bytes_per_s: rate of the copy engine in a gap.
        beside_bytes_per_s: rate beside compute.
        guard_s: part of a gap that stays unused: to begin, and to stop.
    """

    phases: tuple[Phase, ...]
    bytes_per_s: float
    beside_bytes_per_s: float
    guard_s: float

    @cached_property
    def gap_capacities(self) -> list[int]:
        """Returns for each phase the bytes that fit into it. A phase that is no gap has 0."""
        return [
            int(max(0.0, each.seconds - self.guard_s) * self.bytes_per_s) if each.tier is Tier.GAP else 0
            for each in self.phases
        ]

    @cached_property
    def gap_capacities_from(self) -> list[int]:
        """Returns the bytes that fit into the gaps from each phase on. A 0 follows for the end."""
        return [*accumulate(reversed(self.gap_capacities), initial=0)][::-1]

    def longest_gaps(self, nbytes: int) -> list[int]:
        """Returns bytes to copy in each gap: the longest gaps first, until they hold enough.

        Enough is `nbytes` times GAP_MARGIN. Phases that are not used get 0.
        """
        gap_bytes, bytes_wanted = [0] * len(self.gap_capacities), nbytes * GAP_MARGIN
        for index in sorted(range(len(self.gap_capacities)), key=lambda index: -self.gap_capacities[index]):
            if bytes_wanted <= 0:
                break
            gap_bytes[index] = self.gap_capacities[index]
            bytes_wanted -= self.gap_capacities[index]
        return gap_bytes

    @cached_property
    def _seconds_from(self) -> dict[Tier, list[float]]:
        """Returns tier → seconds of that tier from each phase on."""
        return {
            tier: [
                *accumulate(
                    (phase.seconds if phase.tier is tier else 0.0 for phase in reversed(self.phases)), initial=0.0
                )
            ][::-1]
            for tier in (Tier.COMPUTE, Tier.COLLECTIVE)
        }

    @cached_property
    def seconds(self) -> float:
        """Returns the seconds from the mark to the fence."""
        return sum(phase.seconds for phase in self.phases)

    def owed(self, index: int, left: int) -> float:
        """Returns the bytes that this phase's tier must take from this phase on.

        These are the bytes that no gap ahead, and for collectives no compute ahead, has room for.

        Args:
            index: number of the phase.
            left: bytes that are left to copy.
        """
        owed = max(0.0, left - self.gap_capacities_from[index + 1])
        if self.phases[index].tier is Tier.COLLECTIVE:
            owed = max(0.0, owed - self._seconds_from[Tier.COMPUTE][index] * self.beside_bytes_per_s)
        return owed

    def ahead_s(self, index: int) -> float:
        """Returns the usable seconds of this phase's tier from this phase on."""
        return self._seconds_from[self.phases[index].tier][index] * USABLE_TIME


class EnteredPhase(NamedTuple):
    """The phase that training is in, as it was when training entered the phase.

    Attributes:
        number: of the phase, counted from the mark.
        began_s: when training entered the phase.
        bytes_left: bytes that were left to copy then.
        carry: bytes that the phase before was allowed to copy and did not.
    """

    number: int
    tier: Tier
    began_s: float
    bytes_left: int
    carry: float


class PacedCopy:
    """One snapshot that is being copied; see the module. Times are seconds of any one clock.

    Args:
        pacing_plan: None lets all copies go at once.
        weights: bytes that each task moves.
        parity: tasks from this number on are parity.
    """

    def __init__(self, pacing_plan: PacingPlan | None, weights: Sequence[int], parity: int) -> None:
        self._pacing_plan = pacing_plan
        self._weights = weights
        self._chunks = deque(range(parity))
        self._parity = deque(range(parity, len(weights)))
        self._bytes_left = sum(weights)
        self._parity_bytes_after_step = 0  # bytes of parity that no gap has room for
        self._planned_bytes: list[int] = []  # bytes meant for each phase
        self._planned_bytes_from: list[int] = []  # bytes meant for all phases from each one on
        if pacing_plan is not None:
            self._planned_bytes = pacing_plan.longest_gaps(self._bytes_left)
            self._planned_bytes_from = [*accumulate(reversed(self._planned_bytes), initial=0)][::-1]
            self._parity_bytes_after_step = max(0, sum(weights[parity:]) - pacing_plan.gap_capacities_from[0])
        self._window_began_s = 0.0
        self._phase = EnteredPhase(0, Tier.COMPUTE, 0.0, self._bytes_left, 0.0)
        self._phase_bytes = 0  # bytes taken in this phase
        self._is_unpaced = pacing_plan is None

    @property
    def is_done(self) -> bool:
        """Returns whether every task was taken."""
        return not self._chunks and not self._parity

    def begin(self, now_s: float) -> None:
        """Starts the window, at the mark."""
        self._window_began_s, self._phase = now_s, self._phase._replace(began_s=now_s)

    def enter(self, now_s: float, index: int, tier: Tier) -> None:
        """Notes that training enters a phase; its number counts from the mark."""
        carry = self._phase.carry if self._is_unpaced else max(0.0, self._allowance(now_s) - self._phase_bytes)
        self._phase, self._phase_bytes = EnteredPhase(index, tier, now_s, self._bytes_left, carry), 0
        phases = self._pacing_plan.phases if self._pacing_plan else ()
        if index >= len(phases) or phases[index].tier is not tier:
            self._is_unpaced = True

    def lift(self, tier: Tier | None = None) -> None:
        """Lets all copies go at once: the fence asks, or a caller waits for the snapshot."""
        self._is_unpaced = True
        self._phase = self._phase._replace(tier=tier or self._phase.tier)

    def abandon(self) -> None:
        """Drops all tasks that are left."""
        self._chunks.clear()
        self._parity.clear()

    @property
    def wanted_priorities(self) -> frozenset[Priority]:
        """Returns the priorities of threads that may get a task in this phase."""
        if self._is_unpaced or self._pacing_plan is None:
            return frozenset({Priority.ALL, Priority.BUSY})
        if self._phase.tier is Tier.GAP:
            return frozenset({Priority.ALL, Priority.IDLE}) if self._is_gap_used else frozenset()
        owed = self._pacing_plan.owed(self._phase.number, self._phase.bytes_left)
        owes = self._parity_bytes_after_step > 0 or owed > 0
        return frozenset({Priority.ALL, Priority.BUSY}) if owes else frozenset()

    def take(self, now_s: float, priority: Priority) -> CopyTask | None:
        """Returns the next task if one is due for this priority, else None."""
        if not self._is_unpaced and now_s > self._late_s:
            self._is_unpaced = True
        queue = self._due(now_s, priority)
        if queue is None:
            return None
        number = queue.popleft()
        self._bytes_left -= self._weights[number]
        self._phase_bytes += self._weights[number]
        return CopyTask(number, self._phase.tier)

    def due_s(self, now_s: float) -> float:
        """Returns the seconds until time alone may make a task due.

        They count for threads that are not IDLE. A new phase may make one due sooner.
        """
        latest = max(0.0, self._late_s - now_s)
        if self._phase.tier is Tier.GAP or not self._chunks or self._pacing_plan is None:
            return latest
        owed = self._pacing_plan.owed(self._phase.number, self._phase.bytes_left)
        if owed <= 0:
            return latest
        missing = self._phase_bytes + self._weights[self._chunks[0]] - self._phase.carry
        elapsed_s = missing / owed * self._pacing_plan.ahead_s(self._phase.number)
        if elapsed_s > self._pacing_plan.phases[self._phase.number].seconds:
            return latest
        return min(latest, max(0.0, self._phase.began_s + elapsed_s - now_s))

    @property
    def _late_s(self) -> float:
        assert self._pacing_plan is not None
        return self._window_began_s + self._pacing_plan.seconds * LATE_FACTOR + LATE_S

    def _due(self, now_s: float, priority: Priority) -> deque[int] | None:
        """Returns the queue whose first task may go now; None if no task may."""
        any_left = self._parity or self._chunks or None
        if self._is_unpaced:
            return any_left if priority is not Priority.IDLE else None
        assert self._pacing_plan is not None
        if self._phase.tier is Tier.GAP:
            return any_left if priority is not Priority.BUSY and self._is_gap_used else None
        if priority is Priority.IDLE:
            return None
        if self._parity_bytes_after_step > 0 and self._phase.number == 0 and self._parity:
            self._parity_bytes_after_step -= self._weights[self._parity[0]]
            return self._parity
        if self._chunks and self._phase_bytes + self._weights[self._chunks[0]] <= self._allowance(now_s):
            return self._chunks
        return None

    @property
    def _is_gap_used(self) -> bool:
        """Returns whether this gap is used.

        The longest gaps are used. Others are used only if the gaps ahead don't hold the bytes that
        are left.
        """
        assert self._pacing_plan is not None
        index = self._phase.number
        is_behind = self._bytes_left > self._planned_bytes_from[index + 1]
        return self._planned_bytes[index] > 0 or (is_behind and self._pacing_plan.gap_capacities[index] > 0)

    def _allowance(self, now_s: float) -> float:
        """Returns the bytes that may be copied in this phase until now, beside training."""
        phase, plan = self._phase, self._pacing_plan
        if phase.tier is Tier.GAP or plan is None:
            return phase.carry
        owed = plan.owed(phase.number, phase.bytes_left)
        elapsed_s = min(now_s - phase.began_s, plan.phases[phase.number].seconds)
        ahead_s = plan.ahead_s(phase.number)
        return min(owed, phase.carry + owed * (elapsed_s / ahead_s if ahead_s > 0 else 1.0))
