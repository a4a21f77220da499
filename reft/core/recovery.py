"""The recovery plan: from the headers of all surviving slots to the version that every rank loads, or what is missing.

    headers of every reachable daemon ─► plan ─► decision record (new epoch, base) on every daemon ─► load
                                           ▲                                                           │
                                           └──────────── a slot that failed its digest is an erasure ──┘

Invariants
  1. The same inputs give the same plan on every rank; the order of the inputs does not matter.
  2. A version is whole only if every rank of the job holds a sealed slot of exactly that (epoch, step).
  3. Only versions of the newest decision's epoch count, and its base with what led to it: whatever an older history
     wrote after the base, on a node that came back or in an orphan, is dropped.
  4. The plan never looks at what the round announced.

This version knows losses of processes, not of nodes: each rank's state lies whole in its own slot. The cells, shards and
codes that let nodes vanish enter here, as further ways in which a rank's blocks are found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from reft.core.slots import SlotState
from reft.core.version import Epoch, Version


@dataclass(frozen=True)
class Held:
    """One slot's header as its daemon read it.

    Attributes:
        node: id of the node whose daemon holds the slot.
        rank: the rank that wrote it.
        slot: name of the slot in that daemon's arena.
        layout: digest of the leaf table.
    """

    node: str
    rank: int
    slot: str
    state: SlotState
    version: Version | None
    layout: bytes = b""


@dataclass(frozen=True)
class Decision:
    """What one attach decided: the epoch that writes from now on, and the version that it started from."""

    epoch: Epoch
    base: Version | None


@dataclass(frozen=True)
class Plan:
    """What every rank does.

    Attributes:
        base: the version to load; None means a fresh start.
        sources: rank → the slot that it loads from; empty on a fresh start.
        dropped: slots that must be emptied before anyone writes: open, or newer than the base, or of a dead history.
        partial: newer versions that some ranks hold and others lack, with the ranks that lack them, newest first.
    """

    base: Version | None
    sources: dict[int, Held] = field(default_factory=dict)
    dropped: tuple[Held, ...] = ()
    partial: tuple[tuple[Version, tuple[int, ...]], ...] = ()


def newest_decision(decisions: Iterable[Decision | None]) -> Decision | None:
    """The decision that holds: the one with the greatest epoch counter."""
    found = [decision for decision in decisions if decision is not None]
    return max(found, key=lambda decision: (decision.epoch.counter, decision.epoch.ident), default=None)


def next_epoch(decisions: Iterable[Decision | None], held: Iterable[Held], ident: bytes) -> Epoch:
    """An epoch above all that were ever seen."""
    counters = [decision.epoch.counter for decision in decisions if decision is not None]
    counters += [slot.version.epoch.counter for slot in held if slot.version is not None]
    return Epoch(max(counters, default=0) + 1, ident)


def plan(
    held: Collection[Held], world: int, decision: Decision | None, erased: Collection[tuple[str, str, Version]] = ()
) -> Plan:
    """The newest version that is whole, and where each rank finds it.

    Args:
        held: the headers of all slots of the job on all reachable daemons.
        world: how many ranks the job had.
        decision: the newest decision record, None if the job never attached.
        erased: (node, slot, version) of slots that failed their digests: treated as if they were not there.
    """
    usable = [slot for slot in held if _counts(slot, decision) and _key(slot) not in erased]
    found: dict[Version, dict[int, Held]] = {}
    for slot in sorted(usable, key=lambda slot: (slot.node, slot.slot)):
        if slot.version is not None:
            found.setdefault(slot.version, {}).setdefault(slot.rank, slot)
    partial = []
    base = None
    for version in sorted(found, key=lambda version: (*version.order, version.epoch.ident), reverse=True):
        missing = tuple(sorted(set(range(world)) - set(found[version])))
        if not missing:
            base = version
            break
        partial.append((version, missing))
    sources = {rank: slot for rank, slot in found[base].items() if rank < world} if base else {}
    dropped = sorted((slot for slot in held if _is_dead(slot, base, erased)), key=lambda slot: (slot.node, slot.slot))
    return Plan(base, sources, tuple(dropped), tuple(partial))


def _counts(slot: Held, decision: Decision | None) -> bool:
    if slot.state is not SlotState.SEALED or slot.version is None:
        return False
    if decision is None or slot.version.epoch == decision.epoch:
        return True
    base = decision.base
    return base is not None and slot.version.epoch == base.epoch and slot.version.step <= base.step


def _is_dead(slot: Held, base: Version | None, erased: Collection[tuple[str, str, Version]]) -> bool:
    """Older sealed slots are kept: if the base turns out to be corrupt, they are what is left."""
    if slot.state is SlotState.EMPTY or slot.version is None:
        return False
    if slot.state is not SlotState.SEALED or base is None or _key(slot) in erased:
        return True
    return not slot.version.is_older_than(base) and slot.version != base


def _key(slot: Held) -> tuple[str, str, Version] | None:
    return None if slot.version is None else (slot.node, slot.slot, slot.version)
