"""Tests the lines of attach on what was restored."""

from __future__ import annotations

import pytest

from reft.client.attach import report
from reft.core.coding.placement import Exposure, Placement
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.core.recovery.recovery import HeldCapsule, HeldParity, RecoveryPlan, Shortfall
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb
from tests.core.coding.test_placement import placed, sharded
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


@pytest.mark.parametrize("count", [1, 2])
def test_an_attach_that_lost_newer_slots_does_not_go_back(count):
    survey = survey_of(FIRST, {"a": [7, 8], "b": [7]})
    survey.replies["a"].restores.CopyFrom(pb.RestoreCount(step=8, count=count))
    assert len(lines(Version(FIRST.decision.epoch, 7), survey)) == 1


def test_newer_versions_that_were_not_used_are_named_with_the_reason():
    base, newer = (Version(FIRST.decision.epoch, step) for step in (7, 8))
    shortfalls = [Shortfall(newer, (1,)), Shortfall(newer, (0, 1)), Shortfall(newer, is_placed=False)]
    plan = RecoveryPlan(base, partial=tuple(shortfalls))
    survey = survey_of(FIRST, {"a": [7, 8], "b": [7, 8]})
    assert report.restored("job", base, "memory", FIRST.manifest, survey, plan)[1:] == [
        f"{newer} was not used: rank 1 does not hold it.",
        f"{newer} was not used: ranks 0, 1 do not hold it.",
        f"{newer} was not used: no daemon that answers knows how its bytes were placed.",
    ]


def test_leaves_that_came_from_parity_are_named_with_their_step_and_nodes():
    survey = survey_of(FIRST, {"a": [7, 8]})
    base = Version(FIRST.decision.epoch, 7)
    plan = RecoveryPlan(
        base,
        capsules={1: HeldCapsule("a", 1, base, 99)},
        parity={0: HeldParity("a", 0, "parity-0.slot-0", SlotState.SEALED, base)},
    )
    assert report.restored("job", base, "peers", FIRST.manifest, survey, plan)[1:] == [
        "the state of ranks [1] on name-b was decoded from the other nodes; a later snapshot protects it again.",
        "leaves that only ranks [1] held came from parity of step 7 on name-a.",
    ]


NODES = [pb.Node(name=f"node-{i}", ranks=[2 * i, 2 * i + 1]) for i in range(4)]


def shards(tolerate: int | None = None, slots: int = 4, one: int = 3 << 20) -> Placement:
    """Returns a job with two ranks on each of four nodes. Each rank has a shard of its own."""
    return sharded([one, 3 << 20] * 4, [i // 2 for i in range(8)], tolerate=tolerate, slots=slots)


def test_the_exchange_is_announced_with_its_cost():
    assert report.exchange(shards(), NODES) == [
        "protected: 24.0 MiB exist once, and 4 nodes exchange parity of them after whole steps: up to 6.0 MiB sent a turn "
        "and node, 4.0 MiB of parity a node, 4 slots a rank in place of 3."
    ]
    assert report.exchange(shards(slots=3), NODES) == [] == report.exchange(placed(500, [1, 1]), NODES)


def test_what_is_exposed_is_announced_the_worst_first():
    assert report.exposure(shards()) == [] == report.exposure(placed(500, [1, 1]))
    assert report.exposure(shards(tolerate=1)) == []
    assert report.exposure(shards(tolerate=9)) == [
        "partly protected: 24.0 MiB have only one holder and are exchanged between nodes: they survive 3 lost domains and "
        "not 9."
    ]
    assert report.exposure(shards(slots=3)) == [
        "not protected against a lost node: 24.0 MiB have only one holder: lost with its node. Ranks with fewer than 4 "
        "slots exchange nothing."
    ]
    [line] = report.exposure(sharded([3 << 20] * 4, [0, 0, 1, 2, 2][:4], tolerate=2))
    assert line.startswith("partly protected: 12.0 MiB")
    [line] = report.exposure(sharded([3 << 20] * 5, [0, 0, 0, 0, 1], tolerate=2))
    assert line.startswith("not protected against a lost node: 9.0 MiB") and "And 1 more: see reft-cli status." in line


def test_one_node_alone_is_not_warned_of_what_cannot_be_otherwise():
    assert report.exposure(placed(500, [2])) == [] == report.exposure(sharded([3 << 20], [0]))
    [line] = report.exposure(placed(500, [2], tolerate=1))
    assert line.startswith("not protected against a lost node: "), "the user asked for that"
    assert report.exposure(placed(500, [1, 1], scheme="none")), "two nodes could protect the state"


def test_the_larger_number_is_named_first(monkeypatch):
    small, large = Exposure("the small one.", (0,), 10, "kept"), Exposure("the large one.", (0,), 20, "slots")
    monkeypatch.setattr(report, "exposures", lambda placement: [small, large])
    [line] = report.exposure(placed(500, [1, 1]))
    assert line == "not protected against a lost node: the large one. And 1 more: see reft-cli status."


def test_the_remedy_of_the_run_before_stands_at_the_end():
    survey = JobSurvey({"a": reply("a")})
    survey.replies["a"].troubles.extend(["rank 0: the state is odd.\nFix: clone() it", "rank 1: the same."])
    last = lines(None, survey)[-1]
    assert last == "the run before held no whole step. rank 0: the state is odd. And 1 other rank.\nFix: clone() it"
