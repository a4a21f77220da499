"""An agent's threads against real daemons: it is heard, and hears of the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.config import Config
from reft.core.membership.agent_policy import AgentReaction
from reft.core.membership.failure_detector import AgentPhase
from reft.elastic.heartbeat_client import HeartbeatClient, RoundMembers
from reft.wire import messages
from reft.wire.daemon_launcher import DaemonRestarter
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import DaemonProcess, until

TOKEN = bytes(range(32))


class Node:
    """A daemon, and an agent's listener."""

    def __init__(self, *flags: str, tls: Tls | None = None) -> None:
        self.daemon = DaemonProcess("--listen", "127.0.0.1:0", *flags)
        self.hello = self.daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL))
        self.news: list[tuple[RoundMembers, AgentReaction]] = []
        self.term: RoundMembers | None = None
        self.listener = HeartbeatClient(
            self.daemon.address,
            DaemonRestarter(Config(), False, agent_pid=os.getpid()),
            tls,
            lambda *said: self.news.append(said),
        )

    @property
    def member(self) -> pb.Node:
        return pb.Node(name=self.hello.node, id=self.hello.node_id, addresses=self.hello.addresses)

    def begin(self, members: list[pb.Node], round: int) -> None:
        term = RoundMembers("job", self.hello.node_id, "launch", round, TOKEN, tuple(members))
        self.term = term
        self.listener.begin(term)

    def signals(self) -> pb.SignalsReply:
        return self.daemon.call("Signals", pb.SignalsRequest(job="job"))

    @property
    def reaction(self) -> AgentReaction:
        """What the news of the round that runs now mean."""
        said = [reaction for term, reaction in self.news if term is self.term]
        return said[-1] if said else AgentReaction()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made: list[Node] = []
    try:
        made += [Node() for _ in range(3)]
        yield made
    finally:
        for node in made:
            node.listener.close(AgentPhase.FINISHED)
            node.daemon.close()


def begin(nodes: list[Node], round: int = 1) -> None:
    for node in nodes:
        node.begin([each.member for each in nodes], round)

    def all_well() -> bool:
        replies = [node.signals() for node in nodes if any(term is node.term for term, _ in node.news)]
        good = [r for r in replies if r.round == round and all(each.signal == pb.HEALTHY for each in r.nodes)]
        return len(good) == len(nodes)

    until(all_well, 60, "all nodes HEALTHY in the eyes of all")


def test_an_agent_hears_of_failed_workers_and_of_lost_nodes_elsewhere_and_never_of_itself(nodes):
    a, b, c = nodes
    begin(nodes)
    assert all(node.reaction == AgentReaction() for node in nodes)
    b.listener.say(AgentPhase.FAILED)
    until(lambda: a.reaction.reason and c.reaction.reason, 30, "the news of b's workers")
    assert a.reaction.lost == frozenset() and "UNHEALTHY" in a.reaction.reason
    assert b.reaction == AgentReaction()

    begin(nodes, round=2)
    assert all(node.reaction == AgentReaction() for node in nodes), "a new round begins without the past"
    b.listener._closed.set()  # silent, without a last word
    b.daemon.kill()
    until(lambda: all(node.reaction.lost == {b.hello.node_id} for node in (a, c)), 30, "the loss of b")
    assert "OFFLINE" in a.reaction.reason


def test_a_stopped_or_restarted_daemon_of_ones_own_makes_nobody_restart(nodes):
    a, b, _ = nodes
    begin(nodes)
    a.daemon.kill(signal.SIGSTOP)
    until(lambda: any(each.signal == pb.SUSPECT for each in b.signals().nodes), 30, "doubt about the stopped daemon")
    assert all(node.reaction == AgentReaction() for node in nodes), "its agent is heard: the node lives"
    a.daemon.kill(signal.SIGCONT)
    b.daemon.flags = ("--listen", b.hello.addresses[0])  # where the others look for it
    b.daemon.kill()
    b.daemon.start()
    until(lambda: _quietly(lambda: b.signals().round == 1), 60, "the new daemon told of the round by its agent")
    assert all(node.reaction == AgentReaction() for node in nodes)


def _quietly(look) -> bool:
    try:
        return bool(look())
    except Exception:
        return False  # it does not watch the job yet


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_an_agent_is_heard_under_new_certificates(tmp_path):
    """A daemon that comes back with them does not know those with which this agent began."""
    certificates = Certificates(tmp_path)
    flags = certificates.flags("ours")
    nodes, tls = [], []
    try:
        for _ in range(2):
            tls.append(Tls(*map(Path, flags[1::2])))
            nodes.append(Node(*flags, tls=tls[-1]))
        a, b = nodes
        begin(nodes)
        certificates.replace("ours", "new")
        for each in tls:
            each.watch()
            each.reread()
            until(lambda each=each: each.generation == 1, what="new certificates")
        b.daemon.kill()
        b.daemon.start()  # at its earlier port
        until(lambda: _quietly(lambda: _is_heard(a, b)), 60, "the agent of a, by the new daemon of b")
    finally:
        for node in nodes:
            node.listener.close(AgentPhase.FINISHED)
            node.daemon.close()


def _is_heard(agent: Node, by: Node) -> bool:
    return any(each.node_id == agent.hello.node_id and each.agent for each in by.signals().nodes)


def test_an_agent_knows_who_watches_it_without_its_own_daemon():
    """It may be stopped just when a round begins: were its agent silent too, the node would be given up."""
    members = [pb.Node(name=f"n{i}", id=f"id{i}", addresses=[f"127.0.0.1:{9 + i}"]) for i in range(3)]
    listener = HeartbeatClient("unix:/nowhere/d.sock", DaemonRestarter(Config(), False), None, lambda *said: None)
    listener.begin(RoundMembers("job", "id0", "launch", 1, TOKEN, tuple(members)))
    try:
        assert {name for name, _ in listener._targets()} == {"", "id1", "id2"}
    finally:
        listener.close(AgentPhase.FINISHED)


def test_a_client_that_is_stopped_ends_its_threads_in_the_middle_of_a_call(nodes):
    begin(nodes)
    threads = nodes[0].listener._threads
    nodes[0].listener.stop()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
