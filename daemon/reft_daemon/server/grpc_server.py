"""The daemon's gRPC servers: one for each door, with the handlers of that door alone."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from reft.wire import rpc
from reft.wire.proof import Challenges
from reft.wire.tls import Tls
from reft_daemon.registry import Registry
from reft_daemon.server.callers import Callers, Door
from reft_daemon.server.judge import Judge

OPTIONS = (
    *rpc.OPTIONS,
    # Only uncompressed requests: a small compressed one could fill the memory.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Calls of one connection; further ones wait at the caller. A daemon has fewer at one other.
    ("grpc.max_concurrent_streams", 128),
    # Clients of other nodes ping each 30 s (rpc.py). One that pings more often is sent away.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
# A connection ends at this age, so that callers show their certificates again. Calls under way go
# on, and may take as long again; new calls take a new connection.
MAX_AGE_MS = 60 * 60 * 1000


def server(door: Door, age_ms: int = MAX_AGE_MS, grace_ms: int = MAX_AGE_MS) -> grpc.aio.Server:
    """Returns the server of a door, without handlers and ports.

    Args:
        door: where calls come in.
        age_ms: milliseconds after which a connection over TCP takes no new calls.
        grace_ms: time that its calls under way then have to end.
    """
    ages = (("grpc.max_connection_age_ms", age_ms), ("grpc.max_connection_age_grace_ms", grace_ms))
    return grpc.aio.server(options=OPTIONS if door is Door.LOCAL else (*OPTIONS, *ages))


def serve(
    server: grpc.aio.Server,
    door: Door,
    registry: Registry,
    services: Mapping[str, object],
    callers: Callers,
    tls: Tls | None = None,
) -> None:
    """Adds the handlers of a door to a server that has not begun.

    Args:
        server: of the door.
        door: where calls come in.
        registry: the jobs and their tokens.
        services: full name of a service → the object with its methods.
        callers: of the door's acceptor.
        tls: of this daemon; None: callers need no certificate.
    """
    challenges = Challenges(registry.arena.node_id) if door is Door.REMOTE else None
    judge = Judge(door, registry, callers, challenges, tls.role if tls else None)
    server.add_generic_rpc_handlers(judge.handlers(services))
