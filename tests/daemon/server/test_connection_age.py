"""Tests that connections over TCP end at their age, and that no call is lost by that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import grpc
import pytest

from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.peers.channels import PeerChannels
from reft_daemon.server import grpc_server
from reft_daemon.server.acceptor import AcceptorThread
from reft_daemon.server.callers import Door
from reft_daemon.server.relayed_server import RelayedServer, listen_at
from tests.support.daemons import until

TOKEN = b"j" * 32
AGE_MS, GRACE_MS, HOUR_MS = 300, 1000, 3_600_000
PIECES = 3
REGISTRY = SimpleNamespace(
    jobs={"job": SimpleNamespace(record=pb.JobRecord(manifest=pb.Manifest(job="job", token=TOKEN)))},
    arena=SimpleNamespace(node_id="id"),
    heartbeat_service=SimpleNamespace(monitors=SimpleNamespace(tokens=lambda job: [])),
)


class AgedServer:
    """A daemon's server for other nodes, whose Read yields each piece when it may go on."""

    def __init__(self) -> None:
        self.thread, self.may_go_on, self.seen = AcceptorThread(), asyncio.Event(), set[str]()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return self._unserved

    async def _unserved(self, *_: object) -> None:
        raise NotImplementedError

    async def Inventory(self, *_: object) -> pb.InventoryReply:
        self.seen |= self.open
        return pb.InventoryReply(node="answers")

    async def Read(self, *_: object) -> AsyncIterator[pb.Chunk]:
        for number in range(PIECES):
            yield pb.Chunk(data=bytes([number]))
            await self.may_go_on.wait()

    @property
    def open(self) -> set[str]:
        """The names of all connections that are open."""
        return set(self.thread.callers._callers)

    async def end_of(self, name: str) -> None:
        await asyncio.to_thread(until, lambda: name not in self.open, what="the end of a connection")


@contextlib.asynccontextmanager
async def aged(folder, grace_ms: int) -> AsyncIterator[tuple[AgedServer, PeerChannels, pb.Node]]:
    """Yields a server whose connections have AGE_MS, and a daemon's channels to it."""
    made = AgedServer()
    server = grpc_server.server(Door.REMOTE, AGE_MS, grace_ms)
    services = dict.fromkeys(("reft.v1.Daemon", "reft.v1.Peer", "grpc.health.v1.Health"), made)
    grpc_server.serve(server, Door.REMOTE, REGISTRY, MappingProxyType(services), made.thread.callers)
    relayed, listeners = RelayedServer(server, folder / "private"), listen_at("127.0.0.1", 0)
    port = listeners[0].getsockname()[1]
    await relayed.start(made.thread, Door.REMOTE, listeners)
    peers = PeerChannels(None, ())
    try:
        yield made, peers, pb.Node(name="n", id="id", addresses=[f"127.0.0.1:{port}"])
    finally:
        await peers.close()
        await relayed.stop(0)
        made.thread.close()


async def ask(peers: PeerChannels, node: pb.Node) -> None:
    request = pb.InventoryRequest(job="job")
    assert (await peers.call(node, [TOKEN], pb_grpc.DaemonStub, "Inventory", request, 60.0)).node == "answers"


async def test_a_connection_ends_at_its_age_and_no_call_notices(tmp_path):
    async with aged(tmp_path, HOUR_MS) as (server, peers, node):
        pieces = peers.pieces(node, [TOKEN], pb.ReadRequest(job="job"), 60.0)
        found = [await anext(pieces)]
        (first,) = server.open
        while len(server.seen) < 4:
            await ask(peers, node)
        assert first in server.open, "a call is under way"
        server.may_go_on.set()
        found += [piece async for piece in pieces]
        assert found == [bytes([number]) for number in range(PIECES)]
        await server.end_of(first)
        await ask(peers, node)


async def test_a_call_that_takes_longer_than_the_grace_ends(tmp_path):
    async with aged(tmp_path, GRACE_MS) as (server, peers, node):
        pieces = peers.pieces(node, [TOKEN], pb.ReadRequest(job="job"), 60.0)
        await anext(pieces)
        (first,) = server.open
        with pytest.raises(grpc.RpcError) as error:
            await anext(pieces)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await server.end_of(first)
        await ask(peers, node)
