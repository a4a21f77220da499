"""Hooks for Megatron-core's pipeline: its timers report when a stage waits for its neighbours.

    config.timers("forward-recv").start() ─► idle ─► .stop() ─► compute

Megatron calls `config.timers` around each wait, so an object in that place sees every wait. The
object also calls the user's timers, if there are any. A send without a receive is no wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

WAITS = "-recv"  # the end of the names of all timers around a wait: "forward-send-backward-recv", …


class IdleTimers:
    """The replacement for `config.timers`.

    Args:
        idle: marks a gap; `Session.idle`.
        own: the user's timers; None if there are none.
    """

    def __init__(self, idle: Callable[[], AbstractContextManager[None]], own: Any = None) -> None:
        self._idle, self._own = idle, own
        self._wait = ExitStack()  # shared: Megatron gets a timer twice, to start and to stop it

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the config has the user's timers: a session can't be copied."""
        return _timers, (self._own,)

    def __call__(self, name: str, *arguments: Any, **named: Any) -> IdleTimer:
        """Returns the timer of this name; has the signature of Megatron's Timers."""
        own = None if self._own is None else self._own(name, *arguments, **named)
        return IdleTimer(self._wait if name.endswith(WAITS) else None, self._idle, own)


def _timers(own: Any) -> Any:
    return own


@dataclass(frozen=True)
class IdleTimer:
    """One timer of `IdleTimers`.

    Attributes:
        wait: holds the gap while it lasts; None if the timer is not around a wait.
        idle: marks a gap.
        own: the user's timer; None if there is none.
    """

    wait: ExitStack | None
    idle: Callable[[], AbstractContextManager[None]]
    own: Any

    def start(self, *arguments: Any, **named: Any) -> None:
        """Begins a gap if the timer is around a wait."""
        if self.own is not None:
            self.own.start(*arguments, **named)
        if self.wait is not None:
            self.wait.enter_context(self.idle())

    def stop(self, *arguments: Any, **named: Any) -> None:
        """Ends the gap."""
        if self.wait is not None:
            self.wait.close()
        if self.own is not None:
            self.own.stop(*arguments, **named)
