"""Records the last steps of training and copying, as a trace. Chrome and Perfetto show it.

    tracks   steps     │ step 7                                  │ step 8 …
             training  │ F0 │ F1 │ wait │ B0 │ F2 │ … │ fence │
             copying   │    (chunks, each with its tier)  │ parity │ digests │
             snapshots │ OPENING │ COPYING │ LANDED │

A ring of fixed size keeps the newest events. To record an event costs one append; the trace is made
on request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from reft.client.snapshot.task import SnapshotTask
from reft.core.pipeline.pacing import Tier

EVENTS_MAX = 16384
TIERS = {
    Tier.GAP: "gap",
    Tier.COMPUTE: "beside compute",
    Tier.COLLECTIVE: "beside collectives",
    Tier.FENCE: "fence",
}
STEPS, TRAINING, COPYING, SNAPSHOTS = "steps", "training", "copying", "snapshots"


class TimelineEvent(NamedTuple):
    """Something that happened from one time to another, in seconds of `time.perf_counter`.

    Attributes:
        track: the line of the picture on which the event is drawn.
        name: what happened.
        tier: what training did when the event began; None if the event copied nothing.
        detail: a number of the event: of a copy task, or of bytes; -1 is none.
    """

    track: str
    name: str
    begin_s: float
    end_s: float
    tier: Tier | None = None
    detail: int = -1


class Timeline:
    """The newest events of one rank. Any thread may add.

    Args:
        most: how many events are kept.
    """

    def __init__(self, most: int = EVENTS_MAX) -> None:
        self._events: deque[TimelineEvent] = deque(maxlen=most)
        # Times since 1970, so that the traces of several ranks fit together.
        self._epoch_s = time.time() - time.perf_counter()

    def add(self, event: TimelineEvent) -> None:
        """Adds an event; drops the oldest one if the ring is full."""
        self._events.append(event)

    def events(self) -> list[TimelineEvent]:
        """Returns the events that are kept, oldest first."""
        return list(self._events)

    def chrome(self, rank: int, more: Sequence[TimelineEvent] = ()) -> dict[str, Any]:
        """Returns one rank's trace as JSON types, for chrome://tracing and ui.perfetto.dev.

        Args:
            rank: the rank.
            more: events that the ring does not keep.

        Times are microseconds since 1970, so the traces of one machine's ranks can be joined into
        one file.
        """
        events = [*self.events(), *more]
        tracks = list(dict.fromkeys([STEPS, TRAINING, *sorted({event.track for event in events})]))
        numbers = {track: number for number, track in enumerate(tracks)}
        trace_events: list[dict[str, Any]] = [_label("process_name", rank, 0, f"rank {rank}")]
        trace_events += [_label("thread_name", rank, number, track) for track, number in numbers.items()]
        trace_events += [self._trace_event(event, rank, numbers[event.track]) for event in events]
        return {"traceEvents": trace_events, "displayTimeUnit": "ms"}

    def _trace_event(self, event: TimelineEvent, rank: int, number: int) -> dict[str, Any]:
        trace_event: dict[str, Any] = {
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
        return {**trace_event, "args": details} if details else trace_event


def snapshot_spans(task: SnapshotTask) -> list[TimelineEvent]:
    """Returns one event for each state of a snapshot, from the task's own events."""
    return [
        TimelineEvent(SNAPSHOTS, f"step {task.step} {begin.text}", begin.at_s, end.at_s)
        for begin, end in pairwise(tuple(task.events))  # the snapshot thread adds some meanwhile
    ]


def _label(kind: str, rank: int, number: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": number, "args": {"name": name}}
