"""Tests of the inventory, with fake daemons: which nodes are asked, and which are asked again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from reft.client.attach import inventory
from reft.client.attach.introduce import short_table, symbolic_table
from reft.client.link.exchange import to_json
from reft.wire import inventory as wire_inventory
from reft.wire import manifest as manifests
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb
from tests.support import attaches

NODES = {name: pb.Node(name=name, id=name) for name in "abcd"}


def survey(monkeypatch, answers: dict[str, list[str]], settled: bool):
    """Returns the survey's result, and the list of questions.

    Args:
        answers: node → its answers to the first and to the second question.
    """
    asked = []
    monkeypatch.setattr(inventory, "is_settled", lambda plan, decision: settled)

    def ask(nodes, is_again, _tokens):
        asked.append(("".join(node.id for node in nodes), is_again))
        reply = pb.SurveyReply()
        for node in nodes:
            said = answers[node.id].pop(0)
            each = reply.nodes.add(node=node, brief="brief" in said)
            if "answers" in said:
                each.reply.node_id = node.id
            else:
                each.trouble = "Connection refused"
        return reply

    found = inventory.survey_absent_nodes(
        JobSurvey({"a": pb.InventoryReply(node_id="a")}), [NODES[n] for n in answers], ask, ()
    )
    assert all(why == "Connection refused" for why in found.silent.values())
    return sorted(found.replies), tuple(found.silent), asked


def test_a_given_up_node_is_asked_once_if_no_newer_version_is_known(monkeypatch):
    answers = {"b": ["brief"], "c": ["silent"], "d": ["answers"]}
    assert survey(monkeypatch, answers, settled=True) == (["a", "d"], ("b", "c"), [("bcd", False)])


@pytest.mark.parametrize(
    "later, heard, silent", [("answers", ["a", "b", "d"], ("c",)), ("silent", ["a", "d"], ("b", "c"))]
)
def test_a_given_up_node_is_asked_again_if_a_newer_version_may_exist(monkeypatch, later, heard, silent):
    answers = {"b": ["brief", later], "c": ["silent"], "d": ["answers brief"]}
    assert survey(monkeypatch, answers, settled=False) == (heard, silent, [("bcd", False), ("b", True)])


def test_a_node_that_had_the_full_time_is_not_asked_again(monkeypatch):
    assert survey(monkeypatch, {"b": ["silent"]}, settled=False) == (["a"], ("b",), [("b", False)])


@pytest.mark.parametrize("settled", [True, False])
def test_a_node_at_the_address_of_a_lost_node_is_not_counted_twice(monkeypatch, settled):
    """Node b was rebooted as node a. It takes part now and answers at the address of b."""
    monkeypatch.setattr(inventory, "is_settled", lambda plan, decision: settled)
    asked = []

    def ask(nodes, is_again, _tokens):
        asked.append(is_again)
        return pb.SurveyReply(
            nodes=[pb.SurveyedNode(node=NODES["b"], reply=pb.InventoryReply(node_id="a"), brief=True)]
        )

    found = inventory.survey_absent_nodes(JobSurvey({"a": pb.InventoryReply(node_id="a")}), [NODES["b"]], ask, ())
    assert (sorted(found.replies), found.silent, found.emptied, asked) == (["a"], {}, ("b",), [False])


def chained(node: str, epoch: int, nodes: str, base_nodes: str = "") -> pb.InventoryReply:
    """Returns the reply of a node that knows one epoch.

    The node also knows the epoch's nodes and the base's nodes.
    """
    epochs = [pb.Epoch(counter=each, ident=bytes([each]) * 16) for each in (epoch, epoch - 1)]
    reply = pb.InventoryReply(node_id=node, decision=pb.Decision(epoch=epochs[0]))
    reply.manifest.nodes.extend(NODES[each] for each in nodes)
    if base_nodes:
        reply.decision.base.CopyFrom(pb.Version(epoch=epochs[1], step=1))
        reply.base_manifest.nodes.extend(NODES[each] for each in base_nodes)
    return reply


def test_a_node_that_only_a_survey_names_is_asked_too(monkeypatch):
    """The job moved from nodes a, b to b, c. Now a takes part again, and does not know c."""
    monkeypatch.setattr(inventory, "is_settled", lambda plan, decision: True)
    says, asked = {"b": chained("b", 2, "bc", "ab"), "c": chained("c", 2, "bc", "ab")}, []

    def ask(nodes, is_again, _tokens):
        asked.append("".join(node.id for node in nodes))
        return pb.SurveyReply(nodes=[pb.SurveyedNode(node=node, reply=says[node.id]) for node in nodes])

    found = inventory.survey_absent_nodes(JobSurvey({"a": chained("a", 1, "ab")}), [NODES["b"]], ask, ())
    assert asked == ["b", "c"] and sorted(found.replies) == ["a", "b", "c"]


def test_nodes_of_an_older_history_are_not_asked(monkeypatch):
    """Nodes that left two attaches ago may be gone for good. Each restart would wait for them."""
    monkeypatch.setattr(inventory, "is_settled", lambda plan, decision: True)
    asked = []

    def ask(nodes, is_again, _tokens):
        asked.append("".join(node.id for node in nodes))
        return pb.SurveyReply(nodes=[pb.SurveyedNode(node=node, reply=chained("b", 2, "b", "cd")) for node in nodes])

    inventory.survey_absent_nodes(JobSurvey({"a": chained("a", 3, "a", "b")}), [NODES["b"]], ask, ())
    assert asked == ["b"]


class FakeDaemon:
    """A daemon with one reply to each method; remembers the requests."""

    def __init__(self, **replies):
        self.replies, self.requests = replies, []

    def call(self, method, request, deadline_s=None):
        self.requests.append((method, request))
        return self.replies[method]


def test_a_daemon_ends_orphans_of_other_processes_than_its_ranks():
    introduced = attaches.introduction("aba", rank=2)
    request = inventory.inventory_request(introduced)
    assert (request.job, request.launch, request.end_orphans) == ("job", "l", True)
    assert list(request.pids) == [70, 72], "the ranks of its own node"


def test_a_rank_alone_takes_the_inventory_of_its_daemon():
    reply = pb.InventoryReply(node_id="a", node="name-a")
    daemon = FakeDaemon(Inventory=reply)
    introduced = replace(attaches.introduction("a"), daemon=daemon)
    found = inventory.take_inventory(attaches.context(), introduced)
    assert dict(found.replies) == {"a": reply} and found.before is None
    assert [method for method, _ in daemon.requests] == ["Inventory"], "no daemon is absent"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_inventory_brings_the_table_of_each_rank_that_describes_one(rank):
    """Ranks with equal tables publish one. One rank a node asks the daemon."""
    reply = pb.InventoryReply(node_id="a", node="name-a")
    daemon = FakeDaemon(Inventory=reply)
    introduced = replace(attaches.introduction("aa", rank=rank), daemon=daemon)
    sent = []

    def gather_or_raise(act, **_):
        sent.append(act())
        first = inventory.InventoryMessage(reply.SerializeToString(), short_table(attaches.introduction("aa")))
        return [to_json(first), to_json(inventory.InventoryMessage())]

    rank_group = SimpleNamespace(rank=rank, gather_or_raise=gather_or_raise)
    found, tables = inventory.take_first_inventory(replace(attaches.context(), rank_group=rank_group), introduced)
    assert dict(found.replies) == {"a": reply} and tables == [symbolic_table(attaches.introduction("aa")), b""]
    assert len(sent) == 1 and bool(sent[0]["reply"]) is bool(sent[0]["table"]) is bool(daemon.requests) is (rank == 0)


def test_absent_nodes_of_the_old_manifest_are_surveyed_by_a_daemon_that_knows_the_job():
    """The job had nodes a and b; now only a takes part. A later try remembers the first survey."""
    first = attaches.begun("ab")
    known = attaches.survey_of(first, {"a": [8], "b": [8]})
    answer = pb.SurveyReply(nodes=[pb.SurveyedNode(node=first.manifest.nodes[1], reply=known.replies["b"])])
    daemon = FakeDaemon(Inventory=known.replies["a"], Survey=answer)
    introduced = replace(attaches.introduction("a"), daemon=daemon)
    before = JobSurvey({"a": known.replies["a"]})
    found = inventory.take_inventory(attaches.context(), introduced, before=before)
    assert found.replies == known.replies and found.silent == {} and found.before is before
    (_, _), (method, request) = daemon.requests
    assert method == "Survey" and [node.id for node in request.nodes] == ["b"] and not request.again


def test_the_first_daemon_that_knows_the_job_asks():
    replies = {"a": attaches.reply("a"), "b": attaches.reply("b", attaches.begun("b")), "c": attaches.reply("c")}
    nodes = attaches.introduction("acbb").nodes
    assert inventory.asker_of(nodes, replies) == 2


def test_the_layouts_of_a_manifest_are_read_once(monkeypatch):
    read, plan, read_layouts = [], attaches.begun("ab"), manifests.layouts_of
    monkeypatch.setattr(wire_inventory, "layouts_of", lambda manifest: read.append(1) or read_layouts(manifest))
    survey = JobSurvey({"a": attaches.reply("a", plan, [attaches.sealed(0, 3, plan.decision.epoch)])})
    blocks = manifests.placement_of(plan.manifest).rank_placement(0).blocks
    monkeypatch.delattr(manifests, "layouts_of")  # a placement that reads them again would fail
    assert survey.placements[plan.decision.epoch].rank_placement(0).blocks == blocks
    assert survey.layouts[plan.decision.epoch][1] == [0, 0] and len(read) == 1


def test_all_ranks_wait_as_long_as_absent_nodes_may_take():
    """However short REFT_ATTACH_DEADLINE_S is."""
    waits = []

    def gather_or_raise(act, extra_s, deadline_s):
        waits.append(extra_s)
        return [act()]

    def call(method, request, deadline_s=0.0):
        waits.append(deadline_s)
        return known if method == "Inventory" else pb.SurveyReply()

    first = attaches.begun("ab")
    known = attaches.survey_of(first, {"a": [8], "b": [8]}).replies["a"]
    introduced = replace(attaches.introduction("a"), daemon=SimpleNamespace(call=call))
    rank_group = SimpleNamespace(rank=0, gather_or_raise=gather_or_raise)
    inventory.take_inventory(replace(attaches.context(), rank_group=rank_group), introduced)
    assert waits == [0.0, 0.0, inventory.DEADLINE_S, inventory.DEADLINE_S], "group and daemon, twice"
