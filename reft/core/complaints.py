"""What is said aloud of a trouble that comes and goes: where steps take milliseconds it may do so at every second one.

trouble ─► said ─► over ─► said ─► the same within AGAIN_S ─► not said, nor that it is over
"""

from __future__ import annotations

from dataclasses import dataclass, field

AGAIN_S = 600.0
REMEMBERED_MAX = 64


@dataclass
class Complaints:
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
