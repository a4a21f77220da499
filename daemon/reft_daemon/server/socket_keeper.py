"""Keeps the daemon's sockets present, e.g. when a script that clears /tmp has removed them.

    PATH       calls of gRPC          ┐
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
from collections.abc import Callable
from pathlib import Path

import grpc

from reft.errors import ConfigError, ReftError
from reft_daemon.arena.arena import claim_folder, lock_file
from reft_daemon.registry import Registry
from reft_daemon.server.grpc_server import server
from reft_daemon.server.local_socket import LocalSocket

log = logging.getLogger("reft.daemon")
LOOK_S = 1.0


class SocketKeeper:
    """Keeps the sockets present, see the module. Claims the folder and the lock at once.

    Args:
        path: of the gRPC socket.

    Raises:
        ConfigError: the folder can't be used.
        AttachError: another daemon serves there.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.local_path = path, _with_suffix(path, ".ln")
        self._lock = -1
        self._claim()
        self._server: grpc.aio.Server | None = None
        self._local: LocalSocket | None = None

    def _claim(self) -> None:
        claim_folder(self._path.parent)
        for path in (self._path, self.local_path):
            if path.exists() and not path.is_socket():  # making the socket would remove this file
                raise ConfigError(f"{path} exists, and is not a socket.", "name another path with --socket")
        earlier_lock, self._lock = self._lock, lock_file(_with_suffix(self._path, ".lock"), "socket folder")
        if earlier_lock >= 0:
            os.close(earlier_lock)

    async def open(self, registry: Registry, serve: Callable[[grpc.aio.Server], None]) -> None:
        """Listens at both sockets.

        Args:
            registry: the jobs of this daemon.
            serve: adds the services to a server.
        """
        self._local = LocalSocket(self.local_path, registry)
        self._server = server()
        serve(self._server)
        self._path.unlink(missing_ok=True)
        earlier_umask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
        finally:
            os.umask(earlier_umask)
        await self._server.start()
        self._path.chmod(0o600)

    async def watch(self, registry: Registry, serve: Callable[[grpc.aio.Server], None]) -> None:
        """Checks both sockets every LOOK_S, and opens them again if one is gone."""
        failed = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                # in a thread: a file system that hangs must not block the daemon
                if await asyncio.to_thread(self._sockets_exist):
                    failed = ""
                    continue
                await self.close(None)
                if not _with_suffix(self._path, ".lock").exists():
                    self._claim()
                await self.open(registry, serve)
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

    async def close(self, grace_s: float | None) -> None:
        """Closes the sockets; calls in progress have `grace_s` seconds to end."""
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._local is not None:
            self._local.close()
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Releases the lock, so that the next daemon can serve here."""
        os.close(self._lock)


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
