"""How a session counts steps: by marks, or by calls of the optimizer until the first mark."""

from __future__ import annotations


class StepCounting:
    """How steps are counted: by marks, or by calls of the optimizer until the first mark."""


class CountByMarks(StepCounting):
    """The loop marks its steps."""


class CountResumed(CountByMarks):
    """The loop that the restored step is of marked its steps; this one has not done so yet."""

    def __init__(self) -> None:
        self._calls = 0

    def count(self) -> int:
        """Counts a call of the optimizer; how many there were."""
        self._calls += 1
        return self._calls


class CountByOptimizer(StepCounting):
    """Nothing was marked yet."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._calls = 0

    def count(self) -> bool:
        """Counts a call of the optimizer; True from the second on, when it is clear that nobody marks."""
        self._calls += 1
        return self._calls > 1
