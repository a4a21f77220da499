"""Floods a daemon's port as a stranger would, at a bounded rate, from one core.

    python -m tests.support.flooder KIND HOST:PORT SECONDS

It prints a line when it begins, and at the end one JSON object with what it really did. It ends by
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc

from reft.wire import rpc

CONNECTIONS_S: Final = 200
CALLS_S: Final = 2000
TICK_S: Final = 0.01
HELD_MAX: Final = 2000  # connections, or calls, that are open at the same time
LARGE: Final = bytes(10 << 20)
LARGE_AT_ONCE: Final = 32
CHANNELS: Final = 8
# The first bytes of a client of HTTP/2, and its empty settings.
HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HALF_A_HANDSHAKE: Final = b"\x16\x03\x01\x02\x00\x01"
NO_HANDSHAKE: Final = b"\x16\x03\x01\x00\x10" + b"\xff" * 16

FLOOD_NETWORK: Final = "fd00:0:0:3::"
IPV6_FREEBIND: Final = 78  # Python has no name for it


def free_socket() -> socket.socket:
    """Returns a socket of IPv6 that can be bound to any address to which a route leads."""
    made = socket.socket(socket.AF_INET6)
    made.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
    return made


class ConnectionFlood:
    """Opens connections, and says these first bytes by turns.

    Args:
        address: which one is flooded.
        first: the bytes.
        network: of IPv6; each connection comes from another address of it. Empty: from the host's.
    """

    def __init__(self, address: str, *first: bytes, network: str = "") -> None:
        host, _, port = address.rpartition(":")
        self._address, self._first, self._network = (host.strip("[]"), int(port)), first, network
        self._held: list[socket.socket] = []
        self.rate, self.made = CONNECTIONS_S, 0

    def start_one(self) -> None:
        made = free_socket() if self._network else socket.socket()
        if self._network:
            made.bind((f"{self._network}{self.made + 1:x}", 0))
        made.setblocking(False)
        made.connect_ex(self._address)
        self._held.append(made)
        first = self._first[self.made % len(self._first)]
        asyncio.get_running_loop().call_later(0.05, self._say, made, first)
        self.made += 1
        if len(self._held) > HELD_MAX:
            self._held.pop(0).close()

    @staticmethod
    def _say(connection: socket.socket, first: bytes) -> None:
        with contextlib.suppress(OSError):
            connection.send(first)


class CallFlood:
    """Makes calls without a proof, on a few connections."""

    def __init__(self, address: str, method: str, body: bytes | None, at_once: int) -> None:
        self._channels = [
            grpc.aio.insecure_channel(address, options=(*rpc.OPTIONS, ("grpc.use_local_subchannel_pool", 1)))
            for _ in range(CHANNELS)
        ]
        self._method, self._body, self._at_once = method, body, at_once
        self._calls: set[asyncio.Task[None]] = set()
        self.rate, self.made, self.codes = CALLS_S, 0, dict[str, int]()

    def start_one(self) -> None:
        if len(self._calls) < self._at_once:
            call = asyncio.ensure_future(self._call(self._channels[self.made % CHANNELS]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            self.made += 1

    async def _call(self, channel: grpc.aio.Channel) -> None:
        code = grpc.StatusCode.OK
        try:
            await channel.stream_unary(self._method)(self._requests(), timeout=10, metadata=rpc.PROTOCOL_METADATA)
        except grpc.aio.AioRpcError as error:
            code = error.code()
        self.codes[code.name] = self.codes.get(code.name, 0) + 1

    async def _requests(self) -> AsyncIterator[bytes]:
        if self._body is None:  # half-open: no request, and no end
            await asyncio.sleep(60)
        else:
            yield self._body


KINDS: Final[dict[str, Callable[[str], ConnectionFlood | CallFlood]]] = {
    "connections": lambda address: ConnectionFlood(address, b"", HTTP2),
    "handshakes": lambda address: ConnectionFlood(address, NO_HANDSHAKE, HALF_A_HANDSHAKE),
    "a network": lambda address: ConnectionFlood(address, HTTP2, network=FLOOD_NETWORK),
    "half-open calls": lambda address: CallFlood(address, "/reft.v1.Peer/Beat", None, HELD_MAX),
    "health calls": lambda address: CallFlood(address, "/grpc.health.v1.Health/Check", b"", HELD_MAX),
    "large messages": lambda address: CallFlood(address, "/reft.v1.Peer/Keep", LARGE, LARGE_AT_ONCE),
}


async def run(kind: str, address: str, seconds: float) -> None:
    """Floods for so many seconds, says what was done, and ends the process."""
    print("begins", flush=True)
    flood = KINDS[kind](address)
    began, started = time.monotonic(), 0
    while (passed_s := time.monotonic() - began) < seconds:
        due = int(passed_s * flood.rate)
        # What a slow machine has missed is not made up for, so the rate holds in each moment.
        for _ in range(min(due - started, int(2 * flood.rate * TICK_S))):
            flood.start_one()
        started = due
        await asyncio.sleep(TICK_S)
    said = {"kind": kind, "made": flood.made, "a second": round(flood.made / passed_s, 1)}
    print(json.dumps({**said, **getattr(flood, "codes", {})}), flush=True)
    os._exit(0)  # calls under way must not delay the end


if __name__ == "__main__":
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * HELD_MAX), hard))
    asyncio.run(run(sys.argv[1], sys.argv[2], float(sys.argv[3])))
