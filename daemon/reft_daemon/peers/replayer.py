"""The daemon's side of its replayer: gives it one order at a time.

    order ─► replayer ─► answer: the slot is sealed, or why not
                └─ ends, is too slow, or the caller is cancelled ─► killed, and waited for

An order is stopped by the end of the process, and the caller goes on after this end. So no replayer
still writes a slot that the mover begins.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from reft.errors import ReftError
from reft.wire.v1 import replay_pb2
from reft_daemon.arena.arena import SlotFile
from reft_daemon.child.child_process import ChildGone, ChildProcess
from reft_daemon.child.control_channel import DESCRIPTORS_MAX, ControlMessage

START_S: Final = 90.0  # it loads torch, at the lowest priority
SLOTS_MAX: Final = DESCRIPTORS_MAX - 1  # of an order; the order itself takes one descriptor


class ReplayFailed(ReftError):
    """The replayer gave no copies.

    Args:
        message: why.
        counts: whether it may fail again in the same way: wrong bytes, a dead or a slow replayer.
    """

    def __init__(self, message: str, counts: bool) -> None:
        super().__init__(message)
        self.counts = counts


class ReplayCost(NamedTuple):
    """What a replay took: CPU seconds, and seconds."""

    cpu_s: float
    took_s: float


class Replayer:
    """The replayer of this daemon; it runs from the first order on.

    Args:
        failpoints: let tests end the process, see `reft.failpoints`.
    """

    def __init__(self, failpoints: str = "") -> None:
        self._child = ChildProcess("replayer", ["-m", "reft_replayer", "--failpoints", failpoints], START_S)
        self._at_work = asyncio.Lock()  # an order's deadline does not count the orders before

    @property
    def pid(self) -> int:
        """The pid of the process; 0: it does not run."""
        return self._child.running.process.pid if self._child.running is not None else 0

    async def replay(self, order: replay_pb2.ReplayOrder, slots: Sequence[SlotFile], deadline_s: float) -> ReplayCost:
        """Carries out an order; returns what it took, without the start of the process.

        Args:
            order: what is made.
            slots: the copies at hand, the slot to write, and the records.
            deadline_s: for the work, without the start of the process.

        Raises:
            ReplayFailed: the slot to write is not sealed. No process writes it any more.
        """
        if len(slots) > SLOTS_MAX:
            raise ReplayFailed(f"{len(slots)} slots are too many for one replay; the limit is {SLOTS_MAX}.", False)
        async with self._at_work:
            work = asyncio.ensure_future(self._carry_out(order, slots, deadline_s))
            try:
                answer = await asyncio.shield(work)
            except ChildGone as error:
                await self._child.wait_ended()
                raise ReplayFailed(error.message, True) from error
            except asyncio.CancelledError:
                work.cancel()  # it may still wait for the start of the process
                await self._child.close()
                await asyncio.wait({work})
                raise
        if "error" in answer:
            raise ReplayFailed(answer["error"], answer.get("differs", False))
        return ReplayCost(float(answer["cpu_s"]), float(answer["took_s"]))

    async def close(self) -> None:
        """Ends the process, once no order is under way."""
        async with self._at_work:
            await self._child.close()

    async def _carry_out(
        self, order: replay_pb2.ReplayOrder, slots: Sequence[SlotFile], deadline_s: float
    ) -> ControlMessage:
        running, data = await self._child.ensure(), order.SerializeToString()
        descriptor = os.memfd_create("reft-replay-order", os.MFD_CLOEXEC)
        try:
            os.pwrite(descriptor, data, 0)
            message = {"do": "replay", "order_bytes": len(data), "file_bytes": [slot.file_bytes for slot in slots]}
            descriptors = [descriptor, *(slot.descriptor for slot in slots)]
            return await self._child.call(running, message, deadline_s, 0, descriptors)
        finally:
            os.close(descriptor)
