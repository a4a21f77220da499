"""An explicit-state model of snapshots, round, crash and recovery, built on the functions that reft itself decides with.

R ranks with S slots each take snapshots of steps 1..V with no coupling between them: each runs ahead as it likes. At a
step a rank begins a copy into the slot that `choose` names, or skips, for any reason. A copy ends sealed or torn, at any
later time. What a rank says (sealed, void) and what the coordinator concludes reaches each rank at any time or never:
that covers lost, late, repeated and reordered messages. At any moment all ranks may die. The next attach then asks
`plan`, empties what it drops, and goes on in a new epoch from the base; orphans of the old epoch may keep a slot that the
daemon can't empty, and may still seal it.

In every reachable state:
  1. recovery finds a version that every rank holds sealed, not older than the newest that was announced, or the base;
  2. it belongs to the history in force: to the decision's epoch, or it is the decision's base;
  3. all ranks load one version;
  4. if every rank has answered every step and heard every outcome, every rank has a slot to go on with.

`Rules` holds what may be broken on purpose. Ranks are interchangeable, so states are kept up to their order.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from reft.core import recovery
from reft.core.recovery import Decision, Held
from reft.core.slots import Slot, SlotState, choose
from reft.core.version import Epoch, Version

WRITING, TORN, SEALED = 1, 2, 3  # TORN: the header says WRITING, and nobody writes any more
EMPTY = (0, 0, 0)
STATES = {WRITING: SlotState.WRITING, TORN: SlotState.WRITING, SEALED: SlotState.SEALED}
EPOCHS = [Epoch(counter, bytes([counter]) * 16) for counter in range(4)]

# A slot is (epoch, step, state). Sets of steps are bit masks.
# A rank is (slots, ghost, next step, newest step known to be whole, voids known, steps said sealed, steps said void).
Kept = tuple[int, int, int]
Rank = tuple[tuple[Kept, ...], Kept, int, int, int, int, int]
State = tuple[int, tuple[int, int] | None, tuple[Rank, ...]]  # epoch, base, ranks


class Violation(Exception):
    """An invariant does not hold; the message says which, and where."""


@dataclass(frozen=True)
class Rules:
    """What reft does; each field set otherwise is one mistake."""

    reuse: bool = True  # a slot is begun only by the reuse rule
    exact: bool = True  # whole(s) needs sealed(s) of every rank; else sealed of s or a later step
    voids_count: bool = False  # whole(s) is announced when every rank has answered s, void or sealed
    early_voids: bool = False  # void(s) is announced because a rank has not answered yet
    trust_round: bool = False  # recovery loads what all ranks heard to be whole, instead of reading headers
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


@functools.lru_cache(maxsize=None)
def begun(slots: tuple[Kept, ...], epoch: int, whole: tuple[int, int] | None, voids: int, rules: Rules) -> int | None:
    """Which slot is written next; None: none may be."""
    idle = [(i, kept) for i, kept in enumerate(slots) if kept[2] != WRITING]
    if not rules.reuse:
        return min(idle, key=lambda each: each[1], default=(None, EMPTY))[0]
    views = [
        Slot(i, SlotState.EMPTY, None) if kept == EMPTY else Slot(i, STATES[kept[2]], version_of(kept))
        for i, kept in idle
    ]
    known = Version(EPOCHS[whole[0]], whole[1]) if whole else None
    chosen = choose(views, known, frozenset(Version(EPOCHS[epoch], step) for step in steps_of(voids)))
    return None if chosen is None else chosen.index


@functools.lru_cache(maxsize=None)
def planned(
    held: tuple[tuple[Kept, ...], ...], epoch: int, base: tuple[int, int] | None, rules: Rules
) -> tuple[tuple[int, int] | None, bool, frozenset[tuple[int, int]]]:
    """What recovery loads, whether all ranks load the same, and (rank, slot) of what is emptied."""
    found = []
    for rank, slots in enumerate(held):
        for i, kept in enumerate(slots):
            version = version_of(kept) if rules.keyed_by_epoch else Version(EPOCHS[0], kept[1])
            if kept != EMPTY:
                found.append(Held("node", rank, f"{rank}.{i}", STATES[kept[2]], version))
    decision = Decision(EPOCHS[epoch], Version(EPOCHS[base[0]], base[1]) if base else None)
    is_filtered = rules.reads_decision and rules.keyed_by_epoch
    plan = recovery.plan(found, len(held), decision if is_filtered else None)
    if plan.base is None:
        loaded = set()
    else:
        names = [source.slot.split(".") for source in plan.sources.values()]
        loaded = {held[int(rank)][int(i)][:2] for rank, i in names}
    dropped = frozenset(tuple(int(part) for part in slot.slot.split(".")) for slot in plan.dropped)
    return max(loaded, default=None), len(loaded) <= 1, dropped


class Model:
    """The states that are reachable under `rules`, each checked as it is found."""

    def __init__(self, size: Size, rules: Rules) -> None:
        self.size, self.rules = size, rules
        self.begin_bit = (1 << (size.steps + 1)) - 2
        self.states = 0

    def explore(self) -> int:
        """The number of states.

        Raises:
            Violation: an invariant does not hold.
        """
        fresh: Rank = ((EMPTY,) * self.size.slots, EMPTY, 1, 0, 0, 0, 0)
        start: State = (1, None, (fresh,) * self.size.ranks)
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

    # What the coordinator knows

    def wholes(self, ranks: tuple[Rank, ...]) -> int:
        """The steps of this epoch that are announced whole."""
        mask = -1
        for rank in ranks:
            said = rank[5] | (rank[6] if self.rules.voids_count else 0)
            mask &= said if self.rules.exact else (1 << said.bit_length()) - 1
        return mask & self.begin_bit

    def voids(self, ranks: tuple[Rank, ...]) -> int:
        """The steps of this epoch that are announced void."""
        mask = 0
        for rank in ranks:
            mask |= rank[6]
            if self.rules.early_voids and any(rank[5] != other[5] for other in ranks):
                mask |= self.begin_bit & ~rank[5]
        return mask

    def newest(self, state: State) -> tuple[int, int] | None:
        """The newest version that was announced whole, or the base."""
        whole = self.wholes(state[2]).bit_length() - 1
        return (state[0], whole) if whole > 0 else state[1]

    def canonical(self, state: State) -> State:
        """The state without what no longer matters, ranks and slots in one order."""
        epoch, base, ranks = state
        whole = max(self.wholes(ranks).bit_length() - 1, 0)
        forgotten = (1 << min(rank[3] for rank in ranks) + 1) - 1
        kept = []
        for slots, ghost, step, known, voids, sealed, void in ranks:
            older = (1 << known + 1) - 1
            sealed &= ~((1 << whole) - 1)
            kept.append((tuple(sorted(slots)), ghost, step, known, voids & ~older, sealed, void & ~forgotten))
        return epoch, base, tuple(sorted(kept))

    # What may happen next

    def successors(self, state: State) -> Iterator[State]:
        epoch, base, ranks = state
        wholes, voids = self.wholes(ranks), self.voids(ranks)
        for i, rank in enumerate(ranks):
            for changed in self.moves(epoch, base, rank, wholes, voids):
                yield epoch, base, (*ranks[:i], changed, *ranks[i + 1 :])
        if epoch <= self.size.crashes:
            yield from self.crashed(state)

    def moves(self, epoch: int, base: tuple[int, int] | None, rank: Rank, wholes: int, voids: int) -> Iterator[Rank]:
        slots, ghost, step, known, known_voids, sealed, void = rank
        if step <= self.size.steps:
            yield slots, ghost, step + 1, known, known_voids, sealed, void | 1 << step
            at = begun(slots, epoch, self.knowledge(epoch, base, known), known_voids, self.rules)
            if at is not None:
                yield _put(slots, at, (epoch, step, WRITING)), ghost, step + 1, known, known_voids, sealed, void
        for at, (_, copied, state) in enumerate(slots):
            if state == WRITING:
                ended = _put(slots, at, (epoch, copied, SEALED))
                yield ended, ghost, step, known, known_voids, sealed | 1 << copied, void
                torn = _put(slots, at, (epoch, copied, TORN))
                yield torn, ghost, step, known, known_voids, sealed, void | 1 << copied
        if ghost[2] == WRITING:
            yield slots, (ghost[0], ghost[1], SEALED), step, known, known_voids, sealed, void
        for whole in steps_of(wholes):
            if whole > known:
                yield slots, ghost, step, whole, known_voids, sealed, void
        for each in steps_of(voids & ~known_voids):
            if each > known:
                yield slots, ghost, step, known, known_voids | 1 << each, sealed, void

    def knowledge(self, epoch: int, base: tuple[int, int] | None, known: int) -> tuple[int, int] | None:
        """What a rank takes for the newest whole version."""
        if known:
            return epoch, known
        if base is None or self.rules.pins_base:
            return base
        return epoch, base[1]

    def recovered(self, state: State) -> tuple[tuple[int, int] | None, bool, frozenset[tuple[int, int]]]:
        epoch, base, ranks = state
        held = tuple((*rank[0], rank[1]) for rank in ranks)
        found, is_one, dropped = planned(held, epoch, base, self.rules)
        if self.rules.trust_round:
            heard = min(rank[3] for rank in ranks)
            found, is_one = (epoch, heard) if heard else base, True
        return found, is_one, dropped

    def crashed(self, state: State) -> Iterator[State]:
        """All ranks die and attach again; of none, one, or each of them an orphan keeps a slot that was dropped."""
        epoch, _, ranks = state
        found, _, dropped = self.recovered(state)
        step = found[1] + 1 if found else 1
        for orphans in [(), *[(i,) for i in range(len(ranks))], tuple(range(len(ranks)))]:
            after = []
            for i, (slots, *_) in enumerate(ranks):
                gone = {at for rank, at in dropped if rank == i} if self.rules.drops else set()
                kept = tuple(EMPTY if at in gone else _dead(each) for at, each in enumerate(slots))
                lost = [slots[at] for at in gone if at < len(slots) and slots[at][2] in (WRITING, SEALED)]
                ghost = max(lost, default=EMPTY) if i in orphans else EMPTY
                after.append((kept, ghost, step, 0, 0, 0, 0))
            yield epoch + 1, found, tuple(after)

    # What must hold

    def check(self, state: State) -> None:
        epoch, base, ranks = state
        found, is_one, _ = self.recovered(state)
        newest = self.newest(state)
        if not is_one:
            raise Violation(f"ranks load different versions: {state}")
        if newest is not None and (found is None or found < newest):
            raise Violation(f"{newest} was announced, recovery finds {found}: {state}")
        if found is not None and found != base and found[0] != epoch:
            raise Violation(f"recovery finds {found} of a dead history, the base is {base}: {state}")
        self.check_progress(state)

    def check_progress(self, state: State) -> None:
        epoch, base, ranks = state
        wholes, voids = self.wholes(ranks), self.voids(ranks)
        newest = max(wholes.bit_length() - 1, 0)
        for slots, _, step, known, known_voids, _, _ in ranks:
            is_quiet = step == ranks[0][2] and all(kept[2] != WRITING for kept in slots)
            if not is_quiet or known < newest or voids & ~known_voids & ~((1 << known + 1) - 1):
                return
        for slots, _, _, known, known_voids, _, _ in ranks:
            if begun(slots, epoch, self.knowledge(epoch, base, known), known_voids, self.rules) is None:
                raise Violation(f"a rank has no slot to go on with, for ever: {state}")


def _put(slots: tuple[Kept, ...], at: int, kept: Kept) -> tuple[Kept, ...]:
    return (*slots[:at], kept, *slots[at + 1 :])


def _dead(kept: Kept) -> Kept:
    """A slot whose writer is dead."""
    return (kept[0], kept[1], TORN) if kept[2] == WRITING else kept
