"""Tests what a failed beat says of the other node."""

from __future__ import annotations

from types import SimpleNamespace

import grpc

from reft_daemon.membership.beat_sender import BeatSender
from reft_daemon.peers.channels import UnprovedReply


async def test_only_the_kernel_says_that_a_connection_was_refused():
    """A stranger at the address of a dead daemon may write the same words."""
    refused: list[str] = []
    monitor = SimpleNamespace(detector=SimpleNamespace(refused=refused.append))
    sender = BeatSender("own", SimpleNamespace(), SimpleNamespace())
    await sender._note_failed_beat(monitor, True, "n", UnprovedReply(grpc.StatusCode.NOT_FOUND, "Connection refused"))
    assert refused == []
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, details="Connection refused")
    await sender._note_failed_beat(monitor, True, "n", error)
    assert refused == ["n"]
