"""Nodes of one name, and nodes that are silent for many jobs, as the verbs show them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from reft.cli.main import main
from reft.cli.survey import survey, surveys
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import DaemonProcess, Site


def invoke(daemon: DaemonProcess, *arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments), env={"REFT_DAEMON": daemon.address}, catch_exceptions=False)


def decide(daemons: list[DaemonProcess], job: str, *lost: pb.Node) -> list[pb.Node]:
    """Makes a job that did nothing, on daemons and on lost nodes; returns its nodes."""
    hellos = [daemon.call("Hello", messages.hello("", 0, "")) for daemon in daemons]
    nodes = [
        pb.Node(name=hello.node, id=hello.node_id, addresses=hello.addresses, ranks=[rank])
        for rank, hello in enumerate(hellos)
    ]
    nodes += [pb.Node(name=node.name, id=node.id, addresses=node.addresses, ranks=[len(nodes)]) for node in lost]
    manifest = pb.Manifest(job=job, named=True, token=b"t" * 32, world=len(nodes), nodes=nodes, every=1)
    decision = pb.Decision(epoch=pb.Epoch(counter=1, ident=bytes(16)))
    for index, daemon in enumerate(daemons):
        daemon.call("Decide", pb.DecideRequest(manifest=manifest, decision=decision, node_index=index))
    return nodes


def test_two_nodes_of_one_name_are_two_nodes(site: Site) -> None:
    daemons = [site.add(1, "--node", "localhost")[0] for _ in range(2)]
    ids = [node.id[:6] for node in decide(daemons, "job")]
    for asked in daemons:
        (job,) = json.loads(invoke(asked, "status", "--json").stdout)["jobs"]
        names = {f"localhost#{each}": [rank] for rank, each in enumerate(ids)}
        assert {node["node"]: node["ranks"] for node in job["nodes"]} == names
        assert {rank["node"]: [rank["rank"]] for rank in job["ranks"]} == names
    purged = json.loads(invoke(daemons[0], "purge", "job", "--yes", "--json").stdout)
    assert purged["other_nodes"] == [f"localhost#{ids[1]}"]
    (job,) = json.loads(invoke(daemons[1], "status", "--json").stdout)["jobs"]
    assert {node["node"]: node["state"] for node in job["nodes"]} == {
        f"localhost#{ids[0]}": "silent", f"localhost#{ids[1]}": "gone"
    }  # fmt: skip
    assert {*survey(daemons[1].address, "job")[0].silent} == {f"localhost#{ids[0]}"}


def test_all_jobs_are_freed_and_the_other_node_of_the_name_is_named(site: Site) -> None:
    daemons = [site.add(1, "--node", "localhost")[0] for _ in range(2)]
    ids = [node.id[:6] for node in decide(daemons, "job")]
    freed = json.loads(invoke(daemons[0], "purge", "--all", "--yes", "--json").stdout)
    assert freed["other_nodes"] == [f"localhost#{ids[1]}"]


def test_a_silent_node_is_surveyed_once_for_all_jobs(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each survey waits seconds for it, so 200 jobs that lost one node took a minute."""
    lost = pb.Node(name="lost", id="1" * 32, addresses=["unix:/none/d.sock"])
    for number in range(3):
        decide([daemon], f"job{number}", lost)
    asked: list[str] = []

    def ask(address: str, method: str, request: Any, deadline_s: float = 10.0) -> Any:
        asked.extend([request.job] if method == "Survey" else [])
        return daemon.call(method, request, deadline_s)

    monkeypatch.setattr("reft.cli.survey.ask", ask)
    monkeypatch.setattr("reft.cli.survey.AT_ONCE", 1)
    surveys(daemon.address, daemon.call("Status", pb.StatusRequest(deep=True)))
    assert asked == ["job0"]
    mute: dict[tuple[str, ...], str] = {}
    found = [survey(daemon.address, f"job{number}", mute=mute)[0] for number in range(3)]
    assert [{*each.silent} for each in found] == [{"lost"}] * 3 and asked == ["job0", "job0"]
