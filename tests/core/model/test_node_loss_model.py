"""All reachable states of node loss keep the invariants; each broken rule violates one."""

from __future__ import annotations

import pytest

from tests.core.model.commit_model import Violation
from tests.core.model.node_loss_model import Model, Rules, Size, lane

# size, number of states up to rotation of the ring; the number changes only if the model changes
SIZES = {
    "two nodes, three steps": (Size(nodes=2, slots=2, steps=3), 6_035),
    "two nodes, silent ones return": (Size(nodes=2, slots=2, steps=2, returns=True), 3_236),
    "two nodes, two attaches": (Size(nodes=2, slots=2, steps=2, attaches=2), 2_117),
    "two nodes, two attaches, silent ones return": (Size(nodes=2, slots=2, steps=1, attaches=2, returns=True), 520),
    "two nodes, three slots": (Size(nodes=2, slots=3, steps=2), 1_258),
    "three nodes": (Size(nodes=3, slots=2, steps=2), 10_400),
    "three nodes, two attaches": (Size(nodes=3, slots=2, steps=1, attaches=2, returns=True), 2_831),
}


@pytest.mark.soak
def test_the_rules_hold_for_two_steps_after_two_attaches_with_silent_nodes():
    assert Model(Size(nodes=2, slots=2, steps=2, attaches=2, returns=True), Rules()).explore() == 23_776


@pytest.mark.parametrize("name", SIZES)
def test_the_rules_hold(name):
    size, states = SIZES[name]
    assert Model(size, Rules()).explore() == states


SILENT = "without node ., which holds"
ANY, LOSS = "was announced or is the base", "was announced or is the base.* after the loss"
MUTANTS = {
    "no reuse rule": (Rules(reuse=False), ANY),
    "at least s instead of exactly s": (Rules(exact=False), ANY),
    "capsules not waited for": (Rules(waits_for_capsules=False), LOSS),
    "holders keep the newest capsule only": (Rules(keeps_whole=False), LOSS),
    "base not pinned after a restart": (Rules(pins_base=False), ANY),
    "capsules of the base not sent again": (Rules(resends=False), LOSS),
    "loaded before the decision is written": (Rules(decides_first=False), ANY),
    "older histories count": (Rules(reads_decision=False), "dead history"),
    "a decision counts that only one node was told": (Rules(heeds_written=False), "dead history"),
    "no wait where there is any base": (Rules(settles="base"), SILENT),
    "a restored version taken for protected": (Rules(snapshot_protects=False), LOSS),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_broken_rule_is_caught(name):
    rules, invariant = MUTANTS[name]
    with pytest.raises(Violation, match=invariant):
        Model(Size(nodes=2, slots=2, steps=2, returns=True), rules).explore()


RING = ("capsules not waited for", "base not pinned after a restart", "a restored version taken for protected")


@pytest.mark.parametrize("name", RING)
def test_three_nodes_need_the_rules_too(name):
    rules, _ = MUTANTS[name]
    size = Size(nodes=3, slots=2, steps=2)
    with pytest.raises(Violation, match=ANY):
        Model(size, rules).explore()


def test_the_lanes_of_the_model():
    assert [(lane(nodes).lanes[0].code.k, lane(nodes).lanes[0].code.f) for nodes in (2, 3)] == [(1, 1), (2, 1)]
