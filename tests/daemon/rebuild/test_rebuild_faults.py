"""Tests a rebuild whose bytes change on their way, and what a long rebuild says."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from reft.core.commit.slots import SlotState
from reft.errors import AttachError, FormatError
from reft.failpoints import Failpoints
from reft.wire.slot_format import Bytes, SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.membership.retention import RetentionTimes
from reft_daemon.peers.channels import PeerChannels
from reft_daemon.rebuild import rebuild, source_reader
from reft_daemon.rebuild.rebuild import Rebuild
from reft_daemon.registry import Registry
from tests.support.daemons import DaemonProcess

WRONG = "the decoded data of rank 3, step 1 (epoch 1), is not what was saved"
SOURCES = "in lane 0, made from rank 0, rank 1, rank 2 on n0, n1, n2"


class FlippingChannels(PeerChannels):
    """Channels that change one byte of each of the first `flips` reads of a slot's data."""

    def __init__(self, flips: int) -> None:
        super().__init__(None, ())
        self.flips = flips

    async def read(self, node: pb.Node, token: bytes, request: pb.ReadRequest, into: Bytes, deadline_s: float) -> None:
        await super().read(node, token, request, into, deadline_s)
        if request.checked and self.flips:
            self.flips -= 1
            into[into.nbytes // 2] ^= 1


class StoppingChannels(PeerChannels):
    """Channels that stop a daemon before the first read of its slot's data."""

    def __init__(self, name: str, daemon: DaemonProcess) -> None:
        super().__init__(None, ())
        self.name, self.daemon = name, daemon

    async def read(self, node: pb.Node, token: bytes, request: pb.ReadRequest, into: Bytes, deadline_s: float) -> None:
        if request.checked and node.name == self.name:
            self.daemon.kill(signal.SIGSTOP)
        await super().read(node, token, request, into, deadline_s)


def with_registry(peers: PeerChannels, act: Callable[[Registry], Awaitable[None]]) -> None:
    """Runs `act` with a registry whose arena is empty, before and after."""

    async def run(folder: Path) -> None:
        arena = Arena(folder, 64 << 20)
        registry = Registry(arena, peers, RetentionTimes(60, 60), Failpoints(), PeerChannels(None, ()))
        await act(registry)
        await registry.close(purge=True)
        arena.close()

    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        asyncio.run(run(Path(path)))


def is_right(slot: SlotMap) -> bool:
    now = np.fromiter(slot.digests_of(0, slot.chunks), np.uint64)
    return slot.header.state is SlotState.SEALED and np.array_equal(now, slot.digests[: slot.chunks])


def test_a_byte_that_changes_on_its_way_is_found_and_made_once_more(request_of_rank_3, caplog):
    async def act(registry: Registry) -> None:
        reply = await Rebuild(registry, request_of_rank_3).run()
        assert [(slot.rank, slot.state) for slot in reply.slots] == [(3, pb.SEALED)]
        (slot,) = registry.jobs["job"].slots.all.values()
        assert is_right(slot.map)
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warned) == 1 and WRONG in warned[0] and f"{SOURCES}; once more" in warned[0]

    with_registry(FlippingChannels(1), act)


def test_bytes_that_change_again_are_refused_with_their_sources(request_of_rank_3):
    async def act(registry: Registry) -> None:
        with pytest.raises(FormatError, match=re.escape(WRONG)) as raised:
            await Rebuild(registry, request_of_rank_3).run()
        assert f"{SOURCES}, twice." in str(raised.value)
        assert not registry.jobs and not registry.arena.held_bytes

    with_registry(FlippingChannels(1 << 30), act)


def test_a_daemon_that_stops_in_mid_transfer_is_named_within_the_deadline(
    three_of_four, request_of_rank_3, monkeypatch
):
    monkeypatch.setattr(source_reader, "READ_DEADLINE_S", 1.0)
    daemon = three_of_four.job.daemons[1]

    async def act(registry: Registry) -> None:
        with pytest.raises(AttachError, match="node n1 can't be read"):
            await asyncio.wait_for(Rebuild(registry, request_of_rank_3).run(), 60)
        assert not registry.jobs and not registry.arena.held_bytes

    try:
        with_registry(StoppingChannels("n1", daemon), act)
    finally:
        daemon.kill(signal.SIGCONT)


@pytest.mark.parametrize("interval_s", [0, 3600])
def test_a_long_rebuild_says_how_far_it_is(request_of_rank_3, caplog, monkeypatch, interval_s):
    monkeypatch.setattr(rebuild, "PROGRESS_S", interval_s)
    caplog.set_level(logging.INFO, "reft.daemon")

    async def act(registry: Registry) -> None:
        await Rebuild(registry, request_of_rank_3).run()
        said = [line for line in caplog.messages if line.startswith("job=job rebuilt ")]
        if interval_s:
            assert not said
            return
        done, total = said[-1].removeprefix("job=job rebuilt ").split(" of ")
        assert done == total and len(said) == 4, "one line for each stripe"

    with_registry(PeerChannels(None, ()), act)
