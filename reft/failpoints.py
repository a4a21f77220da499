"""Named points where a test makes reft fail: kill the process, raise an error, lose a message.

    REFT_FAILPOINTS="snapshot.chunk:kill:after=3:rank=1:epoch=1,round.send:drop"

Each entry is NAME:ACTION[:key=value…]. ACTION is one of
    kill   SIGKILL of this process
    stop   SIGSTOP of this process
    raise  raises InjectedFault
    drop   the caller does not send the message

`after=n` ignores the first n hits. `times=n` ignores the hits after the entry has fired n times.
`from` and `until` bound the step. Any other key must equal the fact of that name (rank, epoch,
step, …) that the code passes at the point. A point without an entry costs one dictionary look-up.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

from reft.errors import ConfigError, ReftError

ACTIONS = ("kill", "stop", "raise", "drop")


class InjectedFault(ReftError):
    """Raised by a failpoint whose action is `raise`."""


@dataclass
class _Entry:
    action: str
    after: int = 0
    times: int = 1 << 62
    first_step: int = 0
    last_step: int = 1 << 62
    match: dict[str, int] = field(default_factory=dict)
    hits: int = 0

    def fires(self, facts: dict[str, int]) -> bool:
        if any(facts.get(key) != value for key, value in self.match.items()):
            return False
        if not self.first_step <= facts.get("step", self.first_step) <= self.last_step:
            return False
        self.hits += 1
        return self.after < self.hits <= self.after + self.times


class Failpoints:
    """The faults that one process injects.

    Args:
        text: the value of REFT_FAILPOINTS.

    Raises:
        ConfigError: an entry can't be read.
    """

    def __init__(self, text: str = "") -> None:
        self._entries: dict[str, list[_Entry]] = {}
        for item in filter(None, text.split(",")):
            name, _, rest = item.partition(":")
            action, *options = rest.split(":")
            if action not in ACTIONS:
                raise ConfigError(f"failpoint {item!r}: action must be one of {', '.join(ACTIONS)}.")
            self._entries.setdefault(name, []).append(_parse(action, options))

    def hit(self, name: str, **facts: int) -> bool:
        """Passes the point `name`; returns True if the caller must drop its message.

        Raises:
            InjectedFault: the entry's action is `raise`.
        """
        for entry in self._entries.get(name, ()):
            if not entry.fires(facts):
                continue
            if entry.action == "drop":
                return True
            if entry.action == "raise":
                raise InjectedFault(f"failpoint {name} fired with {facts}.")
            os.kill(os.getpid(), signal.SIGKILL if entry.action == "kill" else signal.SIGSTOP)
        return False


def _parse(action: str, options: list[str]) -> _Entry:
    entry = _Entry(action)
    names = {"after": "after", "times": "times", "from": "first_step", "until": "last_step"}
    for option in options:
        key, _, value = option.partition("=")
        if not value.isdecimal():
            raise ConfigError(f"failpoint option {option!r} is not key=number.")
        if key in names:
            setattr(entry, names[key], int(value))
        else:
            entry.match[key] = int(value)
    return entry
