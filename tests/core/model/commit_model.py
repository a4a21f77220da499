"""An explicit-state model of snapshots, round, crash and recovery, built on reft's own functions.

R ranks with S slots each take snapshots of steps 1..V without coupling: each rank may be any number
of steps ahead. At a step a rank begins a copy into the slot that `choose` returns, or skips, for
any reason. A copy ends sealed or torn, at any later time. Answers (sealed, void) and outcomes reach
each rank at any time or never: this covers lost, late, repeated and reordered messages. At any
moment all ranks may die. The next attach calls `plan`, empties the dropped slots, and continues in
a new epoch from the base. Orphans of the old epoch may keep a slot that the daemon can't empty, and
may still seal this slot.

In every reachable state:
  1. recovery finds a version that every rank holds sealed, not older than the newest that was
     announced, or the base;
  2. this version is of the decision's epoch, or is the decision's base;
  3. all ranks load the same version;
  4. if every rank has answered every step and heard every outcome, every rank has a free slot.

`Rules` has the rules that a test may break on purpose. Ranks are interchangeable, so states that
differ only in the order of ranks count once.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from reft.core.coding.placement import Placement, place
from reft.core.commit.decision import Decision
from reft.core.commit.slots import Slot, SlotState, choose_slot
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import divide
from reft.core.layout.layout import pack
from reft.core.recovery import recovery
from reft.core.recovery.recovery import HeldSlot

WRITING, TORN, SEALED = 1, 2, 3  # TORN: the header says WRITING, and nobody writes any more
EMPTY = (0, 0, 0)
STATES = {WRITING: SlotState.WRITING, TORN: SlotState.WRITING, SEALED: SlotState.SEALED}
EPOCHS = [Epoch(counter, bytes([counter]) * 16) for counter in range(4)]

# A slot is (epoch, step, state). Sets of steps are bit masks. A rank is (slots, ghost, next step,
# steps said sealed). Its ghost is a version that an orphan of an older epoch sealed, in memory that
# the rank does not use. The announcements that a rank has heard are no part of the state: when a
# rank begins a copy, it may know any part of the announcements. This covers lost, late and
# forgotten messages.
Kept = tuple[int, int, int]
Rank = tuple[tuple[Kept, ...], Kept, int, int]
State = tuple[int, tuple[int, int] | None, int, tuple[Rank, ...]]  # epoch, base, steps said void by any rank, ranks


class Violation(Exception):
    """A violated invariant. The message has the invariant and the state."""


@dataclass(frozen=True)
class Rules:
    """The rules of reft. Each field with another value is one mistake."""

    reuse: bool = True  # a slot is begun only by the reuse rule
    exact: bool = True  # whole(s) needs sealed(s) of every rank; else sealed of s or a later step
    voids_count: bool = False  # whole(s) is announced when every rank has answered s, void or sealed
    early_voids: bool = False  # void(s) is announced because a rank has not answered yet
    trust_round: bool = False  # recovery loads what it heard to be whole: the base, if the announcement was lost
    keyed_by_epoch: bool = True  # a version is (epoch, step), not the step alone
    drops: bool = True  # an attach empties the slots that the plan names
    pins_base: bool = True  # after a restart the base counts as whole until something newer is
    reads_decision: bool = True  # slots of older histories don't count


@dataclass(frozen=True)
class Size:
    ranks: int
    slots: int
    steps: int
    crashes: int = 1


def version_of(kept: Kept) -> Version:
    return Version(EPOCHS[kept[0]], kept[1])


def steps_of(mask: int) -> list[int]:
    return [step for step in range(mask.bit_length()) if mask >> step & 1]


@functools.cache
def alone(ranks: int) -> Placement:
    """Returns a placement without replicas: a version needs the slot of every rank."""
    return place(divide({b"": pack([])}, [b""] * ranks), [0] * ranks, "none", None, 64)


@functools.cache
def begun(slots: tuple[Kept, ...], epoch: int, whole: tuple[int, int] | None, voids: int, rules: Rules) -> int | None:
    """Returns the slot to write next; None: no slot may be written."""
    idle = [(i, kept) for i, kept in enumerate(slots) if kept[2] != WRITING]
    if not rules.reuse:
        return min(idle, key=lambda each: each[1], default=(None, EMPTY))[0]
    views = [
        Slot(i, SlotState.EMPTY, None) if kept == EMPTY else Slot(i, STATES[kept[2]], version_of(kept))
        for i, kept in idle
    ]
    known = Version(EPOCHS[whole[0]], whole[1]) if whole else None
    chosen = choose_slot(views, known, frozenset(Version(EPOCHS[epoch], step) for step in steps_of(voids)))
    return None if chosen is None else chosen.index


@functools.cache
def planned(
    held: tuple[tuple[Kept, ...], ...], epoch: int, base: tuple[int, int] | None, rules: Rules
) -> tuple[tuple[int, int] | None, bool, frozenset[tuple[int, int]]]:
    """Returns the version loaded, whether all ranks load it, and emptied (rank, slot)."""
    found = []
    for rank, slots in enumerate(held):
        for i, kept in enumerate(slots):
            version = version_of(kept) if rules.keyed_by_epoch else Version(EPOCHS[0], kept[1])
            if kept != EMPTY:
                found.append(HeldSlot("node", rank, f"{rank}.{i}", STATES[kept[2]], version))
    decision = Decision(EPOCHS[epoch], Version(EPOCHS[base[0]], base[1]) if base else None)
    is_filtered = rules.reads_decision and rules.keyed_by_epoch
    plan = recovery.plan(found, (), dict.fromkeys(EPOCHS, alone(len(held))), decision if is_filtered else None)
    if plan.base is None:
        loaded = set()
    else:
        names = [source.slot.split(".") for source in plan.sources.values()]
        loaded = {held[int(rank)][int(i)][:2] for rank, i in names}
    dropped = frozenset(tuple(int(part) for part in slot.slot.split(".")) for slot in plan.dropped)
    return max(loaded, default=None), len(loaded) <= 1, dropped


class Model:
    """Explores the reachable states under `rules`, and checks each one."""

    def __init__(self, size: Size, rules: Rules) -> None:
        self.size, self.rules = size, rules
        self.all_steps = (1 << (size.steps + 1)) - 2

    def explore(self) -> int:
        """Returns the number of reachable states.

        Raises:
            Violation: an invariant does not hold.
        """
        fresh: Rank = ((EMPTY,) * self.size.slots, EMPTY, 1, 0)
        start: State = (1, None, 0, (fresh,) * self.size.ranks)
        seen, queue = {start}, deque([start])
        while queue:
            state = queue.popleft()
            self.check(state)
            for successor in self.successors(state):
                canonical = self.canonical(successor)
                if canonical not in seen:
                    seen.add(canonical)
                    queue.append(canonical)
        return len(seen)

    # Knowledge of the coordinator

    def wholes(self, ranks: tuple[Rank, ...]) -> int:
        """Returns the steps of this epoch that are announced whole."""
        mask = self.all_steps
        for slots, _, step, sealed in ranks:
            if self.rules.voids_count:
                open_steps = sum(1 << kept[1] for kept in slots if kept[2] == WRITING)
                mask &= ((1 << step) - 1) & ~open_steps
            else:
                mask &= sealed if self.rules.exact else (1 << sealed.bit_length()) - 1
        return mask

    def announced_voids(self, state: State) -> int:
        """Returns the steps of this epoch that are announced void."""
        _, _, voids, ranks = state
        if self.rules.early_voids:
            some, every = 0, self.all_steps
            for rank in ranks:
                some, every = some | rank[3], every & rank[3]
            voids |= some & ~every
        return voids

    def newest(self, state: State) -> tuple[int, int] | None:
        """Returns the newest version announced whole, or the base."""
        whole = self.wholes(state[3]).bit_length() - 1
        return (state[0], whole) if whole > 0 else state[1]

    def canonical(self, state: State) -> State:
        """Returns the state without irrelevant parts, with ranks and slots sorted."""
        epoch, base, voids, ranks = state
        whole = max(self.wholes(ranks).bit_length() - 1, 0)
        said = ~((1 << whole) - 1) & (~voids if self.rules == Rules() else -1)
        open_steps = ~((1 << min(rank[2] for rank in ranks)) - 1)
        asked = functools.reduce(operator.or_, (self.asked(epoch, rank[0]) for rank in ranks), open_steps)
        kept = [(tuple(sorted(slots)), ghost, step, sealed & said) for slots, ghost, step, sealed in ranks]
        return epoch, base, voids & asked, tuple(sorted(kept))

    def asked(self, epoch: int, slots: tuple[Kept, ...]) -> int:
        """Returns the steps whose void would permit to reuse a slot."""
        return sum(1 << kept[1] for kept in slots if kept[0] == epoch)

    # Possible next states

    def successors(self, state: State) -> Iterator[State]:
        epoch, base, voids, ranks = state
        wholes, announced = self.wholes(ranks), self.announced_voids(state)
        for i, rank in enumerate(ranks):
            for void, changed in self.moves(epoch, base, rank, wholes, announced):
                yield epoch, base, voids | void, (*ranks[:i], changed, *ranks[i + 1 :])
        if epoch <= self.size.crashes:
            yield from self.crashed(state)

    def moves(
        self, epoch: int, base: tuple[int, int] | None, rank: Rank, wholes: int, voids: int
    ) -> Iterator[tuple[int, Rank]]:
        """Yields the moves of one rank: (mask of the step answered void, the rank afterwards)."""
        slots, ghost, step, sealed = rank
        if step <= self.size.steps:
            yield 1 << step, (slots, ghost, step + 1, sealed)
            for at in self.choices(epoch, base, slots, wholes, voids):
                yield 0, (_put(slots, at, (epoch, step, WRITING)), ghost, step + 1, sealed)
        for at, (_, copied, state) in enumerate(slots):
            if state == WRITING:
                yield 0, (_put(slots, at, (epoch, copied, SEALED)), ghost, step, sealed | 1 << copied)
                yield 1 << copied, (_put(slots, at, (epoch, copied, TORN)), ghost, step, sealed)

    def choices(
        self, epoch: int, base: tuple[int, int] | None, slots: tuple[Kept, ...], wholes: int, voids: int
    ) -> set[int]:
        """Returns the slots that a rank may write, for any part of the announcements heard."""
        relevant = voids & self.asked(epoch, slots)
        found = set()
        for whole in {0, wholes.bit_length() - 1} - {-1}:
            part = relevant
            while True:  # every subset of the voids
                found.add(begun(slots, epoch, self.knowledge(epoch, base, whole), part, self.rules))
                if not part:
                    break
                part = (part - 1) & relevant
        return found - {None}

    def knowledge(self, epoch: int, base: tuple[int, int] | None, known: int) -> tuple[int, int] | None:
        """Returns the newest version that a rank believes to be whole."""
        if known:
            return epoch, known
        if base is None or self.rules.pins_base:
            return base
        return epoch, base[1]

    def recovered(self, state: State) -> tuple[tuple[int, int] | None, bool, frozenset[tuple[int, int]]]:
        epoch, base, _, ranks = state
        held = tuple((*rank[0], rank[1]) for rank in ranks)
        found, is_one, dropped = planned(held, epoch, base, self.rules)
        if self.rules.trust_round:
            found, is_one = base, True
        return found, is_one, dropped

    def crashed(self, state: State) -> Iterator[State]:
        """Yields the states after all ranks die and attach again.

        Orphans of no rank, one rank or all ranks seal a copy that was dropped.
        """
        epoch, _, _, ranks = state
        found, _, dropped = self.recovered(state)
        step = found[1] + 1 if found else 1
        for orphans in [(), *[(i,) for i in range(len(ranks))], tuple(range(len(ranks)))]:
            after = []
            for i, (slots, *_) in enumerate(ranks):
                gone = {at for rank, at in dropped if rank == i} if self.rules.drops else set()
                kept = tuple(EMPTY if at in gone else _dead(each) for at, each in enumerate(slots))
                lost = [slots[at] for at in gone if at < len(slots) and slots[at][2] in (WRITING, SEALED)]
                ghost = (*max(lost)[:2], SEALED) if lost and i in orphans else EMPTY
                after.append((kept, ghost, step, 0))
            yield epoch + 1, found, 0, tuple(after)

    # Invariants

    def check(self, state: State) -> None:
        epoch, base, _, _ = state
        found, is_one, _ = self.recovered(state)
        newest = self.newest(state)
        if not is_one:
            raise Violation(f"ranks load different versions: {state}")
        if newest is not None and (found is None or found < newest):
            raise Violation(f"{newest} was announced or is the base, recovery finds {found}: {state}")
        if found is not None and found != base and found[0] != epoch:
            raise Violation(f"recovery finds {found} of a dead history, the base is {base}: {state}")
        self.check_progress(state)

    def check_progress(self, state: State) -> None:
        epoch, base, _, ranks = state
        if any(step != ranks[0][2] or any(kept[2] == WRITING for kept in slots) for slots, _, step, _ in ranks):
            return
        whole = max(self.wholes(ranks).bit_length() - 1, 0)
        for slots, *_ in ranks:
            voids = self.announced_voids(state) & self.asked(epoch, slots)
            if begun(slots, epoch, self.knowledge(epoch, base, whole), voids, self.rules) is None:
                raise Violation(f"a rank has no slot to go on with, for ever: {state}")


def _put(slots: tuple[Kept, ...], at: int, kept: Kept) -> tuple[Kept, ...]:
    return (*slots[:at], kept, *slots[at + 1 :])


def _dead(kept: Kept) -> Kept:
    """Returns the slot after its writer died."""
    return (kept[0], kept[1], TORN) if kept[2] == WRITING else kept
