"""Carries out the operations of a rebuild: the daemon's driver of `reft.core.recovery.walk`.

read    a task fills the rows of its slice, from a slot at hand
decode  a thread computes the made packets from the rows, and writes them into the new slots
emit    waits for that thread
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from reft.core.coding.erasure import Bytes
from reft.core.recovery.plan import DecodeOperation, EmitOperation, ReadOperation, TransferPlan
from reft.core.recovery.rebuild_plan import DAEMON
from reft.core.recovery.stripes import StripeSlice
from reft.core.recovery.walk import WalkPhase, walk
from reft.errors import ConfigError
from reft_daemon.arena.arena import SlotFile
from reft_daemon.arena.threads import begin_in_thread, run_to_end

T = TypeVar("T")
ReadBytes = Callable[[int, int, Bytes], Awaitable[None]]


async def made_slices(
    plan: TransferPlan, read: ReadBytes, slots: Mapping[int, SlotFile]
) -> AsyncGenerator[StripeSlice, None]:
    """Makes lost slots; yields each slice once its bytes are in the slots.

    At the end, also after an error, nothing reads and nothing writes the slots any more.

    Args:
        plan: from `rebuild_plan`.
        read: `await read(number, offset, into)` fills `into` with data of the slot of an old rank,
            or of a parity number.
        slots: lost rank → its new slot.

    Raises:
        ConfigError: a stripe can't be decoded from the slots at hand.
        FormatError: a new slot was freed, or can't be written.
    """
    rows: dict[StripeSlice, Bytes] = {}
    tasks: dict[ReadOperation | StripeSlice, asyncio.Future[Any]] = {}
    actions = walk(plan.operations(DAEMON), plan.sizes)
    try:
        while (action := await in_thread(next, actions, None)) is not None:
            phase, operation = action
            if phase is WalkPhase.START and isinstance(operation, ReadOperation):
                assert operation.slice is not None, "only slices are read"
                if operation.slice not in rows:
                    rows[operation.slice] = operation.slice.empty_rows()
                tasks[operation] = asyncio.ensure_future(_fill(rows[operation.slice], operation, read))
            elif phase is WalkPhase.FINISH and isinstance(operation, ReadOperation):
                await tasks.pop(operation)
            elif phase is WalkPhase.FINISH and isinstance(operation, DecodeOperation):
                decoding = in_thread(_decode, operation.slice, rows.pop(operation.slice), slots)
                tasks[operation.slice] = asyncio.ensure_future(decoding)
            elif phase is WalkPhase.POST and isinstance(operation, EmitOperation):
                await tasks.pop(operation.slice)
                yield operation.slice
    finally:
        for task in tasks.values():
            task.cancel()
        await run_to_end(asyncio.gather(*tasks.values(), return_exceptions=True))


async def _fill(rows: Bytes, operation: ReadOperation, read: ReadBytes) -> None:
    """Fills the rows of one shard: one call for each run of its slot's bytes."""
    for part in operation.parts:
        for begin, at, size in part.runs.rows():
            await read(operation.owner, begin, rows[at : at + size])


def _decode(stripe_slice: StripeSlice, rows: Bytes, slots: Mapping[int, SlotFile]) -> None:
    """Computes the made packets of a slice, and writes them into their slots."""
    for owner, begin, data in stripe_slice.made_parts(stripe_slice.decode(rows)):
        slots[owner].map.write(begin, data)


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Runs a function in a thread, to its end.

    Raises:
        ConfigError: the function raised ValueError.
        AttachError: no thread can be started now.
    """
    try:
        return await run_to_end(begin_in_thread(function, *arguments))
    except ValueError as error:
        raise ConfigError(f"it can't be rebuilt: {str(error).rstrip('.')}.") from error
