"""TP 2 x PP 2 x DP 2 over four nodes: a rank is killed, any node is lost, and training goes on bit for bit as undisturbed."""

from __future__ import annotations

import random

import pytest

from reft.cli.demo.records import Result, compare
from tests.e2e.test_node_loss import assert_went_on
from tests.support.nodes import Machine, Nodes, stop_at

STEPS = 12
EXAMPLE = {"script": ["tests.support.recorded"], "arguments": ["--example", "tensor_pipeline_3d"]}
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def undisturbed() -> Result:
    with Nodes(1, 8) as nodes:
        nodes.launch("plain", STEPS, **EXAMPLE)
        return nodes.await_end()


def lose(nodes: Nodes, node: Machine) -> tuple[float, int]:
    """Loses a node and waits for its replacement; when it was lost, and which step was whole before."""
    whole = nodes.whole("job")[1]
    lost_s = nodes.lose(node)
    nodes.replace()
    nodes.await_recovery(lost_s)
    return lost_s, whole


def check(result: Result, plain: Result, losses: list[tuple[float, int]]) -> None:
    for lost_s, whole in losses:
        assert_went_on(result, lost_s, whole)
    compared = compare(result, plain, STEPS)
    assert compared.differences == []
    assert {len(plain.digests[rank]) for rank in range(8)} == {44, 48}, "each part of the model, with its moments"


def test_a_rank_is_killed_and_later_a_node_is_lost(undisturbed):
    with Nodes(4, ranks_per_node=2) as nodes:
        nodes.launch("job", STEPS, **EXAMPLE)
        nodes.await_step(3)
        whole = nodes.whole("job")[1]
        killed_s = nodes.kill_ranks(random.Random(1).randrange(8))
        nodes.await_recovery(killed_s)
        nodes.await_protection(epoch=2)
        losses = [(killed_s, whole), lose(nodes, random.Random(2).choice(nodes.living))]
        result = nodes.await_end()
    check(result, undisturbed, losses)


@pytest.mark.chaos
@pytest.mark.parametrize("node", range(4))
def test_any_node_is_lost_in_mid_copy(node, undisturbed):
    with Nodes(4, ranks_per_node=2) as nodes:
        chance = random.Random(node)
        rank = 2 * node + chance.randrange(2)
        nodes.launch(
            "job", STEPS, failpoints=stop_at("snapshot.chunk", rank=rank, step=chance.randrange(3, 8)), **EXAMPLE
        )
        losses = [lose(nodes, nodes.await_stop())]
        result = nodes.await_end()
    check(result, undisturbed, losses)


@pytest.mark.chaos
def test_all_ranks_are_killed(undisturbed):
    with Nodes(4, ranks_per_node=2) as nodes:
        nodes.launch("job", STEPS, **EXAMPLE)
        nodes.await_step(5)
        whole = nodes.whole("job")[1]
        killed_s = nodes.kill_ranks(*range(8))
        nodes.await_recovery(killed_s)
        result = nodes.await_end()
    check(result, undisturbed, [(killed_s, whole)])
