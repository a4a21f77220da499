"""Tests that inventories of daemons are converted to those of core, with their manifests."""

from __future__ import annotations

import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.core.recovery import recovery
from reft.wire import messages
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb
from tests.cli.test_protection import EPOCH, job_survey

BASE = Version(Epoch(7, b"7" * 16), 100)
CARRIED = Decision(Epoch(8, b"c" * 16), BASE, (BASE.epoch,))  # by b and c
TORN = Decision(Epoch(8, b"t" * 16), BASE, (BASE.epoch,))  # for all three, but only a received it


def reply(decision: Decision, members: str, mark: bytes = b"mark") -> pb.InventoryReply:
    manifest = pb.Manifest(
        job="job", job_mark=mark, world=len(members), nodes=[pb.Node(id=each, name=each) for each in members]
    )
    return pb.InventoryReply(decision=messages.decision_to(decision), manifest=manifest)


@pytest.mark.parametrize("order", ["abc", "cba"])
def test_a_decision_of_an_attach_that_died_does_not_outrank_others(order):
    replies = {"a": reply(TORN, "abc"), "b": reply(CARRIED, "bc"), "c": reply(CARRIED, "bc")}
    survey = JobSurvey({node: replies[node] for node in order})
    assert survey.decision == CARRIED
    assert survey.manifest == replies["b"].manifest
    assert survey.nodes.keys() == set("abc")


def test_a_node_with_another_job_of_the_same_name_is_ignored():
    anew = Decision(Epoch(1, b"n" * 16), None)
    survey = JobSurvey({"a": reply(TORN, "abc"), "b": reply(anew, "b", b"another mark")})
    assert survey.decision == TORN


def test_a_manifest_of_one_reply_counts_for_all():
    brief = reply(CARRIED, "bc")
    brief.ClearField("manifest")
    survey = JobSurvey({"a": reply(TORN, "abc"), "b": reply(CARRIED, "bc"), "c": brief})
    assert survey.decision == CARRIED


def test_parity_is_no_slot_of_a_rank():
    """A program that takes parity for a rank's slot would restore parity as state."""
    version = pb.Version(epoch=pb.Epoch(counter=1, ident=bytes(16)), step=7)
    reply = pb.InventoryReply(node="n", node_id="a", decision=pb.Decision(epoch=version.epoch))
    reply.slots.add(rank=0, slot="rank-0.slot-0", state=pb.SEALED, version=version, layout=b"layout", data_bytes=9)
    reply.slots.add(rank=0, slot="parity-0.slot-0", state=pb.SEALED, version=version, layout=b"lane", parity=True)
    survey = JobSurvey({"a": reply})
    assert [slot.slot for slot in survey.held] == ["rank-0.slot-0"]
    (parity,) = survey.parity
    assert (parity.node, parity.rank, parity.slot, parity.layout) == ("a", 0, "parity-0.slot-0", b"lane")
    assert parity.version == messages.version_from(version)


def test_only_trainers_plan_with_gradient_records(monkeypatch):
    """A daemon that planned a replay would look for a slot that does not exist."""
    version = pb.Version(epoch=pb.Epoch(counter=1, ident=bytes(16)), step=7)
    reply = pb.InventoryReply(node="n", node_id="a", decision=pb.Decision(epoch=version.epoch))
    reply.records.add(rank=0, slot="record-0.slot-0", state=pb.SEALED, version=version, data_bytes=64)
    survey = JobSurvey({"a": reply})
    (record,) = survey.records
    assert (record.node, record.rank, record.slot, record.data_bytes) == ("a", 0, "record-0.slot-0", 64)
    assert record.version == messages.version_from(version) and survey.held == []
    monkeypatch.setattr(recovery, "plan", lambda *arguments, **named: (*arguments[6:], *named.values()))
    assert survey.plan(()) == survey.plan({("a", "x", BASE)}) == ([record],)
    assert survey.plan_without({"b"}) == ([], [record]) and survey.plan_without({"n"}) == ([], [])
    assert survey.rebuild_plan(()) == ()


def test_the_plan_of_a_version_names_what_is_left_of_earlier_steps():
    """An export compares the samples there: a step that nobody called whole may have two truths."""
    survey, (older, newest) = (
        job_survey(2, steps=(40, 41)),
        (Version(messages.epoch_from(EPOCH), 40 + i) for i in (0, 1)),
    )
    plan = survey.plan_of(newest)
    assert plan.base == newest and plan.earlier == {0: ((older, "id0"),), 1: ((older, "id1"),)}
    assert survey.plan_of(older).base == older and survey.plan_of(older).earlier == {}
    assert survey.restorable() == [newest, older]
    erased = {(node, f"rank-{rank}.slot-1", newest) for rank, node in enumerate(("id0", "id1"))}
    assert survey.plan_of(newest, erased).base is None and survey.restorable(erased) == [older]
