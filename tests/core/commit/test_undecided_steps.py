"""A rank's answers until the round decides them."""

from __future__ import annotations

from reft.core.commit.pins import Pins
from reft.core.commit.round import Outcome, StepAnswer, StepReport
from reft.core.commit.undecided_steps import UndecidedSteps


def answered(*steps: int, void: tuple[int, ...] = ()) -> UndecidedSteps:
    undecided = UndecidedSteps()
    for step in steps:
        undecided.answer(step, StepAnswer.VOID if step in void else StepAnswer.SEALED, {0: step})
    return undecided


def test_each_report_has_all_undecided_steps():
    undecided = answered(1, 2, 3, void=(2,))
    assert undecided.report(-1) == StepReport(-1, 3, frozenset({1, 3})) and undecided.sealed == {1: {0: 1}, 3: {0: 3}}
    undecided.settle(Outcome(Pins(whole=1), 2))
    assert undecided.report(1) == StepReport(1, 3, frozenset({3}))


def test_an_answer_for_an_earlier_step_changes_nothing():
    undecided = answered(5, 3)
    assert undecided.report(-1) == StepReport(-1, 5, frozenset({5}))


def test_delays_count_decided_steps_and_the_oldest_undecided_one():
    undecided = answered(1, 2, 3)
    assert undecided.longest_delay(9) == 8
    undecided.settle(Outcome(Pins(whole=3), 3))
    assert undecided.longest_delay(9) == 2 and undecided.delays.last_void is None


def test_a_void_step_is_remembered():
    undecided = answered(1, 2, 3)
    undecided.settle(Outcome(Pins(whole=1), 3, frozenset({3})))
    assert undecided.delays.last_void == 3, "the newest step when this rank heard that step 2 is void"
    assert list(undecided.sealed) == [3]
