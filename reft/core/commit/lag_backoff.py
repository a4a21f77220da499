"""Thins out snapshots while the round is slower than a step.

All ranks then take the same snapshots.

    a snapshot each step, 3 slots, outcomes arrive 8 steps late (nothing else is wrong):
      rank 0   takes 5 6 · · 9 10 ·  ·  13 14 …     hears at once of a void: its slots free up first
      rank 1   takes · · 7 8 ·  · 11 12 ·  ·  …     no step is taken by both, so none becomes whole
    only multiples of 4:
      both     take  · · · 8 ·  ·  ·  12 ·  ·  …

A slot is in use from its step until the outcome. One of the `slots` holds the newest whole version.
Slots of other pinned versions (core/commit/pins.py) do not count: all ranks subtract the same pins.
So a rank can take one step out of lag ÷ (slots - 1), where the lag is the distance to the newest
whole step. The step number decides which steps are taken: multiples of the next power of two.

Invariants
  1. Ranks that see different lags share steps: a multiple of the larger power is a multiple of the
     smaller one.
  2. Every due step is taken as long as no sealed snapshot was lost, or outcomes arrive before the
     next step. A rank that hears nothing, because daemons are away, does not thin out. Nor does the
     one rank whose snapshots succeed. So when the daemons are back, the next step counts.
  3. From any step, the next step that is taken is less than SPACING_MAX due steps away.

A lost or late outcome makes the lag look larger: fewer steps are taken until an outcome arrives. A
repeated outcome changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

SPACING_MAX = 16  # also sufficient for longer lags: the outcome of each attempt has 16 due steps to arrive
RECENT = 8 * SPACING_MAX  # due steps after which a failed snapshot is forgotten
MEMORY = 4  # outcomes to remember: if outcomes are late by chance, one early outcome proves little


@dataclass
class OutcomeDelays:
    """How long outcomes take, in steps, as one rank has seen it."""

    # The newest step at the time when this rank last heard that a step it had sealed is void; None:
    # never.
    last_void: int | None = None
    _recent: tuple[int, ...] = ()

    def note_decided(self, step: int, now: int, is_void: bool) -> None:
        """Notes that a sealed step was decided while `now` was the newest step."""
        self._recent = (*self._recent, now - step)[-MEMORY:]
        if is_void:
            self.last_void = now

    def longest(self, step: int, oldest: int | None) -> int:
        """Returns the longest delay of the last MEMORY outcomes and of the missing outcome.

        Args:
            step: the newest step.
            oldest: the oldest sealed step without an outcome; None: there is none.
        """
        return max((0 if oldest is None else step - oldest, *self._recent))


def backoff_interval(lag: int, in_vain: int | None, delay: int, slots: int) -> int:
    """Returns n, a power of two: every n-th due step is to be taken.

    Args:
        lag: due steps since the newest step that is known to be whole, or since the first step.
        in_vain: due steps since this rank heard that a step it had sealed is void; None: never.
        delay: the longest delay of a recent outcome, in due steps.
        slots: number of slots of this rank, without those of pinned versions other than the newest
            whole one.
    """
    interval = 1
    if in_vain is not None and in_vain <= RECENT and delay > 0:
        while interval < SPACING_MAX and lag > 2 * max(slots - 1, 1) * interval:
            interval *= 2
    return interval
