"""Tests what a failed beat says of the other node, and what is left of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc

from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.membership.beat_sender import TIMEOUTS_MAX, BeatSender
from reft_daemon.membership.job_monitor import JobMonitor, MembershipView
from reft_daemon.peers.channels import UnprovedReply

NODE = pb.Node(name="n", id="n")


async def test_only_the_kernel_says_that_a_connection_was_refused():
    """A stranger at the address of a dead daemon may write the same words."""
    refused: list[str] = []
    monitor = SimpleNamespace(detector=SimpleNamespace(refused=refused.append))
    sender = BeatSender("own", SimpleNamespace(), SimpleNamespace())
    await sender._note_failed_beat(monitor, True, NODE, UnprovedReply(grpc.StatusCode.NOT_FOUND, "Connection refused"))
    assert refused == []
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, details="Connection refused")
    await sender._note_failed_beat(monitor, True, NODE, error)
    assert refused == ["n"]


class SilentPeers:
    """Stands for `PeerChannels`: calls get no answer in time, each once a new round has begun.

    Attributes:
        dropped: ids of the nodes to which the connection was made anew.
    """

    def __init__(self) -> None:
        self.round_begins = asyncio.Event()
        self.dropped: list[str] = []

    async def call(self, node: pb.Node, *_: object) -> object:
        await self.round_begins.wait()
        raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED)

    async def drop(self, node: pb.Node) -> None:
        self.dropped.append(node.id)


async def test_a_beat_to_a_node_that_the_new_round_lacks_leaves_nothing_behind():
    """The node is silent, so the next round begins without it, and its beats end after that."""
    peers = SilentPeers()
    own = pb.Node(name="own", id="own")
    view = MembershipView("launch", 1, bytes(32), {"own": own, "n": NODE})
    monitor = JobMonitor("job", "own", view, SimpleNamespace())
    sender = BeatSender("own", peers, SimpleNamespace(record_of=lambda monitor: None))
    for _ in range(TIMEOUTS_MAX):
        sender.send(monitor, ["n"], is_news=True)
    beats = list(sender._tasks)
    monitor.start_view(MembershipView("launch", 2, bytes(32), {"own": own}), None)
    peers.round_begins.set()
    assert await asyncio.gather(*beats) == [None] * TIMEOUTS_MAX
    assert peers.dropped == ["n"]
    assert not sender._unanswered_beats and not sender._timeouts and not sender._tasks
