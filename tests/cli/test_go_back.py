"""The decision of `reft-cli recover --step`, as data: which nodes it names, and what it ends."""

from __future__ import annotations

from reft.cli.go_back import GoBackCommand
from reft.core.commit.decision import Decision, counts
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.lineage import histories, known_to, next_epoch
from reft.wire.inventory import JobSurvey
from reft.wire.messages import decision_to
from reft.wire.v1 import daemon_pb2 as pb

FIRST = Decision(Epoch(1, b"1" * 16), None)


def survey_without(*absent: str) -> JobSurvey:
    nodes = [pb.Node(name=name, id=name, ranks=[rank]) for rank, name in enumerate("abc")]
    manifest = pb.Manifest(job="job", token=b"t" * 32, world=3, nodes=nodes)
    reply = pb.InventoryReply(manifest=manifest, decision=decision_to(FIRST))
    return JobSurvey({name: reply for name in "abc" if name not in absent})


def test_manifest_names_the_nodes_that_answer_and_every_rank() -> None:
    command = GoBackCommand("unix:/nowhere", "job", 10)
    assert [node.id for node in command._manifest(survey_without()).nodes] == ["a", "b", "c"]
    manifest = command._manifest(survey_without("a", "c"))
    assert [(node.id, sorted(node.ranks)) for node in manifest.nodes] == [("b", [0, 1, 2])]


def test_node_that_returns_late_brings_nothing_back() -> None:
    """It remembers the decision before. If the manifest named it, its decision would count."""
    back = Decision(next_epoch([FIRST], (), b"2" * 16), Version(FIRST.epoch, 10), known_to([FIRST]))
    remembered, written = {"a": back, "b": back, "c": FIRST}, {FIRST.epoch}
    named = [node.id for node in GoBackCommand("unix:/nowhere", "job", 10)._manifest(survey_without("c")).nodes]
    assert histories(remembered, {back.epoch: named, FIRST.epoch: "abc"}, written) == [back]
    assert histories(remembered, {back.epoch: "abc", FIRST.epoch: "abc"}, written) == [FIRST]
    assert counts(Version(FIRST.epoch, 10), back) and not counts(Version(FIRST.epoch, 11), back)


def test_going_back_that_reached_some_nodes_only_does_not_count() -> None:
    back = Decision(next_epoch([FIRST], (), b"2" * 16), Version(FIRST.epoch, 10), known_to([FIRST]))
    remembered = {"a": back, "b": FIRST, "c": FIRST}
    assert histories(remembered, {back.epoch: "abc", FIRST.epoch: "abc"}, {FIRST.epoch}) == [FIRST]
