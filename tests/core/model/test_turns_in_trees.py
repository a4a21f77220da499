"""Turns in trees of real rounds: messages are lost, repeated and reordered, daemons restart.

One rank runs on each node, and all ranks form one lane of the exchange. A daemon seals parity at
once when every other rank holds the step. A restarted daemon keeps its parity, and the coordinator
its record. Now and then a restart loses parity, and the daemon says so once it knows the pins. A
step whose turn failed has more turns, at any time: the pause of a shell may be short.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from reft.core.commit import round as round_module
from reft.core.commit.decision import Decision
from reft.core.commit.pins import ExchangeFacts, Pins, UnguardedLane, next_pins, pinned_versions
from reft.core.commit.round import Outcome, Round, StepReport, children_of, parent_of
from reft.core.commit.slots import Slot, SlotState, choose_slot
from reft.core.commit.version import Epoch, Version

EPOCH = Epoch(1, b"e" * 16)
DECISION = Decision(EPOCH, None)
SLOTS = 4


class Rank:
    """One rank with real slots and the reuse rule. A copy takes no time."""

    def __init__(self, slots: int) -> None:
        self.slots: list[int | None] = [None] * slots
        self.said, self.outcome = StepReport(), Outcome()

    def take(self, step: int, fails: bool) -> None:
        whole = Version(EPOCH, self.outcome.whole) if self.outcome.whole >= 0 else None
        views = [
            Slot(
                i, SlotState.EMPTY if held is None else SlotState.SEALED, None if held is None else Version(EPOCH, held)
            )
            for i, held in enumerate(self.slots)
        ]
        void = [view.version for view in views if view.version and self.outcome.voids(view.version.step)]
        chosen = None if fails else choose_slot(views, whole, void, pinned_versions(self.outcome.pins, DECISION))
        sealed = self.said.sealed
        if chosen is not None:
            self.slots[chosen.index] = step
            sealed = sealed | {step}
        self.said = StepReport(self.outcome.whole, step, sealed).without_decided(self.outcome)

    def hear(self, outcome: Outcome) -> None:
        self.outcome = self.outcome.merge(outcome)
        self.said = self.said.without_decided(self.outcome)


class Job:
    """A tree of nodes with one rank each, and a network without any guarantee."""

    def __init__(
        self, nodes: int, chance: random.Random, trouble: float, records: bool = True, slots: int = SLOTS
    ) -> None:
        self.chance, self.trouble, self.records = chance, trouble, records
        self.ranks = [Rank(slots) for _ in range(nodes)]
        self.record = Pins()  # of the coordinator
        self.rounds = [self.fresh(node, nodes) for node in range(nodes)]
        self.parity: list[list[int]] = [[-1, -1] for _ in range(nodes)]
        self.mail: list[tuple] = []
        self.silent: set[int] = set()
        self.lost_at = [-1] * nodes  # the newest turn when a node last lost parity
        self.made_by = 0  # the turn that protected a step last
        self.protected: list[int] = []  # all protected steps, in order
        self.fails = False  # whether sources are gone: no parity can be made

    def fresh(self, node: int, nodes: int) -> Round:
        pins = self.record if node == 0 and self.records else Pins()
        return Round(node, nodes, frozenset({node}), ExchangeFacts(1, SLOTS, True), Outcome(pins, pins.whole))

    def restart(self, node: int, loses_parity: bool) -> None:
        """Restarts the daemon of a node: it has its slots, and its parity or not."""
        self.rounds[node] = self.fresh(node, len(self.rounds))
        if loses_parity:
            self.lost_at[node] = self.record.attempt
            self.parity[node] = [-1, -1]
        held = frozenset(step for step in self.ranks[node].slots if step is not None)
        self.rounds[node].hear_rank(node, StepReport(sealed=held))

    def guard(self, node: int) -> None:
        """Makes the parity of the turn on a node, and notes what the node has and lacks."""
        each, parity = self.rounds[node], self.parity[node]
        pins = each.outcome.pins
        if pins.protected >= 0 and pins.protected not in parity:
            each.guard.note_unguarded(pins, [UnguardedLane(pins.protected, 0, "the parity is gone", pins.protected_by)])
        if pins.turn < 0:
            return
        if self.fails or (pins.turn not in parity and pins.turn < max(parity)):
            each.guard.note_unguarded(pins, [UnguardedLane(pins.turn, 0, "a source is gone", pins.attempt)])
        elif pins.turn not in parity:
            others = [rank for i, rank in enumerate(self.ranks) if i != node]
            if all(pins.turn in rank.slots for rank in others):
                free = [at for at in (0, 1) if parity[at] != pins.guarded_step or pins.guarded_step < 0]
                parity[min(free, key=parity.__getitem__)] = pins.turn
            elif self.chance.random() < 0.2:
                each.guard.note_unguarded(pins, [UnguardedLane(pins.turn, 0, "a source is gone", pins.attempt)])
        if pins.turn in parity and not self.fails:
            each.guard.note_guarded(pins, pins.attempt)

    def announce(self) -> None:
        """Records what the coordinator decides, and announces it."""
        top = self.rounds[0]
        self.record = top.next_outcome().pins
        before = top.outcome.pins
        top.announce()
        if self.record.protected >= 0 and self.record.protected_by != before.protected_by:
            self.protected.append(self.record.protected)
            self.made_by = self.record.protected_by

    def send(self, *message: object) -> None:
        if self.chance.random() >= self.trouble:
            self.mail += [message] * (2 if self.chance.random() < self.trouble else 1)

    def tick(self) -> None:
        """Sends all that is known again, then delivers a part of the mail in any order."""
        top = self.rounds[0]
        if top.guard.retry_pause_s(top.outcome.pins) is not None and self.chance.random() < 0.3:
            top.guard.permit_retry(top.outcome.pins, top.outcome.pins.attempt)
        for node, each in enumerate(self.rounds):
            self.guard(node)
            self.send("rank", node, self.ranks[node].said)
            self.send("news", node, each.outcome)
            if node and each.has_news:
                self.send("up", node, (each.report(), each.guard.report(each.outcome.pins)))
            for child in children_of(node, len(self.rounds)):
                self.send("down", child, each.outcome)
        self.chance.shuffle(self.mail)
        half = len(self.mail) // 2 if self.trouble else len(self.mail)
        due, self.mail = self.mail[:half], self.mail[half:]
        for message in due:
            self.deliver(*message)
        self.check()

    def deliver(self, kind: str, node: int, what: object) -> None:
        if node in self.silent:
            return
        each = self.rounds[node]
        if kind == "rank":
            each.hear_rank(node, what)
        elif kind == "news":
            self.ranks[node].hear(what)
        elif kind == "up":
            report, guard = what
            self.rounds[parent_of(node)].hear_node(node, report, guard=guard)
        else:
            each.hear_outcome(what)
        self.announce()

    def check(self) -> None:
        """Checks that the whole step and the protected step can be restored."""
        held = [{step for step in rank.slots if step is not None} for rank in self.ranks]
        whole, guarded = self.record.whole, self.record.guarded_step
        assert whole < 0 or max(set.intersection(*held), default=-1) >= whole, f"step {whole} was whole, and is lost"
        bare = {i for i, lost_at in enumerate(self.lost_at) if lost_at >= self.made_by}
        for lost in range(len(self.ranks)):
            if guarded >= 0 and bare <= {lost}:
                others = [i for i in range(len(self.ranks)) if i != lost]
                left = set.intersection(*(held[i] & set(self.parity[i]) for i in others))
                assert max(left, default=-1) >= guarded, f"without node {lost}, step {guarded} is lost"

    def heal(self) -> None:
        self.trouble, self.silent = 0.0, set()
        for _ in range(3 * len(self.rounds) + 6):
            self.tick()


def run(job: Job, restarts: bool, steps: int = 60) -> None:
    """Lets ranks train a few steps apart, in trouble."""
    at, chance = [0] * len(job.ranks), job.chance
    for _ in range(steps * len(at)):
        node = chance.choice([each for each, step in enumerate(at) if step <= min(at) + 2])
        at[node] += 1
        job.ranks[node].take(at[node], fails=chance.random() < 0.05)
        if chance.random() < 0.6:
            job.tick()
        if chance.random() < 0.05:
            job.silent = {each for each in range(len(at)) if chance.random() < 0.3}
        if restarts and chance.random() < 0.04:
            job.restart(chance.randrange(len(at)), loses_parity=chance.random() < 0.5)
    newest = max(at)
    for step in (newest + 1, newest + 2):
        for rank in job.ranks:
            rank.take(step, fails=False)
        job.heal()
    assert {rank.outcome.whole for rank in job.ranks} == {newest + 2}, "every rank had a free slot"
    assert job.record.protected >= newest + 1 or job.record.turn >= 0, "turns go on"


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("fan_out", [1, 16])
@pytest.mark.parametrize("seed", range(8))
def test_protected_steps_survive_any_node(fan_out, restarts, seed, monkeypatch):
    monkeypatch.setattr(round_module, "FAN_OUT", fan_out)
    job = Job(2 + seed % 3, random.Random(seed), trouble=0.3)
    run(job, restarts)
    assert len(set(job.protected)) > 2 and job.protected == sorted(job.protected), "in order"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 1100))
def test_protected_steps_survive_any_node_in_many_runs(seed, monkeypatch):
    monkeypatch.setattr(round_module, "FAN_OUT", 1 + seed % 3)
    run(Job(2 + seed % 4, random.Random(seed), trouble=0.1 * (seed % 5)), restarts=True, steps=150)


def test_a_coordinator_that_forgets_its_pins_loses_a_protected_step():
    with pytest.raises(AssertionError, match="is lost"):
        for seed in range(100):
            run(Job(3, random.Random(seed), trouble=0.3, records=False), restarts=True)


def test_reports_that_name_the_step_alone_protect_what_is_lost(monkeypatch):
    def named_by_step(*arguments: object) -> object:
        pins, history = next_pins(*arguments)
        return replace(pins, attempt=history.tried, protected_by=max(pins.protected, 0)), history

    monkeypatch.setattr("reft.core.commit.pins.next_pins", named_by_step)
    with pytest.raises(AssertionError, match="is lost"):
        for seed in range(100):
            run(Job(3, random.Random(seed), trouble=0.3), restarts=True)


@pytest.mark.parametrize("slots", [2, 4])
def test_a_job_that_stands_still_is_protected_again(slots):
    """With two slots, the kept step and the whole one: no newer step could become whole."""
    job = Job(3, random.Random(1), trouble=0.0, slots=slots)
    for step in (1, 2):
        for rank in job.ranks:
            rank.take(step, fails=False)
        job.fails = step == 2
        job.heal()
    assert (job.record.whole, job.record.protected, job.record.turn) in ((2, 1, -1), (2, 1, 2))
    job.fails = False
    job.heal()
    assert job.record.protected == 2, "the sources are back"
    job.restart(1, loses_parity=True)
    job.heal()
    assert job.record.protected == 2 and job.protected == [1, 2, 2]
    for rank in job.ranks:
        rank.take(3, fails=False)
    job.heal()
    assert job.record.whole == 3
