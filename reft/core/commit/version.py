"""A version of the training state: (epoch, step).

Each attach issues an epoch: a counter, one above all counters seen, and a random id. The counter
orders epochs. Two epochs are equal only if counter and id are equal. So two histories that start
from one step are never mixed.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP_MAX = 1 << 62  # an outcome travels as a signed number


@dataclass(frozen=True)
class Epoch:
    """One attach of a job.

    Attributes:
        counter: orders the epochs of a job.
        ident: 16 random bytes; separates this epoch from all others, also from those with the same
            counter.
    """

    counter: int
    ident: bytes


@dataclass(frozen=True)
class Version:
    """The state after `step` completed steps, in the history that `epoch` writes."""

    epoch: Epoch
    step: int

    @property
    def order(self) -> tuple[int, int]:
        """The sort key. Never mix two versions with the same key and different epoch ids."""
        return (self.epoch.counter, self.step)

    def is_older_than(self, other: Version) -> bool:
        """Whether `other` supersedes this version; False if neither is newer."""
        return self.order < other.order

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch.counter})"
