"""An explicit-state model of a new layout in mid-training, built on reft's own functions.

Rank i runs on node i; node 0 is the coordinator. The ranks take snapshots of steps 1, 2, … in epoch
1, without coupling. One attempt makes epoch 2: hold, pin, tell, base, decide, swap. Each message
arrives at any time or never. A daemon may restart, and forgets its pin. The attempt may fail before
the first decision; then all goes on in epoch 1. At any moment all ranks may die: recovery reads the
slots and the decisions that the daemons have. A daemon drops what only it has of a version (its
capsules) once it knows a newer one to be whole.

In every reachable state no rank writes in epoch 1 once a daemon has the decision. Recovery finds a
version that every rank holds sealed, that no daemon has dropped, and that is not older than the
newest one that any rank or daemon knows to be whole.

`Rules` has the rules that a test may break on purpose.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from reft.core.commit.decision import Decision
from reft.core.commit.relayout import accepts_base, holds_at, newest
from reft.core.commit.slots import Slot, SlotState, choose_slot
from reft.core.commit.version import Epoch, Version
from reft.core.recovery import recovery
from reft.core.recovery.lineage import histories
from reft.core.recovery.recovery import HeldSlot
from tests.core.model.commit_model import Violation, alone

OLD, NEW = Epoch(1, bytes([1]) * 16), Epoch(2, bytes([2]) * 16)
EPOCHS = {1: OLD, 2: NEW}
RANKS = 2
EMPTY = (0, 0, False)
Held = tuple[int, int, bool]  # epoch, step, whether SEALED; else WRITING


@dataclass(frozen=True)
class Rules:
    """The rules of reft. Each field with another value is one mistake."""

    holds: bool = True  # a rank begins no snapshot from hold on
    ends_first: bool = True  # hold waits until the last snapshot has ended
    pins: bool = True  # a daemon learns nothing from the pin on
    checks: bool = True  # a daemon refuses a base that is older than what it knows to be whole
    asks_all: bool = True  # the base covers what each rank and daemon knows, not rank 0's word alone
    keeps_base: bool = True  # the new epoch does not write over the base
    decides_first: bool = True  # a rank writes in the new epoch once every daemon has the decision


@dataclass(frozen=True)
class RankState:
    """One rank.

    Attributes:
        slots: its slots.
        step: the next step.
        sealed: the steps that it sealed in its epoch, as a bit mask.
        known: the newest step of epoch 1 that it knows to be whole; 0: none.
        is_held: whether it takes no snapshots.
        told: what it and its daemon knew, as it told the other ranks; None before.
        ready: its completed steps when it had slots of epoch 2; -1 before.
    """

    slots: tuple[Held, ...]
    step: int = 1
    sealed: int = 0
    known: int = 0
    is_held: bool = False
    told: int | None = None
    ready: int = -1


@dataclass(frozen=True)
class DaemonState:
    """One daemon.

    Attributes:
        known: the newest step of epoch 1 that it knows to be whole; 0: none.
        is_pinned: whether it learns nothing more.
        base: the base of the decision of epoch 2; None before. 0 is a fresh start.
    """

    known: int = 0
    is_pinned: bool = False
    base: int | None = None


@dataclass(frozen=True)
class WorldState:
    """All ranks and daemons.

    Attributes:
        heard: for each rank the steps of epoch 1 that the coordinator has heard to be sealed.
        failures: how many times the attempt may still fail, or a daemon may restart.
    """

    ranks: tuple[RankState, ...]
    daemons: tuple[DaemonState, ...]
    heard: tuple[int, ...]
    failures: int

    def with_rank(self, i: int, **changes: object) -> WorldState:
        ranks = [replace(rank, **changes) if j == i else rank for j, rank in enumerate(self.ranks)]  # type: ignore[arg-type]
        return replace(self, ranks=tuple(ranks))

    def with_daemon(self, i: int, **changes: object) -> WorldState:
        daemons = [replace(each, **changes) if j == i else each for j, each in enumerate(self.daemons)]  # type: ignore[arg-type]
        return replace(self, daemons=tuple(daemons))


def version(epoch: int, step: int) -> Version | None:
    return Version(EPOCHS[epoch], step) if step > 0 else None


@functools.cache
def chosen(slots: tuple[Held, ...], whole: Version | None) -> int | None:
    idle = [(i, held) for i, held in enumerate(slots) if held == EMPTY or held[2]]
    views = [
        Slot(i, SlotState.EMPTY if held == EMPTY else SlotState.SEALED, version(held[0], held[1])) for i, held in idle
    ]
    slot = choose_slot(views, whole, ())
    return None if slot is None else slot.index


@functools.cache
def recovered(slots_by_rank: tuple[tuple[Held, ...], ...], bases: tuple[int | None, ...]) -> Version | None:
    """Returns the version that recovery finds.

    Args:
        slots_by_rank: the slots of each rank.
        bases: what each daemon has of the decision of epoch 2.
    """
    remembered = {
        str(i): Decision(OLD, None) if base is None else Decision(NEW, version(1, base), (OLD,))
        for i, base in enumerate(bases)
    }
    held = [
        HeldSlot(str(rank), rank, f"{rank}.{i}", SlotState.SEALED if each[2] else SlotState.WRITING, version(*each[:2]))
        for rank, slots in enumerate(slots_by_rank)
        for i, each in enumerate(slots)
        if each != EMPTY
    ]
    members = dict.fromkeys(EPOCHS.values(), remembered)
    decisions = histories(remembered, members, {each.version.epoch for each in held if each.version})
    if len(decisions) != 1:
        raise Violation(f"{len(decisions)} histories: {remembered}")
    return recovery.plan(held, (), dict.fromkeys(EPOCHS.values(), alone(RANKS)), decisions[0]).base


class RelayoutModel:
    """Explores the reachable states under `rules`, and checks each one.

    Args:
        steps: steps of the run.
        rules: the rules.
        failures: how many times an attempt fails or a daemon restarts.
        slots: slots of a rank.
    """

    def __init__(self, steps: int, rules: Rules, failures: int = 1, slots: int = 2) -> None:
        self.steps, self.rules, self.failures, self.slots = steps, rules, failures, slots
        self.has_new_version = False  # whether a version of epoch 2 was ever found

    def explore(self) -> int:
        """Returns the number of reachable states.

        Raises:
            Violation: the invariant does not hold.
        """
        rank = RankState((EMPTY,) * self.slots)
        start = WorldState((rank,) * RANKS, (DaemonState(),) * RANKS, (0,) * RANKS, self.failures)
        seen, queue = {start}, deque([start])
        while queue:
            world = queue.popleft()
            self.check(world)
            for successor in self.successors(world):
                if successor not in seen:
                    seen.add(successor)
                    queue.append(successor)
        return len(seen)

    # Moves

    def successors(self, world: WorldState) -> Iterator[WorldState]:
        for i in range(RANKS):
            yield from self.trains(world, i)
            yield from self.talks(world, i)
            yield from self.attempts(world, i)
        yield from self.fails(world)

    def trains(self, world: WorldState, i: int) -> Iterator[WorldState]:
        """Begins a snapshot, skips a step, or seals a snapshot."""
        rank = world.ranks[i]
        for at, (epoch, step, is_sealed) in enumerate(rank.slots):
            if epoch and not is_sealed:
                slots = (*rank.slots[:at], (epoch, step, True), *rank.slots[at + 1 :])
                sealed = rank.sealed | 1 << step if epoch == (2 if rank.ready >= 0 else 1) else rank.sealed
                yield world.with_rank(i, slots=slots, sealed=sealed)
        if rank.step > self.steps:
            return
        yield world.with_rank(i, step=rank.step + 1)
        if rank.ready >= 0:
            at = self.slot_of_new_epoch(world, rank)
        elif rank.is_held and self.rules.holds:
            at = None
        else:
            at = chosen(rank.slots, version(1, rank.known))
        if at is not None:
            written = (2 if rank.ready >= 0 else 1, rank.step, False)
            yield world.with_rank(i, slots=(*rank.slots[:at], written, *rank.slots[at + 1 :]), step=rank.step + 1)

    def slot_of_new_epoch(self, world: WorldState, rank: RankState) -> int | None:
        """Returns the slot for the next step of epoch 2, if the layout holds there."""
        ready = [each.ready for each in world.ranks]
        if min(ready) < 0 or not holds_at(rank.step, max(ready) + 1):
            return None
        if not self.rules.keeps_base:
            return chosen(rank.slots, version(2, self.steps + 1))
        whole = self.new_whole(world)
        return chosen(rank.slots, version(2, whole) or version(1, world.daemons[0].base or 0))

    def new_whole(self, world: WorldState) -> int:
        """Returns the newest step of epoch 2 that every rank sealed; 0: none."""
        common = functools.reduce(int.__and__, (rank.sealed if rank.ready >= 0 else 0 for rank in world.ranks))
        return max(common.bit_length() - 1, 0)

    def talks(self, world: WorldState, i: int) -> Iterator[WorldState]:
        """Delivers a message of epoch 1: a report to the coordinator, or an outcome."""
        rank, daemon, first = world.ranks[i], world.daemons[i], world.daemons[0]
        if self.hears(first):
            for step in range(1, self.steps + 1):
                if rank.ready < 0 and rank.sealed >> step & 1 and not world.heard[i] >> step & 1:
                    heard = tuple(mask | (1 << step if j == i else 0) for j, mask in enumerate(world.heard))
                    known = max(functools.reduce(int.__and__, heard).bit_length() - 1, first.known)
                    yield replace(world, heard=heard).with_daemon(0, known=known)
        if i and self.hears(daemon) and first.known > daemon.known:
            yield world.with_daemon(i, known=first.known)
        if (not rank.is_held or not self.rules.holds) and rank.ready < 0 and daemon.known > rank.known:
            yield world.with_rank(i, known=daemon.known)

    def hears(self, daemon: DaemonState) -> bool:
        return daemon.base is None and not (daemon.is_pinned and self.rules.pins)

    def attempts(self, world: WorldState, i: int) -> Iterator[WorldState]:
        """Takes the next part of the attempt on rank i, or on its node."""
        rank, daemon = world.ranks[i], world.daemons[i]
        is_writing = any(epoch and not is_sealed for epoch, _, is_sealed in rank.slots)
        if not rank.is_held and rank.ready < 0:
            if not (is_writing and self.rules.ends_first):
                yield world.with_rank(i, is_held=True)
        elif rank.told is None and rank.ready < 0:
            told = newest([version(1, rank.known), version(1, daemon.known)])
            pinned = world.with_daemon(i, is_pinned=True)
            yield pinned.with_rank(i, told=told.step if told else 0)
        told_by_all = [each.told for each in world.ranks]
        if None in told_by_all:
            return
        base = max(told_by_all) if self.rules.asks_all else told_by_all[0]
        is_accepted = accepts_base(version(1, base or 0), version(1, daemon.known)) or not self.rules.checks
        if daemon.base is None and is_accepted:
            yield world.with_daemon(i, base=base)
        is_decided = all(each.base is not None for each in world.daemons)
        if rank.ready < 0 and (is_decided or not self.rules.decides_first):
            yield world.with_rank(i, ready=rank.step - 1, sealed=0)

    def fails(self, world: WorldState) -> Iterator[WorldState]:
        """Restarts a daemon, or gives up the attempt before the first decision."""
        if not world.failures:
            return
        fewer = replace(world, failures=world.failures - 1)
        for i, daemon in enumerate(world.daemons):
            if daemon.is_pinned:
                yield fewer.with_daemon(i, is_pinned=False)
        if all(daemon.base is None for daemon in world.daemons) and any(rank.is_held for rank in world.ranks):
            if any(rank.ready >= 0 for rank in world.ranks):
                return
            for i in range(RANKS):
                fewer = fewer.with_rank(i, is_held=False, told=None)
                fewer = fewer.with_daemon(i, is_pinned=False)
            yield fewer

    # The invariant

    def check(self, world: WorldState) -> None:
        bases = tuple(daemon.base for daemon in world.daemons)
        found = recovered(tuple(rank.slots for rank in world.ranks), bases)
        known = [version(1, each.known) for each in (*world.ranks, *world.daemons)]
        if any(base is not None for base in bases) and any(
            (1, False) == slot[::2] for rank in world.ranks for slot in rank.slots
        ):
            raise Violation(f"a rank writes in the old epoch, and a daemon may free the slot: {world}")
        best = version(2, self.new_whole(world)) or newest(known)
        if best is not None and (found is None or found.is_older_than(best)):
            raise Violation(f"{best} was known to be whole, recovery finds {found}: {world}")
        if found is not None and found.epoch == OLD and any(found.step < daemon.known for daemon in world.daemons):
            raise Violation(f"recovery finds {found}, which a daemon has dropped: {world}")
        self.has_new_version = self.has_new_version or (found is not None and found.epoch == NEW)
