"""Tests a rebuild whose caller goes away: nothing is left behind, and the next rebuild succeeds."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reft.core.commit.slots import SlotState
from reft.failpoints import Failpoints
from reft.wire.slot_format import SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.membership.retention import RetentionTimes
from reft_daemon.peers.channels import PeerChannels
from reft_daemon.rebuild import executor
from reft_daemon.rebuild.rebuild import Rebuild
from reft_daemon.registry import Registry


class Pause:
    """Replaces a function that runs in threads: each call waits, and is counted while it lasts."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self.act, self.begun, self.goes_on, self.inside = act, threading.Event(), threading.Event(), 0

    def __get__(self, owner: object, _: type) -> Callable[..., Any]:
        return lambda *arguments: self(owner, *arguments)

    def __call__(self, *arguments: Any) -> Any:
        self.inside += 1
        self.begun.set()
        assert self.goes_on.wait(30)
        try:
            return self.act(*arguments)
        finally:
            self.inside -= 1


def tasks_left() -> list[asyncio.Task[Any]]:
    """Returns the tasks of a rebuild that still run."""
    files = ("/rebuild.py", "/executor.py", "/source_reader.py", "/allocator.py", "/slot_reads.py")
    return [task for task in asyncio.all_tasks() if task.get_coro().cr_code.co_filename.endswith(files)]


def slots_of(folder: Path) -> list[Path]:
    return list(folder.glob("job/rank-*"))


PLACES = {"making": (Arena, "create"), "decoding": (executor, "_decode"), "comparing": (SlotMap, "digests_of")}


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_left_of_a_cancelled_rebuild(request_of_rank_3, monkeypatch, place, is_known):
    request = request_of_rank_3

    async def run(arena: Arena, folder: Path) -> None:
        peers = PeerChannels(None, ()), PeerChannels(None, (), own_connections=True)
        registry = Registry(arena, peers[0], RetentionTimes(60, 60), Failpoints(), peers[1])
        if is_known:
            await Rebuild(registry, request)._adopt()
        before = arena.held_bytes
        owner, name = PLACES[place]
        pause = Pause(vars(owner)[name])
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, pause)
            task = asyncio.ensure_future(Rebuild(registry, request).run())
            await asyncio.to_thread(pause.begun.wait, 30)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.1)
            assert not done, "the rebuild waits for the thread that writes a slot"
            pause.goes_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not pause.inside and not tasks_left()
        assert arena.held_bytes == before and not slots_of(folder)
        assert list(registry.jobs) == (["job"] if is_known else [])
        assert not any(job.slots.all for job in registry.jobs.values())
        reply = await Rebuild(registry, request).run()
        assert [(slot.rank, slot.state) for slot in reply.slots] == [(3, pb.SEALED)]
        assert [slot.map.header.state for slot in registry.jobs["job"].slots.all.values()] == [SlotState.SEALED]
        await registry.close(purge=True)

    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        arena = Arena(Path(path), 64 << 20)
        asyncio.run(run(arena, Path(path)))
        arena.close()
