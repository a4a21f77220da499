"""Keeps logs short: of nodes, what is final is logged at once and all else once it has lasted.

    signal   HEALTHY ─► SUSPECT ─► HEALTHY        within LASTED_S: nothing is said
             HEALTHY ─► SUSPECT ─ ─ ─ ─ ─ ─ ►     said after LASTED_S, with the reason that it has by then
             … ─► UNHEALTHY, OFFLINE, COMPLETED   said at once

On busy machines doubts come and go with each beat that is late; a log that says them all hides the one that stays.
Agents and `status` are told everything as it is: this is for people only.

Of a trouble that comes and goes, where steps take milliseconds maybe at every second one:

    trouble ─► said ─► over ─► said ─► the same within AGAIN_S ─► not said, nor that it is over
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from reft.core.membership.failure_detector import FailureDetector, Signal, SignalChange

LASTED_S = 1.0


@dataclass(frozen=True)
class LogSubject:
    """What could be said of a node; snapshots that come and go are none. `kind` names the reason, as in Member."""

    signal: Signal
    kind: str


class SignalLog:
    """Of one term.

    Args:
        detector: whose changes it is told of.
    """

    def __init__(self, detector: FailureDetector) -> None:
        self._detector = detector
        self._said: dict[str, LogSubject] = {}
        self._due_s: dict[str, tuple[LogSubject, float]] = {}  # node → what it is now, and when that is said

    def heard(self, changes: Iterable[SignalChange], now_s: float) -> None:
        """Some nodes are something else now."""
        for node in {change.node for change in changes}:
            matter = self._matter(node)
            before, due_s = self._due_s.pop(node, (None, now_s + LASTED_S))
            if matter == self._said.get(node):
                continue
            if before is None or before.signal is not matter.signal:
                due_s = now_s if matter.signal.is_final else now_s + LASTED_S
            self._due_s[node] = (matter, due_s)

    def due(self, now_s: float) -> list[SignalChange]:
        """What is to be said now, each once."""
        found = []
        for node, (matter, due_s) in list(self._due_s.items()):
            if now_s >= due_s:
                before = self._said.get(node, LogSubject(Signal.JOINING, ""))
                self._said[node] = matter
                del self._due_s[node]
                found.append(SignalChange(node, before.signal, matter.signal))
        return found

    def _matter(self, node: str) -> LogSubject:
        member = self._detector.members[node]
        signal = Signal.HEALTHY if member.signal is Signal.SNAP else member.signal
        return LogSubject(signal, member.kind)


AGAIN_S = 600.0
REMEMBERED_MAX = 64


@dataclass
class TroubleLog:
    """Of one source of trouble."""

    _now: str = ""
    _is_aloud: bool = False
    _said_s: dict[str, float] = field(default_factory=dict)

    def heard(self, trouble: str, now_s: float) -> bool:
        """Whether it is to be said that this is the trouble now; empty: that there is none any more."""
        if trouble == self._now:
            return False
        self._now = trouble
        if not trouble:
            was_aloud, self._is_aloud = self._is_aloud, False
            return was_aloud
        if now_s - self._said_s.get(trouble, float("-inf")) < AGAIN_S:
            return False
        self._said_s.pop(trouble, None)
        self._said_s[trouble] = now_s
        if len(self._said_s) > REMEMBERED_MAX:
            del self._said_s[next(iter(self._said_s))]
        self._is_aloud = True
        return True
