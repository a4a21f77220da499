"""The cadence at a mark: which steps are taken, left out or not due. No clock, no trainer."""

from __future__ import annotations

import pytest

from reft.core.commit.cost_spacing import SECONDS_MAX, ExtraStateCost
from reft.core.commit.snapshot_cadence import CadenceAnswer, CadenceFacts, SnapshotCadence
from reft.core.commit.snapshot_interval import MEASURED, DueSteps, IntervalEstimator, SnapshotInterval


def cadence(every: int = 1, adapts: bool = False) -> SnapshotCadence:
    return SnapshotCadence(DueSteps(every, adapts), IntervalEstimator(0.01))


def facts(**changed) -> CadenceFacts:
    return CadenceFacts(0.0, 0.0, False, SnapshotInterval(), 0, None, 0, 3)._replace(**changed)


def test_every_nth_step_is_taken():
    asked = cadence(3)
    taken = [step for step in range(1, 13) if asked.at_mark(step, facts(whole_step=step - 1)).takes]
    assert taken == [3, 6, 9, 12]
    assert asked.at_mark(13, facts()) == CadenceAnswer(False, "", 0, "")


def test_a_step_is_left_out_while_the_round_lags():
    asked = cadence()
    answers = {step: asked.at_mark(step, facts(last_void=9, delay=8)) for step in range(9, 21)}
    assert [step for step, answer in answers.items() if answer.takes] == [9, 10, 11, 12, 14, 16, 20]
    assert answers[13].left_out == (
        "the round lags behind training: until it catches up, only one of 2 due steps is snapshotted."
    )
    assert "only one of 4 due steps" in answers[18].left_out


def test_the_lag_counts_from_the_first_due_step():
    """A job that attached at step 1000 has heard of nothing yet, and does not lag by 1000 steps."""
    asked = cadence()
    assert asked.at_mark(1000, facts(whole_step=-1, last_void=1000, delay=4)).takes


def measured(asked: SnapshotCadence, stall_s: float, steps: int = 4 * MEASURED) -> int:
    """Returns the requested interval after steps of 1 s, each with a snapshot."""
    requested = 0
    for step in range(1, steps):
        now = facts(now_s=step * (1.0 + stall_s), held_s=step * stall_s, has_snapshot=True, whole_step=step - 1)
        requested = asked.at_mark(step, now).requested_every
    return requested


@pytest.mark.parametrize(("stall_s", "every"), [(0.001, 1), (0.035, 4)])
def test_the_requested_interval_keeps_the_budget(stall_s, every):
    assert measured(cadence(adapts=True), stall_s) == every


def test_a_fixed_interval_is_not_measured():
    assert measured(cadence(), 0.5) == 0


def test_an_agreed_interval_is_announced_once():
    asked, agreed = cadence(adapts=True), SnapshotInterval(8, 5)
    first, second = asked.at_mark(6, facts(interval=agreed)), asked.at_mark(7, facts(interval=agreed))
    assert "from step 8 on one step in 5 is snapshotted" in first.notice and not second.notice
    assert [step for step in range(8, 21) if asked.at_mark(step, facts(interval=agreed, whole_step=step - 1)).takes] == [
        10, 15, 20,
    ]  # fmt: skip


def test_after_a_restart_the_first_interval_is_in_force_again():
    asked = cadence(adapts=True)
    asked.at_mark(6, facts(now_s=5.0, interval=SnapshotInterval(1, 5)))
    assert asked.every(7) == 5
    asked.restart()
    assert asked.every(7) == 1
    asked.at_mark(7, facts(now_s=1e6, held_s=1e6, has_snapshot=True))
    assert asked.interval.snapshots == 0, "the time of a re-attach is no stall"


SLOW, FAST = ExtraStateCost(2.5 * SECONDS_MAX, 0, "model.0"), ExtraStateCost(0.001, 0, "model.0")


def test_steps_are_left_out_while_extra_state_costs_too_much():
    asked = cadence()
    answers = {}
    for step in range(1, 17):
        was_taken = step > 1 and answers[step - 1].takes
        cost = (SLOW if step <= 9 else FAST) if was_taken else None
        answers[step] = asked.at_mark(step, facts(whole_step=step - 1, extra_state=cost))
    assert [step for step, answer in answers.items() if answer.takes] == [1, 2, 4, 8, 12, 13, 14, 15, 16]
    assert [step for step, answer in answers.items() if answer.notice] == [3], "two snapshots were over the budget"
    assert answers[5].left_out == (
        "extra state costs more than its budget: until it costs less, only one of 4 due steps is snapshotted."
    )


def test_a_rank_that_lags_and_a_rank_with_slow_extra_state_share_steps():
    slow, lagging = cadence(), cadence()
    for _ in range(2):
        slow.at_mark(1, facts(extra_state=SLOW))
        lagging.at_mark(1, facts())
    taken = [
        {step for step in range(65, 97) if asked.at_mark(step, facts(whole_step=0, **more)).takes}
        for asked, more in ((slow, {}), (lagging, {"last_void": 64, "delay": 8}))
    ]
    assert taken == [{*range(68, 97, 4)}, {80, 96}], "the lag takes multiples of 16, the cost multiples of 4"


def test_with_an_interval_that_adapts_extra_state_is_part_of_the_measured_stall():
    asked = cadence(adapts=True)
    assert all(asked.at_mark(step, facts(whole_step=step - 1, extra_state=SLOW)).takes for step in range(1, 9))
