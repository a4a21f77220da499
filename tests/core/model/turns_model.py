"""An explicit-state model of turns, pins and guards, built on reft's own functions.

One rank runs on each of N nodes, and the ranks form one lane of the exchange with f = 1: each node
keeps parity of the others' slots, in two buffers. Node i + 1 keeps the capsule of node i. Ranks
take snapshots without coupling, as in commit_model. The coordinator announces pins. Each rank and
each daemon may act on any value that was announced in the epoch, at any time: this covers lost,
late and repeated messages.

At any moment the coordinator may restart, or a node may lose its parity. All trainers may die, and
one node with them: an empty node replaces it, and all attach. The attach may change the shape: then
each rank gets two new slots, and the old ones are retired. A step may have several turns. What a
daemon reports of a turn may arrive at any later time.

In every reachable state, where *newest* is the newest whole version, or the base:
  1. if only trainers die, recovery finds *newest* or a newer version;
  2. after the loss of any one node, recovery finds the newest version that was announced as
     protected, in an earlier epoch, or a newer version; until parity or a node is lost;
     the same for the newest version that was announced as protected in this epoch, if only the lost
     node has lost parity since its turn began: also after that version is protected no more;
  3. if every rank has heard everything, every rank has a slot to write: with four slots always,
     with three unless a turn is under way.

The choice of base and guard by headers, and the rule for the two buffers, are the model's own. The
rest is shipped. `Rules` has the rules that a test may break on purpose.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

from reft.core.commit.capsules import capsules_to_drop
from reft.core.commit.decision import Decision, counts
from reft.core.commit.pins import (
    NO_GUARD,
    ExchangeFacts,
    GuardReport,
    Pins,
    TurnHistory,
    UnguardedLane,
    next_pins,
    pinned_versions,
)
from reft.core.commit.round import Outcome
from reft.core.commit.slots import Slot, SlotState, choose_slot
from reft.core.commit.version import Version
from reft_daemon.jobs.slots import may_be_freed
from tests.core.model.commit_model import EMPTY, EPOCHS, SEALED, STATES, TORN, WRITING, Kept, Violation

Pair = tuple[int, int]  # a version: epoch, step
NO_PAIR = (0, 0)
Parity = tuple[int, int, bool]  # epoch, step, whether SEALED
NO_PARITY = (0, 0, False)
SLOTS = 4  # that the manifest names; a rank may have fewer


class Node(NamedTuple):
    """A node and its rank."""

    slots: tuple[Kept, ...]
    retired: tuple[Pair, ...]  # sealed versions in slots of an older shape
    step: int  # the next step to mark
    said: int  # mask of the steps whose sealed(s) counts
    copies: tuple[Pair, ...]  # versions of this rank whose capsule lies on the next node
    parity: tuple[Parity, Parity] = (NO_PARITY, NO_PARITY)
    reported: frozenset[int] = frozenset()  # turns of which it has reported all parity sealed
    lost_at: int = -1  # the newest turn when it last lost parity

    def holds(self, pair: Pair) -> bool:
        return (*pair, SEALED) in self.slots or pair in self.retired


class State(NamedTuple):
    epoch: int
    base: Pair
    guard: Pair
    pins: Pins  # of the coordinator
    tried: int  # by the coordinator: the newest step that had a turn
    heard: frozenset[Pins]  # all pins that were announced in this epoch
    voids: int
    nodes: tuple[Node, ...]
    made_by: int  # the turn that protected a step of this epoch last; 0: none
    promised: Pair  # the newest version that was announced as protected in an earlier epoch
    lacks_parity: bool  # parity was lost in this epoch
    losses: int  # how often parity may still be lost, or the coordinator restart
    retries: int  # how many steps may still have another turn


@dataclass(frozen=True)
class Rules:
    """The rules of reft. Each field with another value is one mistake."""

    pins_protected: bool = True  # the protected version is pinned
    pins_turn: bool = True  # the turn's version is pinned
    pins_guard: bool = True  # the guard is pinned until a version is protected
    takes_newest: bool = True  # a turn takes the newest whole step, else any older one
    one_value: bool = True  # pins travel as one value; else whole travels apart
    ignores_since: bool = True  # a daemon that knows no pins passes on no whole step
    two_buffers: bool = True  # a holder keeps the protected parity while it makes other parity
    buffers_ascend: bool = True  # a holder begins no older parity than it has
    records: bool = True  # the coordinator records its pins before it announces them
    keeps_capsules: bool = True  # holders keep the capsules of pinned versions
    carries_guard: bool = True  # each decision carries the guard
    keeps_retired: bool = True  # retired slots obey the pins
    waits_for_all: bool = True  # a step is protected once all nodes have sealed its parity
    names_attempts: bool = True  # reports name the turn, else its step
    pins_kept: bool = True  # what is left of a protected step is pinned
    keeps_parity: bool = True  # turns do not write what is left of its parity


@dataclass(frozen=True)
class Size:
    slots: int
    steps: int
    nodes: int = 2
    attaches: int = 0
    losses: int = 0
    retries: int = 0
    reshapes: bool = False
    voids: bool = True


def version_of(pair: Pair) -> Version:
    return Version(EPOCHS[pair[0]], pair[1])


@functools.cache
def decision_of(epoch: int, base: Pair, guard: Pair) -> Decision:
    kept = [version_of(pair) if pair != NO_PAIR else None for pair in (base, guard)]
    return Decision(EPOCHS[epoch], kept[0], tuple(EPOCHS[1:epoch]), kept[1])


@functools.cache
def obeyed(pins: Pins, decision: Decision, rules: Rules) -> frozenset[Version]:
    """Returns the pinned versions, without those that a broken rule forgets."""
    pinned = pinned_versions(pins, decision)
    whole = Version(decision.epoch, pins.whole)
    forgotten = set()
    if not rules.pins_protected:
        forgotten.add(Version(decision.epoch, pins.protected))
    if not rules.pins_kept:
        forgotten.add(Version(decision.epoch, pins.kept))
    if not rules.pins_turn:
        forgotten.add(Version(decision.epoch, pins.turn))
    if not rules.pins_guard:
        forgotten.add(decision.guard)
    return pinned - (forgotten - {whole})


@functools.cache
def begun(slots: tuple[Kept, ...], pins: Pins, decision: Decision, voids: int, rules: Rules) -> int | None:
    """Returns the slot to write next, by the rank's pins; None: no slot may be written."""
    views = [
        Slot(i, SlotState.EMPTY, None) if kept == EMPTY else Slot(i, STATES[kept[2]], version_of(kept[:2]))
        for i, kept in enumerate(slots)
        if kept[2] != WRITING
    ]
    whole = Version(decision.epoch, pins.whole) if pins.whole >= 0 else decision.base
    void = {view.version for view in views if view.version and view.version.epoch == decision.epoch
            and voids >> view.version.step & 1}  # fmt: skip
    chosen = choose_slot(views, whole, void, obeyed(pins, decision, rules))
    return None if chosen is None else chosen.index


@functools.cache
def kept_copies(copies: tuple[Pair, ...], pins: Pins, decision: Decision, rules: Rules) -> tuple[Pair, ...]:
    """Returns the capsules that a holder does not drop."""
    known = pins if rules.keeps_capsules else replace(pins, turn=-1, protected=-1, kept=-1)
    believed = decision if rules.keeps_capsules else replace(decision, guard=None)
    versions = {version_of(pair): pair for pair in copies}
    gone = capsules_to_drop(set(versions), believed, Outcome(known, known.whole))
    return tuple(sorted(pair for version, pair in versions.items() if version not in gone))


@functools.cache
def kept_retired(retired: tuple[Pair, ...], pins: Pins, decision: Decision, rules: Rules) -> tuple[Pair, ...]:
    """Returns the retired slots that a daemon does not free."""
    if pins.whole < 0:
        return retired
    whole = Version(decision.epoch, pins.whole)
    pinned = obeyed(pins, decision, rules) if rules.keeps_retired else frozenset()
    headers = {pair: SimpleNamespace(version=version_of(pair)) for pair in retired}
    return tuple(pair for pair in retired if not may_be_freed(headers[pair], whole, pinned))  # type: ignore[arg-type]


def find(nodes: tuple[Node, ...], decision: Decision, lost: int | None) -> Pair:
    """Returns the newest version that recovery restores after the loss of one node."""
    pairs = {kept[:2] for node in nodes for kept in node.slots if kept[2] == SEALED}
    pairs.update(pair for node in nodes for pair in node.retired)
    return max((pair for pair in pairs if counts(version_of(pair), decision) and comes_back(nodes, pair, lost)),
               default=NO_PAIR)  # fmt: skip


def comes_back(nodes: tuple[Node, ...], pair: Pair, lost: int | None) -> bool:
    """Whether a version can be restored: at most one rank's slot is missing, and can be decoded."""
    missing = [i for i, node in enumerate(nodes) if i == lost or not node.holds(pair)]
    if not missing:
        return True
    if len(missing) > 1:
        return False
    others = [node for i, node in enumerate(nodes) if i != missing[0]]
    return pair in nodes[missing[0]].copies and all((*pair, True) in node.parity for node in others)


def survivor(nodes: tuple[Node, ...], decision: Decision, base: Pair) -> Pair:
    """Returns the newest version, not newer than the base, that survives any one node."""
    pairs = {pair for node in nodes for pair in (*node.retired, *(kept[:2] for kept in node.slots))}
    return max((pair for pair in pairs if NO_PAIR < pair <= base and counts(version_of(pair), decision)
                and all(comes_back(nodes, pair, lost) for lost in range(len(nodes)))), default=NO_PAIR)  # fmt: skip


class Model:
    """Explores the reachable states under `rules`, and checks each one."""

    def __init__(self, size: Size, rules: Rules) -> None:
        self.size, self.rules = size, rules
        self.protected = 0  # states with a protected version
        self.guarded = 0  # states whose decision has a guard
        self.weakened = 0  # states in which one node lacks parity of what was protected

    @property
    def start(self) -> State:
        fresh = Node((EMPTY,) * self.size.slots, (), 1, 0, ())
        return State(1, NO_PAIR, NO_PAIR, Pins(), -1, frozenset(), 0, (fresh,) * self.size.nodes,
                     0, NO_PAIR, False, self.size.losses, self.size.retries)  # fmt: skip

    def explore(self) -> int:
        """Returns the number of reachable states.

        Raises:
            Violation: an invariant does not hold.
        """
        seen, queue = {self.start}, deque([self.start])
        while queue:
            state = queue.popleft()
            self.check(state)
            for successor in self.successors(state):
                canonical = self.canonical(successor)
                if canonical not in seen:
                    seen.add(canonical)
                    queue.append(canonical)
        return len(seen)

    def walk(self, chance: random.Random, length: int) -> None:
        """Takes one random path, and checks each state of it."""
        state = self.start
        for _ in range(length):
            rare = [*self.failed(state), *self.attached(state)] if chance.random() < 0.02 else []
            successors = rare or list(self.usual(state))
            if not successors:
                return
            state = self.canonical(chance.choice(successors))
            if len(state.heard) > 8:
                state = state._replace(
                    heard=frozenset({*chance.sample(sorted(state.heard, key=_order), 7), state.pins})
                )
            self.check(state)

    def canonical(self, state: State) -> State:
        """Returns the state after daemons have dropped what they may, as the smallest rotation."""
        decision = decision_of(state.epoch, state.base, state.guard)
        nodes = [
            node._replace(
                slots=tuple(sorted(node.slots)),
                said=node.said & (-1 << max(state.pins.whole, 0)) if self.rules.takes_newest else node.said,
                copies=kept_copies(node.copies, state.pins, decision, self.rules),
                retired=kept_retired(node.retired, state.pins, decision, self.rules),
                parity=tuple(sorted(node.parity)),
                reported=node.reported & self.counted_names(state.pins),
                lost_at=node.lost_at if node.lost_at >= state.made_by else -1,
            )
            for node in state.nodes
        ]
        turned = min(tuple(nodes[at:] + nodes[:at]) for at in range(len(nodes)))
        asked = sum({1 << kept[1] for node in nodes for kept in node.slots if kept[0] == state.epoch})
        return state._replace(nodes=turned, voids=state.voids & asked)

    def name(self, pins: Pins) -> int:
        """Returns the name by which nodes report on the turn."""
        return pins.attempt if self.rules.names_attempts else pins.turn

    def counted_names(self, pins: Pins) -> set[int]:
        """Returns the names of turns whose reports may still count."""
        if self.rules.names_attempts:
            return {pins.attempt} if pins.turn >= 0 else set()
        return {pins.turn, pins.whole}

    # Possible next states

    def successors(self, state: State) -> Iterator[State]:
        yield from self.usual(state)
        yield from self.failed(state)
        yield from self.attached(state)

    def usual(self, state: State) -> Iterator[State]:
        """Yields the states after a move of a rank, of a daemon, or of the coordinator."""
        yield from self.decided(state)
        for i, node in enumerate(state.nodes):
            for void, changed in (*self.moves(state, node), *self.guards(state, i)):
                nodes = (*state.nodes[:i], changed, *state.nodes[i + 1 :])
                yield state._replace(voids=state.voids | void, nodes=nodes)

    def failed(self, state: State) -> Iterator[State]:
        """Yields the states after a node has lost its parity, or the coordinator has restarted."""
        if not state.losses:
            return
        yield self.restarted(state)
        for i, node in enumerate(state.nodes):
            # The base may need the parity, since a node was lost. A second loss is too much.
            needs_parity = state.pins.whole < 0 and not all(each.holds(state.base) for each in state.nodes)
            if node.parity != (NO_PARITY, NO_PARITY) and not needs_parity:
                changed = node._replace(parity=(NO_PARITY, NO_PARITY), lost_at=state.pins.attempt)
                bare = (*state.nodes[:i], changed, *state.nodes[i + 1 :])
                yield state._replace(nodes=bare, lacks_parity=True, losses=state.losses - 1)

    def whole(self, state: State) -> int:
        """Returns the newest step that all ranks have sealed, as the coordinator may have heard."""
        common = functools.reduce(int.__and__, (node.said for node in state.nodes))
        return max(common.bit_length() - 1, state.pins.whole) if common else state.pins.whole

    def decided(self, state: State) -> Iterator[State]:
        """Yields the states after the coordinator has announced other pins."""
        pins, turn = state.pins, state.pins.turn
        reports = [NO_GUARD]
        if turn >= 0:
            reported = [self.name(pins) in node.reported for node in state.nodes]
            if all(reported) if self.rules.waits_for_all else any(reported):
                reports.append(GuardReport(pins.attempt))
            reports.append(GuardReport(lanes=frozenset({UnguardedLane(turn, 0, "", pins.attempt)})))
        if pins.protected >= 0 and any(node.lost_at >= state.made_by for node in state.nodes):
            reports.append(GuardReport(lanes=frozenset({UnguardedLane(pins.protected, 0, "", pins.protected_by)})))
        histories = [TurnHistory(state.tried), TurnHistory(state.tried, retry_after=pins.attempt)]
        wholes = {pins.whole, self.whole(state)}
        facts = ExchangeFacts(lanes=1, slots=SLOTS, guards=True, has_guard=state.guard != NO_PAIR)
        for whole in wholes:
            for report, memory in itertools.product(reports, histories[: 1 + (state.retries > 0)]):
                after, history = next_pins(pins, whole, report, memory, facts, now_s=0.0)
                options = [(after, history.tried)]
                if not self.rules.takes_newest and after.turn != turn and after.turn >= 0:
                    common = functools.reduce(int.__and__, (node.said for node in state.nodes))
                    older = [
                        s for s in range(1, after.turn) if common >> s & 1 and s > max(pins.protected, state.tried)
                    ]
                    options += [(replace(after, turn=step), step) for step in older]
                for chosen, tried in options:
                    if chosen != pins:
                        is_retry = chosen.attempt > pins.attempt and chosen.turn <= state.tried
                        yield self.announced(state, chosen, tried)._replace(retries=state.retries - is_retry)

    def announced(self, state: State, pins: Pins, tried: int) -> State:
        after = state._replace(pins=pins, tried=tried, heard=state.heard | {pins})
        return after if pins.protected < 0 else after._replace(made_by=pins.protected_by)

    def restarted(self, state: State) -> State:
        """Returns the state after the coordinator has restarted from its record."""
        pins = state.pins
        if not self.rules.records:  # the whole step comes back with the reports
            pins = Pins(whole=pins.whole)
        return state._replace(pins=pins, tried=pins.whole if self.rules.records else -1, losses=state.losses - 1)

    def moves(self, state: State, node: Node) -> Iterator[tuple[int, Node]]:
        """Yields the moves of one rank: (mask of the step answered void, the node afterwards)."""
        if node.step <= self.size.steps:
            if self.size.voids:
                yield 1 << node.step, node._replace(step=node.step + 1)
            for at in self.choices(state, node.slots):
                yield (
                    0,
                    node._replace(slots=_put(node.slots, at, (state.epoch, node.step, WRITING)), step=node.step + 1),
                )
        for at, (epoch, step, kind) in enumerate(node.slots):
            bit = 1 << step
            if kind == WRITING:
                yield 0, node._replace(slots=_put(node.slots, at, (epoch, step, SEALED)))
                if self.size.voids:
                    yield bit, node._replace(slots=_put(node.slots, at, (epoch, step, TORN)))
            is_owed = kind == SEALED and epoch == state.epoch and not node.said & bit
            if is_owed and not state.voids & bit and step > state.pins.whole:
                copies = tuple(sorted({*node.copies, (epoch, step)}))
                yield 0, node._replace(said=node.said | bit, copies=copies)

    def known(self, state: State) -> set[Pins]:
        """Returns all pins that a rank or a daemon may act on."""
        known = {Pins(), *state.heard}
        if not self.rules.one_value:
            known |= {replace(pins, whole=each.whole) for pins in known for each in known}
        if not self.rules.ignores_since:
            known |= {Pins(whole=each.whole) for each in known}
        return known

    def choices(self, state: State, slots: tuple[Kept, ...]) -> set[int]:
        """Returns the slots that a rank may write, for any pins that it may have heard."""
        decision = decision_of(state.epoch, state.base, state.guard)
        voids = {0, state.voids}
        return {begun(slots, p, decision, void, self.rules) for p in self.known(state) for void in voids} - {None}

    def guards(self, state: State, i: int) -> Iterator[tuple[int, Node]]:
        """Yields the node after its daemon has begun or sealed parity of a turn."""
        node = state.nodes[i]
        for pins in state.heard:
            wanted = (state.epoch, pins.turn)
            reported = node.reported | {self.name(pins)}
            if pins.turn >= 0 and (*wanted, True) in node.parity:
                yield 0, node._replace(reported=reported)
                continue
            step = pins.guarded_step if self.rules.keeps_parity else pins.protected
            kept = (state.epoch, step) if step >= 0 else state.guard
            held = [NO_PARITY if each == (*kept, False) else each for each in node.parity]
            if pins.turn < 0 or (self.rules.buffers_ascend and wanted < max(each[:2] for each in held)):
                continue
            free = [at for at in (0, 1) if held[at][:2] != kept or kept == NO_PAIR]
            at = min(free, key=lambda at: (held[at][:2] != wanted, held[at][:2]))
            if not self.rules.two_buffers:
                at = 0 if node.parity[0] >= node.parity[1] else 1
            others = (*state.nodes[:i], *state.nodes[i + 1 :])
            yield 0, node._replace(parity=_put(node.parity, at, (*wanted, False)))
            if all(other.holds(wanted) for other in others):
                yield 0, node._replace(parity=_put(node.parity, at, (*wanted, True)), reported=reported)

    def attached(self, state: State) -> Iterator[State]:
        """Yields the states after all trainers die, with one node or none, and attach again."""
        if state.epoch > self.size.attaches:
            return
        before = decision_of(state.epoch, state.base, state.guard)
        for lost in (None, *range(len(state.nodes))):
            nodes = list(state.nodes)
            if lost is not None:
                nodes[lost] = Node((EMPTY,) * len(nodes[lost].slots), (), 1, 0, nodes[lost].copies)
                nodes[lost - 1] = nodes[lost - 1]._replace(copies=())
            base = find(tuple(nodes), before, None)
            if base == NO_PAIR:
                continue  # attach refuses, or starts fresh, which is the first state again
            guard = survivor(tuple(nodes), before, base) if self.rules.carries_guard else NO_PAIR
            for reshaped in {False, self.size.reshapes}:
                yield self.begun_epoch(state, nodes, base, guard, lost is not None, reshaped)

    def begun_epoch(
        self, state: State, before: list[Node], base: Pair, guard: Pair, has_lost: bool, reshaped: bool
    ) -> State:
        decision = decision_of(state.epoch + 1, base, guard)
        nodes = []
        for node in before:
            slots = tuple(
                kept if counts(version_of(kept[:2]), decision) and kept[2] == SEALED else EMPTY for kept in node.slots
            )
            retired = tuple(pair for pair in node.retired if counts(version_of(pair), decision))
            if reshaped:
                retired = tuple(sorted({*retired, *(kept[:2] for kept in slots if kept != EMPTY)}))
                slots = (EMPTY, EMPTY)
            parity = tuple(each if counts(version_of(each[:2]), decision) else NO_PARITY for each in node.parity)
            copies = {pair for pair in node.copies if counts(version_of(pair), decision)}
            copies |= {pair for pair in (base, guard) if (*pair, SEALED) in slots or pair in retired} - {NO_PAIR}
            first = base[1] + (not has_lost)
            nodes.append(Node(slots, retired, max(first, 1), 0, tuple(sorted(copies)), parity))  # type: ignore[arg-type]
        claimed, bare = self.claim(state)
        promised = guard if has_lost or bare or state.pins.kept >= 0 else max(guard, claimed)
        return State(
            state.epoch + 1, base, guard, Pins(), -1, frozenset(), 0, tuple(nodes), 0, promised, False,
            state.losses, state.retries,
        )  # fmt: skip

    # Invariants

    def claim(self, state: State) -> tuple[Pair, set[int]]:
        """Returns the newest version that was protected, and the nodes that may lack its parity."""
        nodes = range(len(state.nodes))
        if state.pins.guarded_step < 0:
            return state.promised, set(nodes) if state.lacks_parity else set()
        bare = {i for i in nodes if state.nodes[i].lost_at >= state.made_by}
        return (state.epoch, state.pins.guarded_step), bare

    def check(self, state: State) -> None:
        decision = decision_of(state.epoch, state.base, state.guard)
        newest = (state.epoch, state.pins.whole) if state.pins.whole >= 0 else state.base
        found = find(state.nodes, decision, None)
        if found < newest:
            raise Violation(f"{newest} was announced or is the base, recovery finds {found}: {state}")
        self.protected += state.pins.protected >= 0
        self.guarded += state.guard != NO_PAIR
        claimed, bare = self.claim(state)
        for lost in range(len(state.nodes)):
            if bare <= {lost} and (found := find(state.nodes, decision, lost)) < claimed:
                raise Violation(f"{claimed} is protected, recovery finds {found} without node {lost}: {state}")
        self.weakened += state.pins.kept >= 0 and len(bare) == 1
        self.check_progress(state, decision)

    def check_progress(self, state: State, decision: Decision) -> None:
        slots = min(len(node.slots) for node in state.nodes)
        if slots < 3 or (slots < SLOTS and state.pins.turn >= 0):
            return
        if len({node.step for node in state.nodes}) > 1 or self.whole(state) > state.pins.whole:
            return
        for node in state.nodes:
            owed = [kept for kept in node.slots if kept[0] == state.epoch and kept[2] == SEALED]
            open_steps = [step for _, step, _ in owed if step > state.pins.whole and not state.voids >> step & 1]
            if any(kept[2] == WRITING for kept in node.slots) or open_steps:
                return
        for node in state.nodes:
            if begun(node.slots, state.pins, decision, state.voids, self.rules) is None:
                raise Violation(f"a rank has no slot to go on with: {state}")


def _put(items: tuple, at: int, item: object) -> tuple:
    return (*items[:at], item, *items[at + 1 :])


def _order(pins: Pins) -> tuple[int, ...]:
    return (pins.seq, pins.whole, pins.turn, pins.protected, pins.attempt)
