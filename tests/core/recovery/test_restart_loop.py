"""Tests how often a step is restored, when attach goes back, and when it stops."""

from __future__ import annotations

import pytest

from reft.core.commit.version import Epoch, Version
from reft.core.recovery.restart_loop import RestoreCount, count_now, next_count, stopped, went_back


def at(step: int) -> Version:
    return Version(Epoch(1, b"e" * 16), step)


@pytest.mark.parametrize(
    ("before", "base", "reached", "after"),
    [
        (None, None, -1, None),
        (None, 8, -1, RestoreCount(8, 1)),
        (RestoreCount(8, 1), 8, -1, RestoreCount(8, 2)),
        (RestoreCount(8, 1), 8, 8, RestoreCount(8, 2)),
        (RestoreCount(8, 1), 8, 9, RestoreCount(8, 1)),
        (RestoreCount(8, 2), 9, 9, RestoreCount(9, 1)),
        (RestoreCount(8, 2), 9, -1, RestoreCount(9, 1)),
        (RestoreCount(8, 3), 7, -1, RestoreCount(8, 4)),
        (RestoreCount(8, 4), 8, 8, RestoreCount(8, 5)),
        (RestoreCount(8, 4), 7, 9, RestoreCount(7, 1)),
        (RestoreCount(8, 4), None, -1, None),
    ],
)
def test_a_decision_counts_the_restore_of_its_base(before, base, reached, after):
    assert next_count(before, None if base is None else at(base), reached) == after


@pytest.mark.parametrize(
    ("count", "goes_back", "stops"), [(1, False, False), (2, False, False), (3, True, False), (5, True, False), (6, True, True)]
)  # fmt: skip
def test_after_three_restores_it_goes_back_and_after_six_it_stops(count, goes_back, stops):
    restores = RestoreCount(8, count)
    assert (restores.goes_back, restores.stops) == (goes_back, stops)


def test_the_greatest_count_of_any_daemon_counts_until_a_rank_got_past_the_step():
    counts = [RestoreCount(8, 2), RestoreCount(8, 3), RestoreCount(7, 5)]
    assert count_now(counts, [8, -1]) == RestoreCount(8, 3)
    assert count_now(counts, [9, -1]) is None and count_now([], [-1]) is None


def test_the_sentences_name_the_steps():
    assert went_back(RestoreCount(8, 3), at(6)) == (
        "the last 3 restores of step 8, or of a step before it, ended before step 9: going back to step 6."
    )
    assert "No older version is held in memory." in stopped("job", RestoreCount(8, 3))
    assert "No older version" not in stopped("job", RestoreCount(8, 6))
