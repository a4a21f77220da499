"""Accepts all callers of gRPC: counts, limits and identifies them, then relays their bytes.

    listener ─► who is it?  unix: the kernel's word (SO_PEERCRED), the daemon's own user only
             │              TCP: address; with TLS the certificate's role
             ├► is there a place?   admission.py
             └► relay.py ─► a gRPC server that only this process can reach

gRPC for Python has no limit by address, and reads from everybody. It tells neither pid nor uid.
So its servers listen on sockets without a name in any folder. This process reaches them through a
descriptor. Each connection there comes from a socket that is bound to a name of 128 random bits, by
which `Callers` finds the caller.

All acceptors run in the event loop of a thread of their own. There a handshake of TLS, or a large
Read, computes beside the daemon's loop, not in it. An error there is logged, and ends at most one
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import resource
import secrets
import socket
import ssl
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from reft.wire import local_socket
from reft.wire.certificate_role import refusal, role_of
from reft.wire.process import stat_of
from reft.wire.tls import Tls
from reft_daemon.child.admission import Admission, AdmissionLimits, counted_address
from reft_daemon.child.refusals import RefusalCounts
from reft_daemon.server.callers import OTHER_USER, Caller, Callers, Door
from reft_daemon.server.relay import PIECE, CallerRefused, Relay

# Unproved connections of one address. A flood of 200 connections a second needs 1.3 s to fill them.
# That is the time in which a caller of the same address must have proved itself.
OF_ADDRESS_MAX: Final = 256
UNPROVED_MAX: Final = 512  # of all addresses; each takes 60 KiB at most while it carries nothing
PROVED_MAX: Final = 4096  # a daemon has a few of each node that it works with
OF_PROCESS_MAX: Final = 64  # connections of one process of this node; a trainer has two
LOCAL_MAX: Final = 1024  # a node has fewer trainers and agents
# Descriptors of this process for each connection: the caller's, and two for the way to the server.
DESCRIPTORS_EACH: Final = 3
DESCRIPTORS_SHARE: Final = 4  # all connections of one kind take at most the fourth part of what there is
ACCEPTS: Final = 32  # that follow each other; then others have their turn
PAUSE_S: Final = 0.02  # after ACCEPTS: bounds what a flood of connections costs
RETRY_S: Final = 0.1  # after accept has failed, mostly because no descriptor is free
CLOSE_S: Final = 1.0  # for the last bytes of a server that has ended


class AcceptorThread:
    """Runs the event loop of all acceptors of this process.

    Attributes:
        loop: the event loop.
        scratch: memory that all relays share, since they take turns.
        callers: whose first bytes have arrived.
        refusals: what was refused.
    """

    def __init__(self) -> None:
        self.refusals = RefusalCounts()
        self.callers = Callers(self.refusals)
        self.loop = asyncio.new_event_loop()
        self.scratch = memoryview(bytearray(PIECE))
        self._thread = threading.Thread(target=self.loop.run_forever, name="reft-acceptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Acceptor:
    """Accepts the callers of one door.

    Args:
        thread: where this acceptor runs.
        door: which one.
        listeners: listening sockets; this object closes them.
        server: descriptor from `add_private_port`; this object closes it, too.
        tls: certificates; None: without TLS.
    """

    def __init__(
        self,
        thread: AcceptorThread,
        door: Door,
        listeners: Sequence[socket.socket],
        server: int,
        tls: Tls | None = None,
    ) -> None:
        self._thread, self._loop = thread, thread.loop
        self._door, self._listeners, self._server, self._tls = door, listeners, server, tls
        self._admission = Admission(_limits(door, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        self._relays: dict[str, Relay] = {}
        self._all_ended = asyncio.Event()
        for listener in listeners:
            listener.setblocking(False)
            self._loop.call_soon_threadsafe(self._listen, listener)

    # From the daemon's loop

    async def close_listeners(self) -> None:
        """Accepts nobody from now on; open connections go on."""
        await _in_loop(self._loop, self._close_listeners())

    async def close(self) -> None:
        """Ends all connections, those of a server that has ended a moment later."""
        await _in_loop(self._loop, self._close())

    def _note_proved(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self._prove, name)

    # In the acceptors' loop

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)

    def _pause(self, listener: socket.socket, pause_s: float) -> None:
        self._loop.remove_reader(listener)
        self._loop.call_later(pause_s, self._listen, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._thread.refusals.count(f"no connection could be accepted ({error.strerror})", "this daemon")
                return self._pause(listener, RETRY_S)
            try:
                self._admit(connection, address)
            except OSError as error:
                self._thread.refusals.count(f"their connection could not be set up ({error.strerror})", _host(address))
                connection.close()
        self._pause(listener, PAUSE_S)

    def _admit(self, connection: socket.socket, address: Any) -> None:
        connection.setblocking(False)
        if self._door is Door.LOCAL:
            pid, uid = local_socket.peer(connection)
            if uid != os.getuid():
                self._thread.refusals.count(OTHER_USER, f"uid {uid}")
                return connection.close()
            facts = stat_of(pid)
            caller, counted = Caller(self._door, pid, facts.start if facts else 0), f"pid {pid}"
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            caller, counted = Caller(self._door, address=_host(address)), counted_address(_host(address))
            if self._tls is not None:
                connection = self._tls.server_context().wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
        name = f"reft-{self._door.value}-{secrets.token_hex(16)}"
        slowed = self._note_slowed if self._door is Door.REMOTE else None
        self._relays[name] = Relay(name, caller, connection, self._thread.scratch, slowed, self._connect, self._ended)
        self._all_ended.clear()
        displaced = self._admission.add(name, counted)
        if displaced:
            self._relays[displaced].end("others needed their place")

    def _connect(self, relay: Relay) -> socket.socket:
        """Returns a socket to the gRPC server, whose name stands for the caller."""
        caller = self._identify(relay)
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            inner.bind(f"\0{relay.name}")
            self._thread.callers.add(_peer(relay), caller, functools.partial(self._note_proved, relay.name))
            inner.connect(f"/proc/self/fd/{self._server}")
        except OSError:
            inner.close()
            raise
        return inner

    def _identify(self, relay: Relay) -> Caller:
        """Returns who calls, now that the handshake has shown a certificate.

        Raises:
            CallerRefused: the certificate is of another user, or of nobody.
        """
        if self._tls is None:
            return relay.caller
        assert isinstance(relay.outer, ssl.SSLSocket)
        role = role_of(relay.outer.getpeercert())
        if reason := refusal(role, self._tls.role):
            raise CallerRefused(reason)
        return dataclasses.replace(relay.caller, role=role)

    def _note_slowed(self, relay: Relay) -> None:
        self._thread.refusals.count("they sent too much before a proof, and had to wait", relay.caller.address)

    def _prove(self, name: str) -> None:
        relay = self._relays.get(name)
        if relay is None:
            return
        if self._admission.prove(name):
            relay.unpace()
        else:
            self._thread.refusals.count(f"{PROVED_MAX} connections with a proof are open", relay.caller.address)

    def _ended(self, relay: Relay, reason: str) -> None:
        self._thread.callers.remove(_peer(relay))
        self._admission.remove(relay.name)
        del self._relays[relay.name]
        if reason:
            self._thread.refusals.count(reason, relay.caller.address or f"pid {relay.caller.pid}")
        if not self._relays:
            self._all_ended.set()

    async def _close_listeners(self) -> None:
        for listener in self._listeners:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener)
            listener.close()

    async def _close(self) -> None:
        await self._close_listeners()
        if self._relays:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), CLOSE_S)
        for relay in list(self._relays.values()):
            relay.end()
        os.close(self._server)


def add_private_port(server: grpc.aio.Server, path: Path) -> int:
    """Lets a server listen where only this process connects: by the descriptor that is returned.

    Args:
        server: not started.
        path: used for a moment, in a folder that only this user can write.
    """
    path.unlink(missing_ok=True)
    earlier_umask = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    finally:
        os.umask(earlier_umask)
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    path.unlink()
    return descriptor


def _limits(door: Door, descriptors: int) -> AdmissionLimits:
    """Returns how many connections a door has, as the process's descriptors allow."""
    most = max(descriptors // DESCRIPTORS_SHARE // DESCRIPTORS_EACH, 2)
    if door is Door.LOCAL:
        return AdmissionLimits(min(OF_PROCESS_MAX, most // 2), min(LOCAL_MAX, most), 0)
    return AdmissionLimits(min(OF_ADDRESS_MAX, most // 2), min(UNPROVED_MAX, most), min(PROVED_MAX, most))


def _peer(relay: Relay) -> str:
    """Returns the name of a relay's inner socket as gRPC gives it."""
    return f"unix-abstract:{relay.name}"


def _host(address: Any) -> str:
    return str(address[0]) if address else "this node"


async def _in_loop(loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, None]) -> None:
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))
