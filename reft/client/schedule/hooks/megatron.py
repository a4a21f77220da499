"""Follows Megatron-core's pipeline: its timers say when a stage waits for its neighbours, and that is idle time.

    config.timers("forward-recv").start() ─► idle ─► .stop() ─► compute

`config.timers` is Megatron's own seam: whatever is callable so is told of each wait, also of the user's timers if there
are any. Sends without a receive are no waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

WAITS = "-recv"  # as the names of all timers around a wait end: "forward-send-backward-recv", …


class IdleTimers:
    """In the place of `config.timers`.

    Args:
        idle: marks a time of waiting, as `Session.idle` does.
        own: the user's timers; None if there are none.
    """

    def __init__(self, idle: Callable[[], AbstractContextManager[None]], own: Any = None) -> None:
        self._idle, self._own = idle, own
        self._wait = ExitStack()  # Megatron asks for a timer twice, to start and to stop it

    def __call__(self, name: str, *arguments: Any, **named: Any) -> IdleTimer:
        """The timer of this name, as Megatron's Timers give it."""
        own = None if self._own is None else self._own(name, *arguments, **named)
        return IdleTimer(self._wait if name.endswith(WAITS) else None, self._idle, own)


@dataclass(frozen=True)
class IdleTimer:
    """One of them."""

    wait: ExitStack | None
    idle: Callable[[], AbstractContextManager[None]]
    own: Any

    def start(self, *arguments: Any, **named: Any) -> None:
        """Megatron starts to do what the timer is called."""
        if self.own is not None:
            self.own.start(*arguments, **named)
        if self.wait is not None:
            self.wait.enter_context(self.idle())

    def stop(self, *arguments: Any, **named: Any) -> None:
        """It is done."""
        if self.wait is not None:
            self.wait.close()
        if self.own is not None:
            self.own.stop(*arguments, **named)
