import pytest

from reft.core.membership.agent_policy import AgentReaction, react
from reft.core.membership.failure_detector import NodeReport, Signal

CALM = [Signal.JOINING, Signal.HEALTHY, Signal.SNAP, Signal.SUSPECT, Signal.COMPLETED]


@pytest.mark.parametrize("calm", CALM)
def test_only_a_failure_of_another_node_restarts_workers(calm):
    assert react("a", [NodeReport("a", Signal.UNHEALTHY, "me"), NodeReport("b", calm)]) == AgentReaction()


def test_an_unhealthy_node_restarts_workers_and_stays_a_member():
    assert react("a", [NodeReport("b", Signal.UNHEALTHY, "why"), NodeReport("c", Signal.HEALTHY)]) == AgentReaction(
        frozenset(), "UNHEALTHY: why", "b"
    )


def test_lost_nodes_are_removed_from_the_round():
    signs = [
        NodeReport("b", Signal.OFFLINE, "gone"),
        NodeReport("c", Signal.UNHEALTHY, "ill"),
        NodeReport("d", Signal.OFFLINE, "gone too"),
    ]
    assert react("a", signs) == AgentReaction(frozenset("bd"), "OFFLINE: gone", "b")


def test_every_signal_has_a_row_in_the_table():
    assert {*CALM, Signal.UNHEALTHY, Signal.OFFLINE} == set(Signal)
