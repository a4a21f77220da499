"""The ways a session counts steps: by marks, or by calls of the optimizer."""

from __future__ import annotations


class StepCounting:
    """A way to count steps."""


class MarkCounting(StepCounting):
    """Counts marks, because the loop marks its steps."""


class ResumedCounting(MarkCounting):
    """Waits for marks, because the restored step was marked; this loop has no mark yet."""

    def __init__(self) -> None:
        self._calls = 0

    def count(self) -> int:
        """Counts a call of the optimizer, and returns the number of calls."""
        self._calls += 1
        return self._calls


class CallCounting(StepCounting):
    """Counts calls of the optimizer, because the loop has no mark yet."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._calls = 0

    def count(self) -> bool:
        """Counts a call of the optimizer, and returns whether the call is a step.

        The first call is no step yet: a mark may follow.
        """
        self._calls += 1
        return self._calls > 1
