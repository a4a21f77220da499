"""Makes the slots of one job. A request runs to its end, even if its caller no longer waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from reft.errors import AttachError
from reft.wire.slot_format import Geometry
from reft_daemon.arena.arena import Arena, SlotFile
from reft_daemon.arena.threads import begin_in_thread

T = TypeVar("T")


class SlotAllocator:
    """Makes the slots of one job, one request at a time.

    A thread that allocates memory can't be stopped. If a request is dropped, its slots must still
    be freed.

    Args:
        arena: makes the slots.
        job: name of the job.
    """

    def __init__(self, arena: Arena, job: str) -> None:
        self._arena, self._job = arena, job
        self._lock = asyncio.Lock()
        # the event loop keeps only weak references to tasks
        self._tasks: set[asyncio.Future[Any]] = set()

    async def run_alone(self, act: Callable[[], Awaitable[T]]) -> T:
        """Runs `act` while no other request of the job runs.

        If the caller is cancelled, `act` continues.

        Raises:
            AttachError: the job was dropped meanwhile.
        """

        async def locked() -> T:
            async with self._lock:
                return await act()

        task = asyncio.ensure_future(locked())
        self._tasks.add(task)
        task.add_done_callback(self._discard_task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise AttachError(f"job {self._job} was dropped while its slots were made.") from None
            raise

    def _discard_task(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: the caller may be gone

    async def create(self, rank: int, geometries: Mapping[str, Geometry], cpus: list[int]) -> list[SlotFile]:
        """Makes slots, see `Arena.create`.

        If the job is dropped meanwhile, the finished slots are freed.

        The arena's `allocation_lock` is held until the slots are finished or freed. Otherwise two
        requests could take the same free memory, and a new job of the same name could use the same
        files.
        """
        await self._arena.allocation_lock.acquire()
        try:
            thread = begin_in_thread(self._arena.create, self._job, rank, geometries, cpus)
        except AttachError:
            self._arena.allocation_lock.release()
            raise
        try:
            await asyncio.wait({thread})
        except asyncio.CancelledError:
            thread.add_done_callback(self._free_result)
            raise
        self._arena.allocation_lock.release()
        return thread.result()

    def _free_result(self, thread: asyncio.Future[list[SlotFile]]) -> None:
        if not thread.cancelled() and thread.exception() is None:
            for slot in thread.result():
                self._arena.free(slot)
        self._arena.allocation_lock.release()

    def drop(self) -> None:
        """Cancels all running requests: the job is dropped."""
        for task in list(self._tasks):
            task.cancel()
