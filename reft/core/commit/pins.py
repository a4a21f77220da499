"""Pins: the versions whose slots and capsules stay, and the turns that protect them.

Unreplicated state exists once. So daemons keep parity of one another's sealed slots, made outside
the step. A *turn* makes the parity of one whole step on all nodes. Two watermarks follow: `whole`
survives processes, `protected` survives lost nodes, too.

    ranks ── sealed(s) on all ──► whole = s
                                    │ no turn is under way, and enough slots stay free
                                    ▼
    coordinator ── pins(turn = s) ──► daemons pull blocks, seal parity ── guarded(s) ──► all nodes?
                                                                                           │
         parity of P is gone ──► protected = none ◄──── pins(protected = s, turn = none) ◄─┘

Invariants
  1. `Pins` travel and are replaced as one value: the greater `seq` replaces all fields. The reuse
     rule reads `whole` from the same value as the pinned steps.
  2. The coordinator keeps its pins in the job's record before it announces them. A record that can't
     be written announces nothing new.
  3. The slots and the capsules of a pinned version stay, on every node that has them.
  4. A turn takes the newest whole step. At most one turn is under way.
  5. A turn begins only while the pins leave two slots. So one slot can always be written.
  6. Until a step of the new epoch is whole, the base is pinned. Until one is protected, the guard
     is.

A lost message is repeated by the next one, since each is complete. A late one has a smaller `seq`,
and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from reft.core.commit.decision import Decision
from reft.core.commit.version import Version


@dataclass(frozen=True)
class Pins:
    """The steps of an epoch that stay, as one value; -1: none.

    Attributes:
        seq: counts the values that the coordinator announced.
        whole: the newest whole step.
        turn: the step whose parity is being made.
        protected: the newest step that survives lost nodes.
    """

    seq: int = 0
    whole: int = -1
    turn: int = -1
    protected: int = -1

    def merge(self, other: Pins) -> Pins:
        """Returns the newer of two values."""
        return other if other.seq > self.seq else self


def pinned_versions(pins: Pins, decision: Decision) -> frozenset[Version]:
    """Returns the versions whose slots and capsules stay beside those that may become whole.

    Args:
        pins: the newest pins that are known.
        decision: the decision in force.
    """
    pinned = {Version(decision.epoch, step) for step in (pins.whole, pins.turn, pins.protected) if step >= 0}
    if pins.whole < 0 and decision.base is not None:
        pinned.add(decision.base)
    if pins.protected < 0 and decision.guard is not None:
        pinned.add(decision.guard)
    return frozenset(pinned)
