"""Tests how daemons reach one another."""

from __future__ import annotations

import grpc
import pytest

from reft.cli.demo.cluster import free_port
from reft.errors import AttachError
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.peers.round_replicator import PeerChannels

TRIES = 8  # after this many failures in a row gRPC waits a second before the next try


class Answering(pb_grpc.DaemonServicer):
    async def Inventory(self, request, context):
        context.set_trailing_metadata(rpc.PROTOCOL_METADATA)
        return pb.InventoryReply(node="back")


class OfProtocol7(pb_grpc.DaemonServicer):
    """Answers, and does not say its protocol."""

    async def Inventory(self, request, context):
        return pb.InventoryReply(node="old")

    async def Read(self, request, context):
        yield pb.Chunk(data=b"old")


async def inventory(peers: PeerChannels, node: pb.Node, reconnect: bool) -> str:
    request = pb.InventoryRequest(job="job")
    return (await peers.call(node, b"token", pb_grpc.DaemonStub, "Inventory", request, 10.0, reconnect=reconnect)).node


async def test_a_host_that_was_unreachable_before_is_tried_again():
    """A node comes back while gRPC pauses between two tries: a restore's plan needs that node."""
    address = f"127.0.0.1:{free_port()}"
    node, peers = pb.Node(name="n", addresses=[address]), PeerChannels(None, [])
    for _ in range(TRIES):
        for channel, _ in peers._channels.values():
            await pauses(channel)
        with pytest.raises(grpc.RpcError):
            await inventory(peers, node, reconnect=False)
    server = grpc.aio.server(options=rpc.OPTIONS)
    pb_grpc.add_DaemonServicer_to_server(Answering(), server)
    server.add_insecure_port(address)
    await server.start()
    try:
        assert await inventory(peers, node, reconnect=True) == "back"
    finally:
        await peers.close()
        await server.stop(0)


async def pauses(channel: grpc.aio.Channel) -> None:
    """Returns once a try to connect has failed."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
        await channel.wait_for_state_change(state)


async def test_replies_of_a_daemon_of_protocol_7_are_refused():
    """That daemon does not look at our protocol."""
    address = f"127.0.0.1:{free_port()}"
    node, peers = pb.Node(name="n", addresses=[address]), PeerChannels(None, [])
    server = grpc.aio.server(options=rpc.OPTIONS)
    pb_grpc.add_DaemonServicer_to_server(OfProtocol7(), server)
    server.add_insecure_port(address)
    await server.start()
    try:
        with pytest.raises(AttachError, match=r"the daemon of node n speaks protocol 7, this daemon \(reft .*\) 10\."):
            await inventory(peers, node, reconnect=True)
        with pytest.raises(AttachError, match=r"protocol 7.*\nFix: install the same reft"):
            [piece async for piece in peers.pieces(node, b"token", pb.ReadRequest(), 10.0)]
    finally:
        await peers.close()
        await server.stop(0)
