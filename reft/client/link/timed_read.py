"""Reads storage that may hang, and does not hang with it.

On a mount without timeouts the kernel holds the thread that reads, and no signal ends that. So each
read has a thread of its own; if it is late, the caller gets an error, and the process can end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Thread
from typing import Final, TypeVar

from reft.errors import RestoreError

STALL_S: Final = 60.0
READ_BYTES: Final = 64 << 20  # of one read: 1 MiB/s is in time
Value = TypeVar("Value")


def in_time(read: Callable[[], Value], what: str) -> Value:
    """Returns what `read` returns, or raises what `read` raises.

    A late read goes on: what it fills is not to be used afterwards.

    Args:
        read: reads storage.
        what: is read, for the message.

    Raises:
        RestoreError: `read` took longer than STALL_S.
    """
    future: Future[Value] = Future()

    def act() -> None:
        try:
            future.set_result(read())
        except BaseException as error:
            future.set_exception(error)

    # No pool: the interpreter waits for the threads of pools at its end.
    Thread(target=act, name="reft-storage", daemon=True).start()
    if not wait({future}, STALL_S).done:
        raise RestoreError(
            f"storage gave nothing of {what} for {STALL_S:.0f} s.",
            "check the mount of reft-daemon --persist, and start the job again",
        )
    return future.result()


def preadv_in_time(file: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Reads a checkpoint's file as `os.preadv` does, at most READ_BYTES.

    Raises:
        RestoreError: storage hangs.
    """
    taken, room = [], READ_BYTES
    for buffer in buffers:
        taken.append(buffer[:room])
        room -= len(taken[-1])
        if not room:
            break
    return in_time(lambda: os.preadv(file, taken, offset), "a checkpoint's file")
