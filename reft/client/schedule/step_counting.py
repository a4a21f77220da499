"""The ways a session counts steps: by marks, or by calls of the optimizer.

A GradScaler skips a step whose gradients are infinite. Marks count such an iteration as a step.
Calls of the optimizer do not count it:

    plain optimizer         the GradScaler does not call the optimizer: nothing to count
    fused, on the host      `found_inf` says at once that the call trained nothing
    fused, on a device      only the device knows, and the call must not wait for the device

In the last case a call gets the next step number, and its snapshot is void if the device skipped
the step (the snapshot thread waits for the device anyway). The call after a skipped one gets the
same number again, and no snapshot: so no two snapshots have one number. Price: two calls without a
snapshot for each skipped step. That later call reads a flag that is one iteration old, while the
device still has the work of a whole iteration.
"""

from __future__ import annotations

from enum import Enum, auto

from reft.client.memory.cuda import HostCopy


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


class Call(Enum):
    """What a call of the optimizer counts as, in a loop without marks."""

    FIRST = auto()  # a step, but no mark: a mark of the loop may follow
    STEP = auto()  # a step, and its mark
    AGAIN = auto()  # the step whose number the call before had, because the device skipped that one


class CallCounting(StepCounting):
    """Counts calls of the optimizer, because the loop has no mark yet."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._calls = 0
        self._skipped: HostCopy | None = None

    def count(self, skipped: HostCopy | None) -> Call:
        """Counts a call of the optimizer, and returns what the call counts as.

        Args:
            skipped: whether the device skips this call's step; None if the call surely trains.
        """
        earlier, self._skipped = self._skipped, skipped
        self._calls += 1
        if earlier is not None and earlier.is_nonzero():
            return Call.AGAIN
        return Call.STEP if self._calls > 1 else Call.FIRST
