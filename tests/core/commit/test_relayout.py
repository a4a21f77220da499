"""Tests of the agreement before and after a new layout, with all orders of its messages."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

from reft.core.commit.pins import Pins
from reft.core.commit.relayout import (
    LayoutOutcome,
    LayoutReport,
    accepts_base,
    attempt_to_report,
    combine,
    holds_at,
    is_review_due,
    may_begin,
    newest,
)
from reft.core.commit.round import Outcome, Round, StepReport
from reft.core.commit.version import Epoch, Version

FIRST, SECOND = Epoch(1, b"a" * 16), Epoch(2, b"b" * 16)


def test_a_rank_reports_its_own_attempt_or_that_of_another_rank():
    nothing, heard = LayoutOutcome(), LayoutOutcome(wanted=1)
    assert attempt_to_report(0, False, nothing) == 0
    assert attempt_to_report(0, True, nothing) == attempt_to_report(0, False, heard) == 1
    assert attempt_to_report(1, False, heard) == 1, "the attempt has ended here: no new one"
    assert attempt_to_report(1, True, heard) == 2


def test_an_attempt_begins_once_all_ranks_wait_for_it():
    assert not may_begin(0, LayoutOutcome(wanted=1))
    assert may_begin(0, LayoutOutcome(wanted=1, joined=1))
    assert not may_begin(1, LayoutOutcome(wanted=2, joined=1)), "attempt 1 has failed here"


def test_attempts_keep_a_growing_distance():
    assert [is_review_due(steps, 0) for steps in (0, 1)] == [False, True]
    assert [is_review_due(steps, 3) for steps in (7, 8)] == [False, True]
    assert is_review_due(1024, 60) and not is_review_due(1023, 60)


def test_the_layout_holds_from_its_start_on():
    assert [holds_at(step, 5) for step in (4, 5, 6)] == [False, True, True]
    assert not holds_at(5, -1)


def test_the_base_is_the_newest_version_that_anybody_knows():
    known = [Version(FIRST, 6), None, Version(FIRST, 7), Version(Epoch(0, b"0" * 16), 9)]
    assert newest(known) == Version(FIRST, 7)
    assert newest([None, None]) is None


@pytest.mark.parametrize(
    ("base", "whole", "taken"), [(7, 7, True), (7, 6, True), (6, 7, False), (None, 7, False), (None, None, True)]
)
def test_a_daemon_refuses_a_base_that_it_may_have_freed(base, whole, taken):
    versions = [None if step is None else Version(FIRST, step) for step in (base, whole)]
    assert accepts_base(*versions) is taken


def test_a_subtree_reports_the_newest_wish_and_what_all_ranks_do():
    reports = [LayoutReport(2, 2, 7), LayoutReport(1, 1, 9)]
    assert combine(reports, 2) == LayoutReport(2, 1, 9)
    assert combine(reports, 3) == LayoutReport(wanted=2), "one rank was not heard"
    assert combine([LayoutReport(2, 2, 7), LayoutReport(2, 2)], 2).ready == -1, "one rank has no slots"
    assert combine([], 0) == LayoutReport()


def test_a_pinned_round_learns_nothing_until_the_pin_is_undone():
    node = Round(0, 1, frozenset({0}))
    assert node.hear_rank(0, StepReport(until=1, sealed=frozenset({1}))) and node.outcome.whole == 1
    node.is_pinned = True
    assert not node.hear_rank(0, StepReport(until=2, sealed=frozenset({2})))
    assert not node.hear_outcome(Outcome(Pins(whole=5), 5)) and not node.hear_layout(0, LayoutReport(1, 1))
    assert node.outcome.whole == 1 and node.layout == LayoutReport()
    node.is_pinned = False
    node.hear_rank(0, StepReport(until=2, sealed=frozenset({2})))
    assert node.outcome.whole == 2


class World:
    """Three ranks on two nodes. Each event delivers or repeats a message, or restarts a node.

    A rank wants attempt 1, joins the attempts that it hears of, and is ready at its own step once
    it has joined. Attempts and slots of one epoch are enough: all numbers only grow.
    """

    READY = (4, 7, 5)
    NODES = ((0, 1), (2,))

    def __init__(self, wanting: int) -> None:
        self.rounds = [Round(index, 2, frozenset(ranks)) for index, ranks in enumerate(self.NODES)]
        self.heard = [LayoutOutcome()] * 3
        self.wanting = wanting
        self.restarts = 1

    def key(self) -> tuple[object, ...]:
        rounds = tuple((str(node.outcome.layout), str(sorted(node._layouts.items()))) for node in self.rounds)
        return rounds, tuple(self.heard), self.restarts

    def report(self, rank: int) -> LayoutReport:
        attempt = attempt_to_report(0, rank == self.wanting, self.heard[rank])
        ready = self.READY[rank] if may_begin(0, self.heard[rank]) else -1
        return LayoutReport(attempt, attempt, ready)

    def successors(self) -> Iterator[World]:
        for event in range(11):
            world = copy.copy(self)
            world.heard, world.rounds = list(self.heard), [copy.copy(node) for node in self.rounds]
            for node in world.rounds:
                node._layouts = dict(node._layouts)
            if world.happen(event):
                yield world

    def happen(self, event: int) -> bool:
        """Changes the world by one message; a lost one is an event that never happens."""
        if event < 3:
            node = 0 if event in self.NODES[0] else 1
            self.rounds[node].hear_layout(event, self.report(event))
        elif event < 6:
            rank = event - 3
            node = 0 if rank in self.NODES[0] else 1
            self.heard[rank] = self.heard[rank].merge(self.rounds[node].outcome.layout)
        elif event == 6:
            self.rounds[0].hear_child_layout(1, self.rounds[1].layout)
        elif event == 7:
            self.rounds[1].hear_outcome(self.rounds[0].outcome)
        elif event == 8:
            self.rounds[1].hear_layout(2, LayoutReport())  # an old message
        elif event == 9:
            self.rounds[0].hear_child_layout(1, LayoutReport(1))  # perhaps an old message
            return self.report(2).wanted == 1
        elif self.restarts:
            self.restarts -= 1
            self.rounds[0] = Round(0, 2, frozenset(self.NODES[0]))
        else:
            return False
        return True


def explore(wanting: int) -> list[World]:
    worlds = [World(wanting)]
    seen = {worlds[0].key()}
    for world in worlds:
        for successor in world.successors():
            if successor.key() not in seen:
                seen.add(successor.key())
                worlds.append(successor)
    return worlds


@pytest.mark.parametrize("wanting", [0, 2])
def test_all_orders_of_messages_name_one_start_after_all_ranks_are_ready(wanting):
    worlds = explore(wanting)
    starts = set()
    for world in worlds:
        for heard in (*world.heard, *(node.outcome.layout for node in world.rounds)):
            starts.add(heard.start)
            assert heard.joined <= heard.wanted <= 1
            if heard.joined:
                assert all(world.report(rank).joined == 1 for rank in range(3)), "a rank does not wait yet"
            if heard.start >= 0:
                assert all(world.report(rank).ready >= 0 for rank in range(3)), "a rank has no slots yet"
    assert starts == {-1, max(World.READY) + 1}
    assert len(worlds) > 500


def test_from_any_state_the_next_messages_bring_the_start_to_every_rank():
    for world in explore(1)[::7]:
        for _ in range(6):
            for event in (0, 1, 2, 6, 7, 3, 4, 5):
                world.happen(event)
        assert {heard.start for heard in world.heard} == {max(World.READY) + 1}
