"""When the bytes of a snapshot may be copied: gaps first, then beside compute, at last beside collectives. Pure.

    course     compute │ gap │ compute │ gap │ compute │ collective │      stretches, with the lengths that were measured
    rooms                9 MB            7 MB
     6 MB left  ·········████······································  fence  the longest gap holds it: no other
    16 MB left  ·········████···········████·······················  fence  all of it fits into the gaps: nowhere else
    20 MB left  ··█···█··████·█···█···█·████···█···█···············  fence  4 MB are spread over compute, evenly
    after a gap that was shorter than it used to be, what is left is spread anew over what lies ahead

As few gaps as hold it, the longest first: a host that copies drives what training works with out of its caches, each time.

A `PacedCopy` is one snapshot on its way along the course, for an engine that can stop. A copying thread asks it for the next
task; it says which, or for how long nothing is due. While a gap is open, tasks go, however long it lasts. An engine that
enqueues ahead of its device can't take back what a gap turns out not to hold: it follows a plan (core/pipeline/pacing.py).

A host may have two kinds of hands. Idle ones run only while nobody else wants their core: gaps are theirs, and nothing else.

Invariants
  1. In a gap that is too short for the guard time nothing begins, nor in a stretch that is not on the course.
  2. Parity is computed in gaps, or right after the step, where the gaps ahead have no room for it.
  3. Idle hands get nothing once everything goes at once: a thread that waits then must not wait for them.
  4. Once the fence asks, or training has left the course, everything may go at once: no byte waits for a gap that does
     not come.
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
    """A part of a window in which training does one thing; `seconds` is how long it is expected to last."""

    tier: Tier
    seconds: float


class Priority(Enum):
    """Who asks for a task."""

    ALL = auto()  # there is only one kind
    IDLE = auto()
    BUSY = auto()


class PhaseDurations:
    """How long each stretch of a window lasts, for each of the last few kinds of window.

    A loop that does something more now and then (logs, evaluates) has windows of two kinds; what is expected is the kind
    that came last of those that came at least twice.
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
        """What the next window will be like; empty until two were alike."""
        for tiers, kind in reversed(self._kinds.items()):
            if kind[0].count >= SEEN_LEAST:
                return tuple(Phase(tier, estimate.mean) for tier, estimate in zip(tiers, kind, strict=True))
        return ()


class CopyTask(NamedTuple):
    """What to copy next, and in which tier it counts."""

    number: int
    tier: Tier


SEEN_LEAST = 2  # windows of one kind before there is an estimate
KINDS_MAX = 4
SPARE = 1.25  # times the bytes that are to be copied is what the gaps shall hold that are meant for them
PACE = 0.9  # of the time that is left, in which what goes beside training shall be done
LATE_FACTOR = 2.0  # a window that lasts so many times longer than expected has left its course …
LATE_S = 1.0  # … and so many seconds longer


@dataclass(frozen=True)
class PacingPlan:
    """What lies ahead in each window, as measured.

    Attributes:
        phases: from the mark to the fence, in order; the first is compute, whatever follows the mark.
        bytes_per_s: of the copying engine, in a gap.
        beside_bytes_per_s: beside compute.
        guard_s: what of a gap is left alone: to begin, and to stop.
    """

    phases: tuple[Phase, ...]
    bytes_per_s: float
    beside_bytes_per_s: float
    guard_s: float

    @cached_property
    def rooms(self) -> list[int]:
        """Bytes that fit into each stretch if it is a gap, else 0."""
        return [
            int(max(0.0, each.seconds - self.guard_s) * self.bytes_per_s) if each.tier is Tier.GAP else 0
            for each in self.phases
        ]

    @cached_property
    def rooms_from(self) -> list[int]:
        """Bytes that fit into the gaps from each stretch on; one more entry, 0, for the end."""
        return [*accumulate(reversed(self.rooms), initial=0)][::-1]

    def longest(self, nbytes: int) -> list[int]:
        """The rooms of as few gaps as hold so many bytes, and some more; 0 for each other stretch."""
        found, wanted = [0] * len(self.rooms), nbytes * SPARE
        for index in sorted(range(len(self.rooms)), key=lambda index: -self.rooms[index]):
            if wanted <= 0:
                break
            found[index] = self.rooms[index]
            wanted -= self.rooms[index]
        return found

    @cached_property
    def _seconds_from(self) -> dict[Tier, list[float]]:
        """Seconds of a tier from each stretch on."""
        return {
            tier: [*accumulate((s.seconds if s.tier is tier else 0.0 for s in reversed(self.phases)), initial=0.0)][
                ::-1
            ]
            for tier in (Tier.COMPUTE, Tier.COLLECTIVE)
        }

    @cached_property
    def seconds(self) -> float:
        """From the mark to the fence."""
        return sum(stretch.seconds for stretch in self.phases)

    def owed(self, index: int, left: int) -> float:
        """Bytes that no gap ahead has room for and this tier must therefore take, from this stretch on."""
        owed = max(0.0, left - self.rooms_from[index + 1])
        if self.phases[index].tier is Tier.COLLECTIVE:
            owed = max(0.0, owed - self._seconds_from[Tier.COMPUTE][index] * self.beside_bytes_per_s)
        return owed

    def ahead_s(self, index: int) -> float:
        """Seconds of this stretch's tier from this stretch on, as far as they shall be used."""
        return self._seconds_from[self.phases[index].tier][index] * PACE


class PacedCopy:
    """One snapshot on its way; see the module. Time is an argument, in seconds of any clock.

    Args:
        pacing_plan: None lets everything go at once.
        weights: bytes that each task moves.
        parity: the tasks from this one on are parity.
    """

    def __init__(self, pacing_plan: PacingPlan | None, weights: Sequence[int], parity: int) -> None:
        self._pacing_plan = pacing_plan
        self._weights = weights
        self._chunks = deque(range(parity))
        self._parity = deque(range(parity, len(weights)))
        self._left = sum(weights)
        self._after_step = 0  # bytes of parity that no gap has room for
        self._meant: list[int] = []  # what of each stretch's room is meant to be used, …
        self._meant_from: list[int] = []  # … and from each stretch on
        if pacing_plan is not None:
            self._meant = pacing_plan.longest(self._left)
            self._meant_from = [*accumulate(reversed(self._meant), initial=0)][::-1]
            self._after_step = max(0, sum(weights[parity:]) - pacing_plan.rooms_from[0])
        self._index, self._tier = 0, Tier.COMPUTE
        self._began_s = self._since_s = 0.0
        self._at_entry = self._left
        self._taken_here = 0
        self._carry = 0.0
        self._is_lifted = pacing_plan is None

    @property
    def is_done(self) -> bool:
        """Whether every task was taken."""
        return not self._chunks and not self._parity

    def begin(self, now_s: float) -> None:
        """At the mark."""
        self._began_s = self._since_s = now_s

    def enter(self, now_s: float, index: int, tier: Tier) -> None:
        """Training enters the stretch of that number since the mark."""
        if not self._is_lifted:
            self._carry = max(0.0, self._allowance(now_s) - self._taken_here)
        self._index, self._tier, self._since_s = index, tier, now_s
        self._at_entry, self._taken_here = self._left, 0
        phases = self._pacing_plan.phases if self._pacing_plan else ()
        if index >= len(phases) or phases[index].tier is not tier:
            self._is_lifted = True

    def lift(self, tier: Tier | None = None) -> None:
        """Lets everything go at once: the fence asks, or somebody waits for the snapshot."""
        self._is_lifted = True
        self._tier = tier or self._tier

    def abandon(self) -> None:
        """Nothing more is to be copied."""
        self._chunks.clear()
        self._parity.clear()

    @property
    def wanted(self) -> frozenset[Priority]:
        """The hands for which there may be something to do in this stretch."""
        if self._is_lifted or self._pacing_plan is None:
            return frozenset({Priority.ALL, Priority.BUSY})
        if self._tier is Tier.GAP:
            return frozenset({Priority.ALL, Priority.IDLE}) if self._is_meant else frozenset()
        owes = self._after_step > 0 or self._pacing_plan.owed(self._index, self._at_entry) > 0
        return frozenset({Priority.ALL, Priority.BUSY}) if owes else frozenset()

    def take(self, now_s: float, hands: Priority) -> CopyTask | None:
        """The next task, if one is due for such hands; None if not now, or if there is none."""
        if not self._is_lifted and now_s > self._late_s:
            self._is_lifted = True
        queue = self._due(now_s, hands)
        if queue is None:
            return None
        number = queue.popleft()
        self._left -= self._weights[number]
        self._taken_here += self._weights[number]
        return CopyTask(number, self._tier)

    def due_s(self, now_s: float) -> float:
        """Seconds until a task may become due by time alone for hands that are not idle; a new stretch may come first."""
        latest = max(0.0, self._late_s - now_s)
        if self._tier is Tier.GAP or not self._chunks or self._pacing_plan is None:
            return latest
        owed = self._pacing_plan.owed(self._index, self._at_entry)
        if owed <= 0:
            return latest
        missing = self._taken_here + self._weights[self._chunks[0]] - self._carry
        elapsed_s = missing / owed * self._pacing_plan.ahead_s(self._index)
        if elapsed_s > self._pacing_plan.phases[self._index].seconds:
            return latest
        return min(latest, max(0.0, self._since_s + elapsed_s - now_s))

    @property
    def _late_s(self) -> float:
        assert self._pacing_plan is not None
        return self._began_s + self._pacing_plan.seconds * LATE_FACTOR + LATE_S

    def _due(self, now_s: float, hands: Priority) -> deque[int] | None:
        """The queue whose first task may go now."""
        any_left = self._parity or self._chunks or None
        if self._is_lifted:
            return any_left if hands is not Priority.IDLE else None
        assert self._pacing_plan is not None
        if self._tier is Tier.GAP:
            return any_left if hands is not Priority.BUSY and self._is_meant else None
        if hands is Priority.IDLE:
            return None
        if self._after_step > 0 and self._index == 0 and self._parity:
            self._after_step -= self._weights[self._parity[0]]
            return self._parity
        if self._chunks and self._taken_here + self._weights[self._chunks[0]] <= self._allowance(now_s):
            return self._chunks
        return None

    @property
    def _is_meant(self) -> bool:
        """Whether this gap is used: one of the longest, or any if those ahead don't hold what is left."""
        assert self._pacing_plan is not None
        is_behind = self._left > self._meant_from[self._index + 1]
        return self._meant[self._index] > 0 or (is_behind and self._pacing_plan.rooms[self._index] > 0)

    def _allowance(self, now_s: float) -> float:
        """Bytes that may be copied in this stretch until now, beside what training does."""
        if self._tier is Tier.GAP or self._pacing_plan is None:
            return self._carry
        owed = self._pacing_plan.owed(self._index, self._at_entry)
        expected_s = self._pacing_plan.phases[self._index].seconds
        elapsed_s = min(now_s - self._since_s, expected_s)
        ahead_s = self._pacing_plan.ahead_s(self._index)
        return min(owed, self._carry + owed * (elapsed_s / ahead_s if ahead_s > 0 else 1.0))
