"""Walks over a rank's operations: when each one starts, is posted, and finishes.

    operation   pulled from the plan        the oldest not posted      the oldest under way
                        │                             │                         │
    START  read: in a helper thread           POST  send, receive:      FINISH  wait for messages,
                                                    in list order                place, free memory
                └─ at most `ahead` bytes ─┘             └─ at most `window` bytes ─┘

    columns of slice 1 │ DECODE 1 │ columns of slice 2 │ DECODE 2 │ EMIT 1 │ …
                          FINISH: all before is placed; a helper thread decodes
                                                                    POST: waits for it, sends

Invariants
  1. Operations are posted in list order, and finish in list order.
  2. A decode operation finishes after all operations before it, and before its emission is posted.
  3. Beside those to be finished next, at most `ahead` bytes of reads and `window` bytes of messages
     are held, in at most OPERATIONS_MAX operations each.

A driver carries out each action without a decision of its own. A lost or late message ends in the
driver's deadline. After an error the driver drops everything that is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum

from reft.core.recovery.plan import (
    DecodeOperation,
    EmitOperation,
    ReadOperation,
    ReceiveOperation,
    TransferOperation,
    TransferSizes,
)

OPERATIONS_MAX = 8  # in each of the two queues; small messages need no more to hide a wake-up


class WalkPhase(Enum):
    """What a driver does with an operation."""

    START = "start"
    POST = "post"
    FINISH = "finish"


WalkAction = tuple[WalkPhase, TransferOperation]


def walk(operations: Iterable[TransferOperation], sizes: TransferSizes) -> Iterator[WalkAction]:
    """Yields the actions for one rank's operations.

    Args:
        operations: in list order, from `TransferPlan.operations`.
        sizes: of the plan.
    """
    started: deque[TransferOperation] = deque()
    under_way: deque[TransferOperation] = deque()
    read_bytes = message_bytes = 0

    def finish() -> WalkAction:
        nonlocal message_bytes
        oldest = under_way.popleft()
        message_bytes -= _message_bytes(oldest)
        return WalkPhase.FINISH, oldest

    def post() -> Iterator[WalkAction]:
        nonlocal read_bytes, message_bytes
        operation = started.popleft()
        read_bytes -= _read_bytes(operation)
        if isinstance(operation, EmitOperation):
            while any(isinstance(each, DecodeOperation) and each.slice is operation.slice for each in under_way):
                yield finish()
        yield WalkPhase.POST, operation
        under_way.append(operation)
        message_bytes += _message_bytes(operation)
        while len(under_way) > 1 and (message_bytes > sizes.window or len(under_way) > OPERATIONS_MAX):
            yield finish()

    for operation in operations:
        if isinstance(operation, ReadOperation):
            yield WalkPhase.START, operation
        started.append(operation)
        read_bytes += _read_bytes(operation)
        while read_bytes > sizes.ahead or len(started) > OPERATIONS_MAX:
            yield from post()
    while started:
        yield from post()
    while under_way:
        yield finish()


def _read_bytes(operation: TransferOperation) -> int:
    return operation.nbytes if isinstance(operation, ReadOperation) else 0


def _message_bytes(operation: TransferOperation) -> int:
    if isinstance(operation, ReceiveOperation):
        return operation.nbytes
    if isinstance(operation, (ReadOperation, EmitOperation)):
        return sum(message.nbytes * len(message.receivers) for message in operation.messages)
    return 0
