"""Who is asked what in a survey, and when again: beside a fake of the daemons."""

from __future__ import annotations

import pytest

from reft.client import surveying
from reft.wire.v1 import daemon_pb2 as pb

NODES = {name: pb.Node(name=name, id=name) for name in "abcd"}


def survey(monkeypatch, answers: dict[str, list[str]], settled: bool):
    """`answers`: node → what it says when it is asked first, and again. Returns the findings, and who was asked how."""
    asked = []
    monkeypatch.setattr(surveying, "is_settled", lambda plan, decision: settled)

    def ask(nodes, is_again):
        asked.append(("".join(node.id for node in nodes), is_again))
        reply = pb.SurveyReply()
        for node in nodes:
            said = answers[node.id].pop(0)
            each = reply.nodes.add(node=node, brief="brief" in said)
            if "answers" in said:
                each.reply.node_id = node.id
        return reply

    found = surveying.surveyed({"a": pb.InventoryReply(node_id="a")}, [NODES[n] for n in answers], ask, ())
    return sorted(found.replies), found.silent, asked


def test_who_was_given_up_is_not_waited_for_where_nothing_newer_is_known(monkeypatch):
    answers = {"b": ["brief"], "c": ["silent"], "d": ["answers"]}
    assert survey(monkeypatch, answers, settled=True) == (["a", "d"], ("b", "c"), [("bcd", False)])


@pytest.mark.parametrize(
    "later, heard, silent", [("answers", ["a", "b", "d"], ("c",)), ("silent", ["a", "d"], ("c", "b"))]
)
def test_else_it_is_asked_again(monkeypatch, later, heard, silent):
    answers = {"b": ["brief", later], "c": ["silent"], "d": ["answers brief"]}
    assert survey(monkeypatch, answers, settled=False) == (heard, silent, [("bcd", False), ("b", True)])


def test_whoever_had_the_whole_time_is_not_asked_again(monkeypatch):
    assert survey(monkeypatch, {"b": ["silent"]}, settled=False) == (["a"], ("b",), [("b", False)])
