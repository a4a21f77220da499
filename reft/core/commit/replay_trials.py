"""When a copy lane is recomputed again, after its recomputed copies differed from the owners'.

recompute ── differs, FAILURES_MAX times in a row ──► 1, 2, 4, … turns by the exchange
    ▲ │                                                  │
    │ └─ equal: forgets the failures                     ▼
    └──────────────────────────────────────── one more attempt; differs: twice as many turns
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES_MAX = 3  # in a row, before turns are left to the exchange
LEFT_OUT_MAX = 64  # turns


@dataclass(frozen=True)
class ReplayTrials:
    """What a node remembers of a lane's attempts.

    Attributes:
        failures: attempts in a row that gave no copies, or wrong ones.
        left_out: turns that the exchange still makes without an attempt.
    """

    failures: int = 0
    left_out: int = 0

    def skip(self) -> ReplayTrials:
        """Returns the trials after a turn without an attempt."""
        return ReplayTrials(self.failures, max(self.left_out - 1, 0))

    def fail(self) -> ReplayTrials:
        """Returns the trials after an attempt that failed."""
        failures = self.failures + 1
        over = failures - FAILURES_MAX
        return ReplayTrials(failures, min(1 << over, LEFT_OUT_MAX) if over >= 0 else 0)

    def succeed(self) -> ReplayTrials:
        """Returns the trials after an attempt that gave the owners' bytes."""
        return ReplayTrials()
