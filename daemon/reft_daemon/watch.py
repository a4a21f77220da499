"""Trainers as the kernel knows them: alive, dead, or orphaned by the agent that started them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from reft.wire.process import Process

FENCE_DEADLINE_S = 10.0  # a SIGKILLed process that frees much memory takes seconds; a stuck one never ends


class Watch:
    """Calls back, in the event loop, when a process ends.

    Args:
        process: must be alive.
        on_end: called once.

    Raises:
        ProcessLookupError: the process is gone already, or is another one by now.
        OSError: it can't be watched, as where no descriptor is free: nothing is known of it.
    """

    def __init__(self, process: Process, on_end: Callable[[], None]) -> None:
        self._process = process
        self._descriptor = os.pidfd_open(process.pid)
        try:
            if not process.is_alive:
                raise ProcessLookupError(f"no process {process.pid} that started at {process.start}")
        except OSError:
            os.close(self._descriptor)
            raise
        self._on_end = on_end
        self._over = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._end)

    def _end(self) -> None:
        self.close()
        self._on_end()

    async def kill(self) -> bool:
        """SIGKILLs the process; True once it has ended or is watched no more, False if it lives on for FENCE_DEADLINE_S."""
        if not self._over.is_set():
            with contextlib.suppress(ProcessLookupError):  # it has just been reaped, and the loop is yet to hear of it
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        try:
            await asyncio.wait_for(self._over.wait(), FENCE_DEADLINE_S)
        except asyncio.TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Watches no more: it has ended, or has closed its session and writes nothing more."""
        self._over.set()
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
