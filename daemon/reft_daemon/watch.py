"""Trainers as the kernel knows them: alive, dead, or orphaned by the agent that started them."""

from __future__ import annotations

import asyncio
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
    """

    def __init__(self, process: Process, on_end: Callable[[], None]) -> None:
        self._process = process
        self._descriptor = os.pidfd_open(process.pid)
        if not process.is_alive:
            os.close(self._descriptor)
            raise ProcessLookupError(f"no process {process.pid} that started at {process.start}")
        self._on_end = on_end
        self.ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._end)

    def _end(self) -> None:
        self.close()
        self.ended.set()
        self._on_end()

    async def kill(self) -> bool:
        """SIGKILLs the process; True once it has ended, False if it has not within FENCE_DEADLINE_S."""
        if not self.ended.is_set():
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        try:
            await asyncio.wait_for(self.ended.wait(), FENCE_DEADLINE_S)
        except asyncio.TimeoutError:
            return False
        return True

    def close(self) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
