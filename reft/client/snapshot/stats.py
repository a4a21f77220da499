"""Statistics of a copy engine: bytes by tier, rates, and the timeline of events."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from reft.client.snapshot.timeline import TRAINING, Timeline, TimelineEvent
from reft.core.pipeline.pacing import Tier
from reft.core.pipeline.profile import Estimate

LEAST_S = 1e-4  # a shorter time says nothing about a rate


class CopyStats:
    """How many bytes were copied, when and how fast. Any thread may call any method."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._lock = threading.Lock()
        self._written = dict.fromkeys(Tier, 0)
        self._rates: dict[Tier, Estimate] = {}
        self._parity = Estimate()
        self.stall_s = 0.0  # sum of the times that training waited for copies

    def wrote(self, counts: Iterable[int]) -> None:
        """Adds written bytes: one number for each tier, the one in which the copy began."""
        with self._lock:
            for tier, count in zip(Tier, counts, strict=True):
                self._written[tier] += count

    def stalled(self, begin_s: float, end_s: float) -> None:
        """Adds a time in which training waited at the fence."""
        self.stall_s += end_s - begin_s
        self.timeline.add(TimelineEvent(TRAINING, "fence", begin_s, end_s, Tier.FENCE))

    def moved(self, tier: Tier, nbytes: float, seconds: float, is_parity: bool = False) -> None:
        """Adds a measurement of the engine's rate, which is that of all its threads together."""
        if seconds < LEAST_S:
            return
        with self._lock:
            if is_parity:
                self._parity.observe(nbytes / seconds)
                return
            self._rates.setdefault(tier, Estimate()).observe(nbytes / seconds)

    def rate(self, tier: Tier) -> float:
        """Returns the bytes copied a second in a tier.

        Returns:
            The rate of another tier if this one was never measured; 0 if none was.
        """
        with self._lock:
            estimate = self._rates.get(tier) or next(iter(self._rates.values()), None)
            return estimate.mean if estimate else 0.0

    def parity_rate(self) -> float:
        """Returns the bytes of parity computed and written a second; 0 if never measured."""
        with self._lock:
            return self._parity.mean

    def written(self, tier: Tier | None = None) -> int:
        """Returns the bytes written in a tier, or in all tiers."""
        with self._lock:
            return sum(self._written.values()) if tier is None else self._written[tier]
