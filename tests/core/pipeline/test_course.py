"""Tests which task is due when: gaps, then compute, then collectives; time is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.core.pipeline.course import CopyTask, PacedCopy, PacingPlan, Phase, PhaseDurations, Priority
from reft.core.pipeline.pacing import Tier

GAP, COMPUTE, COLLECTIVE, FENCE = Tier
ALL, IDLE, BUSY = Priority


def pacing_plan(*phases: tuple[Tier, float], guard_s: float = 0.0, beside: float = 1.0) -> PacingPlan:
    """Returns a plan with a rate of one byte a second in gaps."""
    return PacingPlan(tuple(Phase(*each) for each in phases), 1.0, beside, guard_s)


def ask(paced_copy: PacedCopy, now_s: float) -> CopyTask | None:
    """Asks for a task as the only kind of thread."""
    return paced_copy.take(now_s, Priority.ALL)


def walk(
    paced_copy: PacedCopy, pacing_plan: PacingPlan, weights: list[int], tick_s: float = 0.25
) -> list[tuple[int, Tier, int]]:
    """Copies with one thread at the plan's rates.

    It returns (task, tier, phase; -1 at the fence).
    """
    paced_copy.begin(0.0)
    taken, now, free_s = [], 0.0, 0.0

    def copy(phase: int) -> None:
        nonlocal free_s
        if now >= free_s and (task := ask(paced_copy, now)):
            taken.append((*task, phase))
            rate = pacing_plan.bytes_per_s if task.tier is GAP else pacing_plan.beside_bytes_per_s
            free_s = now + weights[task.number] / rate

    for index, (tier, seconds) in enumerate(pacing_plan.phases):
        if index:
            paced_copy.enter(now, index, tier)
        for _ in range(int(seconds / tick_s)):
            copy(index)
            now += tick_s
    paced_copy.lift(FENCE)
    while not paced_copy.is_done:
        copy(-1)
        now += tick_s
    return taken


def walked(plan: PacingPlan, weights: list[int], parity: int | None = None) -> list[tuple[int, Tier, int]]:
    return walk(PacedCopy(plan, weights, len(weights) if parity is None else parity), plan, weights)


def test_all_tasks_go_into_gaps_that_hold_them():
    plan = pacing_plan((COMPUTE, 10), (GAP, 5), (COMPUTE, 10), (GAP, 5), (COLLECTIVE, 5))
    taken = walked(plan, [1] * 9)
    assert [(tier, phase) for _, tier, phase in taken] == [(GAP, 1)] * 5 + [(GAP, 3)] * 4


def test_tasks_that_gaps_do_not_hold_are_spread_evenly_over_compute():
    plan = pacing_plan((COMPUTE, 10), (GAP, 5), (COMPUTE, 10), (GAP, 5), (COMPUTE, 20))
    taken = walked(plan, [1] * 30)
    beside = [phase for _, tier, phase in taken if tier is COMPUTE]
    assert [beside.count(phase) for phase in (0, 2, 4)] == [5, 5, 10]
    assert sum(tier is GAP for _, tier, _ in taken) == 10


def test_collectives_come_last():
    plan = pacing_plan((COMPUTE, 4), (COLLECTIVE, 8), (GAP, 2), beside=0.5)
    tiers = [tier for _, tier, _ in walked(plan, [1] * 8)]
    assert [tiers.count(tier) for tier in Tier] == [2, 2, 4, 0]
    tiers = [tier for _, tier, _ in walked(plan, [1] * 3)]
    assert COLLECTIVE not in tiers


def test_nothing_begins_in_a_gap_that_is_too_short():
    plan = pacing_plan((COMPUTE, 2), (GAP, 1), (COMPUTE, 2), (GAP, 9), guard_s=1.0)
    assert [phase for _, _, phase in walked(plan, [1] * 5)] == [3] * 5


def test_after_a_short_gap_tasks_go_into_later_gaps_or_beside_compute():
    plan = pacing_plan((COMPUTE, 1), (GAP, 4), (COMPUTE, 8), (GAP, 1), (COMPUTE, 8))
    paced_copy = PacedCopy(plan, [1] * 5, 5)
    paced_copy.begin(0.0)
    assert ask(paced_copy, 1.0) is None
    paced_copy.enter(1.0, 1, GAP)
    assert ask(paced_copy, 1.0) == (0, GAP)
    paced_copy.enter(2.0, 2, COMPUTE)  # three seconds too early: 4 bytes are left, 1 fits ahead, 3 go beside 16 s
    assert ask(paced_copy, 2.0) is None
    assert paced_copy.due_s(2.0) == pytest.approx(0.9 * 16 / 3)
    assert ask(paced_copy, 2.0 + 0.9 * 16 / 3) == (1, COMPUTE)


def test_parity_waits_for_gaps_and_goes_first_in_them():
    plan = pacing_plan((COMPUTE, 4), (GAP, 3), (COMPUTE, 4))
    taken = walked(plan, [1] * 5, 3)
    assert [task for task, tier, _ in taken if tier is GAP][:2] == [3, 4]
    assert [task for task, tier, _ in taken if tier is COMPUTE] == [0, 2]


def test_parity_that_no_gap_holds_comes_right_after_the_step():
    plan = pacing_plan((COMPUTE, 4), (GAP, 2), (COMPUTE, 4))
    found = walked(plan, [1] * 4, 0)
    assert sorted(found) == [(0, COMPUTE, 0), (1, COMPUTE, 0), (2, GAP, 1), (3, GAP, 1)]


def test_the_fence_makes_all_tasks_due():
    plan = pacing_plan((COMPUTE, 10), (GAP, 10))
    paced_copy = PacedCopy(plan, [1] * 3, 3)
    paced_copy.begin(0.0)
    assert ask(paced_copy, 0.0) is None
    paced_copy.lift(FENCE)
    assert [ask(paced_copy, 0.0) for _ in range(4)] == [(0, FENCE), (1, FENCE), (2, FENCE), None]


def test_idle_threads_copy_in_gaps_and_busy_threads_elsewhere():
    paced_copy = PacedCopy(pacing_plan((COMPUTE, 4), (GAP, 2), (COMPUTE, 1)), [1] * 5, 5)
    paced_copy.begin(0.0)
    assert paced_copy.wanted_priorities == {ALL, BUSY}
    assert paced_copy.take(4.0, IDLE) is None and paced_copy.take(4.0, BUSY) == (0, COMPUTE)
    paced_copy.enter(4.0, 1, GAP)
    assert paced_copy.wanted_priorities == {ALL, IDLE}
    assert paced_copy.take(4.0, BUSY) is None and paced_copy.take(4.0, IDLE) == (1, GAP)
    paced_copy.lift(FENCE)
    assert paced_copy.wanted_priorities == {ALL, BUSY}
    assert paced_copy.take(4.0, IDLE) is None and paced_copy.take(4.0, BUSY) == (2, FENCE)


def test_no_thread_is_wanted_beside_training_if_the_gaps_hold_all_tasks():
    paced_copy = PacedCopy(pacing_plan((COMPUTE, 1), (GAP, 5), (COMPUTE, 1)), [1] * 5, 5)
    paced_copy.begin(0.0)
    assert paced_copy.wanted_priorities == frozenset()


def test_only_the_longest_gaps_are_used_if_they_hold_all_tasks():
    plan = pacing_plan((COMPUTE, 1), (GAP, 2), (COMPUTE, 1), (GAP, 9), (COMPUTE, 1), (GAP, 5))
    assert [phase for _, _, phase in walked(plan, [1] * 7)] == [3] * 7
    assert [phase for _, _, phase in walked(plan, [1] * 8)] == [3] * 8, (
        "the third gap is planned too, but comes too late"
    )
    assert [phase for _, _, phase in walked(plan, [1] * 15)] == [1] * 2 + [3] * 9 + [5] * 4
    paced_copy = PacedCopy(plan, [1] * 7, 7)
    paced_copy.enter(1.0, 1, GAP)
    assert paced_copy.wanted_priorities == frozenset(), "the short one"


def test_short_gaps_are_used_after_a_long_gap_was_too_short():
    paced_copy = PacedCopy(pacing_plan((COMPUTE, 1), (GAP, 9), (COMPUTE, 1), (GAP, 2)), [1] * 7, 7)
    paced_copy.begin(0.0)
    paced_copy.enter(1.0, 1, GAP)
    assert ask(paced_copy, 1.0) == (0, GAP)
    paced_copy.enter(2.0, 2, COMPUTE)
    paced_copy.enter(3.0, 3, GAP)
    assert paced_copy.wanted_priorities == {ALL, IDLE} and ask(paced_copy, 3.0) == (1, GAP)


def test_an_abandoned_copy_has_no_tasks():
    paced_copy = PacedCopy(pacing_plan((COMPUTE, 1), (GAP, 5)), [1] * 5, 3)
    paced_copy.abandon()
    assert paced_copy.is_done


@pytest.mark.parametrize("index, tier", [(1, COMPUTE), (2, COLLECTIVE), (7, GAP)])
def test_a_window_that_left_its_plan_waits_for_no_gap(index, tier):
    paced_copy = PacedCopy(pacing_plan((COMPUTE, 1), (GAP, 9), (COMPUTE, 1)), [1] * 3, 3)
    paced_copy.begin(0.0)
    paced_copy.enter(1.0, index, tier)
    assert ask(paced_copy, 1.0) == (0, tier)


def test_a_window_that_lasts_too_long_waits_for_no_gap():
    paced_copy = PacedCopy(pacing_plan((COMPUTE, 1), (GAP, 9)), [1] * 3, 3)
    paced_copy.begin(100.0)
    assert ask(paced_copy, 120.9) is None and paced_copy.due_s(120.9) == pytest.approx(0.1)
    assert ask(paced_copy, 121.1) == (0, COMPUTE)


def test_without_a_plan_all_tasks_are_due_at_once():
    paced_copy = PacedCopy(None, [1] * 3, 2)
    paced_copy.begin(0.0)
    assert [ask(paced_copy, 0.0).number for _ in range(3)] == [2, 0, 1]


phases = st.lists(st.tuples(st.sampled_from([GAP, COMPUTE, COLLECTIVE]), st.integers(1, 20)), min_size=1, max_size=8)


@given(phases, st.lists(st.integers(1, 4), max_size=30), st.integers(0, 5), st.floats(0, 2))
def test_each_task_is_taken_once_and_parity_only_in_gaps_or_after_the_step(found, weights, parity, guard_s):
    plan = pacing_plan((COMPUTE, 1), *((tier, float(seconds)) for tier, seconds in found), guard_s=guard_s)
    first = max(0, len(weights) - parity)
    done = walked(plan, weights, first)
    assert sorted(task for task, _, _ in done) == list(range(len(weights)))
    for task, tier, phase in done:
        assert tier is (FENCE if phase < 0 else plan.phases[phase].tier)
        assert task < first or tier in (GAP, FENCE) or phase == 0
        assert tier is not GAP or plan.gap_capacities[phase] > 0


def test_expected_phases_need_two_windows_of_one_kind_and_survive_an_odd_one():
    durations = PhaseDurations()
    usual, odd = (COMPUTE, GAP), (COMPUTE, GAP, COMPUTE)
    durations.observe(usual, [9.0, 9.0])
    assert durations.phases() == ()
    durations.observe(usual, [1.0, 2.0])
    durations.observe(usual, [1.0, 2.0])
    assert durations.phases() == ((COMPUTE, 1.0), (GAP, 2.0)), "the first of a kind has more to do"
    durations.observe(odd, [1.0, 2.0, 3.0])
    assert durations.phases() == ((COMPUTE, 1.0), (GAP, 2.0))
    durations.observe(odd, [1.0, 2.0, 3.0])
    assert len(durations.phases()) == 3
