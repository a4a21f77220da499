"""Keeps the sockets in the daemon's folder: makes them again when a script that clears /tmp has removed them.

    PATH       calls of gRPC          ┐
    PATH.ln    the local socket       ├ every LOOK_S: are both there? ── no ──► new ones at the same paths
    PATH.lock  one daemon a socket    ┘

Without them a daemon holds memory that nobody can reach, and its arena's lock keeps the next one out. Reports that have a
connection go on meanwhile; calls of gRPC that are under way are ended, as by a daemon that restarts. A trainer of protocol 6
reports at PATH.ln too. If it outlives its daemon, the next one tells it there that the protocols differ.
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
    """See the module. Its folder and lock are claimed at once.

    Args:
        path: of the socket.

    Raises:
        ConfigError: the folder can't be used.
        AttachError: another daemon serves there.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.local_path = path, _beside(path, ".ln")
        self._lock = -1
        self._claim()
        self._server: grpc.aio.Server | None = None
        self._local: LocalSocket | None = None

    def _claim(self) -> None:
        claim_folder(self._path.parent)
        for path in (self._path, self.local_path):
            if path.exists() and not path.is_socket():  # it would be removed to make room
                raise ConfigError(f"{path} exists, and is no socket.", "name another path with --socket")
        before, self._lock = self._lock, lock_file(_beside(self._path, ".lock"), "socket folder")
        if before >= 0:
            os.close(before)

    async def open(self, registry: Registry, serve: Callable[[grpc.aio.Server], None]) -> None:
        """Listens at both of them.

        Args:
            registry: the jobs of which descriptors are asked and reports come.
            serve: adds the services to a server.
        """
        self._local = LocalSocket(self.local_path, registry)
        self._server = server()
        serve(self._server)
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
        finally:
            os.umask(before)
        await self._server.start()
        self._path.chmod(0o600)

    async def watch(self, registry: Registry, serve: Callable[[grpc.aio.Server], None]) -> None:
        """Opens them again whenever one is gone."""
        failed = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if await asyncio.to_thread(self._are_there):  # a file system that hangs must not silence the daemon
                    failed = ""
                    continue
                await self.close(None)
                if not _beside(self._path, ".lock").exists():
                    self._claim()
                await self.open(registry, serve)
                log.warning("somebody had removed the sockets at %s: they were made again", self._path)
                failed = ""
            except (ReftError, OSError, RuntimeError) as error:
                if str(error) != failed:
                    log.error("the sockets at %s can't be looked after: %s", self._path, error)
                failed = str(error)

    def _are_there(self) -> bool:
        # os.path, not Path: that raises where a folder can't be looked into, and this must never end the daemon.
        return os.path.exists(self._path) and os.path.exists(self.local_path)

    async def close(self, grace_s: float | None) -> None:
        """Listens no more; calls that are under way have so long to end."""
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._local is not None:
            self._local.close()
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Lets the next daemon serve here."""
        os.close(self._lock)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
