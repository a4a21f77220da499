"""A new layout in mid-training: no step waits for it, whatever another rank does meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import until
from tests.support.equality import assert_equal
from tests.support.trainers import Spec, Trainers, run

MARKS = [2, 4, 8, 16]
STEP_S = 0.05
# Far below the time that a rank stands. Without load no step takes a tenth of a second.
WAIT_S = 1.0


def restorable_step(daemon) -> int:
    """Returns the step that a restart would begin with."""
    reply = daemon.call("Inventory", pb.InventoryRequest(job="job"))
    base = JobSurvey({reply.node_id: reply}).plan(()).base
    return base.step if base else -1


def longest_step_beside_a_standing_rank(daemon, stands_s: float, marks: Sequence[int] = MARKS) -> float:
    """Returns the longest step of rank 1, its mark included.

    Rank 0 stands before some of its marks, until rank 1 has taken that many steps. The ranks have
    no collectives of their own, and replicas that differ from step 3 on. So rank 1 wants a new
    layout while rank 0 stands.
    """
    stands = int(stands_s / STEP_S)
    options = {
        "apart": True,
        "alike": True,
        "drift_at": 3,
        "seal_at": [2, 3],
        "step_s": STEP_S,
        "tells": True,
        "seal_s": 1,
        "pause_at": {"0": marks},
    }
    trainers = Trainers(Spec(daemon.address, steps=len(marks) * stands, options=options), 2)
    for mark in marks:
        gate = trainers.folder / f"0.gate{mark}"
        until(gate.exists, 60, what=f"rank 0 at mark {mark}")
        passed = trainers.step(1) + stands
        if mark > 3:  # before, rank 1 waits in `seal`
            until(lambda passed=passed: trainers.step(1) >= passed, 20 + 3 * stands_s, what=f"step {passed} of rank 1")
            assert restorable_step(daemon) >= 3, "the last whole step stays"
        gate.write_text("")
    assert trainers.wait(60 + 10 * stands_s) == [0, 0], trainers.errors()
    assert restorable_step(daemon) >= 3
    return trainers.results()[1]["longest_step_s"]


def test_no_step_waits_for_a_rank_that_stands(daemon):
    assert longest_step_beside_a_standing_rank(daemon, 3.0) < WAIT_S


@pytest.mark.soak
def test_no_step_waits_for_a_rank_that_stands_for_a_minute(daemon):
    assert longest_step_beside_a_standing_rank(daemon, 60.0) < WAIT_S


@pytest.mark.soak
def test_no_step_waits_for_a_rank_that_stands_again_and_again_for_a_minute(daemon):
    assert longest_step_beside_a_standing_rank(daemon, 5.0, [*MARKS, *range(24, 88, 8)]) < WAIT_S


def test_clipped_replicas_of_one_node_come_back_with_the_bytes_of_each_rank(daemon):
    """Each rank clips by its own norm, so no two replicas stay equal. All ranks die twice."""
    options = {"clips": True, "step_s": 0.05}
    undisturbed = run(Spec(daemon.address, job="plain", steps=40, options={**options, "protect": "none"}), 2)
    for kill_at, at_least in ((12, 10), (25, 23)):
        stopping = {**options, "pause_at": [kill_at], "seal_at": [kill_at - 1]}
        trainers = Trainers(Spec(daemon.address, steps=40, options=stopping), 2)
        trainers.wait_for(kill_at)
        trainers.kill()
        assert daemon.status("job").whole >= at_least, trainers.errors()
    after = run(Spec(daemon.address, steps=40, options=options), 2)
    assert min(result["began"] for result in after) >= 23
    assert_equal(after, undisturbed)
