"""The cost of extra state thins out snapshots by powers of two, and lets them return."""

from __future__ import annotations

import pytest

from reft.core.commit.cost_spacing import BYTES_MAX, SECONDS_MAX, SPACING_MAX, CostSpacing, ExtraStateCost


def cost(budgets: float) -> ExtraStateCost:
    """Returns a cost of so many steps' budgets of time."""
    return ExtraStateCost(budgets * SECONDS_MAX, 0, "model.0.up")


def after(*budgets: float, every: int = 1) -> int:
    """Returns the spacing after snapshots of such costs."""
    spacing = CostSpacing()
    for each in budgets:
        spacing.observe(cost(each), every)
    return spacing.spacing


@pytest.mark.parametrize(
    ("budgets", "every", "expected"), [(1, 1, 1), (1.1, 1, 2), (5, 1, 8), (5, 4, 2), (1e9, 1, SPACING_MAX)]
)
def test_the_spacing_keeps_the_budget_of_all_steps_between(budgets, every, expected):
    assert after(budgets, budgets, every=every) == expected


def test_the_size_counts_like_the_time():
    spacing = CostSpacing()
    for _ in range(2):
        spacing.observe(ExtraStateCost(0.0, 3 * BYTES_MAX, "a"), 1)
    assert spacing.spacing == 4


def test_one_slow_answer_changes_nothing():
    assert after(0.1, 40, 0.1, 40, 0.1) == 1


def test_it_falls_only_when_half_of_the_next_smaller_budget_is_enough():
    assert after(5, 5, 2.1) == 8
    assert after(5, 5, 2.0) == 4
    assert after(5, 5, 0.1) == 1
    assert after(1.9, 1.9, 0.6) == 2


def test_it_is_told_once_with_value_limit_and_remedy():
    spacing = CostSpacing()
    told = [spacing.observe(cost(each), 2) for each in (5, 5, 20, 0.1, 5, 5)]
    assert [bool(each) for each in told] == [False, True, False, False, False, False]
    assert "takes 250 ms and 0 bytes at each snapshot, most of the time for model.0.up" in told[1]
    assert "limits are 100 ms and 1048576 bytes for every=2" in told[1] and "one of 4 due steps" in told[1]
    assert "Fix: every=8, or every='auto'" in told[1]
