"""Handles signals that end a command: terminals, processes and files are restored first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unwinding() -> Iterator[None]:
    """Makes SIGTERM exit with 143, and SIGHUP (closed terminal) with 129, through the stack.

    A signal that is ignored, for example under nohup, stays ignored.
    """

    def leave(signal_number: int, frame: object) -> None:
        raise SystemExit(128 + signal_number)

    current_handlers = {
        signal_number: signal.getsignal(signal_number) for signal_number in (signal.SIGTERM, signal.SIGHUP)
    }
    previous_handlers = {
        signal_number: handler for signal_number, handler in current_handlers.items() if handler != signal.SIG_IGN
    }
    for signal_number in previous_handlers:
        signal.signal(signal_number, leave)
    try:
        yield
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)
