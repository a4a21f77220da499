"""Keeps the daemon's sockets present, e.g. when a script that clears /tmp has removed them.

    PATH       callers of gRPC        ┐
    PATH.ln    the local socket       ├ every LOOK_S: do both exist? ── no ──► make them again
    PATH.lock  one daemon per socket  ┘

A daemon without sockets would hold memory that nobody can reach. Its arena's lock would keep the
next daemon out. Open connections for reports go on meanwhile. gRPC calls in progress are ended, as
by a daemon restart. A trainer of protocol 6 reports at PATH.ln, too. If it outlives its daemon, the
next daemon tells it there that the protocols differ.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from reft.errors import ConfigError, ReftError
from reft.folders import claim_folder
from reft.wire.tls import Tls
from reft_daemon.arena.arena import lock_file
from reft_daemon.arena.shortage import remedied
from reft_daemon.registry import Registry
from reft_daemon.server.acceptor import AcceptorThread
from reft_daemon.server.callers import Door
from reft_daemon.server.grpc_server import serve, server
from reft_daemon.server.local_socket import LocalSocket
from reft_daemon.server.relayed_server import RelayedServer, listen_at, listen_at_path

log = logging.getLogger("reft.daemon")
REMEDY = "make that folder writable, and room in it, or name another path with --socket (REFT_SOCKET)"
LOOK_S = 1.0


class SocketKeeper:
    """Keeps the sockets present, see the module. Claims the folder and the lock at once.

    Args:
        path: of the socket for gRPC.

    Attributes:
        thread: where the callers of both doors are accepted.
        local_path: of the local socket.

    Raises:
        ConfigError: the folder can't be used.
        AttachError: another daemon serves there, or the file system takes no file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.local_path, self._private_path = path, _with_suffix(path, ".ln"), _with_suffix(path, ".in")
        self._lock = -1
        with remedied("the daemon's sockets", path.parent, REMEDY):
            self._claim()
        self._server: RelayedServer | None = None
        self._remote: RelayedServer | None = None
        self._listeners: list[socket.socket] = []
        self.thread = AcceptorThread()
        self._local: LocalSocket | None = None

    def _claim(self) -> None:
        claim_folder(self._path.parent)
        for path in (self._path, self.local_path):
            if path.exists() and not path.is_socket():  # making the socket would remove this file
                raise ConfigError(f"{path} exists, and is not a socket.", "name another path with --socket")
        earlier_lock, self._lock = self._lock, lock_file(_with_suffix(self._path, ".lock"), "socket folder")
        if earlier_lock >= 0:
            os.close(earlier_lock)

    def listen(self, host: str, port: int) -> int:
        """Listens over TCP too; returns the port. Callers wait until `open`.

        Raises:
            OSError: see `listen_at`.
        """
        self._listeners = listen_at(host, port)
        return int(self._listeners[0].getsockname()[1])

    async def open(self, registry: Registry, services: Mapping[str, object], tls: Tls | None) -> None:
        """Serves at all sockets.

        Args:
            registry: the jobs of this daemon.
            services: full name of a service → the object with its methods. Both doors share them.
            tls: certificates for TCP; None: without TLS.

        Raises:
            AttachError: the sockets can't be made.
        """
        self._registry, self._services = registry, services
        with remedied("the daemon's sockets", self._path.parent, REMEDY):
            await self._open_local()
        if self._listeners:
            remote = server(Door.REMOTE)
            serve(remote, Door.REMOTE, registry, services, self.thread.callers, tls)
            self._remote = RelayedServer(remote, self._private_path)
            await self._remote.start(self.thread, Door.REMOTE, self._listeners, tls)

    async def _open_local(self) -> None:
        self._local = LocalSocket(self.local_path, self._registry, self.thread.refusals)
        own_server = server(Door.LOCAL)
        serve(own_server, Door.LOCAL, self._registry, self._services, self.thread.callers)
        self._server = RelayedServer(own_server, self._private_path)
        await self._server.start(self.thread, Door.LOCAL, [listen_at_path(self._path)])

    async def watch(self) -> None:
        """Checks both unix sockets every LOOK_S, and opens them again if one is gone."""
        failed = ""
        while True:
            await asyncio.sleep(LOOK_S)
            self.thread.refusals.say(time.monotonic())
            try:
                # in a thread: a file system that hangs must not block the daemon
                if await asyncio.to_thread(self._sockets_exist):
                    failed = ""
                    continue
                await self._close_local(None)
                if not _with_suffix(self._path, ".lock").exists():
                    self._claim()
                await self._open_local()
                log.warning("somebody removed the sockets at %s: they were made again", self._path)
                failed = ""
            except (ReftError, OSError, RuntimeError) as error:
                if str(error) != failed:
                    log.error("the sockets at %s can't be checked or made again: %s", self._path, error)
                failed = str(error)

    def _sockets_exist(self) -> bool:
        # os.path.exists, not Path.exists: that raises if a folder can't be read, which would end
        # the daemon.
        return os.path.exists(self._path) and os.path.exists(self.local_path)

    async def close(self, grace_s: float) -> None:
        """Closes all sockets; calls in progress have `grace_s` seconds to end."""
        closing = [self._close_local(grace_s)]
        if self._remote is not None:
            closing.append(self._remote.stop(grace_s))
        await asyncio.gather(*closing)

    async def _close_local(self, grace_s: float | None) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None
        if self._local is not None:
            self._local.close()
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Ends the thread, and releases the lock, so that the next daemon can serve here."""
        self.thread.close()
        os.close(self._lock)


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
