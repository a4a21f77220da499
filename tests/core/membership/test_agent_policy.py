import pytest

from reft.core.membership.agent_policy import Reaction, react
from reft.core.membership.failure_detector import Sign, Signal

CALM = [Signal.JOINING, Signal.HEALTHY, Signal.SNAP, Signal.SUSPECT, Signal.COMPLETED]


@pytest.mark.parametrize("calm", CALM)
def test_only_a_failure_of_another_node_restarts_workers(calm):
    assert react("a", [Sign("a", Signal.UNHEALTHY, "me"), Sign("b", calm)]) == Reaction()


def test_an_unhealthy_node_restarts_workers_and_stays_a_member():
    assert react("a", [Sign("b", Signal.UNHEALTHY, "why"), Sign("c", Signal.HEALTHY)]) == Reaction(
        frozenset(), "UNHEALTHY: why"
    )


def test_lost_nodes_are_counted_out():
    signs = [
        Sign("b", Signal.OFFLINE, "gone"),
        Sign("c", Signal.UNHEALTHY, "ill"),
        Sign("d", Signal.OFFLINE, "gone too"),
    ]
    assert react("a", signs) == Reaction(frozenset("bd"), "OFFLINE: gone")


def test_every_signal_has_its_row():
    assert {*CALM, Signal.UNHEALTHY, Signal.OFFLINE} == set(Signal)
