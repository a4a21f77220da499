"""Decides when the coordinator persists a step, and which one.

    each --persist-every ─┐
    reft-cli, a trainer ──┼─► pins.persist := step ─► every node writes ─► commit ─► prune ─► none
    the end of the job ───┘                             └─ given up ─────────────────────────► none

Invariants
  1. At most one step is persisted at a time. It is pinned until its checkpoint is complete, or is
     given up. So its slots stay. Ranks with fewer than PERSIST_SLOTS_MIN slots get no pin: else
     they could write no slot meanwhile. Then the step may be overwritten, and is given up.
  2. A protected step goes first: the job comes back to it anyway if a node is lost. A flush takes
     the newest whole step instead, because no later one comes.
  3. A step that a restarted coordinator finds pinned is persisted again, under other names.
  4. A failed step is not tried again by itself. The next interval takes a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from reft.core.commit.pins import Pins

PERSIST_SLOTS_MIN = 3  # of a rank: the persisted step, the newest whole one, and one to write


@dataclass(frozen=True)
class PersistCadence:
    """What a coordinator knows of the checkpoints of one epoch.

    Attributes:
        every_s: seconds between two checkpoints; 0: only on request.
        due_s: when the next one is due without a request.
        persisted: the newest step that is complete on storage; -1: none of this epoch.
        requested: a step that somebody asked for; -1: none.
        given_up: the newest step that was given up since the last request; -1: none.
        flushes: whether the request wants the newest whole step.
    """

    every_s: float
    due_s: float
    persisted: int = -1
    requested: int = -1
    given_up: int = -1
    flushes: bool = False

    def request(self, pins: Pins, flush: bool) -> PersistCadence:
        """Returns the cadence after a request; `requested` is the step that answers it."""
        step = max(newest_step(pins, flush), self.requested)
        return replace(self, requested=step, given_up=-1, flushes=self.flushes or flush)

    def next_step(self, pins: Pins, now_s: float) -> int:
        """Returns the step to persist now; -1: none."""
        newest = newest_step(pins, self.flushes)
        if pins.persist > self.persisted:
            return pins.persist
        is_due = self.every_s > 0 and now_s >= self.due_s
        return newest if newest > self.persisted and (is_due or self.requested > self.persisted) else -1

    def begin(self, now_s: float) -> PersistCadence:
        """Returns the cadence after a checkpoint was begun, or was not needed."""
        return replace(self, due_s=now_s + self.every_s)

    def end(self, step: int, is_complete: bool) -> PersistCadence:
        """Returns the cadence after the checkpoint of `step` has ended."""
        if is_complete:
            after = replace(self, persisted=max(step, self.persisted))
            return replace(after, requested=-1, flushes=False) if after.persisted >= self.requested else after
        after = replace(self, given_up=max(step, self.given_up))
        return replace(after, requested=-1, flushes=False) if self.requested <= step else after

    def found(self, age_s: float, now_s: float) -> PersistCadence:
        """Returns the cadence, now that a checkpoint of this age was found on storage.

        A coordinator that begins would else wait a whole interval. If nodes change more often than
        that, there would be no checkpoint at all. A wrong clock makes one early at worst.
        """
        left_s = self.every_s - min(max(age_s, 0.0), self.every_s)
        return replace(self, due_s=min(self.due_s, now_s + left_s))

    def next_epoch(self) -> PersistCadence:
        """Returns the cadence of the next epoch. The interval goes on: attaches may be frequent."""
        return PersistCadence(self.every_s, self.due_s)


def newest_step(pins: Pins, flush: bool = False) -> int:
    """Returns the step that a checkpoint would have now; -1: none is whole.

    The step of a turn is whole, and pinned already.
    """
    if flush:
        return pins.whole
    return next((step for step in (pins.protected, pins.turn) if step >= 0), pins.whole)
