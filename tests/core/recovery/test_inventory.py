"""Tests the inventories of several nodes: which history counts, silent nodes, names."""

from __future__ import annotations

import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.slots import SlotState
from reft.core.commit.snapshot_interval import FailureHistory
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.inventory import Inventory, ManifestFacts, ManifestNode, NodeInventory
from reft.core.recovery.recovery import HeldSlot
from reft.errors import AttachError

BASE = Version(Epoch(7, b"7" * 16), 100)
CARRIED = Decision(Epoch(8, b"c" * 16), BASE, (BASE.epoch,))  # by b and c
TORN = Decision(Epoch(8, b"t" * 16), BASE, (BASE.epoch,))  # for all three, but only a received it
OTHER = Decision(Epoch(8, b"o" * 16), BASE, (BASE.epoch,))


def facts(members: str, mark: bytes = b"mark", history: FailureHistory | None = None) -> ManifestFacts:
    return ManifestFacts(mark, tuple(ManifestNode(each, each) for each in members), history or FailureHistory())


def report(node: str, decision: Decision | None, *steps: int, **facts: object) -> NodeInventory:
    held = tuple(
        HeldSlot(node, 0, f"s{step}", SlotState.SEALED, Version(decision.epoch, step)) for step in steps if decision
    )
    return NodeInventory(node, decision, held, **facts)


@pytest.mark.parametrize("order", ["abc", "cba"])
def test_a_decision_of_an_attach_that_died_does_not_outrank_others(order):
    reports = {"a": report("a", TORN), "b": report("b", CARRIED), "c": report("c", CARRIED)}
    manifests = {TORN.epoch: facts("abc"), CARRIED.epoch: facts("bc")}
    inventory = Inventory({node: reports[node] for node in order}, manifests)
    assert inventory.decision == CARRIED and inventory.members == set("bc")


def test_a_node_with_another_job_of_the_same_name_is_ignored():
    anew = Decision(Epoch(1, b"n" * 16), None)
    manifests = {TORN.epoch: facts("abc"), anew.epoch: facts("b", b"another mark")}
    assert Inventory({"a": report("a", TORN), "b": report("b", anew)}, manifests).decision == TORN


def test_a_job_with_two_histories_is_refused_with_the_steps_of_each():
    manifests = {OTHER.epoch: facts("ad"), CARRIED.epoch: facts("bc")}
    reports = {"a": report("a", OTHER, 103, 104), "b": report("b", CARRIED, 120), "c": report("c", CARRIED)}
    one = Inventory({node: reports[node] for node in "bc"}, manifests)
    one.refuse_rivals("job")
    with pytest.raises(AttachError, match=r"epoch 8 on a, up to step 104; epoch 8 on b, c, up to step 120\."):
        Inventory(reports, manifests).refuse_rivals("job")
    assert Inventory(reports, manifests, before=one).decision == CARRIED, "what was in force before the try still is"


def test_silent_nodes_are_absent_unless_they_take_part():
    inventory = Inventory({"b": report("b", CARRIED)}, {CARRIED.epoch: facts("bc"), BASE.epoch: facts("abd")})
    assert inventory.absent_nodes({"d"}) == ["a", "c"] and inventory.absent_nodes(set()) == ["a", "c", "d"]


def test_two_nodes_of_one_name_get_different_names():
    members = (ManifestNode("1" * 32, "host"), ManifestNode("2" * 32, "host", "rack"), ManifestNode("3" * 32, "other"))
    inventory = Inventory(
        {members[0].id: report("host", CARRIED)}, {CARRIED.epoch: ManifestFacts(b"t", members, FailureHistory())}
    )
    assert sorted(inventory.names.values()) == ["host#111111", "host#222222", "other"]
    assert inventory.nodes_of("rack") == ["host#222222"] and inventory.nodes_of("none") == []
    assert inventory.domains == {"host#111111": "node host#111111"}


def test_a_rebooted_node_keeps_its_name_and_what_it_was_before_is_marked():
    """It has another id then, and older manifests name the earlier one."""
    names = {"1" * 32: "host", "2" * 32: "host", "3" * 32: "other"}
    before, after = ([ManifestNode(each, names[each]) for each in names if each[0] in ids] for ids in ("13", "23"))
    manifests = {
        BASE.epoch: ManifestFacts(b"t", tuple(before), FailureHistory()),
        CARRIED.epoch: ManifestFacts(b"t", tuple(after), FailureHistory()),
    }
    inventory = Inventory({"2" * 32: report("host", CARRIED)}, manifests)
    assert inventory.names == {"1" * 32: "host#111111", "2" * 32: "host", "3" * 32: "other"}
    assert inventory.nodes_of("host") == ["host"] and inventory.nodes_of("host#111111") == ["host#111111"]


def test_the_history_counts_the_longest_training_and_any_seen_failure():
    manifests = {CARRIED.epoch: facts("bc", history=FailureHistory(100.0, 2))}
    reports = {"b": report("b", CARRIED, trained_s=5.0), "c": report("c", CARRIED, trained_s=7.0)}
    assert Inventory(reports, manifests).history == FailureHistory(100.0, 2).after(7.0, False)
    assert Inventory(reports, manifests, silent={"d": ""}).history == FailureHistory(100.0, 2).after(7.0, True)
    failed = {**reports, "c": report("c", CARRIED, trained_s=7.0, failed=True)}
    assert Inventory(failed, manifests).history == FailureHistory(100.0, 2).after(7.0, True)
    assert Inventory({}, {}).history == FailureHistory()
