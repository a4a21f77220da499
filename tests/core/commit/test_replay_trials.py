from reft.core.commit.replay_trials import (
    FAILURES_MAX,
    JUDGED_TURNS,
    LEFT_OUT_MAX,
    RECOMPUTED_MIN,
    ReplayMeter,
    ReplayTrials,
)


def test_failures_in_a_row_leave_ever_more_turns_to_the_exchange():
    trials, left_out = ReplayTrials(), []
    for _ in range(FAILURES_MAX + 8):
        trials = trials.fail()
        left_out.append(trials.left_out)
        while trials.left_out:
            trials = trials.skip()
    assert left_out == [0, 0, 1, 2, 4, 8, 16, 32, LEFT_OUT_MAX, LEFT_OUT_MAX, LEFT_OUT_MAX]


def test_a_success_forgets_failures():
    trials = ReplayTrials().fail().fail().succeed().fail().fail()
    assert trials.left_out == 0 and trials.fail().left_out == 1


def test_skipping_without_need_changes_nothing():
    assert ReplayTrials(2).skip() == ReplayTrials(2)


def metered(
    turns: int, exchanged: int = 0, cpu_s: float = 0.1, took_s: float = 0.2, step_s: float = 1.0
) -> ReplayMeter:
    """Returns the meter after turns of two marks each; the exchange has made the last ones."""
    meter = ReplayMeter()
    for turn in range(turns):
        step, now_s = 5 + 2 * turn, 100 + 2 * turn * step_s
        if turn < turns - exchanged:
            meter = meter.replayed(step, now_s, 2, 2 * cpu_s, 2 * took_s)
        else:
            meter = meter.exchanged(step, now_s)
    return meter


def test_a_lane_is_judged_after_its_first_turns():
    assert not ReplayMeter().is_over and not metered(JUDGED_TURNS - 1).is_over
    assert metered(JUDGED_TURNS).is_over


def test_a_lane_that_keeps_up_goes_on():
    meter = metered(JUDGED_TURNS, JUDGED_TURNS - RECOMPUTED_MIN)
    assert meter.refusal == ""
    assert meter.verdict == f"recomputed: {RECOMPUTED_MIN} of {JUDGED_TURNS} turns were verified, 0.1 CPU s a step"


def test_a_lane_of_few_recomputed_turns_is_given_up():
    meter = metered(JUDGED_TURNS, JUDGED_TURNS - RECOMPUTED_MIN + 1)
    assert meter.refusal.startswith(f"{RECOMPUTED_MIN - 1} of {JUDGED_TURNS} turns")
    assert metered(JUDGED_TURNS, JUDGED_TURNS).refusal.startswith(f"0 of {JUDGED_TURNS} turns")


def test_a_replay_may_take_a_core_and_the_time_between_steps():
    assert metered(JUDGED_TURNS, cpu_s=1.0, took_s=1.0).refusal == ""
    assert "1.1 CPU seconds" in metered(JUDGED_TURNS, cpu_s=1.1, took_s=0.5).refusal
    assert metered(JUDGED_TURNS, cpu_s=0.1, took_s=1.1).refusal == "a step takes 1 s, and to recompute one takes 1.1 s."


def test_one_slow_replay_decides_nothing():
    meter = ReplayMeter().replayed(1, 50.0, 1, 30.0, 40.0)
    for step in range(2, JUDGED_TURNS + 1):
        meter = meter.replayed(step, 50.0 + step, 1, 0.1, 0.2)
    assert meter.is_over and meter.refusal == ""


def test_turns_after_the_first_ones_take_no_memory():
    meter = metered(JUDGED_TURNS)
    assert metered(3 * JUDGED_TURNS) == meter == metered(3 * JUDGED_TURNS, 2 * JUDGED_TURNS)
