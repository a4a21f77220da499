"""Which task is due when: gaps first, then compute, then collectives; time is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.core.pipeline.course import Course, Hands, Lengths, Passage, Stretch, Task
from reft.core.pipeline.pacing import Tier

GAP, COMPUTE, COLLECTIVE, FENCE = Tier
ALL, IDLE, BUSY = Hands


def course(*stretches: tuple[Tier, float], guard_s: float = 0.0, beside: float = 1.0) -> Course:
    """At one byte a second in gaps."""
    return Course(tuple(Stretch(*each) for each in stretches), 1.0, beside, guard_s)


def ask(passage: Passage, now_s: float) -> Task | None:
    """Hands of the only kind ask."""
    return passage.take(now_s, Hands.ALL)


def walk(passage: Passage, course: Course, weights: list[int], tick_s: float = 0.25) -> list[tuple[int, Tier, int]]:
    """One thread that copies at the course's rates, asking in every tick: (task, tier, stretch; -1 at the fence)."""
    passage.begin(0.0)
    found, now, free_s = [], 0.0, 0.0

    def copy(stretch: int) -> None:
        nonlocal free_s
        if now >= free_s and (task := ask(passage, now)):
            found.append((*task, stretch))
            rate = course.bytes_per_s if task.tier is GAP else course.beside_bytes_per_s
            free_s = now + weights[task.number] / rate

    for index, (tier, seconds) in enumerate(course.stretches):
        if index:
            passage.enter(now, index, tier)
        for _ in range(int(seconds / tick_s)):
            copy(index)
            now += tick_s
    passage.lift(FENCE)
    while not passage.is_done:
        copy(-1)
        now += tick_s
    return found


def walked(road: Course, weights: list[int], parity: int | None = None) -> list[tuple[int, Tier, int]]:
    return walk(Passage(road, weights, len(weights) if parity is None else parity), road, weights)


def test_all_goes_into_gaps_that_suffice():
    road = course((COMPUTE, 10), (GAP, 5), (COMPUTE, 10), (GAP, 5), (COLLECTIVE, 5))
    found = walked(road, [1] * 9)
    assert [(tier, stretch) for _, tier, stretch in found] == [(GAP, 1)] * 5 + [(GAP, 3)] * 4


def test_what_gaps_do_not_hold_is_spread_evenly_over_compute():
    road = course((COMPUTE, 10), (GAP, 5), (COMPUTE, 10), (GAP, 5), (COMPUTE, 20))
    found = walked(road, [1] * 30)
    beside = [stretch for _, tier, stretch in found if tier is COMPUTE]
    assert [beside.count(stretch) for stretch in (0, 2, 4)] == [5, 5, 10]
    assert sum(tier is GAP for _, tier, _ in found) == 10


def test_collectives_come_last():
    road = course((COMPUTE, 4), (COLLECTIVE, 8), (GAP, 2), beside=0.5)
    tiers = [tier for _, tier, _ in walked(road, [1] * 8)]
    assert [tiers.count(tier) for tier in Tier] == [2, 2, 4, 0]
    tiers = [tier for _, tier, _ in walked(road, [1] * 3)]
    assert COLLECTIVE not in tiers


def test_nothing_begins_in_a_gap_that_is_too_short():
    road = course((COMPUTE, 2), (GAP, 1), (COMPUTE, 2), (GAP, 9), guard_s=1.0)
    assert [stretch for _, _, stretch in walked(road, [1] * 5)] == [3] * 5


def test_what_a_short_gap_left_goes_into_the_gaps_ahead_or_beside_compute():
    road = course((COMPUTE, 1), (GAP, 4), (COMPUTE, 8), (GAP, 1), (COMPUTE, 8))
    passage = Passage(road, [1] * 5, 5)
    passage.begin(0.0)
    assert ask(passage, 1.0) is None
    passage.enter(1.0, 1, GAP)
    assert ask(passage, 1.0) == (0, GAP)
    passage.enter(2.0, 2, COMPUTE)  # three seconds too early: 4 bytes are left, 1 fits ahead, 3 go beside 16 s
    assert ask(passage, 2.0) is None
    assert passage.due_s(2.0) == pytest.approx(0.9 * 16 / 3)
    assert ask(passage, 2.0 + 0.9 * 16 / 3) == (1, COMPUTE)


def test_parity_waits_for_gaps_and_goes_first_in_them():
    road = course((COMPUTE, 4), (GAP, 3), (COMPUTE, 4))
    found = walked(road, [1] * 5, 3)
    assert [task for task, tier, _ in found if tier is GAP][:2] == [3, 4]
    assert [task for task, tier, _ in found if tier is COMPUTE] == [0, 2]


def test_parity_that_no_gap_holds_comes_right_after_the_step():
    road = course((COMPUTE, 4), (GAP, 2), (COMPUTE, 4))
    found = walked(road, [1] * 4, 0)
    assert sorted(found) == [(0, COMPUTE, 0), (1, COMPUTE, 0), (2, GAP, 1), (3, GAP, 1)]


def test_the_fence_lets_everything_go():
    road = course((COMPUTE, 10), (GAP, 10))
    passage = Passage(road, [1] * 3, 3)
    passage.begin(0.0)
    assert ask(passage, 0.0) is None
    passage.lift(FENCE)
    assert [ask(passage, 0.0) for _ in range(4)] == [(0, FENCE), (1, FENCE), (2, FENCE), None]


def test_gaps_are_for_idle_hands_and_all_else_for_busy_ones():
    passage = Passage(course((COMPUTE, 4), (GAP, 2), (COMPUTE, 1)), [1] * 5, 5)
    passage.begin(0.0)
    assert passage.wanted == {ALL, BUSY}
    assert passage.take(4.0, IDLE) is None and passage.take(4.0, BUSY) == (0, COMPUTE)
    passage.enter(4.0, 1, GAP)
    assert passage.wanted == {ALL, IDLE}
    assert passage.take(4.0, BUSY) is None and passage.take(4.0, IDLE) == (1, GAP)
    passage.lift(FENCE)
    assert passage.wanted == {ALL, BUSY}
    assert passage.take(4.0, IDLE) is None and passage.take(4.0, BUSY) == (2, FENCE)


def test_what_fits_into_the_gaps_wakes_nobody_beside_training():
    passage = Passage(course((COMPUTE, 1), (GAP, 5), (COMPUTE, 1)), [1] * 5, 5)
    passage.begin(0.0)
    assert passage.wanted == frozenset()


def test_the_longest_gaps_are_enough_if_they_hold_it_with_some_to_spare():
    road = course((COMPUTE, 1), (GAP, 2), (COMPUTE, 1), (GAP, 9), (COMPUTE, 1), (GAP, 5))
    assert [stretch for _, _, stretch in walked(road, [1] * 7)] == [3] * 7
    assert [stretch for _, _, stretch in walked(road, [1] * 8)] == [3] * 8, "the third is meant too, but comes too late"
    assert [stretch for _, _, stretch in walked(road, [1] * 15)] == [1] * 2 + [3] * 9 + [5] * 4
    passage = Passage(road, [1] * 7, 7)
    passage.enter(1.0, 1, GAP)
    assert passage.wanted == frozenset(), "the short one"


def test_a_long_gap_that_was_too_short_is_made_up_for_in_the_short_ones():
    passage = Passage(course((COMPUTE, 1), (GAP, 9), (COMPUTE, 1), (GAP, 2)), [1] * 7, 7)
    passage.begin(0.0)
    passage.enter(1.0, 1, GAP)
    assert ask(passage, 1.0) == (0, GAP)
    passage.enter(2.0, 2, COMPUTE)
    passage.enter(3.0, 3, GAP)
    assert passage.wanted == {ALL, IDLE} and ask(passage, 3.0) == (1, GAP)


def test_after_a_failure_nothing_is_left_to_wait_for():
    passage = Passage(course((COMPUTE, 1), (GAP, 5)), [1] * 5, 3)
    passage.abandon()
    assert passage.is_done


@pytest.mark.parametrize("index, tier", [(1, COMPUTE), (2, COLLECTIVE), (7, GAP)])
def test_whoever_leaves_the_course_waits_for_no_gap(index, tier):
    passage = Passage(course((COMPUTE, 1), (GAP, 9), (COMPUTE, 1)), [1] * 3, 3)
    passage.begin(0.0)
    passage.enter(1.0, index, tier)
    assert ask(passage, 1.0) == (0, tier)


def test_a_window_that_does_not_end_waits_for_no_gap():
    passage = Passage(course((COMPUTE, 1), (GAP, 9)), [1] * 3, 3)
    passage.begin(100.0)
    assert ask(passage, 120.9) is None and passage.due_s(120.9) == pytest.approx(0.1)
    assert ask(passage, 121.1) == (0, COMPUTE)


def test_without_a_course_everything_goes_at_once():
    passage = Passage(None, [1] * 3, 2)
    passage.begin(0.0)
    assert [ask(passage, 0.0).number for _ in range(3)] == [2, 0, 1]


stretches = st.lists(st.tuples(st.sampled_from([GAP, COMPUTE, COLLECTIVE]), st.integers(1, 20)), min_size=1, max_size=8)


@given(stretches, st.lists(st.integers(1, 4), max_size=30), st.integers(0, 5), st.floats(0, 2))
def test_each_task_goes_once_and_parity_never_beside_anything(found, weights, parity, guard_s):
    road = course((COMPUTE, 1), *((tier, float(seconds)) for tier, seconds in found), guard_s=guard_s)
    first = max(0, len(weights) - parity)
    done = walked(road, weights, first)
    assert sorted(task for task, _, _ in done) == list(range(len(weights)))
    for task, tier, stretch in done:
        assert tier is (FENCE if stretch < 0 else road.stretches[stretch].tier)
        assert task < first or tier in (GAP, FENCE) or stretch == 0
        assert tier is not GAP or road.rooms[stretch] > 0


def test_what_is_expected_needs_two_windows_alike_and_outlives_an_odd_one():
    lengths = Lengths()
    usual, odd = (COMPUTE, GAP), (COMPUTE, GAP, COMPUTE)
    lengths.observe(usual, [9.0, 9.0])
    assert lengths.stretches() == ()
    lengths.observe(usual, [1.0, 2.0])
    lengths.observe(usual, [1.0, 2.0])
    assert lengths.stretches() == ((COMPUTE, 1.0), (GAP, 2.0)), "the first of a kind has more to do"
    lengths.observe(odd, [1.0, 2.0, 3.0])
    assert lengths.stretches() == ((COMPUTE, 1.0), (GAP, 2.0))
    lengths.observe(odd, [1.0, 2.0, 3.0])
    assert len(lengths.stretches()) == 3
