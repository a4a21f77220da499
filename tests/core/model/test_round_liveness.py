"""Snapshots continue, however slow the round is: a simulation in time with reft's own functions.

A step lasts one unit. A copy is sealed 0.3 after its mark. A rank without a slot waits for one
until the fence, 0.6 after the mark, and then answers void. The network of the case decides how long
each message takes. Messages may overtake each other.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from reft.core.commit import lag_backoff as spacing_module
from reft.core.commit.round import Outcome, Round, StepAnswer, StepReport
from reft.core.commit.slots import Slot, SlotState, choose_slot
from reft.core.commit.snapshot_cadence import CadenceFacts, SnapshotCadence
from reft.core.commit.snapshot_interval import DueSteps, IntervalEstimator, SnapshotInterval
from reft.core.commit.undecided_steps import UndecidedSteps
from reft.core.commit.version import Epoch, Version

EPOCH = Epoch(1, b"e" * 16)
STEPS = 300
Network = Callable[[random.Random, int, float], float]  # chance, rank, time → delay of a message


class Rank:
    def __init__(self, slots: int) -> None:
        self.slots = [Slot(i, SlotState.EMPTY, None) for i in range(slots)]
        self.busy: set[int] = set()
        self.outcome = Outcome()
        self.undecided = UndecidedSteps()
        self.cadence = SnapshotCadence(DueSteps(1, adapts=False), IntervalEstimator(0.01))
        self.waits: int | None = None

    def is_in_turn(self, now: float, step: int) -> bool:
        delays = self.undecided.delays.last_void, self.undecided.longest_delay(step)
        whole = max(self.outcome.whole, 0)
        return self.cadence.at_mark(
            step, CadenceFacts(now, 0.0, False, SnapshotInterval(), whole, *delays, len(self.slots))
        ).takes

    def begin(self, step: int) -> int | None:
        """Returns the slot that the step is copied to; None if no slot is free."""
        whole = Version(EPOCH, self.outcome.whole) if self.outcome.whole >= 0 else None
        idle = [slot for slot in self.slots if slot.index not in self.busy]
        void = [slot.version for slot in idle if slot.version and self.outcome.voids(slot.version.step)]
        chosen = choose_slot(idle, whole, void)
        if chosen is None:
            return None
        self.slots[chosen.index] = Slot(chosen.index, SlotState.SEALED, Version(EPOCH, step))
        self.busy.add(chosen.index)
        return chosen.index

    def answer(self, step: int, is_sealed: bool) -> StepReport:
        self.undecided.answer(step, StepAnswer.SEALED if is_sealed else StepAnswer.VOID, {})
        return self.undecided.report(self.outcome.whole)

    def hear(self, outcome: Outcome) -> None:
        self.outcome = self.outcome.merge(outcome)
        self.undecided.settle(self.outcome)


class Training:
    """Ranks that train side by side, and the coordinator."""

    def __init__(self, ranks: int, slots: int, network: Network, fails: range = range(0)) -> None:
        self.chance, self.network, self.fails = random.Random(1), network, fails
        self.ranks = [Rank(slots) for _ in range(ranks)]
        self.coordinator = Round(0, 1, frozenset(range(ranks)))
        self.queue: list[tuple[float, int, Callable[[float], None]]] = []
        self.count = itertools.count()
        self.wholes: list[tuple[float, int]] = []

    def at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self.queue, (time, next(self.count), event))

    def run(self) -> float:
        """Returns the greatest age of the newest whole step, in steps."""
        for rank in range(len(self.ranks)):
            for step in range(1, STEPS):
                self.at(step + 0.05 * self.chance.random(), lambda now, r=rank, s=step: self.mark(now, r, s))
        while self.queue:
            time, _, event = heapq.heappop(self.queue)
            if time < STEPS:
                event(time)
        news = [(0.0, 0), *self.wholes, (float(STEPS), STEPS)]
        return max(later - step for (_, step), (later, _) in itertools.pairwise(news))

    def mark(self, now: float, rank: int, step: int) -> None:
        each = self.ranks[rank]
        if not each.is_in_turn(now, step):
            self.at(now + 0.6, lambda now: self.say(now, rank, each.answer(step, False)))
        elif not self.take(now, rank, step):
            each.waits = step
            self.at(now + 0.6, lambda now: self.fence(now, rank, step))

    def take(self, now: float, rank: int, step: int) -> bool:
        slot = None if rank == 1 and step in self.fails else self.ranks[rank].begin(step)
        if slot is not None:
            self.at(now + 0.3, lambda now: self.sealed(now, rank, step, slot))
        return slot is not None

    def sealed(self, now: float, rank: int, step: int, slot: int) -> None:
        self.ranks[rank].busy.discard(slot)
        self.say(now, rank, self.ranks[rank].answer(step, True))

    def fence(self, now: float, rank: int, step: int) -> None:
        if self.ranks[rank].waits == step:
            self.ranks[rank].waits = None
            self.say(now, rank, self.ranks[rank].answer(step, False))

    def say(self, now: float, rank: int, said: StepReport) -> None:
        self.at(now + self.network(self.chance, rank, now), lambda now: self.hear(now, rank, said))

    def hear(self, now: float, rank: int, said: StepReport) -> None:
        before = self.coordinator.outcome
        self.coordinator.hear_rank(rank, said)
        outcome = self.coordinator.outcome
        if outcome.whole > before.whole:
            self.wholes.append((now, outcome.whole))
        if outcome != before:
            for other in range(len(self.ranks)):
                delay = self.network(self.chance, other, now)
                self.at(now + delay, lambda now, other=other: self.news(now, other, outcome))

    def news(self, now: float, rank: int, outcome: Outcome) -> None:
        each = self.ranks[rank]
        each.hear(outcome)
        if each.waits is not None and self.take(now, rank, each.waits):
            each.waits = None


# case → network, and the greatest permitted age of the newest whole step with three slots
CASES: dict[str, tuple[Network, float]] = {
    "fast": (lambda chance, rank, now: 0.01, 2),
    "a fifth of a step": (lambda chance, rank, now: 0.2 * chance.random(), 3),
    "a step": (lambda chance, rank, now: 1.0, 10),
    "three steps": (lambda chance, rank, now: 3.0, 40),
    "up to two steps": (lambda chance, rank, now: 2 * chance.random(), 20),
    "up to five steps": (lambda chance, rank, now: 5 * chance.random(), 50),
    "a slow node": (lambda chance, rank, now: 4.0 if rank == 1 else 0.05, 40),
    "a very slow node": (lambda chance, rank, now: 10.0 if rank == 1 else 0.05, 80),
    "half of the nodes": (lambda chance, rank, now: 3.0 if rank % 2 else 0.05, 40),
    "three steps on average": (lambda chance, rank, now: chance.expovariate(1 / 3), 60),
    "bursts": (lambda chance, rank, now: 20 - now % 20 if rank == 1 and now % 20 > 3 else 0.05, 30),
    "away for 100 steps": (lambda chance, rank, now: 200 - now if rank == 1 and 100 <= now < 200 else 0.01, 102),
}


@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize("case", CASES)
def test_the_newest_whole_step_stays_young(case, ranks):
    network, oldest = CASES[case]
    assert Training(ranks, 3, network).run() <= oldest


@pytest.mark.parametrize("case", CASES)
def test_the_newest_whole_step_stays_young_with_two_slots(case):
    network, oldest = CASES[case]
    assert Training(8, 2, network).run() <= 2 * oldest


def test_once_a_rank_takes_snapshots_again_the_next_step_is_whole():
    assert Training(4, 3, CASES["fast"][0], fails=range(100, 200)).run() <= 102


@pytest.mark.parametrize("case", ["a slow node", "half of the nodes", "three steps on average"])
def test_without_backoff_ranks_never_share_a_step(case, monkeypatch):
    monkeypatch.setattr(spacing_module, "SPACING_MAX", 1)
    assert Training(16, 3, CASES[case][0]).run() > STEPS / 4
