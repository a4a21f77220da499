"""Pins and turns: each decision of the coordinator alone, and what nodes report to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reft.core.commit.decision import Decision, counts
from reft.core.commit.pins import (
    LEFT_OUT_MAX,
    NO_GUARD,
    ExchangeFacts,
    GuardReport,
    GuardRound,
    Pins,
    TurnHistory,
    UnguardedLane,
    next_pins,
    pinned_versions,
)
from reft.core.commit.version import Epoch, Version

OLDEST, OLD, NOW = (Epoch(counter, bytes([counter]) * 16) for counter in (1, 2, 3))
FOUR = ExchangeFacts(lanes=3, slots=4, guards=True)
FRESH = TurnHistory()


def lacks(step: int, *lanes: int) -> GuardReport:
    return GuardReport(lanes=frozenset(UnguardedLane(step, lane, "a source is gone") for lane in lanes))


# Pins


def test_the_greater_seq_replaces_all_fields():
    newer = Pins(seq=2, whole=5, turn=5)
    for older in (Pins(1, 9, 4, 3), Pins(2, 4, 5), Pins()):
        assert older.merge(newer) == newer.merge(older) == newer


def test_before_any_step_is_whole_the_base_and_the_guard_are_pinned():
    base, guard = Version(OLD, 7), Version(OLDEST, 4)
    decision = Decision(NOW, base, (OLD, OLDEST), guard)
    assert pinned_versions(Pins(), decision) == {base, guard}
    assert pinned_versions(Pins(whole=8), decision) == {Version(NOW, 8), guard}, "the guard, until a step is protected"
    assert pinned_versions(Pins(1, 9, 8, -1), decision) == {Version(NOW, 9), Version(NOW, 8), guard}
    assert pinned_versions(Pins(2, 9, -1, 8), decision) == {Version(NOW, 9), Version(NOW, 8)}
    assert pinned_versions(Pins(3, 9, -1, -1), decision) == {Version(NOW, 9), guard}, "the protected step was lost"


def test_versions_up_to_the_guard_count():
    decision = Decision(NOW, Version(OLD, 7), (OLD, OLDEST), Version(OLDEST, 4))
    assert counts(Version(OLDEST, 4), decision) and counts(Version(OLDEST, 3), decision)
    assert not counts(Version(OLDEST, 5), decision) and not counts(Version(OLD, 8), decision)
    assert not counts(Version(OLDEST, 4), replace(decision, guard=None))


# Turns


def test_a_turn_takes_the_newest_whole_step_and_protects_it():
    pins, history = next_pins(Pins(), 5, NO_GUARD, FRESH, FOUR)
    assert pins == Pins(1, 5, 5, -1)
    pins, history = next_pins(pins, 7, NO_GUARD, history, FOUR)
    assert pins == Pins(1, 7, 5, -1), "one turn at a time"
    pins, history = next_pins(pins, 7, GuardReport(5), history, FOUR)
    assert pins == Pins(2, 7, 7, 5), "the next turn begins in the same value"
    assert next_pins(pins, 7, GuardReport(7), history, FOUR)[0] == Pins(3, 7, -1, 7)


def test_a_late_report_of_an_earlier_turn_protects_nothing():
    pins = Pins(4, 9, 9, 5)
    assert next_pins(pins, 9, GuardReport(5), TurnHistory(9, 2), FOUR)[0] == pins


@pytest.mark.parametrize(
    ("facts", "protected", "begins"),
    [
        (FOUR, 5, True),
        (replace(FOUR, has_guard=True), -1, True),
        (replace(FOUR, slots=3), -1, True),
        (replace(FOUR, slots=3), 5, False),
        (replace(FOUR, slots=3, has_guard=True), -1, False),
        (replace(FOUR, lanes=0), -1, False),
        (ExchangeFacts(), -1, False),
    ],
)
def test_a_turn_begins_only_while_the_pins_leave_two_slots(facts, protected, begins):
    pins = next_pins(Pins(3, 8, -1, protected), 9, NO_GUARD, TurnHistory(5, 1), facts)[0]
    assert pins == (Pins(4, 9, 9, protected) if begins else Pins(3, 9, -1, protected))


def test_a_lane_without_parity_ends_the_turn_and_the_protected_step_stays():
    pins, history = next_pins(Pins(2, 8, 8, 5), 8, lacks(8, 1), TurnHistory(8, 2), FOUR)
    assert pins == Pins(3, 8, -1, 5), "each step has one turn"
    assert next_pins(pins, 9, lacks(8, 1), history, FOUR)[0] == Pins(4, 9, 9, 5)


def test_lost_parity_of_the_protected_step_demotes_it():
    pins, history = next_pins(Pins(2, 9, -1, 5), 9, lacks(5, 1), TurnHistory(5, 1), FOUR)
    assert pins == Pins(3, 9, 9, -1), "and the next turn begins at once"
    assert next_pins(pins, 9, lacks(5, 1), history, FOUR)[0] == pins


def test_a_failing_lane_is_left_out_of_more_and_more_turns():
    """The lane fails whenever a turn tries it: two turns, then each first one after a pause."""
    pins, history, tried = Pins(), FRESH, []
    for step in range(1, 40):
        pins, history = next_pins(pins, step, NO_GUARD, history, FOUR)
        tried.append(1 not in history.exposed[step])
        report = replace(lacks(step, 1), guarded=step)
        pins, history = next_pins(pins, step, report, history, FOUR)
        assert pins.turn == -1 and (pins.protected == step) == (not tried[-1])
    assert [step for step, was_tried in enumerate(tried, 1) if was_tried] == [1, 2, 4, 7, 12, 21, 38]


def test_a_lane_that_was_guarded_again_starts_anew():
    pins, history = Pins(), FRESH
    for step, report in ((1, lacks(1, 2)), (2, GuardReport(2)), (3, lacks(3, 2)), (4, NO_GUARD)):
        pins, history = next_pins(pins, step, NO_GUARD, history, FOUR)
        assert not history.exposed[step]
        pins, history = next_pins(pins, step, report, history, FOUR)


def test_the_pause_of_a_failing_lane_is_bounded():
    history = FRESH
    for _ in range(30):
        history = history.after_failure([0])
    assert history.failures[0].next_try == history.turns + 1 + LEFT_OUT_MAX


def test_an_exposed_lane_does_not_demote_the_step_that_was_protected_without_it():
    history = TurnHistory(8, 4, {}, {8: frozenset({1})})
    pins, history = next_pins(Pins(5, 8, 8, -1), 8, replace(lacks(8, 1), guarded=8), history, FOUR)
    assert pins == Pins(6, 8, -1, 8)
    pins, history = next_pins(pins, 9, lacks(8, 1), history, FOUR)
    assert pins == Pins(7, 9, 9, 8), "the next turn keeps what it knows of the protected step"
    assert next_pins(pins, 9, lacks(8, 1), history, FOUR)[0] == pins
    assert next_pins(pins, 9, lacks(8, 0), history, FOUR)[0] == Pins(8, 9, 9, -1), "another lane counts"


def test_if_all_lanes_would_be_left_out_none_is():
    history = FRESH.after_failure([0, 1]).after_failure([0, 1])
    assert not history.begin(9, 2, -1).exposed[9]
    assert history.begin(9, 3, -1).exposed[9] == {0, 1}


# Reports

TURN = Pins(3, 9, 9, 5)


def test_a_node_has_guarded_a_turn_once_all_below_it_have():
    node = GuardRound(FOUR, 2, FRESH)
    assert node.note_guarded(TURN, 9) and node.report(TURN) == NO_GUARD
    node.hear(1, GuardReport(9))
    assert node.report(TURN) == NO_GUARD, "one child was not heard"
    node.hear(2, GuardReport(5))
    assert node.report(TURN) == NO_GUARD, "of an earlier turn"
    assert node.hear(2, GuardReport(9)) and not node.hear(2, GuardReport(9))
    assert node.report(TURN) == GuardReport(9)
    assert node.report(Pins(4, 11, 11, 9)) == NO_GUARD
    node.hear(1, NO_GUARD)
    assert node.report(TURN) == NO_GUARD, "the child was restarted"


def test_a_node_that_guards_nothing_answers_for_those_below_it():
    assert GuardRound(ExchangeFacts(3, 4), 0, FRESH).report(TURN) == GuardReport(9)
    assert GuardRound(ExchangeFacts(3, 4), 0, FRESH).report(Pins(3, 9, -1, 5)) == NO_GUARD


def test_notes_on_other_steps_than_the_pinned_ones_change_nothing():
    node = GuardRound(FOUR, 0, FRESH)
    assert not node.note_guarded(TURN, 5) and not node.note_guarded(Pins(), -1)
    assert not node.note_unguarded(TURN, [UnguardedLane(7, 0, "")])
    assert node.report(TURN) == NO_GUARD


def test_lanes_without_parity_are_reported_once_each():
    node = GuardRound(FOUR, 2, FRESH)
    node.hear(1, lacks(9, 0, 1))
    node.hear(2, lacks(9, 1))
    assert node.note_unguarded(TURN, [UnguardedLane(5, 2, "damaged"), UnguardedLane(4, 2, "damaged")])
    assert {(lane.step, lane.lane) for lane in node.report(TURN).lanes} == {(9, 0), (9, 1), (5, 2)}
    assert len(node.report(TURN).lanes) == 3
    assert node.report(Pins(4, 11, 11, -1)) == NO_GUARD
