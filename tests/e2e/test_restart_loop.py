"""Ranks die after each restore, before the next step: attach goes back, and at last stops."""

from __future__ import annotations

import re

from tests.support.daemons import until
from tests.support.equality import assert_equal
from tests.support.trainers import Spec, Trainers, run

LOOP = {"die_at": 5, "dies_again": True}


def start(daemon, options: dict, **environment: str) -> str:
    """Runs the job until it dies; returns what it said."""
    trainers = Trainers(Spec(daemon.address, options=options, environment=environment))
    assert trainers.wait() != [0], trainers.errors()
    until(lambda: not daemon.status("job").ranks[0].alive, what="the trainer's end")
    return trainers.errors()


def test_after_three_restores_attach_goes_back_and_then_stops(daemon):
    plain = run(Spec(daemon.address, job="plain"))
    start(daemon, {**LOOP, "seal_at": [4, 5]})
    restored, text = [], ""
    while "RestoreError" not in text and len(restored) < 9:
        text = start(daemon, LOOP)
        restored += map(int, re.findall(r"job job: restored step (\d+)", text))
        assert ("going back to step 4" in text) is ("restored step 4" in text)
    assert restored == [5, 5, 5, 4, 4, 4]
    assert "6 restores of job job from step 5, or from a step before it, ended before step 6." in text
    assert "then start the job once with REFT_RESTORE=newest" in text
    assert "RestoreError" in start(daemon, {}), "each further start is refused, and changes nothing"
    after = run(Spec(daemon.address, environment={"REFT_RESTORE": "newest"}))
    assert after[0]["began"] in (4, 5)
    assert_equal(after, plain)


def test_runs_of_a_finished_job_are_no_loop(daemon):
    for _ in range(5):
        (last,) = run(Spec(daemon.address, steps=5))
    assert last["began"] == 5 and "going back" not in last["said"]
