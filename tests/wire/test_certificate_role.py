"""Tests roles: which names make one, which make none, and whom a daemon serves."""

from __future__ import annotations

import pytest

from reft.wire.certificate_role import Role, refusal, role_of

ALICE = Role("alice", "node1")
USER, NODE, AGENT = "reft://user/alice", "reft://node/node1", "reft://agent/node1"


def certificate(*names: str, kind: str = "URI") -> dict[str, object]:
    """Returns a certificate with alternative names, as ssl decodes it."""
    return {"subject": ((("commonName", USER),),), "subjectAltName": tuple((kind, name) for name in names)}


@pytest.mark.parametrize(
    ("names", "role"),
    [
        ([USER, NODE], Role("alice", "node1")),
        ([NODE, USER], Role("alice", "node1")),
        ([USER, AGENT], Role("alice", agent="node1")),
        ([USER], Role("alice")),
        ([USER, "spiffe://elsewhere/x", "https://reft"], Role("alice")),
        (["reft://user/_apt.x-1", "reft://node/" + "N" * 253], Role("_apt.x-1", "N" * 253)),
    ],
)
def test_names_that_make_a_role(names, role):
    assert role_of(certificate(*names)) == role


@pytest.mark.parametrize(
    "names",
    [
        [],
        [NODE],
        [AGENT],
        [USER, "reft://user/bob"],
        [USER, USER],
        [USER, NODE, "reft://node/node2"],
        [USER, AGENT, "reft://agent/node2"],
        [USER, NODE, AGENT],
        [USER, "reft://group/yes"],
        [USER, "reft://"],
        [USER, "reft://node"],
        [USER, "reft://node/"],
        ["reft://user/Alice"],
        ["reft://user/"],
        ["reft://user/" + "a" * 64],
        ["reft://user/alice\n"],
        ["reft://user/alice\0"],
        ["reft://user/al ice"],
        ["reft://user/älice"],
        ["reft://user/-alice"],
        ["reft://user/alice/node/node1"],
        ["reft://user/alice?x"],
        ["REFT://user/alice"],
        [USER, "reft://node/" + "n" * 254],
        [USER, "reft://node/../x"],
        [USER, "reft://node/٣"],
    ],
)
def test_names_that_make_none(names):
    assert role_of(certificate(*names)) is None


def test_only_names_of_type_uri_count():
    for kind in ("DNS", "email", "IP Address", "DirName"):
        assert role_of(certificate(USER, NODE, kind=kind)) is None
    assert role_of(None) is None and role_of({}) is None


def test_a_daemon_serves_its_own_user_only():
    for role in (Role("alice"), Role("alice", "node2"), Role("alice", agent="node1"), ALICE):
        assert not refusal(role, ALICE)
    for role in (None, Role("bob"), Role("bob", "node1"), Role("bob", agent="node1")):
        reason = refusal(role, ALICE)
        assert "user" in reason and "certificates.sh" in reason and "bob" not in reason


def test_a_certificate_speaks_for_its_own_node():
    daemon, agent, person = ALICE, Role("alice", agent="node1"), Role("alice")
    assert daemon.is_daemon_on("node1") and not agent.is_daemon_on("node1") and not person.is_daemon_on("node1")
    assert daemon.is_on("node1") and agent.is_on("node1") and not person.is_on("node1")
    for role in (daemon, agent, person):
        assert not role.is_on("node2") and not role.is_daemon_on("node2")
        assert not role.is_on("") and not role.is_daemon_on("")


def test_a_role_in_words():
    assert str(ALICE) == "daemon of user alice on node node1"
    assert str(Role("alice", agent="n2")) == "agent of user alice on node n2" and str(Role("alice")) == "user alice"
