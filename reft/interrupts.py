"""Ends a program without a traceback if Ctrl-C comes while the program imports its modules."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Lets the kernel end this process at Ctrl-C, until the end of the block.

    A signal that is ignored, for example under nohup, stays ignored.
    """
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
