"""The outcome of the round, as one rank's snapshots need it."""

from __future__ import annotations

from reft.client.link.reports import Reporter
from reft.core.commit.version import Version


class RoundView:
    """What this rank knows to be whole.

    Args:
        reporter: hears the outcome.
        base: the version that this attach started from; it is known to be whole.

    Attributes:
        discarded_until: up to this step, numbers counted calls of the optimizer; such steps count
            as never taken. -1 excludes none.
    """

    def __init__(self, reporter: Reporter, base: Version | None) -> None:
        self._reporter = reporter
        self.base = base
        self.discarded_until = -1

    @property
    def whole(self) -> Version | None:
        """The newest version known to be whole: of this epoch and not discarded, or the base."""
        known = self._reporter.whole
        return self.base if known is None or self.is_discarded(known.step) else known

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
