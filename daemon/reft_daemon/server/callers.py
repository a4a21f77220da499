"""Names the caller of each connection, as the kernel or a certificate says.

    acceptor: accepts ─► SO_PEERCRED, or address and certificate ─► Callers.add(name, caller)
                      └► connects to a gRPC server, from a socket bound to `name`
    handler:  context.peer() ─► Callers.of ─► caller

gRPC for Python tells a handler the address of the caller's socket, and nothing else. So each
connection gets a name that nobody can guess, and the name stands for the caller.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from reft.wire.certificate_role import Role
from reft_daemon.child.refusals import RefusalCounts

# Refused calls that follow each other before the next one counts. The first calls of a daemon learn
# this daemon's challenge by being refused, a few at the same time.
UNCOUNTED = 16
OTHER_USER = "they belong to another user"  # why callers of a unix socket are refused


class Door(enum.Enum):
    """A way into the daemon. Each way is a server of its own."""

    LOCAL = "unix"  # the unix socket, for processes of the daemon's own user on this node
    REMOTE = "tcp"


@dataclass(frozen=True)
class Caller:
    """The other end of a connection.

    Attributes:
        door: where the caller came in.
        pid: of the calling process, as this daemon sees it; 0: not known, as over TCP.
        start: of that process when it was accepted: a later process may get the same pid; 0: not
            known.
        address: host of a caller over TCP, without the port.
        role: of the caller's certificate; None: without TLS.
    """

    door: Door
    pid: int = 0
    start: int = 0
    address: str = ""
    role: Role | None = None

    def __str__(self) -> str:
        """Returns who calls, for audit lines."""
        if self.door is Door.LOCAL:
            return f"pid {self.pid}"
        return self.address if self.role is None else f"{self.address}, {self.role}"


class Callers:
    """The callers of all open connections, by the names of their sockets. For all threads.

    Args:
        refusals: counts the calls that were refused.
    """

    def __init__(self, refusals: RefusalCounts) -> None:
        self._refusals = refusals
        self._callers: dict[str, Caller] = {}
        self._refused: dict[str, list[int]] = {}  # a number of calls, since the last one with a proof
        self._unproved: dict[str, Callable[[], None]] = {}

    def add(self, name: str, caller: Caller, proved: Callable[[], None] | None = None) -> None:
        """Notes who calls from the socket of that name.

        Args:
            name: as gRPC's context.peer() will give it.
            caller: who it is.
            proved: called at the first `note_proved`.
        """
        self._callers[name] = caller
        self._refused[name] = [0]
        if proved is not None:
            self._unproved[name] = proved

    def note_proved(self, name: str) -> None:
        """Notes that a call of this connection had the right proof."""
        proved = self._unproved.pop(name, None)
        if proved is not None:
            proved()
        if refused := self._refused.get(name):
            refused[0] = 0

    def note_refused(self, name: str, reason: str) -> None:
        """Notes that a call of this connection was refused; ignores connections that have ended.

        Args:
            name: of the connection.
            reason: as in `RefusalCounts.count`.
        """
        caller, refused = self._callers.get(name), self._refused.get(name)
        if caller is None or refused is None:
            return
        refused[0] += 1
        if refused[0] > UNCOUNTED:
            self._refusals.count(reason, caller.address or f"pid {caller.pid}")

    def remove(self, name: str) -> None:
        """Forgets a connection that has ended."""
        self._callers.pop(name, None)
        self._refused.pop(name, None)
        self._unproved.pop(name, None)

    def of(self, peer: str) -> Caller | None:
        """Returns the caller of a connection; None: nobody accepted that connection.

        Args:
            peer: as gRPC's context.peer() gives it.
        """
        return self._callers.get(peer)
