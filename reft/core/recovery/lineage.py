"""Which history of a job counts, where daemons remember unlike decisions.

    decision, epoch 4 ── knows 3, 2, 1 ── what they wrote is over, but for the base           daemons on a, b
    decision, epoch 3 ── knows 2, 1                                                           a daemon on c, back late

Nobody writes under a decision before the daemons of all its nodes have it, and a daemon only takes greater ones. So one that a
daemon of its own nodes lacks, which has a lower one or another of the same counter, was never carried out: its attach died
while it was told. It must not outrank the history that went on without the node that heard of it.

Counters say nothing of two decisions that know nothing of each other: each was made while the node that remembers the other was
silent, and one of them was perhaps told to a single node. What was written under them decides.

Invariants
  1. The same inputs give the same history on every rank; the order of the inputs does not matter.
  2. A decision ends those that it knew of.
  3. One that does not know of another outranks it only if nothing was written under the other, and the first knew of the
     history that the other goes back to. So no version is dropped that the deciding ranks had never heard of.
  4. Where two have written, neither knowing of the other, a person must choose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from reft.core.commit.decision import KNOWN_MAX, Decision
from reft.core.commit.version import Epoch
from reft.core.recovery.recovery import HeldCapsule, HeldSlot


def histories(
    remembered: Mapping[str, Decision], members: Mapping[Epoch, Collection[str]], written: Collection[Epoch]
) -> list[Decision]:
    """The decision in force; then those of other histories that none of them may outrank, if there are any.

    Args:
        remembered: node id → what its daemon remembers.
        members: epoch → ids of the nodes that its decision was for, as far as they still hold the same job.
        written: the epochs of which a slot or a capsule is left.
    """

    def is_torn(decision: Decision) -> bool:
        others = (remembered.get(node, decision).epoch for node in members.get(decision.epoch, ()))
        return any(epoch != decision.epoch and epoch.counter <= decision.epoch.counter for epoch in others)

    def last(decision: Decision) -> Epoch | None:
        """Of which epoch the newest bytes of its history are."""
        if decision.epoch in written:
            return decision.epoch
        return decision.base.epoch if decision.base else None

    def may_outrank(decision: Decision, other: Decision) -> bool:
        theirs = last(other)
        return theirs is None or theirs == last(decision) or decision.ends(theirs)

    every = set(remembered.values())
    carried = {each for each in every if not is_torn(each)} or every
    newest = [each for each in carried if not any(other.ends(each.epoch) for other in carried)]
    leading = [each for each in newest if all(may_outrank(each, other) for other in newest)]
    return sorted(leading, key=_order)[-1:] or sorted(newest, key=_order, reverse=True)


def _order(decision: Decision) -> tuple[object, ...]:
    """Of those that go back to one history: the newest base first, so that nothing is dropped which another had kept."""
    base = () if decision.base is None else (decision.base.order, decision.base.epoch.ident)
    return (base, decision.epoch.counter, decision.epoch.ident)


def written_by(held: Iterable[HeldSlot], copies: Iterable[HeldCapsule]) -> set[Epoch]:
    """The epochs of which a slot or a capsule is left."""
    return {slot.version.epoch for slot in held if slot.version is not None} | {copy.version.epoch for copy in copies}


def next_epoch(decisions: Iterable[Decision], held: Iterable[HeldSlot], ident: bytes) -> Epoch:
    """An epoch above all that were ever seen, those of decisions that were never carried out included."""
    counters = [decision.epoch.counter for decision in decisions]
    counters += [slot.version.epoch.counter for slot in held if slot.version is not None]
    return Epoch(max(counters, default=0) + 1, ident)


def known_to(decisions: Iterable[Decision]) -> tuple[Epoch, ...]:
    """What a decision knows that is made where these are remembered."""
    known = {epoch for decision in decisions for epoch in (decision.epoch, *decision.known)}
    return tuple(sorted(known, key=lambda epoch: (epoch.counter, epoch.ident), reverse=True)[:KNOWN_MAX])
