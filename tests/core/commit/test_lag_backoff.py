"""Which due steps are taken while the round is slower than a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reft.core.commit.lag_backoff import MEMORY, RECENT, SPACING_MAX, OutcomeDelays, backoff_interval

LAGS, SLOTS = st.integers(0, 10_000), st.integers(1, 8)


def test_every_step_is_taken_while_the_round_follows():
    assert all(backoff_interval(lag, 0, 9, 3) == 1 for lag in range(5))


def test_the_interval_grows_with_the_lag():
    assert [backoff_interval(lag, 0, 9, 3) for lag in (4, 5, 8, 9, 16, 17, 32, 33, 1000)] == [
        1,
        2,
        2,
        4,
        4,
        8,
        8,
        16,
        16,
    ]
    assert [backoff_interval(lag, 0, 9, 2) for lag in (2, 3, 4, 5, 8, 9)] == [1, 2, 2, 4, 4, 8]
    assert backoff_interval(1, 0, 9, 1) == 1


@given(LAGS, SLOTS, st.one_of(st.none(), st.integers(RECENT + 1, 10**6)))
def test_silence_alone_does_not_thin_out_snapshots(lag, slots, in_vain):
    """When a daemon is back after an absence, the next step counts."""
    assert backoff_interval(lag, in_vain, lag, slots) == 1


@given(LAGS, SLOTS)
def test_a_failing_rank_does_not_thin_out_other_ranks(lag, slots):
    """They hear of each void at once. So all ranks share a step once the rank succeeds again."""
    assert backoff_interval(lag, 0, 0, slots) == 1


@given(LAGS, LAGS, SLOTS, SLOTS, st.integers(0, RECENT))
def test_ranks_with_different_lags_share_steps(lag, other, slots, others, in_vain):
    pair = sorted((backoff_interval(lag, in_vain, lag, slots), backoff_interval(other, 0, 2, others)))
    assert pair[1] % pair[0] == 0 and pair[1] <= SPACING_MAX


@given(LAGS, st.integers(2, 8))
def test_no_more_steps_are_left_out_than_needed(lag, slots):
    interval = backoff_interval(lag, 0, 9, slots)
    assert interval == 1 or (slots - 1) * interval < lag


def test_the_longest_recent_or_current_delay_counts():
    delays = OutcomeDelays()
    assert delays.longest(5, None) == 0 and delays.last_void is None
    delays.note_decided(3, 8, is_void=False)
    assert delays.longest(9, None) == 5 and delays.last_void is None
    for step in range(10, 10 + MEMORY):
        delays.note_decided(step, step + 1, is_void=step == 10)
        assert delays.last_void == 11
    assert delays.longest(20, None) == 1 and delays.longest(20, 18) == 2
