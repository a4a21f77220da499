"""From stalls to requested intervals, to one agreed interval, and the cost by control steps."""

import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.commit.snapshot_interval import (
    CONTROL,
    EVERY_MAX,
    LEAD,
    MEASURED,
    PRIOR_S,
    SKIPPED,
    DueSteps,
    FailureHistory,
    IntervalEstimator,
    OverheadMeter,
    SnapshotInterval,
    daly,
    is_control,
    is_due,
    next_interval,
)


def measured(stall_s, step_s, budget=0.001, mtbf_s=0.0, snapshots=40):
    estimator = IntervalEstimator(budget, mtbf_s)
    for _ in range(snapshots):
        estimator.observe(step_s, stall_s)
    return estimator


@pytest.mark.parametrize(
    ("stall_ms", "every"), [(0.0, 1), (0.4, 1), (1.0, 1), (1.01, 2), (5.0, 5), (30.0, 30), (1e9, EVERY_MAX)]
)
def test_each_step_is_taken_while_the_stall_is_within_the_budget(stall_ms, every):
    assert measured(stall_ms / 1000, 1.0).requested_every() == every


@pytest.mark.parametrize("step_s", [0.0, 1e-9, 1.0])
def test_no_budget_and_no_mtbf_is_too_small_or_too_large_to_count_with(step_s):
    assert measured(0.001, step_s, budget=5e-324).requested_every() == EVERY_MAX
    assert measured(0.0, step_s, budget=5e-324).requested_every() == 1
    for mtbf_s in (1.7e308, math.inf):
        assert measured(10.0, step_s, budget=0.5, mtbf_s=mtbf_s).requested_every() == EVERY_MAX


def test_the_first_snapshots_of_a_process_are_not_measured():
    estimator = IntervalEstimator(0.001)
    for index in range(MEASURED):
        assert estimator.requested_every() == 0
        estimator.observe(1.0, 10.0 if index < SKIPPED else 0.002)
        estimator.observe(1.0, None)  # an iteration without a snapshot does not count
    assert estimator.requested_every() == 2


def test_a_known_mtbf_asks_for_dalys_interval_if_that_is_longer():
    hours = 3 * 3600.0
    assert daly(0.010, hours) == pytest.approx(math.sqrt(2 * 0.010 * hours), rel=0.01)
    assert measured(0.010, 1.0, budget=0.01).requested_every() == 1
    assert measured(0.010, 1.0, budget=0.01, mtbf_s=hours).requested_every() == 15
    assert (
        measured(0.010, 1.0, budget=0.0001, mtbf_s=hours).requested_every() == 100
    )  # here the budget gives the longer interval
    assert daly(10.0, 4.0) == 4.0  # a snapshot takes longer than the time between failures


@pytest.mark.parametrize("cost", [0.001, 1.0, 30.0])
def test_dalys_interval_loses_the_least_time(cost):
    """Compares with the exact expectation for exponential failures."""
    mtbf = 3600.0

    def wall_time(interval):  # per second of work
        return mtbf * math.expm1((interval + cost) / mtbf) / interval

    best = wall_time(daly(cost, mtbf))
    assert all(best <= wall_time(daly(cost, mtbf) * factor) for factor in (0.5, 0.8, 1.25, 2))


def test_the_measured_mtbf_comes_from_failures_over_training_time():
    assert FailureHistory().after(1e6, False).mtbf_s == 0.0, "no failure yet, so the budget alone decides"
    young = FailureHistory().after(600.0, True)
    assert young == FailureHistory(600.0, 1) and young.mtbf_s == pytest.approx(PRIOR_S / 2, rel=0.01)
    old = FailureHistory()
    for _ in range(300):
        old = old.after(3 * 3600.0, True)
    assert old.mtbf_s == pytest.approx(3 * 3600.0, rel=0.03)
    assert old.after(10 * 3600.0, False).mtbf_s > old.mtbf_s


def test_a_request_rises_at_once_and_falls_only_by_half():
    estimator = measured(0.010, 1.0)
    assert estimator.requested_every() == 10
    for _ in range(200):
        estimator.observe(1.0, 0.012)
    assert estimator.requested_every() == 12
    for _ in range(400):
        estimator.observe(1.0, 0.008)
    assert estimator.requested_every() == 12
    for _ in range(400):
        estimator.observe(1.0, 0.003)
    assert estimator.requested_every() <= 6


def test_an_interval_starts_ahead_and_after_the_previous_one():
    assert next_interval(SnapshotInterval(), 0, 100) == SnapshotInterval()
    interval = next_interval(SnapshotInterval(), 5, 100)
    assert interval == SnapshotInterval(100 + LEAD, 5)
    assert next_interval(interval, 7, 100 + LEAD - 1) == interval  # not before the last interval has started
    assert next_interval(interval, 5, 500) == interval
    assert next_interval(interval, 7, 500) == SnapshotInterval(500 + LEAD, 7)
    assert next_interval(interval, 1 << 40, 500).every == EVERY_MAX


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 12)), max_size=4), st.randoms())
def test_ranks_with_the_same_intervals_take_the_same_steps(changes, chance):
    intervals, start = [], 0
    for ahead, every in changes:
        start += ahead
        intervals.append(SnapshotInterval(start, every))
    prompt, repeated = DueSteps(1, True), DueSteps(1, True)
    for interval in intervals:
        assert prompt.hear(interval)
        assert repeated.hear(interval)
        assert not repeated.hear(chance.choice(intervals[: intervals.index(interval) + 1]))  # late or repeated
    for step in range(1, 500):
        assert prompt.due(step) == repeated.due(step)
        known = [interval.every for interval in intervals if interval.start <= step]
        assert prompt.due(step) == is_due(step, known[-1] if known else 1)


def test_a_fixed_interval_is_taken_as_it_is():
    cadence = DueSteps(3, False)
    assert not cadence.hear(SnapshotInterval(10, 7))
    assert [step for step in range(1, 400) if cadence.due(step)] == list(range(3, 400, 3))


def test_control_steps_are_few_and_not_periodic():
    controls = [step for step in range(100_000) if is_control(step)]
    assert len(controls) == pytest.approx(100_000 / CONTROL, rel=0.1)
    assert controls[0] >= CONTROL
    for period in (2, 3, 4, 5, 8, 10, 100):
        assert len([step for step in controls if step % period == 0]) == pytest.approx(len(controls) / period, rel=0.4)


def controls_of(steps, cost, noise, drift=0.0, every=1, seed=0):
    chance, controls = random.Random(seed), OverheadMeter()
    for step in range(steps):
        has = is_due(step, every)
        controls.observe(1.0 + drift * step + chance.gauss(0, noise) + (cost if has else 0), has)
    return controls.overhead()


def test_the_confidence_interval_covers_the_true_cost():
    hits = [o.low <= 0.01 <= o.high for o in (controls_of(3000, 0.01, 0.02, seed=seed) for seed in range(80))]
    spread = 4 * math.sqrt(0.95 * 0.05 / len(hits))
    assert sum(hits) / len(hits) == pytest.approx(0.95, abs=spread)
    assert NormalDist().inv_cdf(0.975) == pytest.approx(1.96, abs=0.001)


def test_a_drift_of_step_times_is_not_counted_as_cost():
    """If steps become slower all the time, plain means with and without snapshots would mislead."""
    found = controls_of(4000, 0.0, 0.001, drift=0.001)
    assert abs(found.mean) < 0.001 and found.low < 0 < found.high


def test_the_cost_scales_with_the_steps_taken():
    assert controls_of(6000, 0.08, 0.01, every=1).mean == pytest.approx(0.08, rel=0.1)
    assert controls_of(6000, 0.08, 0.01, every=4).mean == pytest.approx(0.02, rel=0.1)
    assert controls_of(70, 0.08, 0.01) is None  # too few comparisons
    assert "of training time (95 %:" in str(controls_of(6000, 0.08, 0.01))
