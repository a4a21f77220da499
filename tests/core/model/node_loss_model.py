"""An explicit-state model of node loss, built on reft's own functions.

One rank runs on each of N nodes. The state of the ranks is one lane. With three nodes or more the
lane is coded, and one member may be missing. With two nodes each has a copy. Node i + 1 keeps the
capsule of node i. Ranks take snapshots as in commit_model: each rank may be any number of steps
ahead, copies end sealed or torn, messages arrive at any time or never. A capsule is sent when its
slot is sealed, and arrives at any time or never. The rank's answer counts when the capsule has
arrived. Holders drop capsules as soon as permitted.

At any moment all trainers may die, and one node with them. Then the slots of this node and the
capsules on it are lost. An empty node replaces the lost one, and all nodes attach: plan, decision,
capsules of the base sent again, and a new epoch. After a loss, the first snapshot of the new epoch
is that of the base. A lost node may only have been silent, and may come back at any later attach
with all its data. Before the node went silent, an attach of all nodes may have died after it told
its decision only to this node.

In every reachable state, with *newest* the newest version that was announced whole, or the base:
  1. if only trainers die, recovery finds *newest* or a newer version;
  2. the same holds after the loss of any one node, unless a node was lost before and no version of
     the epoch was whole since;
  3. in that case recovery finds *newest*, a newer version, or nothing: it refuses, and never goes
     back silently;
  4. the version found belongs to the history in force, unless a silent node comes back before
     anything was written in this history; at most one slot of the version is missing, and the
     capsule of its rank exists;
  5. if every rank has answered every step and heard every outcome, every rank has a free slot;
  6. if the plan without the answer of one node is settled, then the answer of this node would not
     give a newer base.

`Rules` has the rules that a test may break on purpose. Nodes form a ring, so states that differ
only by a rotation count once.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from reft.core.coding.placement import Placement, place
from reft.core.commit import capsules
from reft.core.commit.decision import Decision
from reft.core.commit.pins import Pins
from reft.core.commit.round import Outcome
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf, pack
from reft.core.recovery import recovery
from reft.core.recovery.lineage import histories, written_by
from reft.core.recovery.recovery import HeldCapsule, HeldSlot
from reft.core.recovery.survey_timeout import is_settled
from tests.core.model import commit_model
from tests.core.model.commit_model import (
    EMPTY,
    EPOCHS,
    SEALED,
    STATES,
    TORN,
    WRITING,
    Kept,
    Violation,
    begun,
    version_of,
)

Pair = tuple[int, int]  # a version: epoch, step
# Newer than all epochs whose decision was carried out, because several attaches died.
TORN_EPOCH = recovery.Epoch(len(EPOCHS), b"torn" * 4)


class Node(NamedTuple):
    """A node and its rank.

    `copies` has the capsules of this rank, which lie on the next node.
    """

    slots: tuple[Kept, ...]
    step: int  # the next step to mark
    said: int  # mask of the steps whose sealed(s) counts
    copies: tuple[Pair, ...]  # versions of this rank whose capsule lies on the next node


class Ghost(NamedTuple):
    """A silent node."""

    index: int
    slots: tuple[Kept, ...]
    copies: tuple[Pair, ...]  # capsules that lie on this node
    torn: Pair | None  # the base of a decision that only this node was told


class State(NamedTuple):
    epoch: int
    base: Pair | None
    decision: tuple[int, Pair | None]  # the decision on the daemons: epoch and base
    is_exposed: bool  # a node was lost, and no version was whole since
    voids: int
    nodes: tuple[Node, ...]
    ghost: Ghost | None


@dataclass(frozen=True)
class Rules:
    """The rules of reft. Each field with another value is one mistake."""

    reuse: bool = True  # a slot is written only by the reuse rule
    exact: bool = True  # whole(s) needs sealed(s) of every rank; else sealed of s or a later step
    waits_for_capsules: bool = True  # a rank's sealed(s) counts only when its capsule is kept elsewhere
    keeps_whole: bool = True  # a holder lets go of a version only by `capsules.surplus`; else when a newer one comes
    pins_base: bool = True  # after a restart the base counts as whole until something newer is
    resends: bool = True  # attach sends the base's capsules again before anything is written
    decides_first: bool = True  # the decision is on the daemons before anyone loads; else nobody wrote it in time
    reads_decision: bool = True  # versions of older histories don't count
    heeds_written: bool = True  # of two decisions that don't know of each other that one holds which was written under
    settles: str = (
        "is_settled"  # when a silent node is not waited for; else where there is any "base", or nothing "newer"
    )
    snapshot_protects: bool = True  # after a loss only a whole version of the new epoch protects; else the restore does


@dataclass(frozen=True)
class Size:
    nodes: int
    slots: int
    steps: int
    attaches: int = 1
    returns: bool = False  # whether lost nodes may come back


@functools.cache
def lane(nodes: int) -> Placement:
    """Returns the placement of one cell on one rank of each node. One slot may be missing."""
    layout = pack([Leaf("w", "float32", (1 << 16,), (1,), 1 << 18, False, (1 << 16,), (0,))])
    return place(divide({b"": layout}, [b""] * nodes), range(nodes), "auto", 1, 64)


def pair_of(version: recovery.Version | None) -> Pair | None:
    return None if version is None else (version.epoch.counter, version.step)


def decision_of(decision: tuple[int, Pair | None]) -> Decision:
    epoch, base = decision
    return Decision(EPOCHS[epoch], version_of((*base, SEALED)) if base else None, tuple(EPOCHS[1:epoch]))


def in_force_of(
    decision: tuple[int, Pair | None], count: int, lost: int | None, ghost: Ghost, written: Collection[recovery.Epoch]
) -> Decision:  # fmt: skip
    """Returns the decision in force if a returned node has another one.

    The other one has a larger counter.
    """
    assert ghost.torn is not None, "a ghost that was told nothing"
    newest = decision_of(decision)
    torn = Decision(TORN_EPOCH, version_of((*ghost.torn, SEALED)), tuple(EPOCHS[1 : ghost.torn[0] + 1]))
    others = {f"n{rank}": newest for rank in range(count) if rank != lost}
    was_for = [f"n{rank}" for rank in range(count) if rank != ghost.index] + [f"old{ghost.index}"]
    members = {newest.epoch: [f"n{rank}" for rank in range(count)], TORN_EPOCH: was_for}
    found, *rivals = histories({**others, f"old{ghost.index}": torn}, members, written)
    assert not rivals, "an attach of which only one was told writes nothing"
    return found


@functools.cache
def planned(
    slots: tuple[tuple[Kept, ...], ...], copies: tuple[tuple[Pair, ...], ...], lost: int | None,
    ghost: Ghost | None, decision: tuple[int, Pair | None], reads_decision: bool, heeds_written: bool,
) -> tuple[Pair | None, frozenset[tuple[int, int]], frozenset[str]]:  # fmt: skip
    """Returns the base, the emptied (rank, slot), and the values of `settles` that hold."""
    count = len(slots)
    held = [
        HeldSlot(f"n{rank}", rank, f"{i}", STATES[kept[2]], version_of(kept))
        for rank, own in enumerate(slots)
        for i, kept in enumerate(own)
        if kept != EMPTY
    ]
    kept_copies = [
        HeldCapsule(f"n{(rank + 1) % count}", rank, version_of((*pair, SEALED)), 0)
        for rank, own in enumerate(copies)
        for pair in own
    ]
    in_force = decision_of(decision)
    if ghost is not None:
        index, old_slots, old_copies, torn = ghost
        held += [
            HeldSlot(f"old{index}", index, f"{i}", STATES[kept[2]], version_of(kept))
            for i, kept in enumerate(old_slots)
            if kept != EMPTY
        ]
        kept_copies += [
            HeldCapsule(f"old{index}", (index - 1) % count, version_of((*p, SEALED)), 0) for p in old_copies
        ]
        if torn is not None:
            in_force = in_force_of(decision, count, lost, ghost, written_by(held, kept_copies) if heeds_written else ())
    known = in_force if reads_decision else None
    plan = recovery.plan(held, kept_copies, dict.fromkeys(EPOCHS, lane(count)), known)
    dropped = frozenset((slot.rank, int(slot.slot)) for slot in plan.dropped if slot.node == f"n{slot.rank}")
    rules = {
        "is_settled": is_settled(plan, in_force),
        "newer": plan.base is not None and not plan.partial,
        "base": plan.base is not None,
    }
    return pair_of(plan.base), dropped, frozenset(name for name, holds in rules.items() if holds)


@functools.cache
def kept_on(copies: tuple[Pair, ...], decision: tuple[int, Pair | None], whole: int, voids: int) -> tuple[Pair, ...]:
    """Returns the capsules that a holder does not drop."""
    versions = {version_of((*pair, SEALED)): pair for pair in copies}
    still = frozenset(step for step in range(whole + 1, voids.bit_length()) if not voids >> step & 1)
    outcome = Outcome(Pins(whole=whole if whole else -1), voids.bit_length() - 1, still)
    gone = capsules.capsules_to_drop(set(versions), decision_of(decision), outcome)
    return tuple(sorted(pair for version, pair in versions.items() if version not in gone))


class Model:
    """Explores the reachable states under `rules`, and checks each one."""

    def __init__(self, size: Size, rules: Rules) -> None:
        self.size, self.rules = size, rules
        self.commit_rules = commit_model.Rules(reuse=rules.reuse)
        self.all_steps = (1 << (size.steps + 1)) - 2

    def explore(self) -> int:
        """Returns the number of reachable states.

        Raises:
            Violation: an invariant does not hold.
        """
        fresh = Node((EMPTY,) * self.size.slots, 1, 0, ())
        start = State(1, None, (1, None), False, 0, (fresh,) * self.size.nodes, None)
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

    # Knowledge

    def whole(self, state: State) -> int:
        """Returns the newest step of this epoch announced whole, 0 if there is none."""
        mask = self.all_steps
        for node in state.nodes:
            mask &= node.said if self.rules.exact else (1 << node.said.bit_length()) - 1
        return max(mask.bit_length() - 1, 0)

    def newest(self, state: State) -> Pair | None:
        """Returns the newest version announced whole, or the base."""
        whole = self.whole(state)
        return (state.epoch, whole) if whole else state.base

    def knowledge(self, state: State, whole: int) -> Pair | None:
        """Returns the newest version that a rank believes to be whole."""
        if whole or state.base is None:
            return (state.epoch, whole) if whole else None
        return state.base if self.rules.pins_base else (state.epoch, state.base[1])

    def asked(self, state: State, slots: tuple[Kept, ...]) -> int:
        """Returns the steps whose void would permit to reuse a slot."""
        return sum({1 << kept[1] for kept in slots if kept[0] == state.epoch})

    def canonical(self, state: State) -> State:
        """Returns the state without irrelevant parts, as the smallest of its rotations."""
        whole, count = self.whole(state), len(state.nodes)
        said = ~((1 << whole) - 1) & (~state.voids if self.rules.exact else -1)
        matters = ~((1 << min(node.step for node in state.nodes)) - 1)
        for node in state.nodes:
            matters |= self.asked(state, node.slots)
        nodes = []
        for node in state.nodes:
            copies = kept_on(node.copies, state.decision, whole, state.voids)
            if not self.rules.keeps_whole:
                copies = copies[-1:]
            nodes.append(Node(tuple(sorted(node.slots)), node.step, node.said & said, copies))
        turns = []
        for turn in range(count):
            ghost = state.ghost and state.ghost._replace(index=(state.ghost.index - turn) % count)
            turns.append((tuple(nodes[turn:] + nodes[:turn]), ghost))
        least = min(turns, key=lambda each: (each[0], each[1] or ()))
        exposed = state.is_exposed and not whole
        return state._replace(is_exposed=exposed, voids=state.voids & matters, nodes=least[0], ghost=least[1])

    # Possible next states

    def successors(self, state: State) -> Iterator[State]:
        for i, node in enumerate(state.nodes):
            for void, changed in self.moves(state, node):
                nodes = (*state.nodes[:i], changed, *state.nodes[i + 1 :])
                yield state._replace(voids=state.voids | void, nodes=nodes)
        if state.epoch <= self.size.attaches:
            yield from self.attached(state)

    def moves(self, state: State, node: Node) -> Iterator[tuple[int, Node]]:
        """Yields the moves of one rank: (mask of the step answered void, the node afterwards)."""
        if node.step <= self.size.steps:
            yield 1 << node.step, node._replace(step=node.step + 1)
            for at in self.choices(state, node.slots):
                slots = _put(node.slots, at, (state.epoch, node.step, WRITING))
                yield 0, node._replace(slots=slots, step=node.step + 1)
        for at, (epoch, step, kind) in enumerate(node.slots):
            bit = 1 << step
            if kind == WRITING:
                sealed = node._replace(slots=_put(node.slots, at, (epoch, step, SEALED)))
                yield 0, sealed if self.rules.waits_for_capsules else sealed._replace(said=node.said | bit)
                yield bit, node._replace(slots=_put(node.slots, at, (epoch, step, TORN)))
            is_owed = kind == SEALED and epoch == state.epoch and (epoch, step) not in node.copies
            if is_owed and not state.voids & bit and step > self.whole(state):
                yield 0, node._replace(said=node.said | bit, copies=tuple(sorted((*node.copies, (epoch, step)))))

    def choices(self, state: State, slots: tuple[Kept, ...]) -> set[int]:
        """Returns the slots that a rank may write.

        The rank has heard of all wholes or none, and of all voids or none.
        """
        voids = state.voids & self.asked(state, slots)
        known = {self.knowledge(state, 0), self.knowledge(state, self.whole(state))}
        return {begun(slots, state.epoch, w, v, self.commit_rules) for w in known for v in {0, voids}} - {None}

    def recovered(
        self, state: State, lost: int | None, with_ghost: bool
    ) -> tuple[Pair | None, frozenset[tuple[int, int]], frozenset[str]]:
        """Returns the plan after the loss; see `planned`."""
        nodes = _without(state.nodes, lost)
        slots = tuple(node.slots for node in nodes)
        ghost = state.ghost if with_ghost else None
        copies, rules = tuple(node.copies for node in nodes), self.rules
        return planned(slots, copies, lost, ghost, state.decision, rules.reads_decision, rules.heeds_written)

    def attached(self, state: State) -> Iterator[State]:
        """Yields the states after all trainers die, with one node or none, and attach again.

        A silent node comes back or does not.
        """
        for lost in (None, *range(len(state.nodes))):
            for with_ghost in {False, state.ghost is not None}:
                base, dropped, _ = self.recovered(state, lost, with_ghost)
                if base is None:
                    continue  # attach refuses, or starts fresh, which is the first state again
                if with_ghost and base != self.recovered(state, lost, False)[0]:
                    continue  # later states do not contain the data of the silent node
                after = self.begun_epoch(state, lost, base, dropped)
                yield after if not with_ghost else after._replace(ghost=None)
                if lost is not None and self.size.returns and not with_ghost:
                    yield from (after._replace(ghost=ghost) for ghost in self.ghosts(state, lost, base))

    def ghosts(self, state: State, lost: int, base: Pair) -> Iterator[Ghost]:
        """Yields the silent nodes that may come back after an attach without them.

        `base` is the base of this attach.
        """
        # Only versions of a dead history, or a decision that was not carried out, can do harm.
        slots = tuple(kept for kept in state.nodes[lost].slots if kept[2] == SEALED and kept[:2] > base)
        copies = tuple(pair for pair in state.nodes[lost - 1].copies if pair > base)
        if slots:
            yield Ghost(lost, slots, copies, None)
        torn, dropped, _ = self.recovered(state, None, False)
        if torn is not None:
            at_hand = (kept for at, kept in enumerate(state.nodes[lost].slots) if (lost, at) not in dropped)
            left = tuple(kept for kept in at_hand if kept[2] == SEALED and kept[:2] > base)
            yield Ghost(lost, left, copies, torn)

    def begun_epoch(self, state: State, lost: int | None, base: Pair, dropped: frozenset[tuple[int, int]]) -> State:
        exposed = lost is not None or (state.is_exposed and not self.whole(state))
        decision = (state.epoch + 1, base) if self.rules.decides_first else state.decision
        nodes = []
        for rank, node in enumerate(_without(state.nodes, lost)):
            slots = tuple(EMPTY if (rank, at) in dropped else _dead(kept) for at, kept in enumerate(node.slots))
            copies = kept_on(node.copies, decision, 0, 0)
            if self.rules.resends and (*base, SEALED) in slots:
                copies = tuple(sorted({*copies, base}))
            nodes.append(Node(slots, base[1] if exposed else base[1] + 1, 0, copies))
        exposed = exposed and self.rules.snapshot_protects
        return State(state.epoch + 1, base, decision, exposed, 0, tuple(nodes), state.ghost)

    # Invariants

    def check(self, state: State) -> None:
        newest = self.newest(state)
        for lost in (None, *range(len(state.nodes))):
            for with_ghost in {False, state.ghost is not None}:
                found, _, settled = self.recovered(state, lost, with_ghost)
                answered = self.recovered(state, None, with_ghost)[0]
                if self.rules.settles in settled and found < answered:
                    raise Violation(f"{found} without node {lost}, which holds {answered}: {state}")
                may_refuse = state.is_exposed and lost is not None
                if newest is not None and (found < newest if found else not may_refuse):
                    when = f"after the loss of node {lost}" if lost is not None else "after a crash"
                    raise Violation(f"{newest} was announced or is the base, recovery finds {found} {when}: {state}")
                if found is not None:
                    self.check_found(state, found, lost, with_ghost)
        self.check_progress(state)

    def check_found(self, state: State, found: Pair, lost: int | None, with_ghost: bool) -> None:
        nodes, count = _without(state.nodes, lost), len(state.nodes)
        kept = [*chain.from_iterable((*node.slots, *node.copies) for node in nodes)]
        is_begun = any(epoch == state.epoch for epoch, *_ in kept)
        if found != state.base and found[0] != state.epoch and (is_begun or not with_ghost):
            raise Violation(f"recovery finds {found} of a dead history, the base is {state.base}: {state}")
        index, old_slots, old_copies, _ = state.ghost if with_ghost and state.ghost else (-1, (), (), None)
        lacking = [
            rank
            for rank, node in enumerate(nodes)
            if (*found, SEALED) not in node.slots and not (rank == index and (*found, SEALED) in old_slots)
        ]
        for rank in lacking:
            if found not in nodes[rank].copies and not (rank == (index - 1) % count and found in old_copies):
                raise Violation(f"recovery finds {found} without the capsule of rank {rank}: {state}")
        if len(lacking) > 1:
            raise Violation(f"recovery finds {found}, which {lacking} lack: {state}")

    def check_progress(self, state: State) -> None:
        whole = self.whole(state)
        steps = {node.step for node in state.nodes}
        if len(steps) > 1 or any(kept[2] == WRITING for node in state.nodes for kept in node.slots):
            return
        if any(self.is_owed(state, node) for node in state.nodes):
            return
        for node in state.nodes:
            voids = state.voids & self.asked(state, node.slots)
            if begun(node.slots, state.epoch, self.knowledge(state, whole), voids, self.commit_rules) is None:
                raise Violation(f"a rank has no slot to go on with, for ever: {state}")

    def is_owed(self, state: State, node: Node) -> bool:
        """Whether a capsule has not arrived yet."""
        owed = [k for k in node.slots if k[0] == state.epoch and k[2] == SEALED and k[:2] not in node.copies]
        return any(not state.voids >> step & 1 and step > self.whole(state) for _, step, _ in owed)


def _put(slots: tuple[Kept, ...], at: int, kept: Kept) -> tuple[Kept, ...]:
    return (*slots[:at], kept, *slots[at + 1 :])


def _dead(kept: Kept) -> Kept:
    """Returns the slot after its writer died."""
    return (kept[0], kept[1], TORN) if kept[2] == WRITING else kept


def _without(nodes: tuple[Node, ...], lost: int | None) -> tuple[Node, ...]:
    """Returns the nodes after the loss of one.

    An empty node replaces the lost one. The capsules on the lost node are gone.
    """
    if lost is None:
        return nodes
    after = list(nodes)
    after[lost] = after[lost]._replace(slots=(EMPTY,) * len(after[lost].slots))
    after[lost - 1] = after[lost - 1]._replace(copies=())
    return tuple(after)
