"""Signals that end a command: the stack is unwound first, so that terminals, processes and files are as they were before."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unwinding() -> Iterator[None]:
    """SIGTERM ends with 143, SIGHUP, of a terminal that was closed, with 129. What is ignored, as under nohup, stays so."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heeded = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)
