"""An agent's heartbeat client with real daemons: the agent is heard, and hears of other nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from reft.cli.demo.cluster import free_port
from reft.config import Config
from reft.core.membership.agent_policy import AgentReaction
from reft.core.membership.failure_detector import AgentPhase
from reft.elastic.heartbeat_client import HeartbeatClient, RoundMembers
from reft.wire import messages, rpc
from reft.wire.daemon_launcher import DaemonRestarter
from reft.wire.proof import Challenges
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import DaemonProcess, until
from tests.support.proving import ProvingServer, rogue

TOKEN = bytes(range(32))


class Node:
    """A daemon, and an agent's heartbeat client."""

    def __init__(self, *flags: str, tls: Tls | None = None) -> None:
        self.daemon = DaemonProcess("--listen", "127.0.0.1:0", *flags)
        self.hello = self.daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL))
        self.signals_heard: list[tuple[RoundMembers, AgentReaction]] = []
        self.round_members: RoundMembers | None = None
        self.client = HeartbeatClient(
            self.daemon.address,
            DaemonRestarter(Config(), False, agent_pid=os.getpid()),
            tls,
            lambda *news: self.signals_heard.append(news),
        )

    @property
    def member(self) -> pb.Node:
        return pb.Node(name=self.hello.node, id=self.hello.node_id, addresses=self.hello.addresses)

    def begin(self, members: list[pb.Node], round: int) -> None:
        round_members = RoundMembers("job", self.hello.node_id, "launch", round, TOKEN, tuple(members))
        self.round_members = round_members
        self.client.begin(round_members)

    def signals(self) -> pb.SignalsReply:
        return self.daemon.call("Signals", pb.SignalsRequest(job="job"))

    @property
    def reaction(self) -> AgentReaction:
        """Returns the reaction to the newest signals of the current round."""
        reactions = [reaction for round_members, reaction in self.signals_heard if round_members is self.round_members]
        return reactions[-1] if reactions else AgentReaction()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made: list[Node] = []
    try:
        made += [Node() for _ in range(3)]
        yield made
    finally:
        for node in made:
            node.client.close(AgentPhase.FINISHED)
            node.daemon.close()


def begin(nodes: list[Node], round: int = 1) -> None:
    for node in nodes:
        node.begin([each.member for each in nodes], round)

    def all_well() -> bool:
        replies = [
            node.signals()
            for node in nodes
            if any(round_members is node.round_members for round_members, _ in node.signals_heard)
        ]
        good = [r for r in replies if r.round == round and all(each.signal == pb.HEALTHY for each in r.nodes)]
        return len(good) == len(nodes)

    until(all_well, 60, "all nodes to see all nodes as HEALTHY")


def test_an_agent_hears_of_failed_workers_and_lost_nodes_but_not_of_itself(nodes):
    a, b, c = nodes
    begin(nodes)
    assert all(node.reaction == AgentReaction() for node in nodes)
    b.client.say(AgentPhase.FAILED)
    until(lambda: a.reaction.reason and c.reaction.reason, 30, "the signal of b's workers")
    assert a.reaction.lost == frozenset() and "UNHEALTHY" in a.reaction.reason
    assert b.reaction == AgentReaction()

    begin(nodes, round=2)
    assert all(node.reaction == AgentReaction() for node in nodes), "a new round starts without old signals"
    b.client._closed.set()  # silent, without a last heartbeat
    b.daemon.kill()
    until(lambda: all(node.reaction.lost == {b.hello.node_id} for node in (a, c)), 30, "the loss of b")
    assert "OFFLINE" in a.reaction.reason


def test_a_stopped_or_restarted_own_daemon_causes_no_restart(nodes):
    a, b, _ = nodes
    begin(nodes)
    a.daemon.kill(signal.SIGSTOP)
    until(lambda: any(each.signal == pb.SUSPECT for each in b.signals().nodes), 30, "SUSPECT for the stopped daemon")
    assert all(node.reaction == AgentReaction() for node in nodes), "the agent is heard, so the node lives"
    a.daemon.kill(signal.SIGCONT)
    b.daemon.flags = ("--listen", b.hello.addresses[0])  # the address that other daemons know
    b.daemon.kill()
    b.daemon.start()
    until(lambda: _quietly(lambda: b.signals().round == 1), 60, "the new daemon to learn of the round from its agent")
    assert all(node.reaction == AgentReaction() for node in nodes)


def _quietly(look) -> bool:
    try:
        return bool(look())
    except Exception:
        return False  # the daemon does not watch the job yet


def beating(tmp_path: Path, address: str) -> HeartbeatClient:
    """Returns a client whose node is watched by the daemon at `address`; its own daemon is away."""
    restarter = DaemonRestarter(Config(), False, agent_pid=os.getpid())
    client = HeartbeatClient(f"unix:{tmp_path / 'away.sock'}", restarter, None, lambda *news: None)
    nodes = (pb.Node(name="own", id="own"), pb.Node(name="watcher", id="watcher", addresses=[address]))
    client.begin(RoundMembers("job", "own", "launch", 1, TOKEN, nodes))
    return client


class MetadataRecorder(grpc.GenericRpcHandler):
    """A server that refuses all calls and notes their metadata, by method."""

    def __init__(self) -> None:
        self.by_method: dict[str, dict] = {}

    def service(self, handler_call_details) -> None:
        method = handler_call_details.method.rpartition("/")[2]
        self.by_method[method] = dict(handler_call_details.invocation_metadata)


def test_calls_to_the_own_daemon_say_the_protocol(tmp_path):
    """The next daemon may have no common protocol: it hears no node, and would call all lost."""
    recorder = MetadataRecorder()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[recorder])
    server.add_insecure_port(f"unix:{tmp_path / 'away.sock'}")
    server.start()
    client = beating(tmp_path, f"127.0.0.1:{free_port()}")
    try:
        until(lambda: {"AgentBeat", "Signals"} <= set(recorder.by_method), what="both calls")
    finally:
        client.stop()
        server.stop(None).wait()
    for metadata in recorder.by_method.values():
        assert set(rpc.PROTOCOL_METADATA) <= set(metadata.items())


def test_heartbeats_to_other_nodes_are_proved(tmp_path):
    watcher, address = ProvingServer("watcher", TOKEN, reply=pb.AgentBeatReply()), f"127.0.0.1:{free_port()}"
    with rogue(watcher, address):
        client = beating(tmp_path, address)
        try:
            until(lambda: watcher.proved >= 2, what="two heartbeats")
            watcher.challenges = Challenges("watcher")  # a restart
            proved = watcher.proved
            until(lambda: watcher.proved >= proved + 2, what="two heartbeats to the restarted daemon")
            watcher.challenges, proved = Challenges("watcher"), watcher.proved
        finally:
            client.close(AgentPhase.FINISHED)
        assert watcher.proved > proved, "the last word is proved, too"
    assert repr(TOKEN)[2:-1] not in repr(watcher.received)


def test_a_rogue_daemon_learns_nothing_from_heartbeats(tmp_path):
    stranger, address = ProvingServer("watcher", bytes(32), reply=pb.AgentBeatReply()), f"127.0.0.1:{free_port()}"
    with rogue(stranger, address):
        client = beating(tmp_path, address)
        until(lambda: len(stranger.received) >= 6, what="three heartbeats")
        client.stop()
    assert not stranger.proved and repr(TOKEN)[2:-1] not in repr(stranger.received)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_an_agent_is_heard_with_new_certificates(tmp_path):
    """A restarted daemon with new certificates does not accept the old ones of the agent."""
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
        b.daemon.start()  # at the same port
        until(lambda: _quietly(lambda: _is_heard(a, b)), 60, "the new daemon of b to hear the agent of a")
    finally:
        for node in nodes:
            node.client.close(AgentPhase.FINISHED)
            node.daemon.close()


def _is_heard(agent: Node, by: Node) -> bool:
    return any(each.node_id == agent.hello.node_id and each.agent for each in by.signals().nodes)


def test_an_agent_knows_its_watchers_without_its_own_daemon():
    """The agent's daemon may be stopped when a round begins.

    If the agent were silent too, the node would be declared lost.
    """
    members = [pb.Node(name=f"n{i}", id=f"id{i}", addresses=[f"127.0.0.1:{9 + i}"]) for i in range(3)]
    client = HeartbeatClient("unix:/nowhere/d.sock", DaemonRestarter(Config(), False), None, lambda *news: None)
    client.begin(RoundMembers("job", "id0", "launch", 1, TOKEN, tuple(members)))
    try:
        assert {name for name, _ in client._targets()} == {"", "id1", "id2"}
    finally:
        client.close(AgentPhase.FINISHED)


def test_a_stopped_client_ends_its_threads_during_a_call(nodes):
    begin(nodes)
    threads = nodes[0].client._threads
    nodes[0].client.stop()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
