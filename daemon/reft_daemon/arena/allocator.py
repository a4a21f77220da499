"""Slots that are being made: each request to its end, whether or not who asked for it still waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from reft.errors import AttachError
from reft.wire.slot_format import Geometry
from reft_daemon.arena.arena import Arena, SlotFile

T = TypeVar("T")


class SlotAllocator:
    """One job's. A thread that makes memory can't be stopped: what is dropped is its result, so somebody must take it.

    Args:
        arena: makes the slots.
        job: whose they are.
    """

    def __init__(self, arena: Arena, job: str) -> None:
        self._arena, self._job = arena, job
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Future[Any]] = set()  # the event loop alone would let go of them

    async def alone(self, act: Callable[[], Awaitable[T]]) -> T:
        """Carries out `act` while nothing else of the job is made; it goes on if the caller is cancelled.

        Raises:
            AttachError: the job was dropped meanwhile.
        """

        async def locked() -> T:
            async with self._lock:
                return await act()

        task = asyncio.ensure_future(locked())
        self._tasks.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise AttachError(f"job {self._job} was dropped while its slots were made.") from None
            raise

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone: nobody else asks for it

    async def create(self, rank: int, names: list[str], geometry: Geometry, cpus: list[int]) -> list[SlotFile]:
        """See `Arena.create`; slots that are finished after the job was dropped are freed.

        Nobody makes others before: there might not be room for both, and a job of the same name has the same files.
        """
        await self._arena.turn.acquire()
        thread = asyncio.ensure_future(asyncio.to_thread(self._arena.create, self._job, rank, names, geometry, cpus))
        try:
            await asyncio.wait({thread})
        except asyncio.CancelledError:
            thread.add_done_callback(self._free)
            raise
        self._arena.turn.release()
        return thread.result()

    def _free(self, thread: asyncio.Future[list[SlotFile]]) -> None:
        if not thread.cancelled() and thread.exception() is None:
            for slot in thread.result():
                self._arena.free(slot)
        self._arena.turn.release()

    def drop(self) -> None:
        """Ends what is under way: the job is dropped."""
        for task in list(self._tasks):
            task.cancel()
