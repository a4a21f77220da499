"""Pins: the versions whose slots and capsules stay, and the turns that protect them.

Unreplicated state exists once. So daemons keep parity of one another's sealed slots, made outside
the step. A *turn* makes the parity of one whole step on all nodes. Two watermarks follow: `whole`
survives processes, `protected` survives lost nodes, too.

    ranks ── sealed(s) on all ──► whole = s
                                    │ no turn is under way, and enough slots stay free
                                    ▼
    coordinator ── pins(turn = s, attempt = a) ──► daemons pull blocks, seal parity
        ▲                                               │
        │ all nodes?                                    ├─ guarded(a) ─────────────► protected = s
        └───────────────────────────────────────────────┴─ unguarded(a, lane) ─────► turn = none
                                                                                       │
        another attempt at the newest whole step ◄── after 1, 2, 4, … seconds ─────────┤
                                                                                       │
        parity of P is gone ──► protected = none, kept = P ────────────────────────────┘

Invariants
  1. `Pins` travel and are replaced as one value. `seq` counts the changes of all fields but
     `whole`. The greater `seq` wins, then the greater `whole`. The reuse rule reads `whole` from
     the same value as the pinned steps.
  2. The coordinator of a job that exchanges keeps its pins in a file before it announces them.
     Pins that can't be written announce nothing new.
  3. The slots and the capsules of a pinned version stay, on every node that has them.
  4. A turn takes the newest whole step. At most one turn is under way. Each turn has a number of
     its own in the epoch: the *attempt*. Reports name the attempt, not the step. So a late report
     on an earlier turn never counts for another one, also if both are turns of one step.
  5. A turn begins only while the pins leave two slots. So one slot can always be written.
  6. Until a step of the new epoch is whole, the base is pinned. Until one is protected, the guard
     is.
  7. `protected` is announced only after every node has sealed all its parity of that step. Lanes
     that were left out of the turn are the exception: they are *exposed*, and reported by name. The
     pins say whether there are any, because ranks hear nothing else of the exchange.
  8. The coordinator of a job with storage pins the step that is being written there, by itself: see
     reft/core/persist/persist_schedule.py. So its slots stay until the checkpoint is complete.
  9. A protected step that loses parity is no longer called protected. It is *kept*, which means
     pinned as before, until another turn succeeds. It may still survive fewer losses, or those of
     other nodes.

While the newest whole step is not protected in all lanes, the step has more turns, after pauses of
1, 2, 4, … s. The shell has the clock: it asks for `retry_pause_s`, and calls `permit_retry`. A
newer whole step has its turn at once.

A lane that ended two turns as unguardable is left out of 1, 2, 4, … turns, so that the other lanes
go on. A turn without a lane lets go of an earlier step that was protected in all of them. So while
a step or the guard is pinned, two turns are not enough: they must lie LEFT_OUT_AFTER_S apart, in
which a daemon is restarted. If all lanes would be left out, none is.

A lost message is repeated by the next one, since each is complete. A late one has a smaller `seq`,
or names an earlier attempt, and changes nothing. A repeated one changes nothing. A restarted daemon
knows no pins, and reports nothing until it hears them. A restarted coordinator starts from its
file, and goes on with its turn. It has forgotten which lanes failed, so those may end further
turns, as if they had not failed before. A job that exchanges nothing has no turns: `whole` alone
advances. Then the file is written only if the persisted step changes, and `since` of the reports
brings a newer `whole` back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from reft.core.commit.decision import Decision
from reft.core.commit.version import Version

EXCHANGE_SLOTS_MIN = 4  # slots of a rank: protected, turn, newest whole step, and one to write
LEFT_OUT_MAX = 64  # turns that a failing lane is left out of
LEFT_OUT_AFTER_S = 30.0  # as long as a turn waits for a silent node
RETRY_PAUSE_MAX_S = 64  # between two turns of one step


@dataclass(frozen=True)
class Pins:
    """The steps of an epoch that stay, as one value; -1: none.

    Attributes:
        seq: counts the changes of the fields below.
        whole: the newest whole step; `seq` does not count its changes.
        turn: the step whose parity is being made.
        protected: the newest step that survives lost nodes.
        attempt: number of the newest turn of the epoch, also if that turn is over; 0: none yet.
        protected_by: number of the turn that made the parity of `protected`; 0: none.
        kept: the step that was protected last, if a part of its parity is gone since.
        persist: the step that is being written to storage.
        is_exposed: whether lanes lack parity of `protected`, because its turn left them out.
    """

    seq: int = 0
    whole: int = -1
    turn: int = -1
    protected: int = -1
    attempt: int = 0
    protected_by: int = 0
    kept: int = -1
    persist: int = -1
    is_exposed: bool = False

    @property
    def guarded_step(self) -> int:
        """The step whose parity stays: the protected one, or what is left of the last one."""
        return max(self.protected, self.kept)

    @property
    def is_complete(self) -> bool:
        """Whether the newest whole step is protected in all lanes."""
        return self.protected == self.whole and not self.is_exposed

    def merge(self, other: Pins) -> Pins:
        """Returns the newer of two values."""
        return max(self, other, key=lambda pins: (pins.seq, pins.whole))

    def with_persist(self, step: int) -> Pins:
        """Returns the coordinator's next pins if it persists `step`; -1: it persists none."""
        return replace(self, seq=self.seq + 1, persist=step)


def pinned_versions(pins: Pins, decision: Decision) -> frozenset[Version]:
    """Returns the versions whose slots and capsules stay beside those that may become whole.

    Args:
        pins: the newest pins that are known.
        decision: the decision in force.
    """
    steps = (pins.whole, pins.turn, pins.guarded_step, pins.persist)
    pinned = {Version(decision.epoch, step) for step in steps if step >= 0}
    if pins.whole < 0 and decision.base is not None:
        pinned.add(decision.base)
    if pins.guarded_step < 0 and decision.guard is not None:
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
        attempt: number of the turn that is to make the parity, or has made it.
    """

    step: int
    lane: int
    words: str
    attempt: int


@dataclass(frozen=True)
class GuardReport:
    """What a node, or a subtree, reports on the parity of the pinned steps.

    Attributes:
        guarded: the attempt of which all parity here is sealed, except that of `lanes`; 0: none.
        lanes: the lanes that lack parity of the turn or of the protected step.
    """

    guarded: int = 0
    lanes: frozenset[UnguardedLane] = frozenset()

    def lacking(self, attempt: int) -> frozenset[int]:
        """Returns the lanes that lack parity of a turn."""
        return frozenset(lane.lane for lane in self.lanes if lane.attempt == attempt)


NO_GUARD = GuardReport()


def _of_pinned_turns(pins: Pins, lanes: Iterable[UnguardedLane]) -> frozenset[UnguardedLane]:
    attempts = {pins.attempt if pins.turn >= 0 else 0, pins.protected_by} - {0}
    return frozenset(lane for lane in lanes if lane.attempt in attempts)


@dataclass(frozen=True)
class LaneHistory:
    """The turns that one lane ended as unguardable.

    Attributes:
        since_s: when it ended the first one, since it was last guarded.
        left_out: of how many turns it was left out after the newest one.
        next_try: number of the first turn that tries the lane again.
    """

    since_s: float
    left_out: int
    next_try: int


@dataclass(frozen=True)
class TurnHistory:
    """What the coordinator remembers of the turns of an epoch.

    Attributes:
        tried: the newest step that had a turn.
        tries: how many turns that step had, as far as is remembered.
        retry_after: the attempt after which `tried` may have another turn; -1: none.
        failures: lane → the turns that it ended.
        exposed: attempt → the lanes that were left out, for the turn and the protected step.
    """

    tried: int = -1
    tries: int = 0
    retry_after: int = -1
    failures: Mapping[int, LaneHistory] = field(default_factory=dict)
    exposed: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def failed(self, report: GuardReport, attempt: int) -> frozenset[int]:
        """Returns the lanes that lack parity of a turn, though the turn tried them."""
        return report.lacking(attempt) - self.exposed.get(attempt, frozenset())

    def begin(self, step: int, attempt: int, lanes: int, protected_by: int) -> TurnHistory:
        """Returns the history with a new turn.

        Args:
            step: the step of the turn.
            attempt: its number.
            lanes: the number of lanes.
            protected_by: number of the turn of the step that is protected now; 0: none.
        """
        left_out = frozenset(lane for lane, failures in self.failures.items() if attempt < failures.next_try)
        exposed = {attempt: left_out if len(left_out) < lanes else frozenset[int]()}
        if protected_by in self.exposed:
            exposed[protected_by] = self.exposed[protected_by]
        tries = self.tries + 1 if step == self.tried else 1
        return TurnHistory(step, tries, -1, self.failures, exposed)

    def after_failure(self, lanes: Iterable[int], attempt: int, now_s: float, patience_s: float) -> TurnHistory:
        """Returns the history after these lanes ended a turn.

        Args:
            lanes: the lanes.
            attempt: number of the turn.
            now_s: the present time.
            patience_s: for so long after its first failure a lane is not left out.
        """
        failures = dict(self.failures)
        for lane in lanes:
            before = failures.get(lane)
            since_s = before.since_s if before is not None else now_s
            left_out = 0
            if before is not None and (before.left_out or now_s - since_s >= patience_s):
                left_out = min(max(2 * before.left_out, 1), LEFT_OUT_MAX)
            failures[lane] = LaneHistory(since_s, left_out, attempt + 1 + left_out)
        return replace(self, failures=failures)

    def after_success(self, lacking: frozenset[int]) -> TurnHistory:
        """Returns the history after a turn succeeded, without the lanes that lack its parity."""
        return replace(self, failures={lane: self.failures[lane] for lane in self.failures.keys() & lacking})


def next_pins(
    pins: Pins, whole: int, report: GuardReport, history: TurnHistory, facts: ExchangeFacts, now_s: float
) -> tuple[Pins, TurnHistory]:
    """Returns the coordinator's next pins, and its memory of turns.

    Args:
        pins: the pins that were announced last.
        whole: the newest whole step.
        report: what all nodes report on the parity of these pins.
        history: the coordinator's memory until now.
        facts: of the job's exchange.
        now_s: the present time, by any clock that never goes back.
    """
    after = replace(pins, whole=whole)
    if after.protected >= 0 and history.failed(report, after.protected_by):
        after = replace(after, protected=-1, protected_by=0, kept=after.protected, is_exposed=False)
    elif after.protected >= 0 and report.lacking(after.protected_by):
        after = replace(after, is_exposed=True)
    if after.turn >= 0:
        if failed := history.failed(report, after.attempt):
            patience_s = LEFT_OUT_AFTER_S if after.guarded_step >= 0 or facts.has_guard else 0.0
            history = history.after_failure(failed, after.attempt, now_s, patience_s)
            after = replace(after, turn=-1)
        elif 0 < report.guarded == after.attempt:
            lacking = report.lacking(after.attempt)
            after = replace(
                after, turn=-1, protected=after.turn, protected_by=after.attempt, kept=-1, is_exposed=bool(lacking)
            )
            history = history.after_success(lacking)
    is_due = whole > history.tried or (history.retry_after == after.attempt and not after.is_complete)
    if is_due and _may_begin(after, facts):
        after = replace(after, turn=whole, attempt=after.attempt + 1)
        history = history.begin(whole, after.attempt, facts.lanes, after.protected_by)
    has_changed = after != replace(pins, whole=whole)
    return replace(after, seq=pins.seq + has_changed), history


def _may_begin(pins: Pins, facts: ExchangeFacts) -> bool:
    """Whether a turn of the newest whole step may begin."""
    return pins.turn < 0 <= pins.whole and facts.lanes > 0 and _leaves_two_slots(pins, facts)


def _leaves_two_slots(pins: Pins, facts: ExchangeFacts) -> bool:
    """Whether a turn of the whole step, beside what is pinned, leaves two slots.

    Pinned are the guarded step or the guard, and the step that is written to storage.
    """
    steps = {pins.whole, pins.guarded_step, pins.persist} - {-1}
    pinned = len(steps) + (pins.guarded_step < 0 and facts.has_guard)
    return pinned <= facts.slots - 2


@dataclass
class GuardRound:
    """One node's part in the turns of one epoch, as its `Round` needs it.

    Args:
        facts: of the job's exchange.
        children: how many nodes report to this one.
        history: the coordinator's memory of the turns.
        now_s: the time, which the coordinator's shell sets before it announces.
    """

    facts: ExchangeFacts
    children: int
    history: TurnHistory
    now_s: float = 0.0
    _own: GuardReport = NO_GUARD
    _reports: dict[int, GuardReport] = field(default_factory=dict)

    def hear(self, child: int, report: GuardReport) -> bool:
        """Takes the report of the subtree below a child; True if it is news."""
        is_news = report != self._reports.get(child, NO_GUARD)
        self._reports[child] = report
        return is_news

    def note_guarded(self, pins: Pins, attempt: int) -> bool:
        """Notes that all parity of the turn here is sealed; False for another turn."""
        if pins.turn < 0 or attempt != pins.attempt:
            return False
        self._own = replace(self._own, guarded=attempt)
        return True

    def note_unguarded(self, pins: Pins, lanes: Iterable[UnguardedLane]) -> bool:
        """Notes lanes that lack parity here; True if one is of a pinned turn."""
        noted = _of_pinned_turns(pins, lanes)
        self._own = replace(self._own, lanes=_of_pinned_turns(pins, self._own.lanes) | noted)
        return bool(noted)

    def report(self, pins: Pins) -> GuardReport:
        """Returns the report of this node's subtree, to be sent to the parent."""
        reports = [*self._reports.values(), *([self._own] if self.facts.guards else [])]
        are_all_heard = len(self._reports) == self.children
        is_guarded = pins.turn >= 0 and are_all_heard and all(each.guarded == pins.attempt for each in reports)
        lanes = _of_pinned_turns(pins, (lane for each in reports for lane in each.lanes))
        one_each = {(lane.attempt, lane.lane): lane for lane in sorted(lanes, reverse=True)}
        return GuardReport(pins.attempt if is_guarded else 0, frozenset(one_each.values()))

    def next_pins(self, pins: Pins, whole: int) -> Pins:
        """Returns the coordinator's next pins; see the function."""
        return self._next(pins, whole)[0]

    def announce(self, pins: Pins, whole: int) -> None:
        """Remembers that the coordinator announces `next_pins`."""
        _, self.history = self._next(pins, whole)

    def retry_pause_s(self, pins: Pins) -> float | None:
        """Returns after how many seconds the newest whole step may have another turn.

        None: no other turn is wanted, or none may begin.
        """
        if not _may_begin(pins, self.facts) or pins.is_complete:
            return None
        return float(min(1 << max(self.history.tries - 1, 0), RETRY_PAUSE_MAX_S))

    def permit_retry(self, pins: Pins, attempt: int) -> None:
        """Permits another turn of the same step, unless a turn after `attempt` has begun."""
        if pins.turn < 0 and attempt == pins.attempt:
            self.history = replace(self.history, retry_after=attempt)

    def _next(self, pins: Pins, whole: int) -> tuple[Pins, TurnHistory]:
        return next_pins(pins, whole, self.report(pins), self.history, self.facts, self.now_s)
