"""Tests task plans: each task once, tiers in order, nothing outside windows, overruns reported."""

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.pipeline.bubbles import Gap
from reft.core.pipeline.pacing import AT_MARK, LEFT_OVER, CopyRates, CopyWindow, Tier, plan, windows

MiB = 1 << 20
TINY = 1e-8  # above the rounding error of sums of floats
rates_of = st.sampled_from([0.0, 10e6, 1e9, 20e9])


@st.composite
def cut_times(draw):
    """Draws (windows, deadline, forbidden, gaps) of a step with random times."""
    deadline = draw(st.floats(0.01, 2.0))

    def intervals(most):
        ends = sorted(draw(st.lists(st.floats(0, 1.2 * deadline), max_size=2 * most, unique=True)))
        return list(zip(ends[::2], ends[1::2], strict=False))

    gaps = [Gap(i, None, start, end - start) for i, (start, end) in enumerate(intervals(6)) if end > start]
    forbidden = intervals(2)
    return windows(gaps, deadline, forbidden=forbidden, collectives=intervals(3)), deadline, forbidden, gaps


@settings(max_examples=80, deadline=None)
@given(
    cut_times(),
    st.lists(st.integers(0, 16 * MiB), max_size=60),
    st.lists(st.integers(1, 16 * MiB), max_size=10),
    st.builds(CopyRates, st.sampled_from([10e6, 1e9, 20e9]), rates_of, rates_of, st.sampled_from([10e6, 1e9])),
    st.sampled_from([0.0, 0.0003, 0.01]),
)
def test_a_plan_keeps_its_invariants(cut, chunks, parity, rates, guard_s):
    copy_windows, deadline, forbidden, _ = cut
    made = plan(chunks, parity, copy_windows, rates, guard_s, deadline)
    sizes = [*chunks, *parity]
    # Every task once.
    placed = [made.tasks(window) for window in (*range(len(copy_windows)), AT_MARK, LEFT_OVER)]
    assert sorted(np.concatenate(placed).tolist()) == list(range(len(sizes)))
    for index, window in enumerate(copy_windows):
        at = window.start
        for task in placed[index].tolist():
            is_parity = task >= len(chunks)
            assert not is_parity or window.tier is Tier.GAP
            assert made.start[task] >= at - TINY  # one after the other
            at = made.start[task] + sizes[task] / (rates.parity if is_parity else rates.of(window.tier))
            assert not any(made.start[task] < end - TINY and at > start + TINY for start, end in forbidden)
        assert at <= window.end - (guard_s if window.tier is Tier.GAP and len(placed[index]) else 0) + TINY
    assert all(task >= len(chunks) for task in placed[-2])
    assert made.bytes_by_tier(sizes)[Tier.FENCE] == sum(sizes[task] for task in placed[-1])


@settings(max_examples=40, deadline=None)
@given(cut_times(), st.integers(0, 200), st.sampled_from([0.0, 0.001]))
def test_a_later_tier_takes_only_tasks_that_earlier_ones_do_not_hold(cut, count, guard_s):
    copy_windows, deadline, *_ = cut
    size, rates = MiB, CopyRates(1e9, 0.5e9, 0.25e9, 1e9)
    made = plan([size] * count, [], copy_windows, rates, guard_s, deadline)
    room = dict.fromkeys(Tier, 0)  # chunks that each tier could hold
    for window in copy_windows:
        seconds = window.end - window.start - (guard_s if window.tier is Tier.GAP else 0)
        room[window.tier] += max(int((seconds + TINY) * rates.of(window.tier) / size), 0)
    left = count
    for tier in (Tier.GAP, Tier.COMPUTE, Tier.COLLECTIVE):
        taken = made.bytes_by_tier([size] * count)[tier] // size
        assert abs(taken - min(left, room[tier])) <= 1  # rounding may decide about one chunk
        left -= taken
    assert len(made.tasks(LEFT_OVER)) == left


def test_gaps_first_then_compute_then_collectives_then_the_optimizer_waits():
    gaps = [Gap(0, None, 0.0, 0.010), Gap(4, None, 0.030, 0.010)]
    found = windows(gaps, 0.060, forbidden=[(0.040, 0.050)], collectives=[(0.050, 0.060)])
    assert found == (
        CopyWindow(Tier.GAP, 0.0, 0.010),
        CopyWindow(Tier.COMPUTE, 0.010, 0.030),
        CopyWindow(Tier.GAP, 0.030, 0.040),
        CopyWindow(Tier.COLLECTIVE, 0.050, 0.060),
    )
    rates = CopyRates(1e9, 0.5e9, 1e9, 1e9)  # 10, 10, 10 and 10 chunks of 1 MB
    for chunks, by_tier, left in (
        (15, (15, 0, 0), 0),
        (25, (20, 5, 0), 0),
        (35, (20, 10, 5), 0),
        (45, (20, 10, 10), 5),
    ):
        made = plan([1_000_000] * chunks, [], found, rates, 0.0, 0.060)
        taken = made.bytes_by_tier([1_000_000] * chunks)
        assert tuple(taken[tier] // 1_000_000 for tier in Tier) == (*by_tier, left)


def test_copies_beside_compute_are_spread_over_all_of_it():
    found = windows([], 1.0, forbidden=[(0.4, 0.5)])
    made = plan([MiB] * 90, [], found, CopyRates(1e9, 1e9, 0, 1e9), 0.0, 1.0)
    starts = np.sort(made.start)
    assert np.all(np.diff(starts) > 0.8 * 0.01)  # 0.9 s for 90 chunks
    assert (len(made.tasks(0)), len(made.tasks(1))) == (40, 50)


def test_parity_is_computed_in_gaps_or_at_the_mark_and_before_copies():
    found = windows([Gap(1, None, 0.5, 0.1)], 1.0)
    made = plan([50_000_000] * 3, [30_000_000] * 4, found, CopyRates(1e9, 1e9, 0, 0.5e9), 0.0, 1.0)
    assert made.tasks(1).tolist() == [3]  # 60 ms of parity; nothing else fits behind it
    assert made.tasks(AT_MARK).tolist() == [4, 5, 6]
    assert sorted([*made.tasks(0), *made.tasks(2)]) == [0, 1, 2]


def test_a_task_that_no_gap_holds_does_not_block_other_tasks():
    found = windows([Gap(0, None, 0.0, 0.010)], 0.1)
    made = plan([20_000_000, 5_000_000], [], found, CopyRates(1e9, 1e9, 0, 1e9), 0.0, 0.1)
    assert made.tasks(0).tolist() == [1]
    assert made.tasks(1).tolist() == [0]


def test_a_plan_of_ten_thousand_chunks_is_made_in_milliseconds():
    gaps = [Gap(i, None, 0.04 * i, 0.02) for i in range(60)]
    found = windows(gaps, 2.5)
    chunks, rates = [8 * MiB] * 10_000, CopyRates(50e9, 40e9, 0, 50e9)
    took = []
    for _ in range(5):
        began = time.process_time()
        made = plan(chunks, chunks[:500], found, rates, 0.0003, 2.5)
        took.append(time.process_time() - began)
    assert not len(made.tasks(LEFT_OVER))
    assert min(took) < 0.05  # seconds of a core; the goal is 10 ms, but cores of a busy machine are slow
