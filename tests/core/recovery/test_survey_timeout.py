"""Tests how long silent nodes are waited for. tests/core/model shows that a brief wait is safe."""

from __future__ import annotations

import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.recovery import RecoveryPlan, Shortfall
from reft.core.recovery.survey_timeout import BRIEF_S, WHOLE_S, GivenUpNodes, is_settled, survey_timeout_s

ONE, TWO = Epoch(1, b"a" * 16), Epoch(2, b"b" * 16)
AT = GivenUpNodes("launch", 3)


def test_nodes_lost_in_the_round_before_are_given_up():
    assert AT.next("launch", 4, {"a", "b", "new"}, {"c": 7.0}) == GivenUpNodes("launch", 4, {"c": 7.0})


@pytest.mark.parametrize(
    "given_up_s, is_again, expected",
    [(None, False, WHOLE_S), (None, True, WHOLE_S), (0.0, False, BRIEF_S), (9.0, False, BRIEF_S),
     (0.0, True, WHOLE_S), (1.0, True, WHOLE_S - 1.0), (9.0, True, BRIEF_S)],
)  # fmt: skip
def test_a_given_up_node_gets_the_whole_time_only_if_its_answer_may_matter(given_up_s, is_again, expected):
    assert survey_timeout_s(given_up_s, is_again) == expected


def test_nodes_that_take_part_again_or_were_heard_get_the_whole_time():
    after = AT.next("launch", 4, {"a", "b"}, {"c": 1.0, "d": 2.0, "e": 3.0})
    assert after.next("launch", 5, {"a", "c"}, {"b": 4.0}).nodes == {"b": 4.0, "d": 2.0, "e": 3.0}, (
        "still missing, or now"
    )
    assert after.without("d").without("a").nodes == {"c": 1.0, "e": 3.0}


@pytest.mark.parametrize("launch, round", [("launch", 5), ("launch", 3), ("launch", 2), ("another", 4)])
def test_a_node_that_missed_a_round_gives_up_no_other(launch, round):
    """The others continued without the node: they live, and hold newer versions."""
    assert AT.next(launch, round, {"a", "b"}, {"c": 1.0}) == GivenUpNodes(launch, round)


def test_without_agents_no_node_is_given_up():
    assert GivenUpNodes("", 1).next("", 2, {"a"}, {"b": 1.0}).nodes == {}


@pytest.mark.parametrize(
    "plan, decision, expected",
    [
        (RecoveryPlan(Version(TWO, 7)), Decision(TWO, Version(ONE, 5)), True),
        (RecoveryPlan(Version(ONE, 5)), Decision(TWO, Version(ONE, 5)), True),
        (RecoveryPlan(None), Decision(TWO, Version(ONE, 5)), False),
        (RecoveryPlan(None), None, False),
        # A part of a newer version is known: the silent node may hold the rest.
        (RecoveryPlan(Version(TWO, 7), partial=(Shortfall(Version(TWO, 8)),)), Decision(TWO, Version(ONE, 5)), False),
        # The decision's base was found once, although no slot of it is found now.
        (RecoveryPlan(Version(ONE, 4)), Decision(TWO, Version(ONE, 5)), False),
    ],
)  # fmt: skip
def test_a_plan_is_settled_if_nothing_newer_is_known(plan, decision, expected):
    assert is_settled(plan, decision) is expected
