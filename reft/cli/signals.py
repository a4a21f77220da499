"""Handles signals that end a command: terminals, processes and files are restored first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


@contextmanager
def deferring() -> Iterator[None]:
    """Makes Ctrl-C, SIGTERM and SIGHUP wait until the end of the block.

    The last one comes then. A child process does not inherit this, as it would a blocked signal. On
    another thread than the main one nothing is done: signals do not come there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    previous_handlers = {
        number: handler for number in ENDING if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    for number in previous_handlers:
        signal.signal(number, lambda signal_number, frame: heard.append(signal_number))
    try:
        yield
    finally:
        # A signal between two of these calls would keep the other handlers from coming back.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if heard:
            signal.raise_signal(heard[-1])
