"""Tests estimates of idle times, and their comparison with the closed form."""

import random

import pytest

from reft.core.pipeline import actions, bubbles
from reft.core.pipeline.actions import ActionKind, Times
from reft.core.pipeline.bubbles import Gap
from reft.core.pipeline.profile import FIRST_VALUES, Estimate, GapComparison, GapDifference, StageProfile, compare


def noisy(mean, share, count, seed=0):
    chance = random.Random(seed)
    return [mean * (1 + share * chance.uniform(-1, 1)) for _ in range(count)]


def observed(values):
    estimate = Estimate()
    for value in values:
        estimate.observe(value)
    return estimate


def test_an_estimate_approaches_the_mean_and_the_deviation():
    estimate = observed(noisy(0.020, 0.10, 300))
    assert estimate.mean == pytest.approx(0.020, rel=0.04)
    assert estimate.deviation == pytest.approx(0.001, rel=0.5)
    assert estimate.count == 300


@pytest.mark.parametrize("wild", [1.0, 100.0, 0.0])
def test_single_wild_values_hardly_move_an_estimate(wild):
    values = noisy(0.020, 0.05, 400)
    for index in (0, 3, 50, 130, 131, 300):  # also among the first values
        values[index] = wild
    estimate = observed(values)
    assert estimate.mean == pytest.approx(0.020, rel=0.05)


def test_an_estimate_begins_with_the_median_of_its_first_values():
    estimate = observed([1.0, 1.1, 0.9, 1.0, 9.0])
    assert estimate.mean == 1.0
    assert estimate.deviation <= 0.1  # the first step of a process does not inflate the deviation


def test_a_lasting_change_is_followed():
    estimate = observed(noisy(0.020, 0.05, 100) + noisy(0.060, 0.05, 150))
    assert estimate.mean == pytest.approx(0.060, rel=0.05)


def test_equal_values_do_not_freeze_an_estimate():
    estimate = observed([0.020] * 100 + [0.021] * 150)
    assert estimate.mean == pytest.approx(0.021, rel=0.01)
    assert observed([0.0] * 50).mean == 0
    assert observed([0.0] * 50 + [0.005] * 100).mean == pytest.approx(0.005, rel=0.02)


def profile_of(order, gaps, times, share, steps):
    profile = StageProfile()
    chance = random.Random(1)
    durations = {gap.place: (gap.start, gap.length) for gap in gaps}
    for _ in range(steps):
        for place in range(len(order) + 1):
            start, length = durations.get(place, (0.0, 0.0))
            profile.observe(place, start, start + length * (1 + share * chance.uniform(-1, 1)))
        for action in order:
            profile.observe_action(action.kind, times.of(action.kind) * (1 + share * chance.uniform(-1, 1)))
    return profile


@pytest.mark.parametrize("stage", range(4))
def test_a_profile_finds_the_closed_form_in_noise(stage):
    times = Times(0.010, 0.020)
    order, closed = actions.one_f_one_b(stage, 4, 8), bubbles.one_f_one_b(stage, 4, 8, times)
    profile = profile_of(order, closed, times, 0.10, 60)
    measured = profile.gaps(order, least=0.0003)
    assert [(gap.place, gap.after) for gap in measured] == [(gap.place, gap.after) for gap in closed]
    foreseen = bubbles.one_f_one_b(stage, 4, 8, profile.times())
    found = compare(foreseen, measured)
    assert found.worst < 0.06 and found.total < 0.04
    assert {profile.length(place).count for place in range(len(order) + 1)} == {60}


def test_times_of_a_backward_in_two_parts():
    profile = StageProfile()
    assert profile.times() is None
    for kind, seconds in ((ActionKind.FORWARD, 1.0), (ActionKind.INPUT, 1.25), (ActionKind.WEIGHT, 0.75)):
        profile.observe_action(kind, seconds)
    assert profile.times() == Times(1.0, 2.0, 0.75)
    assert profile.times().input == 1.25


def test_a_comparison_counts_unforeseen_gaps():
    foreseen = [Gap(0, None, 0, 2.0), Gap(3, None, 5, 2.0)]
    measured = [Gap(0, None, 0, 2.2), Gap(4, None, 7, 0.8)]
    found = compare(foreseen, measured)
    assert found == GapComparison(
        (GapDifference(0, 2.0, 2.2), GapDifference(3, 2.0, 0.0), GapDifference(4, 0.0, 0.8)), 1.0, pytest.approx(0.25)
    )
    assert compare([], measured).worst == 0


def test_the_estimate_of_an_unmeasured_gap_has_count_zero():
    profile = StageProfile()
    for _ in range(FIRST_VALUES):
        profile.observe(2, 1.0, 1.5)
    assert profile.length(2).mean == 0.5
    assert profile.length(3).count == 0
    assert profile.gaps() == (Gap(2, None, 1.0, 0.5),)
