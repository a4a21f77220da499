"""The decision of an attach, and which versions count under it."""

from __future__ import annotations

from dataclasses import dataclass

from reft.core.commit.version import Epoch, Version

KNOWN_MAX = 64  # attaches that a decision names


@dataclass(frozen=True)
class Decision:
    """What one attach decided: the epoch that writes from now on, and the version that it started from.

    Attributes:
        known: the epochs of all decisions before it that it knew of, the newest first; of a full list, older ones too.
    """

    epoch: Epoch
    base: Version | None
    known: tuple[Epoch, ...] = ()

    def ends(self, epoch: Epoch) -> bool:
        """Whether it knew of that one, so that what was written under it is over, but for the base."""
        return epoch in self.known or (len(self.known) >= KNOWN_MAX and epoch.counter < self.known[-1].counter)


def counts(version: Version, decision: Decision | None) -> bool:
    """Whether the version belongs to the history in force."""
    if decision is None or version.epoch == decision.epoch:
        return True
    base = decision.base
    return base is not None and version.epoch == base.epoch and version.step <= base.step
