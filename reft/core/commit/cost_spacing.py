"""Thins out snapshots while the modules' extra state costs more than its budget.

    extra state takes 120 ms at each mark, budget 50 ms a step, every=1
      ─► only multiples of 4:   · · · 4 · · · 8 · · · 12 …       30 ms a step
    it takes 10 ms again        ─► every step

Attach refuses extra state that costs too much, and this file is for a cost that grows later. An
older answer of a module is never used again. With every="auto" the interval grows by itself.

Invariants
  1. Two snapshots one after the other are over the budget before any step is left out. One slow
     answer, such as a compilation, changes nothing.
  2. The step number decides: multiples of a power of two, as in lag_backoff.py. So ranks with
     different costs, or of which one lags, share steps.
  3. The spacing falls when half of the budget of the next smaller one is enough. So a cost near a
     limit makes no step irregular.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SECONDS_MAX = 0.05  # of extra state, for each step between two snapshots
BYTES_MAX = 512 << 10  # half of a capsule, for each step between two snapshots
SPACING_MAX = 1024


class ExtraStateCost(NamedTuple):
    """What the modules' extra state cost at a mark.

    Attributes:
        seconds: how long all modules took.
        nbytes: size of their bytes, arrays and tensors.
        name: the module that took longest.
    """

    seconds: float
    nbytes: int
    name: str

    @property
    def steps(self) -> float:
        """For how many steps the budget would suffice."""
        return max(self.seconds / SECONDS_MAX, self.nbytes / BYTES_MAX)


@dataclass
class CostSpacing:
    """Every how many due steps one rank takes one, because of the cost.

    Attributes:
        spacing: a power of two; 1 takes every due step.
    """

    spacing: int = 1
    _last_steps: float = 0.0
    _was_told: bool = False

    def observe(self, cost: ExtraStateCost, every: int) -> str:
        """Takes the cost of one snapshot; returns a notice once steps are left out.

        The notice comes once in a session.

        Args:
            cost: the cost.
            every: the snapshot interval, in steps.
        """
        steps, self._last_steps = min(cost.steps, self._last_steps), cost.steps
        falling = min(self.spacing, _spacing(2 * cost.steps / every))
        self.spacing = max(falling, _spacing(steps / every))
        if self.spacing == 1 or self._was_told:
            return ""
        self._was_told = True
        return (
            f"extra state (get_extra_state) takes {1000 * cost.seconds:.0f} ms and {cost.nbytes} bytes at each snapshot, "
            f"most of the time for {cost.name}; the limits are {1000 * SECONDS_MAX * every:.0f} ms and {BYTES_MAX * every} "
            f"bytes for every={every}. Until it costs less, only one of {self.spacing} due steps is snapshotted."
            f"\nFix: every={every * self.spacing}, or every='auto'; keep large values in buffers of the module"
        )


def _spacing(least: float) -> int:
    spacing = 1
    while spacing < min(least, SPACING_MAX):
        spacing *= 2
    return spacing
