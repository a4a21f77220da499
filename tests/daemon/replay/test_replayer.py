"""Real replayer processes: killed, too slow, cancelled; what they map, and how they run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from reft.core.commit.slots import SlotState
from reft_daemon.peers.replayer import Replayer, ReplayFailed
from tests.support.daemons import until
from tests.support.parity import at
from tests.support.replays import ReplayScene

DEADLINE_S = 60.0


def run(act: Callable[[Replayer], Coroutine[Any, Any, None]], failpoints: str = "") -> None:
    async def with_replayer() -> None:
        replayer = Replayer(failpoints)
        try:
            await asyncio.wait_for(act(replayer), 200)
        finally:
            await replayer.close()

    asyncio.run(with_replayer())


async def replayed(replayer: Replayer, scene: ReplayScene, deadline_s: float = DEADLINE_S) -> float:
    return await replayer.replay(scene.order, scene.slots, deadline_s)


def text_of(replayer: Replayer, name: str) -> str:
    return Path(f"/proc/{replayer.pid}/{name}").read_text()


def test_orders_are_carried_out_by_one_low_process_which_maps_nothing_between():
    async def act(replayer: Replayer) -> None:
        first, second = ReplayScene(marks=1), ReplayScene(owners=2, marks=2)
        assert min(await replayed(replayer, first)) > 0
        pid = replayer.pid
        del second.records[1]
        with pytest.raises(ReplayFailed, match="the record of mark 12 is missing") as refused:
            await replayed(replayer, second)
        assert not refused.value.counts
        third = ReplayScene(owners=2, marks=2)
        third.order.sections[1].digests[2] ^= 1
        with pytest.raises(ReplayFailed, match="rank 2 differs") as refused:
            await replayed(replayer, third)
        assert refused.value.counts
        third.order.sections[1].digests[2] ^= 1
        await replayed(replayer, third)
        assert (first.made, third.made) == (first.wanted, third.wanted)
        assert third.target.map.reread().version == at(12)
        assert replayer.pid == pid
        maps = text_of(replayer, "maps")
        assert "parity-0" not in maps and "record-0" not in maps and "replay-order" not in maps
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert int(text_of(replayer, "oom_score_adj")) == 950

    run(act)


@pytest.mark.parametrize("name", ["updated", "landed"])
def test_a_killed_replayer_leaves_no_wrong_copies(name):
    """Each other point is in `tests/daemon/replayer/test_section_replay.py`."""
    scene = ReplayScene(marks=2)

    async def act(replayer: Replayer) -> None:
        with pytest.raises(ReplayFailed, match="the replayer ended before it answered") as failed:
            await replayed(replayer, scene)
        assert failed.value.counts and not replayer.pid
        state = scene.target.map.reread().state
        assert state is (SlotState.LANDED if name == "landed" else SlotState.WRITING)
        assert (scene.made == scene.wanted) is (name == "landed")

    run(act, f"replay.{name}:kill:after={int(name == 'updated')}")


def test_a_stopped_replayer_is_killed():
    scene = ReplayScene(marks=2)

    async def act(replayer: Replayer) -> None:
        with pytest.raises(ReplayFailed, match="did not answer in 1 s, and was killed") as failed:
            await replayed(replayer, scene, 1.0)
        assert failed.value.counts and not replayer.pid
        assert scene.target.map.reread().state is SlotState.WRITING

    run(act, "replay.updated:stop")


def test_a_cancelled_order_goes_on_when_no_process_writes_the_slot():
    scene = ReplayScene(marks=1)

    async def act(replayer: Replayer) -> None:
        order = asyncio.ensure_future(replayed(replayer, scene))
        is_writing = lambda: scene.target.map.reread().state is SlotState.WRITING  # noqa: E731
        await asyncio.to_thread(until, is_writing, what="the replayer begins the slot")
        pid = replayer.pid
        order.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await order
        assert order.cancelled() and not replayer.pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(act, "replay.copied:stop")


def test_a_cancelled_order_that_waits_for_its_process_starts_none():
    """The process has died early, so the next start has to wait."""

    async def act(replayer: Replayer) -> None:
        replayer._child._started_s = time.monotonic() + 1000
        order = asyncio.ensure_future(replayed(replayer, ReplayScene()))
        while not replayer._child._starting.locked():  # noqa: ASYNC110
            await asyncio.sleep(0)
        order.cancel()
        ended, _ = await asyncio.wait({order}, timeout=10)
        order.cancel()  # lets a test that fails end
        assert ended and replayer.pid == 0 and not replayer._child._starting.locked()

    run(act)


def test_a_replayer_that_died_between_two_orders_is_started_again():
    scene = ReplayScene(marks=1)

    async def act(replayer: Replayer) -> None:
        await replayed(replayer, scene)
        os.kill(replayer.pid, signal.SIGKILL)
        with contextlib.suppress(ReplayFailed):  # its end may have been seen already
            await replayed(replayer, scene)
        await replayed(replayer, scene)
        assert scene.made == scene.wanted

    run(act)
