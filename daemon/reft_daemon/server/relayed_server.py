"""A gRPC server behind an acceptor, and the sockets at which its callers arrive."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from reft.wire.tls import Tls
from reft_daemon.server.acceptor import Acceptor, AcceptorThread, add_private_port
from reft_daemon.server.callers import Door

_NO_SUCH_ADDRESS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class RelayedServer:
    """Serves one door.

    Args:
        server: with its handlers, and without ports; not started.
        path: used for a moment, in a folder that only this user can write.
    """

    def __init__(self, server: grpc.aio.Server, path: Path) -> None:
        self._server = server
        self._private = add_private_port(server, path)
        self._acceptor: Acceptor | None = None

    async def start(
        self, thread: AcceptorThread, door: Door, listeners: Sequence[socket.socket], tls: Tls | None = None
    ) -> None:
        """Serves those who call at the listeners, which this object closes."""
        await self._server.start()
        self._acceptor = Acceptor(thread, door, listeners, self._private, tls)

    async def stop(self, grace_s: float | None) -> None:
        """Accepts nobody from now on; calls in progress have `grace_s` seconds to end."""
        if self._acceptor is None:
            return os.close(self._private)
        await self._acceptor.close_listeners()
        await self._server.stop(grace_s)
        await self._acceptor.close()
        return None


def listen_at(host: str, port: int) -> list[socket.socket]:
    """Returns sockets that listen at each address of a host, all at one port.

    Args:
        host: a name or a number, without brackets.
        port: 0 takes any free one.

    Raises:
        OSError: the host has no address here, or another process has the port.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
        try:
            listeners.append(_listener(family, (address[0], port, *address[2:])))
        except OSError as error:
            if error.errno not in _NO_SUCH_ADDRESS:
                for listener in listeners:
                    listener.close()
                raise
            missing = error  # e.g. a name has an address of IPv6, and this host has none
        else:
            port = listeners[0].getsockname()[1]
    if not listeners and missing is not None:
        raise missing
    return listeners


def _listener(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Ended connections of an earlier daemon may keep the port. No SO_REUSEPORT: two daemons
        # must not share it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def listen_at_path(path: Path) -> socket.socket:
    """Returns a unix socket that listens there, for this user only."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    earlier_umask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(earlier_umask)
    listener.listen(socket.SOMAXCONN)
    return listener
