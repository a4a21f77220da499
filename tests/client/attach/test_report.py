"""Tests the lines of attach on what was restored."""

from __future__ import annotations

from reft.client.attach import report
from reft.core.commit.version import Version
from reft.core.recovery.recovery import RecoveryPlan
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.attaches import begun, reply, survey_of

FIRST = begun()


def lines(base: Version | None, survey: JobSurvey) -> list[str]:
    return report.restored("job", base, "memory", FIRST.manifest, survey, RecoveryPlan(base))


def test_a_start_from_step_0_has_a_block_only_if_somebody_knows_of_a_whole_step():
    survey = JobSurvey({"a": reply("a")})
    assert lines(None, survey) == ["job job: nothing held, starting fresh; 2 ranks on 2 nodes."]
    survey = JobSurvey({"a": reply("a")})
    survey.replies["a"].known.add(step=7, source="the agent")
    block, last = lines(None, survey)
    assert "STARTS FROM STEP 0" in block and "step 7 was whole, says the agent." in block
    assert last.startswith("job job: nothing held")


def test_an_attach_that_goes_back_says_so():
    survey = survey_of(FIRST, {"a": [7, 8], "b": [7, 8]})
    survey.replies["a"].restores.CopyFrom(pb.RestoreCount(step=8, count=3))
    assert lines(Version(FIRST.decision.epoch, 7), survey)[1].endswith("ended before step 9: going back to step 7.")
    assert len(lines(Version(FIRST.decision.epoch, 8), survey)) == 1
