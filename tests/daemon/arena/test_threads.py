"""Work in a thread: what was refused is not done later, and what has begun is awaited."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reft.errors import AttachError
from reft.wire.slot_format import Geometry
from reft_daemon.arena.allocator import SlotAllocator
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.threads import begin_in_thread

SLOT = {"rank-0.slot-0": Geometry(4096, 4096, 4096)}


async def busy() -> tuple[threading.Event, asyncio.Future[bool]]:
    """Returns the gate of the only thread that runs, and that thread's work."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    gate, begun = threading.Event(), threading.Event()

    def stand() -> bool:
        begun.set()
        return gate.wait(30)

    work = begin_in_thread(stand)
    while not begun.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return gate, work


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def refused(monkeypatch) -> Callable[[Callable[[threading.Thread], None]], pytest.MonkeyPatch]:
    def patched(start: Callable[[threading.Thread], None]) -> pytest.MonkeyPatch:
        monkeypatch.setattr(threading.Thread, "start", start)
        return monkeypatch

    return patched


def test_slots_whose_thread_was_refused_are_not_made_by_the_next_free_one(refused):
    async def run(arena: Arena) -> None:
        gate, work = await busy()
        allocator, patch = SlotAllocator(arena, "job"), refused(refuse)
        with pytest.raises(AttachError, match="can't start new thread"):
            await allocator.create(0, SLOT, [])
        patch.undo()
        gate.set()
        assert await work
        await asyncio.gather(*(asyncio.to_thread(list) for _ in range(4)))  # what was queued before has run
        assert arena.held_bytes == 0 and not list(arena.folder.glob("job/*"))
        assert len(await allocator.create(0, SLOT, [])) == 1, "the lock is free"

    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        arena = Arena(Path(path), 64 << 20)
        asyncio.run(run(arena))
        arena.close()


def test_work_that_a_free_thread_has_taken_is_awaited(refused):
    """The thread becomes free while the system refuses another one."""

    async def run() -> None:
        gate, work = await busy()
        taken, goes_on = threading.Event(), threading.Event()

        def act() -> int:
            taken.set()
            return 7 if goes_on.wait(30) else 0

        def refuse_late(thread: threading.Thread) -> None:
            gate.set()
            assert taken.wait(30)
            refuse(thread)

        patch = refused(refuse_late)
        result = begin_in_thread(act)
        patch.undo()
        assert not result.done()
        goes_on.set()
        assert await result == 7 and await work

    asyncio.run(run())


def test_an_error_of_the_work_is_the_callers():
    async def run() -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            await begin_in_thread(int, "x")

    asyncio.run(run())
