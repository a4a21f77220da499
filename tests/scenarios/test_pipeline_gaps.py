"""torch's pipeline over gloo, one process a stage: gaps as predicted, copies in gaps, no stall.

Four stages sleep until their time is over. Two stages, each pinned to a core of its own, compute
until then, so that a copy outside of a gap would take the core from them. The measured times
contain the load of the machine, so these tests are marked slow, and need a quiet machine.
test_hooks.py tests what does not depend on time.
"""

from __future__ import annotations

import os

import pytest

from tests.support.daemons import DaemonProcess
from tests.support.train_pipeline import Pipeline
from tests.support.trainers import Spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MICROBATCHES, STEPS, WARM = 8, 16, 8
TIMES = {"forward_s": 0.06, "backward_s": 0.12}
COMMON = {"width": 1024, "microbatches": MICROBATCHES, "warm": WARM, **TIMES}


def trained(stages, **options):
    """Trains a pipeline; returns the result of each stage."""
    daemon = DaemonProcess()
    spec = Spec(daemon.address, job="pipeline", steps=STEPS, options={**COMMON, **options})
    pipeline = Pipeline(spec, stages)
    try:
        assert pipeline.wait(300) == [0] * stages, pipeline.errors()
        return pipeline.results()
    finally:
        pipeline.kill()
        daemon.close()


@pytest.fixture(scope="module", params=["1F1B", "GPipe", "1F1B pinned"])
def run(request):
    if request.param == "1F1B pinned":
        if len(os.sched_getaffinity(0)) < 2:
            pytest.skip("two stages with a core each need two cores")
        return trained(2, schedule="1F1B", pinned=True, computes=True)
    return trained(4, schedule=request.param)


@pytest.mark.parametrize("run", ["1F1B", "GPipe"], indirect=True)
def test_every_gap_is_within_a_fifth_of_the_closed_form(run):
    for stage, result in enumerate(run):
        assert result["gaps"], f"stage {stage}"
        for place, predicted, measured in result["gaps"]:
            assert abs(measured - predicted) <= 0.2 * predicted, f"stage {stage}, gap {place}: {predicted} {measured}"


def test_nine_tenths_of_the_bytes_are_copied_in_gaps(run):
    for stage, result in enumerate(run):
        before, after = result["before"], result["stats"]
        copied = {name: after[name] - before[name] for name in after if name.endswith("_bytes")}
        assert sum(copied.values()) > 0 and result["sealed"], f"stage {stage}"
        assert copied["gap_bytes"] >= 0.9 * sum(copied.values()), f"stage {stage}: {copied}"


def test_idle_threads_copy_only_if_each_stage_has_a_core(run):
    """Four stages on two cores have no idle threads."""
    is_pinned = len(run) == 2
    cores = len(os.sched_getaffinity(0))
    assert [result["idle_threads"] > 0 for result in run] == [is_pinned or cores >= len(run)] * len(run)


def test_the_optimizer_hardly_waits_if_gaps_are_long_enough(run):
    for stage, result in enumerate(run):
        before, after = result["before"], result["stats"]
        stall_ms = after["stall_ms"] * after["snapshots"] - before["stall_ms"] * before["snapshots"]
        steps_ms = 1000 * sum(result["steps"][WARM:])
        assert stall_ms < 0.01 * steps_ms, f"stage {stage}: {stall_ms} ms of {steps_ms} ms"
