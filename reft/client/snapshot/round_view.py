"""The outcome of the round, as one rank's snapshots need it."""

from __future__ import annotations

from typing import NamedTuple

from reft.client.link.reports import Reporter
from reft.core.commit.decision import Decision
from reft.core.commit.pins import Pins, pinned_versions
from reft.core.commit.version import Version


class KeptVersions(NamedTuple):
    """The versions that this rank must not overwrite, all by one outcome.

    Attributes:
        whole: the newest version known to be whole; None if there is none.
        pinned: versions that stay, though they may be older.
    """

    whole: Version | None
    pinned: frozenset[Version]


class RoundView:
    """What this rank knows to be whole, and to be pinned.

    Args:
        reporter: hears the outcome.
        decision: the decision in force; its base is known to be whole.

    Attributes:
        discarded_until: up to this step, numbers counted calls of the optimizer; such steps count
            as never taken. -1 excludes none.
    """

    def __init__(self, reporter: Reporter, decision: Decision) -> None:
        self._reporter = reporter
        self._decision = decision
        self.discarded_until = -1

    @property
    def base(self) -> Version | None:
        """The version that this attach started from."""
        return self._decision.base

    @property
    def kept(self) -> KeptVersions:
        """The newest whole version and the pinned ones, by the newest outcome.

        Both come from one outcome: a whole step of a later one could lie behind its pins.
        """
        pins = self._reporter.pins
        if self.is_discarded(pins.whole):
            pins = Pins()
        whole = Version(self._decision.epoch, pins.whole) if pins.whole >= 0 else self.base
        return KeptVersions(whole, pinned_versions(pins, self._decision))

    @property
    def whole(self) -> Version | None:
        """The newest version known to be whole: of this epoch and not discarded, or the base."""
        return self.kept.whole

    @property
    def whole_step(self) -> int:
        """The newest step that is known to be whole; -1 if there is none."""
        return self.whole.step if self.whole else -1

    def voids(self, version: Version) -> bool:
        """Decides whether a version is known never to become whole."""
        return self._reporter.voids(version)

    def is_discarded(self, step: int) -> bool:
        """Tells whether this step's number counted calls of the optimizer."""
        return step <= self.discarded_until
