"""A version of the training state: (epoch, step).

An epoch is issued at every attach: a counter, one above all that were seen, and a random id. Epochs are ordered by the
counter and equal only by both, so two histories that were started from one step are never mixed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    """One attach of a job: `counter` orders it, `ident` (16 random bytes) tells it from all others."""

    counter: int
    ident: bytes


@dataclass(frozen=True)
class Version:
    """The state after `step` completed steps, in the history that `epoch` writes."""

    epoch: Epoch
    step: int

    @property
    def order(self) -> tuple[int, int]:
        """What versions are sorted by. Two versions of equal order and unlike ids must never be mixed."""
        return (self.epoch.counter, self.step)

    def is_older_than(self, other: Version) -> bool:
        """Whether this version was superseded by `other`; False if neither is newer."""
        return self.order < other.order

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch.counter})"
