"""Finds the lines of the user's code at which a default generator moves.

    start ─► each line of the user's code: have the generators moved since the line before? ─► stop

Python's trace function is called for the user's lines only, and for calls of any other function.
Where a line calls other code, what moves there counts as moved by that line. A move counts only if
it still stands in the end: reft puts generators back after a restore.

The call that hands out a batch of torch's DataLoader, or of torchdata's, is seen on the way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any, Final, NamedTuple

from reft.client.rehearsal.digests import generator_digests
from reft.client.rehearsal.user_code import SourceLine, frames, frames_of, is_users

LINES_MAX: Final = 20_000  # each costs some 50 µs
MOVES_MAX: Final = 20
# Iterators of this module hand out batches in `__next__`; those of torchdata call it.
LOADER: Final = "torch.utils.data.dataloader"
RESUMABLE: Final = "reft.client.data."  # reft's loader asks a loader below for its batches
TRACED: Final = "another trace function is set: a debugger's, or that of a coverage tool"
TOO_MANY: Final = f"more than {LINES_MAX} lines ran before the first forward"


class GeneratorMove(NamedTuple):
    """A generator, and a line that moved it."""

    generator: str
    line: SourceLine


class GeneratorTracer:
    """Traces this thread from `start` to `stop`; see the module.

    Args:
        on_error: called with an error, which never reaches training.
        on_batch: called when a DataLoader hands out a batch, unless reft's loader asked for it.
    """

    def __init__(self, on_error: Callable[[Exception], None], on_batch: Callable[[], None]) -> None:
        self._on_error = on_error
        self._on_batch = on_batch
        self._pid = os.getpid()
        self._is_users = cache(is_users)
        self._line: SourceLine | None = None  # the user's line that runs
        self._start: dict[str, str] = {}
        self._last: dict[str, str] = {}
        self._moves: list[GeneratorMove] = []
        self._lines = 0
        # The very object that sys.gettrace() returns: each access to a method makes a new one.
        self._global_trace = self._on_call

    def start(self) -> str:
        """Begins to trace; returns why that is not possible, or an empty string."""
        if sys.gettrace() is not None:
            return TRACED
        self._start = self._last = generator_digests()
        self._moves, self._lines, self._line = [], 0, None
        for frame in frames():
            if self._is_users(frame.f_code.co_filename):
                self._line = self._line or line_of(frame)
                frame.f_trace = self._on_line
        sys.settrace(self._global_trace)
        return ""

    def stop(self) -> tuple[list[GeneratorMove], str]:
        """Ends the tracing; returns the moves that stand, and why others are not known.

        Does nothing if there is no tracing.
        """
        if not self._is_tracing():
            return [], ""
        sys.settrace(None)
        self._look_once_more()
        return self._moves[:MOVES_MAX], TOO_MANY if self._lines > LINES_MAX else ""

    def close(self) -> None:
        """Ends the tracing, if there is one."""
        if self._is_tracing():
            sys.settrace(None)

    def _is_tracing(self) -> bool:
        return sys.gettrace() is self._global_trace

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if os.getpid() != self._pid:
            sys.settrace(None)  # a worker of a loader
            return None
        if frame.f_code.co_name == "__next__" and hands_out(frame):
            frame.f_trace_lines = False
            return self._on_next
        if not self._is_users(frame.f_code.co_filename):
            return None
        self._guarded_look()
        return self._on_line

    def _on_next(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if event == "return" and argument is not None and self._is_tracing():
            self._on_batch()  # without an argument: no batch is left, or an error came
        return self._on_next

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not self._is_tracing() or os.getpid() != self._pid:
            return None
        if event not in ("line", "return"):
            return self._on_line
        self._guarded_look()
        if event == "line":
            self._line = line_of(frame)
            return self._on_line
        caller = frame.f_back
        while caller is not None and not self._is_users(caller.f_code.co_filename):
            caller = caller.f_back
        self._line = line_of(caller) if caller else None
        return self._on_line

    def _guarded_look(self) -> None:
        """Looks at the generators; an error here would come up in the user's code."""
        try:
            self._look_once_more()
        except Exception as error:
            self.close()
            self._on_error(error)

    def _look_once_more(self) -> None:
        """Notes which generators have moved since the last look, up to the limit."""
        self._lines += 1
        if self._lines > LINES_MAX:
            return
        now = generator_digests()
        for name in now.keys() | self._last.keys():
            if now.get(name) == self._last.get(name):
                continue
            if now.get(name) == self._start.get(name):
                self._moves = [move for move in self._moves if move.generator != name]
            elif self._line is not None and (move := GeneratorMove(name, self._line)) not in self._moves:
                self._moves.append(move)
        self._last = now


def hands_out(frame: FrameType) -> bool:
    """Returns whether a call of `__next__` is a DataLoader's, and reft's loader did not ask."""
    callers = (each.f_globals.get("__name__", "") for each in frames_of(frame))
    return next(callers) == LOADER and not any(name.startswith(RESUMABLE) for name in callers)


def line_of(frame: FrameType) -> SourceLine:
    """Returns the line that a frame runs."""
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)
