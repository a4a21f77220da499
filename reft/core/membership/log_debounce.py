"""Keeps logs short: logs final signals at once, and all others only once they have lasted.

    signal   HEALTHY ─► SUSPECT ─► HEALTHY        within LASTED_S: not logged
             HEALTHY ─► SUSPECT ─ ─ ─ ─ ─ ─ ►     logged after LASTED_S, with the reason by then
             … ─► UNHEALTHY, OFFLINE, COMPLETED   logged at once

On busy machines, doubts come and go with each late beat. A log of all of them hides the one that
stays. Agents and `status` get every change: this module is for logs only.

Repeated troubles are logged like this; where steps take milliseconds, a trouble may come at every
second step:

    trouble ─► logged ─► over ─► logged ─► the same within AGAIN_S ─► not logged, neither is its end
    one that small runs often have ─► logged if it is heard again after LASTED_S, and is not over
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from reft.core.membership.failure_detector import FailureDetector, Signal, SignalChange

LASTED_S = 1.0


@dataclass(frozen=True)
class LogSubject:
    """The loggable facts of a node.

    SNAP counts as HEALTHY. `kind` names the reason, as in WatchedNode.
    """

    signal: Signal
    kind: str


class SignalLog:
    """Decides which signal changes of one term are logged.

    Args:
        detector: the source of the changes.
    """

    def __init__(self, detector: FailureDetector) -> None:
        self._detector = detector
        self._logged: dict[str, LogSubject] = {}
        self._due_s: dict[str, tuple[LogSubject, float]] = {}  # node → its subject, and when to log

    def heard(self, changes: Iterable[SignalChange], now_s: float) -> None:
        """Takes changes into account."""
        for node in {change.node for change in changes}:
            subject = self._subject(node)
            before, due_s = self._due_s.pop(node, (None, now_s + LASTED_S))
            if subject == self._logged.get(node):
                continue
            if before is None or before.signal is not subject.signal:
                due_s = now_s if subject.signal.is_final else now_s + LASTED_S
            self._due_s[node] = (subject, due_s)

    def due(self, now_s: float) -> list[SignalChange]:
        """Returns the changes to log now, each once."""
        changes = []
        for node, (subject, due_s) in list(self._due_s.items()):
            if now_s >= due_s:
                before = self._logged.get(node, LogSubject(Signal.JOINING, ""))
                self._logged[node] = subject
                del self._due_s[node]
                changes.append(SignalChange(node, before.signal, subject.signal))
        return changes

    def _subject(self, node: str) -> LogSubject:
        member = self._detector.members[node]
        signal = Signal.HEALTHY if member.signal is Signal.SNAP else member.signal
        return LogSubject(signal, member.kind)


AGAIN_S = 600.0
REMEMBERED_MAX = 64


@dataclass
class TroubleLog:
    """Decides which troubles of one source are logged."""

    _trouble: str = ""
    _since_s: float = 0.0
    _is_new: bool = False  # nothing is decided about the trouble yet
    _is_logged: bool = False
    _logged_s: dict[str, float] = field(default_factory=dict)

    def heard(self, trouble: str, now_s: float, lasted_s: float = 0.0) -> bool:
        """Returns whether to log this trouble; an empty one means that the trouble is over.

        Args:
            trouble: a sentence.
            now_s: the time.
            lasted_s: a trouble that has not lasted so long is not logged.
        """
        if trouble != self._trouble:
            self._trouble, self._since_s, self._is_new = trouble, now_s, True
        if not self._is_new or now_s - self._since_s < lasted_s:
            return False
        self._is_new = False
        if not trouble:
            was_aloud, self._is_logged = self._is_logged, False
            return was_aloud
        if now_s - self._logged_s.get(trouble, float("-inf")) < AGAIN_S:
            return False
        self._logged_s.pop(trouble, None)
        self._logged_s[trouble] = now_s
        if len(self._logged_s) > REMEMBERED_MAX:
            del self._logged_s[next(iter(self._logged_s))]
        self._is_logged = True
        return True
