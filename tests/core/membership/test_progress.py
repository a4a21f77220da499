from __future__ import annotations

from reft.core.membership.progress import GAPS, HUNG_FACTOR, HUNG_MIN_S, Stall, StepProgress, laggard


def paced(gap_s: float, steps: int = 10) -> tuple[StepProgress, float]:
    progress, now_s = StepProgress(), 0.0
    for step in range(steps):
        now_s = step * gap_s
        progress.saw(step, now_s)
        progress.saw(step, now_s + gap_s / 2)  # each step is reported twice
    return progress, now_s


def test_a_hang_is_distinguished_from_a_slow_step():
    progress, now_s = paced(2.0)
    assert progress.usual_s == 2.0
    assert progress.stands_still_s(now_s + HUNG_FACTOR * 2.0) is None
    assert progress.stands_still_s(now_s + HUNG_FACTOR * 2.0 + 1) == HUNG_FACTOR * 2.0 + 1


def test_short_steps_stall_only_after_the_minimum_time():
    progress, now_s = paced(0.001)
    assert progress.stands_still_s(now_s + HUNG_MIN_S) is None
    assert progress.stands_still_s(now_s + HUNG_MIN_S + 0.1) is not None


def test_before_a_few_steps_there_is_no_usual_time():
    progress, now_s = paced(1.0, steps=3)
    assert progress.usual_s is None and progress.stands_still_s(now_s + 1e6) is None


def test_the_usual_time_follows_the_training():
    progress, now_s = paced(1.0)
    for step in range(10, 10 + GAPS):
        now_s += 30.0
        progress.saw(step, now_s)
    assert progress.usual_s == 30.0
    assert progress.stands_still_s(now_s + 200) is None
    progress.saw(3, now_s + 250)  # a late report of an older step is no progress
    assert progress.stands_still_s(now_s + 301) == 301


def test_one_long_pause_does_not_change_the_usual_time():
    progress, now_s = paced(1.0)
    progress.saw(10, now_s + 100)
    assert progress.usual_s == 1.0


def test_the_laggard_is_behind_or_stopped_or_the_lowest():
    ahead, behind = Stall(0, 8, 9.0, 1.0), Stall(3, 7, 9.0, 1.0)
    assert laggard([ahead, behind]) is behind
    stopped = Stall(5, 7, 9.0, 1.0, stopped=True)
    assert laggard([ahead, behind, stopped]) is stopped
    assert laggard([Stall(2, 7, 9.0, 1.0), behind]).rank == 2
    assert laggard([]) is None
