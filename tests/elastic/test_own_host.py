"""The host by which other nodes reach an agent's daemon, for any content of /etc/hosts."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from reft.elastic import node
from reft.elastic.shared_state import PLAIN
from reft.errors import DaemonUnavailable
from reft.wire import daemon_launcher, rpc
from reft.wire.certificate_role import Role
from reft.wire.v1 import daemon_pb2 as pb

NAMES = {"debian": ["127.0.1.1"], "far": ["10.0.0.9"], "real": ["10.0.0.7"], "both": ["127.0.1.1", "10.0.0.7"]}


@pytest.fixture(autouse=True)
def resolver(monkeypatch):
    """Resolves names as on another machine; numbers stay as they are."""
    genuine = socket.getaddrinfo

    def lookup(host, port, *more, **options):
        return [entry for number in NAMES.get(host, [host]) for entry in genuine(number, port, *more, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True), ("::1", True), ("debian", True), ("real", False), ("both", False), ("10.0.0.7", False),
        ("", False), ("no such host", False),
    ],
)  # fmt: skip
def test_loopback(host, is_loopback):
    assert rpc.is_loopback(host) is is_loopback


@pytest.mark.parametrize(
    ("name", "endpoint", "ways", "expected"),
    [
        ("real", "far:29400", {}, "real"),
        ("debian", "far:29400", {"far": "10.0.0.7"}, "10.0.0.7"),
        ("debian", "far", {"far": "10.0.0.7"}, "10.0.0.7"),
        ("debian", "etcd://far:2379,farther:2379", {"far": "10.0.0.7"}, "10.0.0.7"),
        ("debian", "debian:29400", {"debian": "127.0.0.1", node.ELSEWHERE: "10.0.0.7"}, "10.0.0.7"),
        ("debian", "[fd00::9]:29400", {"fd00::9": "fd00::7"}, "fd00::7"),
        ("debian", "localhost:29400", {}, "127.0.0.1"),
        ("debian", "127.0.0.1:29400", {}, "127.0.0.1"),
        ("debian", "[::1]:29400", {}, "127.0.0.1"),
        ("debian", "", {}, "127.0.0.1"),
        ("debian", "far:29400", {}, "debian"),
    ],
)
def test_own_host(monkeypatch, name, endpoint, ways, expected):
    monkeypatch.setattr(socket, "getfqdn", lambda: name)
    monkeypatch.setattr(node, "_address_towards", lambda host: ways.get(host, ""))
    assert node.own_host(endpoint) == expected


@pytest.mark.parametrize(
    ("host", "environment", "role", "nodes", "flags"),
    [
        ("10.0.0.7", {"REFT_INSECURE": "1"}, None, 2, ["--listen", "10.0.0.7:0"]),
        ("fd00::7", {}, Role("alice", "n7"), 2, ["--listen", "[fd00::7]:0"]),
        ("10.0.0.7", {}, Role("alice", agent="n7"), 2, []),
        ("127.0.0.1", {"REFT_INSECURE": "1"}, Role("alice", agent="n7"), 2, []),
        ("127.0.0.1", {}, None, 2, ["--listen", "127.0.0.1:0"]),
        ("10.0.0.7", {}, None, 2, []),
        ("10.0.0.7", {"REFT_INSECURE": "1", "REFT_LISTEN": "10.0.0.7:7070"}, None, 2, []),
        ("10.0.0.7", {"REFT_INSECURE": "1"}, None, 1, []),
    ],
)
def test_the_flags_of_a_daemon_that_the_agent_starts(monkeypatch, host, environment, role, nodes, flags):
    for name in ("REFT_INSECURE", "REFT_LISTEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    parameters = SimpleNamespace(local_addr=host, endpoint="far:29400", max_nodes=nodes)
    assert node._flags(parameters, role and SimpleNamespace(role=role)) == flags


@pytest.mark.parametrize(
    ("role", "says"),
    [
        (None, "this agent has no certificates"),
        (Role("alice"), "REFT_TLS_CERT is of the user alice, and this agent is on node n7"),
        (Role("alice", agent="n8"), "is of the agent of user alice on node n8, and this agent is on node n7"),
        (Role("alice", agent="n7"), ""),
        (Role("alice", "n7"), ""),
    ],
)
def test_an_agent_says_that_its_certificate_does_not_fit(capfd, role, says):
    node._check_certificates(role and SimpleNamespace(role=role), "n7")
    stderr = capfd.readouterr().err
    assert says in stderr and bool(stderr) == bool(says)


@pytest.mark.parametrize(
    ("role", "has_tls", "addresses", "whose"),
    [
        (Role("alice", agent="n7"), True, ["unix:/s", "n7:1"], "user alice"),
        (Role("alice", agent="n7"), True, ["unix:/s"], "user alice"),
        (None, True, ["unix:/s", "n7:1"], ""),
        (None, False, ["unix:/s", "n7:1"], PLAIN),
        (None, False, ["unix:/s"], ""),
    ],
)
def test_an_agent_tells_whose_certificates_its_node_has(role, has_tls, addresses, whose):
    hello = pb.HelloReply(tls=has_tls, addresses=addresses)
    assert node._whose(role and SimpleNamespace(role=role), hello) == whose


def test_an_agent_waits_for_a_named_daemon_and_then_goes_on_without(monkeypatch, capfd):
    waits: list[bool] = []

    def find(settings, flags, is_restart=False):
        waits.append(is_restart)
        raise DaemonUnavailable("no daemon answers.", "none")

    monkeypatch.setattr(daemon_launcher, "find", find)
    facts, daemon = node.resolve_node(RendezvousParameters("reft", "", "job", 1, 1))
    assert waits == [True] and daemon is None and not facts.home
    assert "this node has no reft-daemon" in capfd.readouterr().err


def test_the_address_towards_a_host():
    assert node._address_towards("127.0.0.1") == "127.0.0.1"
    assert node._address_towards("no such host") == ""


def test_unreadable_certificates_are_reported_and_are_not_fatal(monkeypatch, capfd, tmp_path):
    assert node.tls() is None
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"REFT_TLS_{name}", str(tmp_path / name))
    assert node.tls() is None
    stderr = capfd.readouterr().err
    assert "do not hear this agent" in stderr and str(tmp_path / "CERT") in stderr
