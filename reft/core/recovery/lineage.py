"""Decides which history of a job counts if daemons remember different decisions.

    decision, epoch 4 ── knows 3, 2, 1 ── ends their versions,         daemons on a, b
                                          except its base
    decision, epoch 3 ── knows 2, 1                                    a daemon on c, back late

A rank writes under a decision only after the daemons of all nodes of that decision have it. A
daemon accepts only greater decisions. Suppose a daemon of the decision's own nodes has a lower
decision, or another of the same counter. Then the decision was never carried out: its attach died
while announcing it. It must not outrank the history that continued without the node that received
it.

Counters do not order two decisions that do not know each other. Each was made while all daemons
that remember the other one were silent, and one may have reached a single node only. The versions
written under them decide.

Invariants
  1. The same inputs give the same history on every rank. The order of the inputs does not matter.
  2. A decision ends the decisions that it knew of.
  3. A decision outranks another one that it does not know only under two conditions. Nothing was
     written under the other one, and the first knew of the history that the other one goes back to.
     So a version is never dropped by a decision that did not know of it.
  4. If versions were written under two decisions, and neither knows the other, a person must
     choose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from reft.core.commit.decision import KNOWN_MAX, Decision
from reft.core.commit.version import Epoch
from reft.core.recovery.recovery import HeldCapsule, HeldSlot


def histories(
    remembered: Mapping[str, Decision], members: Mapping[Epoch, Collection[str]], written: Collection[Epoch]
) -> list[Decision]:
    """Returns the decision in force, and others that it may not outrank.

    The others are decisions of other histories.

    Returns more than one decision only if none of them may outrank the others.

    Args:
        remembered: node id → the decision that its daemon remembers.
        members: epoch → ids of the nodes of its decision that still hold the same job.
        written: the epochs of which a slot or a capsule is left.
    """

    def is_torn(decision: Decision) -> bool:
        others = (remembered.get(node, decision).epoch for node in members.get(decision.epoch, ()))
        return any(epoch != decision.epoch and epoch.counter <= decision.epoch.counter for epoch in others)

    def newest_epoch(decision: Decision) -> Epoch | None:
        """Returns the epoch of the newest bytes in the history of a decision."""
        if decision.epoch in written:
            return decision.epoch
        return decision.base.epoch if decision.base else None

    def may_outrank(decision: Decision, other: Decision) -> bool:
        other_epoch = newest_epoch(other)
        return other_epoch is None or other_epoch == newest_epoch(decision) or decision.supersedes(other_epoch)

    decisions = set(remembered.values())
    carried_out = {each for each in decisions if not is_torn(each)} or decisions
    newest = [each for each in carried_out if not any(other.supersedes(each.epoch) for other in carried_out)]
    leading = [each for each in newest if all(may_outrank(each, other) for other in newest)]
    return sorted(leading, key=_order)[-1:] or sorted(newest, key=_order, reverse=True)


def _order(decision: Decision) -> tuple[object, ...]:
    """Sorts decisions of one history by their base.

    The newest base wins, so that no version is dropped which another decision kept.
    """
    base = () if decision.base is None else (decision.base.order, decision.base.epoch.ident)
    return (base, decision.epoch.counter, decision.epoch.ident)


def written_by(held: Iterable[HeldSlot], copies: Iterable[HeldCapsule]) -> set[Epoch]:
    """Returns the epochs of which a slot or a capsule is left."""
    return {slot.version.epoch for slot in held if slot.version is not None} | {copy.version.epoch for copy in copies}


def next_epoch(decisions: Iterable[Decision], held: Iterable[HeldSlot], ident: bytes) -> Epoch:
    """Returns an epoch above all epochs ever seen, also those of decisions never carried out."""
    counters = [decision.epoch.counter for decision in decisions]
    counters += [slot.version.epoch.counter for slot in held if slot.version is not None]
    return Epoch(max(counters, default=0) + 1, ident)


def known_to(decisions: Iterable[Decision]) -> tuple[Epoch, ...]:
    """Returns the epochs that a decision knows if it is made where `decisions` are remembered."""
    known = {epoch for decision in decisions for epoch in (decision.epoch, *decision.known)}
    return tuple(sorted(known, key=lambda epoch: (epoch.counter, epoch.ident), reverse=True)[:KNOWN_MAX])
