"""The announcement of an attach, with data."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from reft.client.attach import report
from reft.client.attach.begin import announcement
from reft.client.attach.plan import AttachPlan, make_plan, recover
from reft.client.attach.rank_table import RankTable
from reft.client.restore.restore import RestoreResult
from reft.config import Launch
from tests.support.attaches import begun, context, description, introduction, survey_of

RESTORED = RestoreResult(tree={"marked": True}, lines=("each old rank had its own model.0.b.",))


def restoring(nodes: str) -> AttachPlan:
    """Returns the plan of an attach on these nodes, after step 8 was whole on nodes a and b."""
    survey = survey_of(begun(), {"a": [8], "b": [8]})
    recovery = recover("job", survey, (), may_start_fresh=False)
    return make_plan(description(introduction(nodes)), survey, recovery, [], b"i" * 16)


def announced(
    nodes: str,
    plan: AttachPlan,
    result: RestoreResult,
    job: str = "job",
    launch: Launch | None = None,
    key_mark: str = "",
) -> list[str]:
    introduced = introduction(nodes, job=job)
    ranks = RankTable([replace(info, key_mark=key_mark) for info in introduced.ranks.infos])
    introduced = replace(introduced, ranks=ranks)
    tracked = SimpleNamespace(modules={}, optimizers=(), parameters=tuple)
    introduced = replace(introduced, state=replace(introduced.state, tracked=tracked))
    return announcement(context(launch=launch), introduced, plan, result, plan.restored_from(introduced.nodes))


def test_a_fresh_start_is_announced():
    lines = announced("ab", begun(), RestoreResult())
    assert lines[0] == "job job: nothing held, starting fresh; 2 ranks on 2 nodes."


def test_a_job_without_a_name_is_told_how_to_get_one_unless_an_agent_restarts_it():
    line = report.unnamed()
    assert "REFT_JOB=NAME" in line and line in announced("ab", begun(), RestoreResult(), job="")
    assert line not in announced("ab", begun(), RestoreResult(), job="", launch=Launch(0, 1, "none", ""))
    assert line not in announced("ab", begun(), RestoreResult())


def test_a_job_of_several_nodes_without_a_key_is_told_what_its_store_holds():
    launch, fresh = Launch(0, 1, "job", "", launch="l"), RestoreResult()
    assert announced("ab", begun(), fresh, launch=launch).count(report.NO_KEY) == 1
    assert report.NO_KEY not in announced("a", begun("a"), fresh, launch=launch), "one node"
    assert report.NO_KEY not in announced("ab", begun(), fresh), "another rendezvous"
    assert report.NO_KEY not in announced("ab", begun(), fresh, launch=launch, key_mark="k")
    assert "REFT_JOB_KEY_FILE" in report.NO_KEY


@pytest.mark.parametrize(("nodes", "source"), [("ab", "memory"), ("ba", "peers")])
def test_a_restore_is_announced_with_its_source(nodes, source):
    lines = announced(nodes, restoring(nodes), RESTORED)
    assert lines[0] == f"job job: restored step 8 (epoch 1) from {source}, 2 ranks on 2 nodes."
    assert not any("resharded" in line for line in lines)


def test_a_reshard_is_announced_with_both_numbers_of_ranks():
    lines = announced("a", restoring("a"), RESTORED)
    assert lines[1:3] == ["the state of 2 ranks was resharded for 1 rank.", *RESTORED.lines]
