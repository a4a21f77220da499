"""The decision of an attach, and which versions count under it."""

from __future__ import annotations

from dataclasses import dataclass

from reft.core.commit.version import Epoch, Version

KNOWN_MAX = 64  # epochs that a decision can name


@dataclass(frozen=True)
class Decision:
    """The result of one attach.

    Attributes:
        epoch: the epoch that writes from now on.
        base: the version that training starts from; None: training starts fresh.
        known: epochs of all earlier decisions that this attach knew of, the newest first. A full
            list also stands for all older epochs.
        guard: the guard version: the newest one, not newer than the base, that survives lost
            nodes. It stays until a newer one is protected, through any number of attaches. None:
            there is none, or the epoch exchanges nothing.
    """

    epoch: Epoch
    base: Version | None
    known: tuple[Epoch, ...] = ()
    guard: Version | None = None

    def supersedes(self, epoch: Epoch) -> bool:
        """Whether this attach knew of `epoch`, and so ended it.

        Of an ended epoch, only the versions up to the base count.
        """
        return epoch in self.known or (len(self.known) >= KNOWN_MAX and epoch.counter < self.known[-1].counter)


def counts(version: Version, decision: Decision | None) -> bool:
    """Whether the version belongs to the history of the decision in force."""
    if decision is None or version.epoch == decision.epoch:
        return True
    kept = (each for each in (decision.base, decision.guard) if each is not None)
    return any(version.epoch == each.epoch and version.step <= each.step for each in kept)
