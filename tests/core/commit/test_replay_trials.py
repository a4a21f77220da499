from reft.core.commit.replay_trials import FAILURES_MAX, LEFT_OUT_MAX, ReplayTrials


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
