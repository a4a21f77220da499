"""Tests the word and the sentence of `status`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reft.core.commit.version import Epoch, Version
from reft.core.recovery.holdings import Holdings, HoldingState
from reft.core.status.health import LAG_STEPS, Health, JobFacts, RankFacts, held_version, judge, survival
from reft.core.status.protection import Protection

EPOCH = Epoch(1, b"1" * 16)


def at(step: int) -> Version:
    return Version(EPOCH, step)


RANKS = tuple(RankFacts(rank, "n0", True, False, 10, at(10)) for rank in range(2))
GOOD = JobFacts(2, RANKS, at(10), "tmpfs")


def ranks(**changes: object) -> tuple[RankFacts, ...]:
    """Returns healthy ranks, the second one changed."""
    return (RANKS[0], replace(RANKS[1], **changes))


def test_a_protected_job_is_ok():
    assert judge(GOOD) == (Health.OK, "step 10 is held by all 2 ranks.")


def test_a_silent_node_comes_first():
    word, sentence = judge(replace(GOOD, silent_nodes=["n1", "n2"], whole=None))
    assert word is Health.WARN and "n1, n2" in sentence


def test_nothing_whole_yet():
    word, sentence = judge(replace(GOOD, whole=None))
    assert word is Health.WARN and "nothing is whole yet" in sentence


def test_a_rank_in_trouble_is_named_with_its_reason():
    word, sentence = judge(replace(GOOD, ranks=ranks(trouble="no room.")))
    assert word is Health.WARN
    assert sentence == "rank 1 skips snapshots: no room. Step 10 is held."


def test_the_remedy_of_a_trouble_is_at_the_end():
    both = tuple(replace(rank, trouble="no room.\nFix: slots=2") for rank in RANKS)
    word, sentence = judge(replace(GOOD, ranks=both))
    assert word is Health.WARN
    assert sentence == "rank 0 and 1 more rank skip snapshots: no room. Step 10 is held.\nFix: slots=2"


def test_the_trouble_of_a_dead_rank_is_not_shown():
    word, sentence = judge(replace(GOOD, ranks=ranks(trouble="no room.", alive=False)))
    assert word is Health.WARN and "trainers gone: 1 of 2; step 10 is held." in sentence


def test_lag_is_measured_in_snapshots():
    for interval in (1, 5):
        edge = 10 + LAG_STEPS * interval
        facts = replace(GOOD, interval=interval)
        assert judge(replace(facts, ranks=ranks(step=edge)))[0] is Health.OK
        word, sentence = judge(replace(facts, ranks=ranks(step=edge + 1)))
        assert word is Health.WARN and f"training is at step {edge + 1}" in sentence


def test_the_end_of_training_is_ok():
    closed = tuple(replace(rank, alive=False, closed=True) for rank in RANKS)
    assert judge(replace(GOOD, ranks=closed)) == (Health.OK, "training has ended; step 10 is still held.")


def test_no_living_trainer_is_a_warning_with_the_held_step():
    dead = tuple(replace(rank, alive=False) for rank in RANKS)
    assert judge(replace(GOOD, ranks=dead)) == (Health.WARN, "trainers gone: 2 of 2; step 10 is held.")


def test_a_trainer_that_has_ended_is_not_gone():
    ended = ranks(alive=False, closed=True)
    assert judge(replace(GOOD, ranks=ended)) == (
        Health.OK,
        "step 10 is held by all 2 ranks. Training has ended on 1 of 2 ranks.",
    )
    dead = (replace(ended[0], alive=False), ended[1])
    assert judge(replace(GOOD, ranks=dead)) == (Health.WARN, "trainers gone: 1 of 2; step 10 is held.")


def test_which_losses_are_survived():
    held = {loss: survives for loss, survives, _ in survival(GOOD)}
    assert held == {
        "any number of trainers": True, "a daemon, trainers alive": True, "daemons and trainers": True, "a node": False,
    }  # fmt: skip
    weaker = {loss: (survives, lost) for loss, survives, lost in survival(replace(GOOD, backing="memfd"))}
    assert weaker["daemons and trainers"] == (False, "all steps of this run")
    gone = {loss: survives for loss, survives, _ in survival(replace(GOOD, backing="unlinked"))}
    assert [loss for loss, survives in gone.items() if survives] == ["any number of trainers"]
    for backing in ("tmpfs", "memfd"):
        lost = survival(replace(GOOD, whole=None, backing=backing))
        assert all((survives, parts) == (False, "all steps of this run") for _, survives, parts in lost)


def test_a_step_on_storage_is_not_lost_with_the_memory():
    lost = {loss: (survives, parts) for loss, survives, parts in survival(replace(GOOD, stored=7))}
    assert lost["a node"] == (False, "steps after 7 (on storage)")
    assert lost["any number of trainers"] == (True, "steps after 10")


def test_removed_files_are_a_warning():
    word, sentence = judge(replace(GOOD, backing="unlinked"))
    assert word is Health.WARN and "files were removed" in sentence


LOST = Holdings(HoldingState.UNRECOVERABLE, None, (), "no version is whole now: no slots are left.", "purge")


def test_total_loss_is_an_error_whatever_was_announced():
    assert judge(replace(GOOD, holdings=LOST)) == (Health.ERR, LOST.reason)
    assert judge(replace(GOOD, holdings=LOST, silent_nodes=["n1"])) == (Health.ERR, LOST.reason)


def test_a_version_is_held_only_if_it_can_be_restored():
    held = Holdings(HoldingState.WHOLE, at(8), (), "")
    assert held_version(at(10), LOST) is None
    assert held_version(at(10), held) == at(8), "newer slots are gone"
    assert held_version(at(6), held) == at(6), "step 8 is not announced yet"
    assert held_version(None, held) == at(8), "all trainers died before it was announced"
    assert held_version(at(10), None) == at(10) and held_version(None, LOST) is None


@pytest.mark.parametrize(("tolerated", "loss"), [(1, "any node"), (2, "any 2 nodes")])
def test_the_protected_step_is_named_with_the_number_of_nodes_that_it_survives(tolerated, loss):
    protection = Protection(at(40), (), tolerated, tolerated, (), True, 6, (), newest=at(46))
    job = JobFacts(2, ranks(), at(46), "tmpfs", protection=protection)
    assert judge(job)[1].endswith(f" Step 46 survives processes, step 40 survives {loss}.")
