"""Counts work in instructions of Python, which are always the same; seconds are not."""

from __future__ import annotations

import asyncio.events
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest


def instructions(work: Callable[[], object]) -> int:
    """Returns how many instructions `work` executes in this thread."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(earlier)
    return count


@contextmanager
def counted_callbacks() -> Iterator[list[int]]:
    """Gives a list that gets the instructions of each callback of the event loop.

    The callback in which the counting ends is left out: it goes on with the test.
    """
    counts: list[int] = []
    run_callback = asyncio.events.Handle._run

    def run(handle: asyncio.events.Handle) -> None:
        count = instructions(lambda: run_callback(handle))
        if asyncio.events.Handle._run is run:
            counts.append(count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.events.Handle, "_run", run)
        yield counts
