"""What training and copying did in the last steps, as a trace that Chrome's and Perfetto's viewers show.

    tracks   steps     │ step 7                                  │ step 8 …
             training  │ F0 │ F1 │ wait │ B0 │ F2 │ … │ fence │
             copying   │    (chunks, each with its tier)  │ parity │ digests │

The newest events are kept, in a ring of fixed size. An event costs one append; what a viewer wants is made when asked.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from reft.core.pipeline.pacing import Tier

EVENTS_MAX = 16384
TIERS = {
    Tier.GAP: "gap",
    Tier.COMPUTE: "beside compute",
    Tier.COLLECTIVE: "beside collectives",
    Tier.FENCE: "fence",
}
STEPS, TRAINING, COPYING = "steps", "training", "copying"


class TimelineEvent(NamedTuple):
    """Something that took from one time to another, in seconds of `time.perf_counter`.

    Attributes:
        track: one line of the picture.
        name: what it was.
        tier: what training did when it began; None if it copied nothing.
        detail: a number that belongs to it: of a chunk, or bytes.
    """

    track: str
    name: str
    begin_s: float
    end_s: float
    tier: Tier | None = None
    detail: int = -1


class Timeline:
    """See the module. Any thread may add.

    Args:
        most: events that are kept.
    """

    def __init__(self, most: int = EVENTS_MAX) -> None:
        self._events: deque[TimelineEvent] = deque(maxlen=most)
        self._epoch_s = time.time() - time.perf_counter()  # so that the traces of several ranks lie side by side

    def add(self, event: TimelineEvent) -> None:
        """Keeps an event; the oldest makes room."""
        self._events.append(event)

    def events(self) -> list[TimelineEvent]:
        """Those that are kept, as they were added."""
        return list(self._events)

    def chrome(self, rank: int) -> dict[str, Any]:
        """The trace of one rank as JSON types, in the format that chrome://tracing and ui.perfetto.dev open.

        Times are microseconds since 1970, so traces of ranks of one machine can be laid into one file.
        """
        events = self.events()
        tracks = list(dict.fromkeys([STEPS, TRAINING, *sorted({event.track for event in events})]))
        numbers = {track: number for number, track in enumerate(tracks)}
        found: list[dict[str, Any]] = [_label("process_name", rank, 0, f"rank {rank}")]
        found += [_label("thread_name", rank, number, track) for track, number in numbers.items()]
        found += [self._drawn(event, rank, numbers[event.track]) for event in events]
        return {"traceEvents": found, "displayTimeUnit": "ms"}

    def _drawn(self, event: TimelineEvent, rank: int, number: int) -> dict[str, Any]:
        drawn: dict[str, Any] = {
            "name": event.name,
            "cat": event.track if event.tier is None else TIERS[event.tier],
            "ph": "X",
            "ts": round((self._epoch_s + event.begin_s) * 1e6, 1),
            "dur": round((event.end_s - event.begin_s) * 1e6, 1),
            "pid": rank,
            "tid": number,
        }
        details: dict[str, Any] = {} if event.tier is None else {"tier": int(event.tier)}
        if event.detail >= 0:
            details["number"] = event.detail
        return {**drawn, "args": details} if details else drawn


def _label(kind: str, rank: int, number: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": number, "args": {"name": name}}
