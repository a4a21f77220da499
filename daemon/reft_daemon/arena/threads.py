"""Begins work in a thread, or not at all.

An executor queues work before it starts a thread for it. If the system refuses that thread, the
caller gets an error, and yet a thread that becomes free does the work. By then the caller has freed
what the work writes: a slot, a descriptor, a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from reft.errors import AttachError

T = TypeVar("T")


def begin_in_thread(function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Begins a function in a thread of the event loop; returns its result to come.

    Raises:
        AttachError: no thread can be started now. The function is not called later either.
    """
    done: Future[T] = Future()

    def run() -> None:
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(function(*arguments))
            except BaseException as error:  # for the caller, as from any thread of an executor
                done.set_exception(error)

    try:
        asyncio.get_running_loop().run_in_executor(None, run)
    except RuntimeError as error:
        if done.cancel():  # else a thread that was free has taken the work
            raise AttachError(
                f"the daemon can't do this now: {error}.", "see the limits of reft-daemon (ulimit -u), or try again"
            ) from error
    return asyncio.wrap_future(done)


async def run_to_end(work: Awaitable[T]) -> T:
    """Waits until `work` has ended, even if the caller is cancelled; then returns its result.

    The work writes into a slot, or a descriptor, which must not be freed before.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # marks the exception as retrieved
    raise cancelled
