"""Pins: the versions whose slots and capsules stay, and the turns that protect them.

Unreplicated state exists once. So daemons keep parity of one another's sealed slots, made outside
the step. A *turn* makes the parity of one whole step on all nodes. Two watermarks follow: `whole`
survives processes, `protected` survives lost nodes, too.

    ranks ── sealed(s) on all ──► whole = s
                                    │ no turn is under way, and enough slots stay free
                                    ▼
    coordinator ── pins(turn = s) ──► daemons pull blocks, seal parity ── guarded(s) ──► all nodes?
                                         │                                                 │
                                         └─ unguarded(s, lane): can't be made ──► turn = none
                                                                                           │
         parity of P is gone ──► protected = none ◄──── pins(protected = s, turn = none) ◄─┘

Invariants
  1. `Pins` travel and are replaced as one value. `seq` counts the changes of turn and protected.
     The greater `seq` wins, then the greater `whole`. The reuse rule reads `whole` from the same
     value as the pinned steps.
  2. The coordinator of a job that exchanges keeps its pins in the job's record before it announces
     them. A record that can't be written announces nothing new.
  3. The slots and the capsules of a pinned version stay, on every node that has them.
  4. A turn takes the newest whole step. At most one turn is under way, and each step has at most
     one turn. So a late report on an earlier turn never counts for another one.
  5. A turn begins only while the pins leave two slots. So one slot can always be written.
  6. Until a step of the new epoch is whole, the base is pinned. Until one is protected, the guard
     is.
  7. `protected` is announced only after every node has sealed all its parity of that step. Lanes
     that were left out of the turn are the exception: they are *exposed*, and reported by name.

A lane that ended two turns as unguardable is left out of 1, 2, 4, … turns, so that the other lanes
go on. If all lanes would be left out, none is.

A lost message is repeated by the next one, since each is complete. A late one has a smaller `seq`,
or names an earlier step, and changes nothing. A repeated one changes nothing. A restarted daemon
knows no pins, and reports nothing until it hears them. A restarted coordinator starts from its
record. Its first turn is at a step that becomes whole after the restart. It has forgotten which
lanes failed, so those may end two more turns. A job that exchanges nothing has no turns: `whole`
alone advances, and no record is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from reft.core.commit.decision import Decision
from reft.core.commit.version import Version

EXCHANGE_SLOTS_MIN = 4  # slots of a rank: protected, turn, newest whole step, and one to write
LEFT_OUT_MAX = 64  # turns that a failing lane is left out of


@dataclass(frozen=True)
class Pins:
    """The steps of an epoch that stay, as one value; -1: none.

    Attributes:
        seq: counts the changes of `turn` and `protected`.
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
        return max(self, other, key=lambda pins: (pins.seq, pins.whole))


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


@dataclass(frozen=True)
class ExchangeFacts:
    """What the round must know of the job's exchange.

    Attributes:
        lanes: the number of the job's guard lanes; 0: nothing is exchanged.
        slots: the number of slots of each rank.
        guards: whether this node keeps parity.
        has_guard: whether the decision names a guard, which is pinned until a step is protected.
    """

    lanes: int = 0
    slots: int = 0
    guards: bool = False
    has_guard: bool = False


@dataclass(frozen=True, order=True)
class UnguardedLane:
    """A lane whose parity of a step can't be made, or is gone.

    Attributes:
        step: the step.
        lane: number of the lane.
        words: why, for a person.
    """

    step: int
    lane: int
    words: str


@dataclass(frozen=True)
class GuardReport:
    """What a node, or a subtree, reports on the parity of the pinned steps.

    Attributes:
        guarded: the turn of which all parity here is sealed, except that of `lanes`; -1: none.
        lanes: the lanes that lack parity of the turn or of the protected step.
    """

    guarded: int = -1
    lanes: frozenset[UnguardedLane] = frozenset()


NO_GUARD = GuardReport()


def _of_pinned_steps(pins: Pins, lanes: Iterable[UnguardedLane]) -> frozenset[UnguardedLane]:
    return frozenset(lane for lane in lanes if lane.step >= 0 and lane.step in (pins.turn, pins.protected))


@dataclass(frozen=True)
class LaneHistory:
    """The turns that one lane ended as unguardable.

    Attributes:
        count: how many, since the lane was last guarded.
        next_try: number of the first turn that tries the lane again.
    """

    count: int
    next_try: int


@dataclass(frozen=True)
class TurnHistory:
    """What the coordinator remembers of the turns of an epoch.

    Attributes:
        tried: the newest step that had a turn; a later turn takes a newer step.
        turns: how many turns have begun.
        failures: lane → the turns that it ended.
        exposed: step → the lanes that were left out, for the turn and the protected step.
    """

    tried: int = -1
    turns: int = 0
    failures: Mapping[int, LaneHistory] = field(default_factory=dict)
    exposed: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def failed(self, report: GuardReport, step: int) -> frozenset[int]:
        """Returns the lanes that lack parity of a step, though the turn tried them."""
        lacking = frozenset(lane.lane for lane in report.lanes if lane.step == step)
        return lacking - self.exposed.get(step, frozenset())

    def begin(self, step: int, lanes: int, protected: int) -> TurnHistory:
        """Returns the history with a new turn.

        Args:
            step: the step of the turn.
            lanes: the number of lanes.
            protected: the step that is protected now.
        """
        turns = self.turns + 1
        left_out = frozenset(lane for lane, failures in self.failures.items() if turns < failures.next_try)
        exposed = {step: left_out if len(left_out) < lanes else frozenset[int]()}
        if protected in self.exposed:
            exposed[protected] = self.exposed[protected]
        return TurnHistory(step, turns, self.failures, exposed)

    def after_failure(self, lanes: Iterable[int]) -> TurnHistory:
        """Returns the history after these lanes ended the turn."""
        failures = dict(self.failures)
        for lane in lanes:
            count = failures[lane].count + 1 if lane in failures else 1
            left_out = min(1 << (count - 2), LEFT_OUT_MAX) if count >= 2 else 0
            failures[lane] = LaneHistory(count, self.turns + 1 + left_out)
        return replace(self, failures=failures)

    def after_success(self, step: int) -> TurnHistory:
        """Returns the history after the turn of a step succeeded."""
        exposed = self.exposed.get(step, frozenset())
        return replace(self, failures={lane: self.failures[lane] for lane in self.failures.keys() & exposed})


def next_pins(
    pins: Pins, whole: int, report: GuardReport, history: TurnHistory, facts: ExchangeFacts
) -> tuple[Pins, TurnHistory]:
    """Returns the coordinator's next pins, and its memory of turns.

    Args:
        pins: the pins that were announced last.
        whole: the newest whole step.
        report: what all nodes report on the parity of these pins.
        history: the coordinator's memory until now.
        facts: of the job's exchange.
    """
    turn, protected = pins.turn, pins.protected
    if protected >= 0 and history.failed(report, protected):
        protected = -1
    if turn >= 0:
        if failed := history.failed(report, turn):
            turn, history = -1, history.after_failure(failed)
        elif report.guarded == turn:
            turn, protected, history = -1, turn, history.after_success(turn)
    if turn < 0 and whole > history.tried and _leaves_two_slots(protected, facts):
        turn, history = whole, history.begin(whole, facts.lanes, protected)
    has_changed = (turn, protected) != (pins.turn, pins.protected)
    return Pins(pins.seq + has_changed, whole, turn, protected), history


def _leaves_two_slots(protected: int, facts: ExchangeFacts) -> bool:
    """Whether a turn may begin: its step, and the protected one or the guard, leave two slots."""
    pinned = 1 + (protected >= 0 or facts.has_guard)
    return facts.lanes > 0 and pinned <= facts.slots - 2


@dataclass
class GuardRound:
    """One node's part in the turns of one epoch, as its `Round` needs it.

    Args:
        facts: of the job's exchange.
        children: how many nodes report to this one.
        history: the coordinator's memory of the turns.
    """

    facts: ExchangeFacts
    children: int
    history: TurnHistory
    _own: GuardReport = NO_GUARD
    _reports: dict[int, GuardReport] = field(default_factory=dict)

    def hear(self, child: int, report: GuardReport) -> bool:
        """Takes the report of the subtree below a child; True if it is news."""
        is_news = report != self._reports.get(child, NO_GUARD)
        self._reports[child] = report
        return is_news

    def note_guarded(self, pins: Pins, step: int) -> bool:
        """Notes that all parity of the turn here is sealed; False for another step."""
        if step != pins.turn or step < 0:
            return False
        self._own = replace(self._own, guarded=step)
        return True

    def note_unguarded(self, pins: Pins, lanes: Iterable[UnguardedLane]) -> bool:
        """Notes lanes that lack parity here; True if the step is pinned."""
        noted = _of_pinned_steps(pins, lanes)
        self._own = replace(self._own, lanes=_of_pinned_steps(pins, self._own.lanes) | noted)
        return bool(noted)

    def report(self, pins: Pins) -> GuardReport:
        """Returns the report of this node's subtree, to be sent to the parent."""
        reports = [*self._reports.values(), *([self._own] if self.facts.guards else [])]
        are_all_heard = len(self._reports) == self.children
        is_guarded = pins.turn >= 0 and are_all_heard and all(each.guarded == pins.turn for each in reports)
        lanes = _of_pinned_steps(pins, (lane for each in reports for lane in each.lanes))
        one_each = {(lane.step, lane.lane): lane for lane in sorted(lanes, reverse=True)}
        return GuardReport(pins.turn if is_guarded else -1, frozenset(one_each.values()))

    def next_pins(self, pins: Pins, whole: int) -> Pins:
        """Returns the coordinator's next pins; see the function."""
        return next_pins(pins, whole, self.report(pins), self.history, self.facts)[0]

    def announce(self, pins: Pins, whole: int) -> None:
        """Remembers that the coordinator announces `next_pins`."""
        _, self.history = next_pins(pins, whole, self.report(pins), self.history, self.facts)
