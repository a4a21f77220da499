"""What an engine has copied: how many bytes in which tier, how fast, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from reft.client.snapshot.timeline import TRAINING, Timeline, TimelineEvent
from reft.core.pipeline.pacing import Tier
from reft.core.pipeline.profile import Estimate

LEAST_S = 1e-4  # shorter than this says nothing about a rate


class CopyStats:
    """See the module. Any thread may count."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._lock = threading.Lock()
        self._written = dict.fromkeys(Tier, 0)
        self._rates: dict[Tier, Estimate] = {}
        self._parity = Estimate()
        self.stall_s = 0.0  # for which training waited for copies

    def wrote(self, counts: Iterable[int]) -> None:
        """Counts bytes that were written, one number a tier, by what training did when their copy began."""
        with self._lock:
            for tier, count in zip(Tier, counts, strict=True):
                self._written[tier] += count

    def stalled(self, begin_s: float, end_s: float) -> None:
        """Counts a time in which training waited at the fence."""
        self.stall_s += end_s - begin_s
        self.timeline.add(TimelineEvent(TRAINING, "fence", begin_s, end_s, Tier.FENCE))

    def moved(self, tier: Tier, nbytes: float, seconds: float, is_parity: bool = False) -> None:
        """Takes a measurement of the engine's speed, of all its threads together, into account."""
        if seconds < LEAST_S:
            return
        with self._lock:
            if is_parity:
                self._parity.observe(nbytes / seconds)
                return
            self._rates.setdefault(tier, Estimate()).observe(nbytes / seconds)

    def rate(self, tier: Tier) -> float:
        """Bytes a second beside what training does; what was measured beside something else before it was; 0 if nothing."""
        with self._lock:
            found = self._rates.get(tier) or next(iter(self._rates.values()), None)
            return found.mean if found else 0.0

    def parity_rate(self) -> float:
        """Bytes of parity a second, computed and written; 0 if it was not measured apart from copies."""
        with self._lock:
            return self._parity.mean

    def written(self, tier: Tier | None = None) -> int:
        """Bytes written in a tier, or in all."""
        with self._lock:
            return sum(self._written.values()) if tier is None else self._written[tier]
