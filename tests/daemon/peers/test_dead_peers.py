"""A daemon closes channels to dead peers by itself, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import shutil

import grpc
import pytest

from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.arena.arena import Arena
from reft_daemon.peers import channels
from reft_daemon.peers.channels import PeerChannels
from tests.support.daemons import until
from tests.support.jobs import Code, Job, refused, registry_of

UNUSED_S = 0.2


async def test_channels_to_a_peer_that_died_are_closed(start, tmp_path, monkeypatch):
    monkeypatch.setattr(channels, "UNUSED_S", UNUSED_S)
    peer = start("--listen", "127.0.0.1:0")
    hello = peer.call("Hello", messages.hello())
    node = pb.Node(name="n", id=hello.node_id, addresses=hello.addresses)
    arena = Arena(tmp_path / "arena", 64 << 20)
    registry = registry_of(arena)
    both = (registry.peers, registry.heartbeat_service.sender.peers)

    async def call(peers: PeerChannels) -> None:
        request = pb.InventoryRequest(job="job")
        with contextlib.suppress(grpc.RpcError):  # the peer holds no job, or is dead
            await peers.call(node, [bytes(32)], pb_grpc.DaemonStub, "Inventory", request, 5.0)

    async def are_closed() -> None:
        await asyncio.to_thread(until, lambda: not any(peers._channels for peers in both))

    await asyncio.gather(*map(call, both))
    assert [len(peers._channels) for peers in both] == [1, 1]
    peer.kill()
    expiring = asyncio.ensure_future(registry.expire_for_ever(0))
    try:
        for _ in range(2):  # a later call opens one again
            await are_closed()
            await asyncio.gather(*map(call, both))
        await are_closed()
    finally:
        expiring.cancel()
        await asyncio.wait({expiring})
        await registry.close(True)
        arena.close()


@pytest.mark.parametrize("method", ["PersistJob", "Hold"])
def test_a_coordinator_whose_socket_was_removed_is_named(start, tmp_path, method):
    daemons = [start("--persist", str(tmp_path)) for _ in range(2)]
    job = Job([(daemon, [rank]) for rank, daemon in enumerate(daemons)], slots=4, lineage="0" * 16).decide()
    for rank in job.home:
        job.lease(rank, slots=0)
    daemons[0].kill()
    shutil.rmtree(daemons[0].home)
    request = getattr(pb, f"{method}Request")(job="job")
    with refused(Code.FAILED_PRECONDITION, "node n0 can't be reached: "):
        daemons[1].call(method, request)
