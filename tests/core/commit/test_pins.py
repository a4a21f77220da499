"""Pins and turns: each decision of the coordinator alone, and what nodes report to it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from reft.core.commit.decision import Decision, counts
from reft.core.commit.pins import (
    LEFT_OUT_AFTER_S,
    LEFT_OUT_MAX,
    NO_GUARD,
    ExchangeFacts,
    GuardReport,
    GuardRound,
    LaneHistory,
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
NOW_S = 1000.0


def lacks(attempt: int, *lanes: int, step: int = 0) -> GuardReport:
    return GuardReport(lanes=frozenset(UnguardedLane(step, lane, "a source is gone", attempt) for lane in lanes))


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
    kept = pinned_versions(Pins(3, 9, -1, -1, 2, 0, 8), decision)
    assert kept == {Version(NOW, 9), Version(NOW, 8)}, "a part of the parity is lost: the rest of the step stays"


def test_the_step_that_is_written_to_storage_stays():
    decision = Decision(NOW, Version(OLD, 7), (OLD,))
    writing = Pins(4, 9, persist=5)
    assert pinned_versions(writing, decision) == {Version(NOW, 9), Version(NOW, 5)}
    assert pinned_versions(replace(writing, seq=5, persist=-1), decision) == {Version(NOW, 9)}
    assert pinned_versions(Pins(1, -1, persist=5), decision) == {Version(NOW, 5), Version(OLD, 7)}


def test_a_turn_leaves_a_slot_beside_the_step_that_is_written_to_storage():
    for protected, persist, slots, begins in ((5, 4, 4, False), (5, 4, 5, True), (5, 5, 4, True), (-1, 4, 4, True)):
        before = Pins(3, 8, -1, protected, 1, int(protected >= 0), persist=persist)
        pins = next_pins(before, 9, NO_GUARD, TurnHistory(5, 1), replace(FOUR, slots=slots), NOW_S)[0]
        assert (pins.turn == 9) == begins and pins.persist == persist


def test_versions_up_to_the_guard_count():
    decision = Decision(NOW, Version(OLD, 7), (OLD, OLDEST), Version(OLDEST, 4))
    assert counts(Version(OLDEST, 4), decision) and counts(Version(OLDEST, 3), decision)
    assert not counts(Version(OLDEST, 5), decision) and not counts(Version(OLD, 8), decision)
    assert not counts(Version(OLDEST, 4), replace(decision, guard=None))


# Turns


def test_a_turn_takes_the_newest_whole_step_and_protects_it():
    pins, history = next_pins(Pins(), 5, NO_GUARD, FRESH, FOUR, NOW_S)
    assert pins == Pins(1, 5, 5, -1, 1)
    pins, history = next_pins(pins, 7, NO_GUARD, history, FOUR, NOW_S)
    assert pins == Pins(1, 7, 5, -1, 1), "one turn at a time"
    pins, history = next_pins(pins, 7, GuardReport(1), history, FOUR, NOW_S)
    assert pins == Pins(2, 7, 7, 5, 2, 1), "the next turn begins in the same value"
    assert next_pins(pins, 7, GuardReport(2), history, FOUR, NOW_S)[0] == Pins(3, 7, -1, 7, 2, 2)


def test_late_reports_of_an_earlier_turn_change_nothing():
    pins, history = Pins(6, 9, 9, 5, 4, 2), TurnHistory(9, 2)
    for late in (GuardReport(3), lacks(3, 0), lacks(1, 0, 1)):
        assert next_pins(pins, 9, late, history, FOUR, NOW_S)[0] == pins, "attempt 3 was a turn of step 9, too"


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
    before = Pins(3, 8, -1, protected, 1, int(protected >= 0))
    for each in (before, replace(before, protected=-1, protected_by=0, kept=protected)):
        pins = next_pins(each, 9, NO_GUARD, TurnHistory(5, 1), facts, NOW_S)[0]
        assert pins == (replace(each, seq=4, whole=9, turn=9, attempt=2) if begins else replace(each, whole=9))


def test_a_lane_without_parity_ends_the_turn_and_the_protected_step_stays():
    pins, history = next_pins(Pins(2, 8, 8, 5, 2, 1), 8, lacks(2, 1), TurnHistory(8, 1), FOUR, NOW_S)
    assert pins == Pins(3, 8, -1, 5, 2, 1), "another turn of the step begins after a pause only"
    assert next_pins(pins, 9, lacks(2, 1), history, FOUR, NOW_S)[0] == Pins(4, 9, 9, 5, 3, 1), (
        "a newer step is not delayed"
    )


def test_lost_parity_ends_the_protection_and_what_is_left_stays():
    pins, history = next_pins(Pins(2, 9, -1, 5, 1, 1), 9, lacks(1, 1), TurnHistory(5, 1), FOUR, NOW_S)
    assert pins == Pins(3, 9, 9, -1, 2, 0, 5), "and the next turn begins at once"
    assert next_pins(pins, 9, lacks(1, 1), history, FOUR, NOW_S)[0] == pins
    failed, _ = next_pins(pins, 9, lacks(2, 0), history, FOUR, NOW_S)
    assert failed == Pins(4, 9, -1, -1, 2, 0, 5), "also if that turn fails"
    assert next_pins(pins, 9, GuardReport(2), history, FOUR, NOW_S)[0] == Pins(4, 9, -1, 9, 2, 2)


# Another turn of one step


def retried(pins: Pins, history: TurnHistory, report: GuardReport = NO_GUARD) -> tuple[Pins, TurnHistory]:
    """Returns the pins after the pause, and the history."""
    node = GuardRound(FOUR, 0, history)
    node.permit_retry(pins, pins.attempt)
    return next_pins(pins, pins.whole, report, node.history, FOUR, NOW_S)


def test_a_step_whose_turn_failed_has_another_one():
    pins, history = next_pins(Pins(2, 8, 8, 5, 2, 1), 8, lacks(2, 1), TurnHistory(8, 1), FOUR, NOW_S)
    assert next_pins(pins, 8, NO_GUARD, history, FOUR, NOW_S)[0] == pins
    pins, history = retried(pins, history)
    assert pins == Pins(4, 8, 8, 5, 3, 1)
    assert next_pins(pins, 8, lacks(2, 1), history, FOUR, NOW_S)[0] == pins, "a late report on the first turn"
    assert next_pins(pins, 8, GuardReport(3), history, FOUR, NOW_S)[0] == Pins(5, 8, -1, 8, 3, 3)


def test_a_step_that_lost_its_parity_has_another_turn():
    pins, history = next_pins(Pins(2, 9, -1, 9, 1, 1), 9, lacks(1, 1), TurnHistory(9, 1), FOUR, NOW_S)
    assert pins == Pins(3, 9, -1, -1, 1, 0, 9)
    pins, history = retried(pins, history)
    assert pins == Pins(4, 9, 9, -1, 2, 0, 9)
    pins, history = next_pins(pins, 9, GuardReport(2), history, FOUR, NOW_S)
    assert pins == Pins(5, 9, -1, 9, 2, 2)
    assert next_pins(pins, 9, lacks(1, 1), history, FOUR, NOW_S)[0] == pins, (
        "a late report on the parity of the first turn"
    )


def test_lanes_that_were_left_out_are_tried_again_at_the_same_step():
    history = TurnHistory(8, 3, -1, {1: LaneHistory(0, 1, 5)}, {4: frozenset({1})})
    pins = Pins(5, 8, -1, 8, 4, 4, is_exposed=True)
    pins, history = retried(pins, history)
    assert pins == Pins(6, 8, 8, 8, 5, 4, is_exposed=True) and not history.exposed[5]
    failed, _ = next_pins(pins, 8, lacks(5, 1), history, FOUR, NOW_S)
    assert failed == Pins(7, 8, -1, 8, 5, 4, is_exposed=True), "the step stays protected in the other lanes"
    assert next_pins(pins, 8, GuardReport(5), history, FOUR, NOW_S)[0] == Pins(7, 8, -1, 8, 5, 5)


def test_the_pauses_between_turns_of_one_step_grow():
    pins, history, pauses = Pins(), FRESH, []
    for _ in range(9):
        pins, history = retried(pins, history) if pauses else next_pins(pins, 5, NO_GUARD, FRESH, FOUR, NOW_S)
        assert GuardRound(FOUR, 0, history).retry_pause_s(pins) is None, "the turn is under way"
        pins, history = next_pins(pins, 5, lacks(pins.attempt, 0, 1, 2), history, FOUR, NOW_S)
        pauses.append(GuardRound(FOUR, 0, history).retry_pause_s(pins))
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64, 64] and pins.attempt == 9
    pins, history = next_pins(pins, 6, NO_GUARD, history, FOUR, NOW_S)
    pins, history = next_pins(pins, 6, lacks(pins.attempt, 0), history, FOUR, NOW_S)
    assert GuardRound(FOUR, 0, history).retry_pause_s(pins) == 1, "of another step"


def test_no_other_turn_is_wanted_of_a_protected_step_or_without_lanes():
    done = Pins(3, 9, -1, 9, 2, 2)
    assert GuardRound(FOUR, 0, TurnHistory(9, 1)).retry_pause_s(done) is None
    assert retried(done, TurnHistory(9, 1))[0] == done
    assert GuardRound(ExchangeFacts(), 0, FRESH).retry_pause_s(Pins(whole=3)) is None
    assert GuardRound(FOUR, 0, FRESH).retry_pause_s(Pins()) is None


def test_a_late_permission_begins_no_turn():
    node = GuardRound(FOUR, 0, TurnHistory(9, 1))
    for late, pins in ((1, Pins(5, 9, -1, 5, 2, 1)), (2, Pins(5, 9, 9, 5, 2, 1))):
        node.permit_retry(pins, late)
        assert next_pins(pins, 9, NO_GUARD, node.history, FOUR, NOW_S)[0] == pins


# Lanes that fail


def test_a_failing_lane_is_left_out_of_more_and_more_turns():
    """The lane fails whenever a turn tries it: two turns, then each first one after a pause."""
    pins, history, tried = Pins(), FRESH, []
    for step in range(1, 40):
        pins, history = next_pins(pins, step, NO_GUARD, history, FOUR, NOW_S)
        assert pins.attempt == step
        tried.append(1 not in history.exposed[step])
        report = replace(lacks(step, 1), guarded=step)
        pins, history = next_pins(pins, step, report, history, FOUR, NOW_S)
        assert pins.turn == -1 and (pins.protected == step) == (not tried[-1])
    assert [step for step, was_tried in enumerate(tried, 1) if was_tried] == [1, 2, 4, 7, 12, 21, 38]


@pytest.mark.parametrize("step_s", [0.1, 1.0, 7.0])
def test_a_daemon_that_is_restarted_does_not_cost_the_protected_step(step_s):
    """Its lane ends each turn meanwhile. Once it is back, the next turn protects all lanes."""
    pins, history = Pins(2, 8, -1, 8, 1, 1), TurnHistory(8, 1)
    for i in range(int(LEFT_OUT_AFTER_S / step_s)):
        pins, history = next_pins(pins, 9 + i, NO_GUARD, history, FOUR, NOW_S + i * step_s)
        report = replace(lacks(pins.attempt, 1), guarded=pins.attempt)
        pins, history = next_pins(pins, pins.whole, report, history, FOUR, NOW_S + i * step_s)
        assert (pins.turn, pins.protected, pins.is_exposed) == (-1, 8, False)
    pins, history = next_pins(pins, pins.whole + 1, NO_GUARD, history, FOUR, NOW_S + LEFT_OUT_AFTER_S)
    pins, history = next_pins(pins, pins.whole, GuardReport(pins.attempt), history, FOUR, NOW_S + LEFT_OUT_AFTER_S)
    assert pins.protected == pins.whole and not pins.is_exposed and not history.failures


@pytest.mark.parametrize(
    ("pins", "facts", "without"),
    [
        (Pins(2, 8, -1, 8, 1, 1), FOUR, [12]),
        (Pins(2, 8, -1, -1, 1, kept=8), FOUR, [12]),
        (Pins(2, 8, -1, -1, 1), replace(FOUR, has_guard=True), [12]),
        (Pins(2, 8, -1, -1, 1), FOUR, [11]),
    ],
)
def test_a_lane_is_left_out_at_once_only_if_that_lets_go_of_nothing(pins, facts, without):
    """The lane ends each turn that tries it. The third such turn ends long after the first one."""
    history, left_out = TurnHistory(8, 1), []
    for whole, after_s in ((9, 0.0), (10, 1.0), (11, LEFT_OUT_AFTER_S), (12, LEFT_OUT_AFTER_S)):
        pins, history = next_pins(pins, whole, NO_GUARD, history, facts, NOW_S + after_s)
        left_out += [whole] if history.exposed[pins.attempt] else []
        report = replace(lacks(pins.attempt, 1), guarded=pins.attempt)
        pins, history = next_pins(pins, whole, report, history, facts, NOW_S + after_s)
    assert left_out == without


def test_a_lane_that_was_guarded_again_starts_anew():
    pins, history = Pins(), FRESH
    for step, report in ((1, lacks(1, 2)), (2, GuardReport(2)), (3, lacks(3, 2)), (4, NO_GUARD)):
        pins, history = next_pins(pins, step, NO_GUARD, history, FOUR, NOW_S)
        assert not history.exposed[step]
        pins, history = next_pins(pins, step, report, history, FOUR, NOW_S)


def test_the_pause_of_a_failing_lane_is_bounded():
    history = FRESH
    for attempt in range(30):
        history = history.after_failure([0], attempt, NOW_S, 0)
    assert history.failures[0].next_try == 29 + 1 + LEFT_OUT_MAX


def test_an_exposed_lane_does_not_demote_the_step_that_was_protected_without_it():
    history = TurnHistory(8, 1, -1, {}, {4: frozenset({1})})
    pins, history = next_pins(Pins(5, 8, 8, -1, 4), 8, replace(lacks(4, 1), guarded=4), history, FOUR, NOW_S)
    assert pins == Pins(6, 8, -1, 8, 4, 4, is_exposed=True)
    pins, history = next_pins(pins, 9, lacks(4, 1), history, FOUR, NOW_S)
    assert pins == Pins(7, 9, 9, 8, 5, 4, is_exposed=True), "the next turn keeps what it knows of the protected step"
    assert next_pins(pins, 9, lacks(4, 1), history, FOUR, NOW_S)[0] == pins
    assert next_pins(pins, 9, lacks(4, 0), history, FOUR, NOW_S)[0] == Pins(8, 9, 9, -1, 5, 0, 8), "another lane counts"


@pytest.mark.parametrize("seed", range(20))
def test_the_pins_say_whether_a_lane_lacks_parity_of_the_protected_step(seed):
    """Lanes fail in spells, and lose parity again. Now and then the coordinator is restarted."""
    chance, node, pins, failing = random.Random(seed), GuardRound(FOUR, 0, FRESH), Pins(), frozenset[int]()
    lacking: dict[int, frozenset[int]] = {}  # attempt → lanes
    seen = set()
    for whole in range(1, 80):
        failing = frozenset(lane for lane in range(3) if chance.random() < 0.4) if chance.random() < 0.2 else failing
        if chance.random() < 0.05:
            node = GuardRound(FOUR, 0, TurnHistory(pins.whole))
        if pins.protected >= 0 and chance.random() < 0.1:
            lacking[pins.protected_by] |= {chance.randrange(3)}
        for attempt in lacking:
            node.note_unguarded(pins, [UnguardedLane(0, lane, "", attempt) for lane in lacking[attempt]])
        if chance.random() < 0.9:
            node.note_guarded(pins, pins.attempt)
        node.now_s += chance.choice([0.1, LEFT_OUT_AFTER_S])
        after = node.next_pins(pins, whole)
        node.announce(pins, whole)
        pins = after
        lacking.setdefault(pins.attempt, failing)
        assert pins.is_exposed == (pins.protected >= 0 and bool(lacking[pins.protected_by]))
        seen.add((pins.is_exposed, pins.protected >= 0))
    assert seen == {(True, True), (False, True), (False, False)}


def test_a_lane_that_was_left_out_and_is_guarded_all_the_same_starts_anew():
    history = TurnHistory(8, 1, -1, {0: LaneHistory(0, 2, 9), 1: LaneHistory(0, 2, 9)}, {4: frozenset({0, 1})})
    pins, history = next_pins(Pins(5, 8, 8, -1, 4), 8, replace(lacks(4, 1), guarded=4), history, FOUR, NOW_S)
    assert pins.is_exposed and history.failures == {1: LaneHistory(0, 2, 9)}
    pins, _ = next_pins(Pins(5, 8, 8, -1, 4), 8, GuardReport(4), history, FOUR, NOW_S)
    assert pins == Pins(6, 8, -1, 8, 4, 4) and GuardRound(FOUR, 0, history).retry_pause_s(pins) is None


def test_if_all_lanes_would_be_left_out_none_is():
    history = FRESH.after_failure([0, 1], 1, NOW_S, 0).after_failure([0, 1], 2, NOW_S, 0)
    assert not history.begin(9, 3, 2, 0).exposed[3]
    assert history.begin(9, 3, 3, 0).exposed[3] == {0, 1}


# Reports

TURN = Pins(3, 9, 9, 5, attempt=4, protected_by=2)


def test_a_node_has_guarded_a_turn_once_all_below_it_have():
    node = GuardRound(FOUR, 2, FRESH)
    assert node.note_guarded(TURN, 4) and node.report(TURN) == NO_GUARD
    node.hear(1, GuardReport(4))
    assert node.report(TURN) == NO_GUARD, "one child was not heard"
    node.hear(2, GuardReport(3))
    assert node.report(TURN) == NO_GUARD, "of an earlier turn"
    assert node.hear(2, GuardReport(4)) and not node.hear(2, GuardReport(4))
    assert node.report(TURN) == GuardReport(4)
    assert node.report(Pins(4, 9, 9, 5, 5, 2)) == NO_GUARD
    node.hear(1, NO_GUARD)
    assert node.report(TURN) == NO_GUARD, "the child was restarted"


def test_a_node_that_guards_nothing_answers_for_those_below_it():
    assert GuardRound(ExchangeFacts(3, 4), 0, FRESH).report(TURN) == GuardReport(4)
    assert GuardRound(ExchangeFacts(3, 4), 0, FRESH).report(Pins(3, 9, -1, 5, 4, 2)) == NO_GUARD


def test_notes_on_other_turns_than_the_pinned_ones_change_nothing():
    node = GuardRound(FOUR, 0, FRESH)
    assert not node.note_guarded(TURN, 2) and not node.note_guarded(Pins(), 0)
    assert not node.note_unguarded(TURN, [UnguardedLane(9, 0, "", 3)])
    assert node.report(TURN) == NO_GUARD


def test_lanes_without_parity_are_reported_once_each():
    node = GuardRound(FOUR, 2, FRESH)
    node.hear(1, lacks(4, 0, 1, step=9))
    node.hear(2, lacks(4, 1, step=9))
    assert node.note_unguarded(TURN, [UnguardedLane(5, 2, "damaged", 2), UnguardedLane(5, 2, "damaged", 1)])
    assert {(lane.step, lane.lane) for lane in node.report(TURN).lanes} == {(9, 0), (9, 1), (5, 2)}
    assert len(node.report(TURN).lanes) == 3
    assert node.report(Pins(4, 11, 11, -1, 5)) == NO_GUARD
