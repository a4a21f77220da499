"""For whom a certificate was made, by its alternative names.

    reft://user/U                          a person of that user
    reft://user/U and reft://agent/N       an agent of that user on node N
    reft://user/U and reft://node/N        the daemon of that user on node N

    ssl.SSLSocket.getpeercert() ─► role_of ─► Role, or None ─► refusal ─► why not, or admitted

A certificate says who somebody is. Whatever concerns a job also takes the job's proof.

An agent has a certificate and a key of its own: where training runs, no key lies with which one
could serve in a daemon's place, or call in its name. An agent's certificate still names its node.
So with a stolen agent's key no other node can be declared failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

SCHEME: Final = "reft://"
# Of a user: lower case, because the user is a part of a host name too (`server_name`), and gRPC
# compares host names without regard to case.
USER: Final = re.compile(r"[a-z0-9_][a-z0-9._-]{0,62}")
NODE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
REMEDY: Final = "make certificates with examples/deploy/certificates.sh, or with the names that it gives them"


@dataclass(frozen=True)
class Role:
    """For whom a certificate was made.

    Attributes:
        user: name of the user.
        node: name of the node whose daemon has the certificate; empty: a person or an agent has it.
        agent: name of the node whose agent has the certificate; empty: a person or a daemon has it.
    """

    user: str
    node: str = ""
    agent: str = ""

    @property
    def server_name(self) -> str:
        """Returns the host name that certificates of this user's daemons have.

        gRPC's clients can look at one name of a server's certificate, which must be a host name.
        This one proves whose daemon answers. The daemons of several users have the same host.
        """
        return f"{self.user}.reft.internal"

    def is_daemon_on(self, node: str) -> bool:
        """Returns whether the daemon of that node has the certificate."""
        return bool(node) and node == self.node

    def is_on(self, node: str) -> bool:
        """Returns whether the daemon or an agent of that node has the certificate."""
        return bool(node) and node in (self.node, self.agent)

    def __str__(self) -> str:
        place = f" on node {self.node or self.agent}" if self.node or self.agent else ""
        return f"{'daemon of ' if self.node else 'agent of ' if self.agent else ''}user {self.user}{place}"


def role_of(certificate: Mapping[str, Any] | None) -> Role | None:
    """Returns the role of a verified certificate; None: it has none, or several.

    Args:
        certificate: as `ssl.SSLSocket.getpeercert()` returns it.
    """
    return role_of_names(name for kind, name in (certificate or {}).get("subjectAltName", ()) if kind == "URI")


def role_of_names(names: Iterable[str]) -> Role | None:
    """Returns the role that alternative names of type URI stand for; None: no role, or several.

    Names of other schemes count for nothing. A name of this scheme that is not well formed, or is
    there twice, makes the certificate one without a role.
    """
    values: dict[str, str] = {}
    for name in names:
        if not name.startswith(SCHEME):
            continue
        kind, _, value = name.removeprefix(SCHEME).partition("/")
        pattern = {"user": USER, "node": NODE, "agent": NODE}.get(kind)
        if pattern is None or kind in values or not pattern.fullmatch(value):
            return None
        values[kind] = value
    if "user" not in values or len(values) > 2:
        return None
    return Role(**values)


def refusal(role: Role | None, own: Role) -> str:
    """Returns why a daemon refuses a caller with this certificate; empty: it serves it.

    Nothing that the caller sent is in the text.

    Args:
        role: of the caller's certificate.
        own: of the daemon's certificate.
    """
    if role is None:
        return f"their certificate names no user, or several ({REMEDY})"
    if role.user != own.user:
        return f"their certificate is of another user than {own.user} ({REMEDY})"
    return ""
