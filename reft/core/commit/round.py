"""The round: a small, asynchronous agreement on each snapshot. No step waits for it.

    rank 0 ─┐ report: sealed {s}, until n                       whole(s), all others up to n void
    rank 1 ─┴► node 1 ──report of subtree──► node 0: coordinator ──outcome──► node 1 ─► ranks 0, 1
    rank 2 ──► node 2 ────────────────────►     (a tree of fan-out 16; every node runs this file)

Invariants
  1. A rank answers steps in ascending order, each step once: sealed or void. A report is complete:
     each step up to the newest answer that the report does not name is void. So each message
     contains everything, and its size does not grow with time.
  2. whole(s) is announced only if every rank of the job sealed exactly s. "At least s" would be
     wrong: a rank that skipped s and sealed s+1 holds nothing of s.
  3. void(s) is announced as soon as one rank reports void. After that, s never becomes whole.
  4. Outcomes only permit reuse of slots. Recovery never trusts an outcome: it reads slot headers.
  5. Ranks that hold replicas send a digest of each cell with "sealed": of the whole cell, or of a
     window that moves with the step. If two digests differ, s is void, and so are all later steps
     of this epoch, because their windows may lie elsewhere. Shards of replicas that differ do not
     make one state.
  6. Reports and outcomes also carry what the ranks agree on before a new layout
     (core/commit/relayout.py). While that goes on, a node's round is pinned: it hears nothing.
  7. Outcomes carry the pins (core/commit/pins.py), as one value. `whole` is a part of it: only the
     coordinator learns of a whole step without its pins. Reports carry what the subtree guards.
  8. Reports carry the interval that each rank requests. Outcomes carry the agreed interval
     (core/commit/snapshot_interval.py). If only some ranks take a step, because others do not know
     a new interval yet, then the others' reports on a later step make that step void.

Undecided steps are never dropped, however long daemons are away. Memory stays bounded: a report
names only the few undecided steps that some rank has sealed, or may still seal. Each sender also
reports the newest step that it knows to be whole, and nothing about older steps, which it may have
dropped. So a restarted coordinator learns what its predecessor announced. Other nodes pass that
step on, and act only on the outcome: a step that is whole may come with pins that they don't know.

The coordinator of a job that exchanges announces only pins that are written. So its shell asks for
`next_outcome`, writes the pins, and calls `announce`. Without an exchange a report is announced at
once.

The next message repairs a lost one, because each message is complete. A late or repeated message
tells less than is known, and the first answer to a step stays. One `Round` belongs to one epoch.
The daemon refuses messages of other epochs, so they never reach this class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType

from reft.core.commit.pins import NO_GUARD, ExchangeFacts, GuardReport, GuardRound, Pins, TurnHistory
from reft.core.commit.relayout import LayoutOutcome, LayoutReport, combine
from reft.core.commit.snapshot_interval import SnapshotInterval, next_interval

FAN_OUT = 16
# Steps of one rank that are sealed, or may still be sealed, without a decision: the limit on slots
# of a rank.
UNDECIDED_MAX = 32
Digests = Mapping[int, Mapping[int, int]]  # step → cell → digest
NO_DIGESTS: Digests = MappingProxyType({})


class StepAnswer(IntEnum):
    """A rank's answer to one step."""

    SEALED = 1
    VOID = 2


@dataclass(frozen=True)
class StepReport:
    """The answers to an epoch's steps, by one rank or a whole subtree.

    A subtree's answers are those of all its ranks. Each step between `since` and `until` that is
    neither sealed nor pending is void.

    Attributes:
        since: the newest step known to be whole. The report does not cover this step and older
            ones. -1: none.
        until: the newest answered step; -1: none.
        sealed: steps sealed by this rank, or by all ranks of the subtree.
        pending: steps without a full answer although a later step is answered. No rank has reported
            them void.
    """

    since: int = -1
    until: int = -1
    sealed: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()

    def answer(self, step: int) -> StepAnswer | None:
        """Returns the answer to `step`; None if there is none."""
        if step in self.sealed:
            return StepAnswer.SEALED
        if step <= self.since or step > self.until or step in self.pending:
            return None
        return StepAnswer.VOID

    def merge(self, report: StepReport) -> StepReport:
        """Merges a report that arrived later. The first answer to a step counts."""
        sealed = self.sealed | {step for step in report.sealed if self.answer(step) is None}
        candidates = (self.pending | report.pending) - sealed
        pending = {step for step in candidates if self.answer(step) is None and report.answer(step) is None}
        since, until = max(self.since, report.since), max(self.until, report.until)
        return StepReport(since, until, _newest(sealed), _newest(pending))

    def without_decided(self, outcome: Outcome) -> StepReport:
        """Returns the report without the steps that `outcome` decides."""
        sealed, pending = (
            frozenset(step for step in steps if not outcome.decides(step)) for steps in (self.sealed, self.pending)
        )
        return replace(self, since=max(self.since, outcome.whole), sealed=sealed, pending=pending)


NOTHING = StepReport()


@dataclass(frozen=True)
class Outcome:
    """The coordinator's decisions: on every step up to `until`, except the open ones.

    Attributes:
        pins: the newest whole step, and the steps that stay beside it. Steps newer than the whole
            one, up to `until`, are void, except the open ones.
        until: the newest step that a rank has answered.
        open: undecided steps newer than `whole`: some rank sealed them, no rank reported them void.
        mismatched: cells whose replicas differed at some step of this epoch.
        interval: the newest agreed interval.
        layout: what the ranks agree on before a new layout.
    """

    pins: Pins = field(default_factory=Pins)
    until: int = -1
    open: frozenset[int] = frozenset()
    mismatched: frozenset[int] = frozenset()
    interval: SnapshotInterval = SnapshotInterval()  # noqa: RUF009 - a named tuple never changes
    layout: LayoutOutcome = field(default_factory=LayoutOutcome)

    @property
    def whole(self) -> int:
        """The newest whole step; -1: none yet."""
        return self.pins.whole

    def decides(self, step: int) -> bool:
        """Whether the step is decided, whole or void."""
        return step <= self.whole or (step <= self.until and step not in self.open)

    def voids(self, step: int) -> bool:
        """Whether the step is void and newer than the newest whole step."""
        return step > self.whole and self.decides(step)

    def merge(self, outcome: Outcome) -> Outcome:
        """Merges another outcome, older or newer. A step is decided if either one decides it."""
        still_open = {step for step in self.open | outcome.open if not self.decides(step) and not outcome.decides(step)}
        return Outcome(
            self.pins.merge(outcome.pins),
            max(self.until, outcome.until),
            frozenset(still_open),
            self.mismatched | outcome.mismatched,
            max(self.interval, outcome.interval),
            self.layout.merge(outcome.layout),
        )


def _newest(steps: Iterable[int]) -> frozenset[int]:
    """Returns the newest UNDECIDED_MAX steps.

    A sender that reports more breaks the limit; the older steps then count as void.
    """
    return frozenset(sorted(steps)[-UNDECIDED_MAX:])


def parent_of(index: int) -> int | None:
    """Returns the node to which node `index` reports; None for node 0, the coordinator."""
    return None if index == 0 else (index - 1) // FAN_OUT


def children_of(index: int, nodes: int) -> range:
    """Returns the nodes that report to node `index`."""
    first = index * FAN_OUT + 1
    return range(min(first, nodes), min(first + FAN_OUT, nodes))


@dataclass
class Round:
    """One node's part in the rounds of one epoch.

    Args:
        index: this node's index in the manifest.
        nodes: how many nodes the manifest names.
        ranks: the ranks that train on this node.
        exchange: what the job exchanges; nothing by default.
        outcome: what this node knows of the coordinator's decisions.
        is_pinned: whether this node learns nothing more, because a new layout is being decided.

    Attributes:
        guard: the parity of this node's subtree.
    """

    index: int
    nodes: int
    ranks: frozenset[int]
    exchange: ExchangeFacts = field(default_factory=ExchangeFacts)
    outcome: Outcome = field(default_factory=Outcome)
    is_pinned: bool = False
    _reports: dict[tuple[str, int], StepReport] = field(default_factory=dict)
    _digests: dict[int, dict[int, int]] = field(default_factory=dict)
    _mismatched: set[int] = field(default_factory=set)  # undecided steps whose replicas differ
    _requests: dict[tuple[str, int], int] = field(default_factory=dict)
    _layouts: dict[tuple[str, int], LayoutReport] = field(default_factory=dict)
    guard: GuardRound = field(init=False)

    def __post_init__(self) -> None:
        children = len(children_of(self.index, self.nodes))
        self.guard = GuardRound(self.exchange, children, TurnHistory(tried=self.outcome.whole))

    def hear_rank(self, rank: int, report: StepReport, digests: Digests = NO_DIGESTS) -> bool:
        """Takes the report of a local rank; True if there is news to pass on.

        Args:
            rank: the sender.
            report: its answers.
            digests: step → cell → digest, for the sealed steps.

        Raises:
            ValueError: the rank does not train on this node.
        """
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not one of this node's ranks {sorted(self.ranks)}")
        return self._hear(("rank", rank), report, digests)

    def hear_node(
        self,
        child: int,
        report: StepReport,
        digests: Digests = NO_DIGESTS,
        mismatched: Iterable[int] = (),
        requested_every: int = 0,
        guard: GuardReport = NO_GUARD,
    ) -> bool:
        """Takes the report of the subtree below `child`.

        The result is True if there is news to pass on.

        Args:
            child: the sending node.
            report: the answers of its subtree.
            digests: step → cell → digest, for the sealed steps.
            mismatched: cells whose replicas differ within the subtree.
            requested_every: the subtree's `requested_every`.
            guard: what the subtree guards.

        Raises:
            ValueError: the node does not report to this one.
        """
        if child not in children_of(self.index, self.nodes):
            raise ValueError(f"node {child} does not report to node {self.index}")
        self._requests["node", child] = requested_every
        is_news = self._note_mismatched(mismatched)
        if not self.is_pinned and self.guard.hear(child, guard):
            is_news = True
        return self._hear(("node", child), report, digests) or is_news

    def hear_layout(self, rank: int, layout: LayoutReport) -> bool:
        """Takes what a local rank reports on layouts; True if there is news."""
        return self._hear_layout(("rank", rank), layout)

    def hear_child_layout(self, child: int, layout: LayoutReport) -> bool:
        """Takes what the subtree below `child` reports on layouts; True if there is news."""
        return self._hear_layout(("node", child), layout)

    @property
    def layout(self) -> LayoutReport:
        """What this node's subtree reports on layouts."""
        return combine(self._layouts.values(), self._sources)

    def hear_request(self, rank: int, every: int) -> None:
        """Takes a local rank's request: a snapshot each `every`-th step; 0 means no request yet."""
        self._requests["rank", rank] = every

    @property
    def requested_every(self) -> int:
        """The largest interval that a rank of the subtree requests; 0 until all have requests."""
        requests = self._requests.values()
        return max(requests) if requests and len(requests) == self._sources and all(requests) else 0

    def hear_outcome(self, outcome: Outcome) -> bool:
        """Takes the coordinator's decisions; True if they are news."""
        merged = self.outcome.merge(outcome)
        if merged == self.outcome or self.is_pinned:
            return False
        self.outcome = merged
        for source, report in self._reports.items():
            self._reports[source] = report.without_decided(merged)
        self._mismatched = {step for step in self._mismatched if not merged.decides(step)}
        self._digests = {step: cells for step, cells in self._digests.items() if not merged.decides(step)}
        return True

    @property
    def is_open(self) -> bool:
        """Whether a step that some rank of the subtree has sealed is undecided."""
        return any(report.sealed or report.pending for report in self._reports.values())

    @property
    def has_news(self) -> bool:
        """Whether `report()` tells the coordinator more than it has decided.

        The news concerns newer steps, a step that is open in the outcome, parity of a pinned step,
        or a new layout.
        """
        report = self.report()
        is_answered = any(report.answer(step) is not None for step in self.outcome.open)
        has_layout_news = self.outcome.layout.after(self.layout) != self.outcome.layout
        has_guard_news = self.guard.report(self.outcome.pins) != NO_GUARD
        is_ahead = report.until > self.outcome.until
        return bool(report.sealed or report.pending) or is_ahead or is_answered or has_layout_news or has_guard_news

    def report(self) -> StepReport:
        """Returns the complete report of this node's subtree, to be sent to the parent."""
        reports = self._reports.values()
        # every rank has answered a whole step, so `until` covers it
        since = max(self.outcome.whole, *(report.since for report in reports), -1)
        until = max(since, *(report.until for report in reports), -1)
        sealed, pending = set(), set()
        for step in frozenset().union(*(report.sealed | report.pending for report in reports)) - self._mismatched:
            answers = [report.answer(step) for report in reports]
            if step <= since or StepAnswer.VOID in answers:
                continue
            if None not in answers and len(answers) == self._sources:
                sealed.add(step)
            elif step <= until:
                pending.add(step)
        return StepReport(since, until, frozenset(sealed), frozenset(pending))

    def digests(self) -> dict[int, dict[int, int]]:
        """Returns the digests of the sealed steps of `report()`: step → cell → digest."""
        return {step: dict(self._digests[step]) for step in self.report().sealed if step in self._digests}

    @property
    def _sources(self) -> int:
        """How many ranks and nodes report to this node."""
        return len(self.ranks) + len(children_of(self.index, self.nodes))

    def _hear_layout(self, source: tuple[str, int], layout: LayoutReport) -> bool:
        before = self._layouts.get(source, LayoutReport())
        if self.is_pinned:
            return False
        merged = self._layouts[source] = before.merge(layout)
        if self.index == 0:
            self.hear_outcome(replace(self.outcome, layout=self.outcome.layout.after(self.layout)))
        return merged != before

    def _hear(self, source: tuple[str, int], report: StepReport, digests: Digests) -> bool:
        if self.is_pinned:
            return False
        before = self._reports.get(source, NOTHING)
        after = before.merge(report).without_decided(self.outcome)
        self._reports[source] = after
        for step in sorted(after.sealed - before.sealed):
            self._compare(step, digests.get(step, {}))
        if after == before:
            return False
        if self.index == 0 and not self.exchange.lanes:
            self.announce()
        return True

    def _compare(self, step: int, digests: Mapping[int, int]) -> None:
        """Compares a source's digests with those of the other sources.

        If they differ, the step is void. No source is blamed: nothing tells which of them is wrong.
        """
        known = self._digests.setdefault(step, {})
        mismatched = {cell for cell, digest in digests.items() if known.setdefault(cell, digest) != digest}
        if mismatched:
            self._mismatched.add(step)
            self._note_mismatched(mismatched)

    def _note_mismatched(self, cells: Iterable[int]) -> bool:
        before = self.outcome
        self.outcome = replace(before, mismatched=before.mismatched | frozenset(cells))
        return self.outcome != before

    def next_outcome(self) -> Outcome:
        """Returns what the coordinator announces next; on other nodes nothing new."""
        if self.index != 0 or self.is_pinned:
            return self.outcome
        report = self.report()
        newest = -1 if self.outcome.mismatched else max(report.sealed, default=-1)
        whole = max(report.since, newest)
        interval = (
            next_interval(self.outcome.interval, self.requested_every, whole)
            if whole > self.outcome.whole
            else self.outcome.interval
        )
        pins = self.guard.next_pins(self.outcome.pins, whole)
        return self.outcome.merge(Outcome(pins, report.until, report.pending, interval=interval))

    def announce(self) -> None:
        """Announces `next_outcome`."""
        outcome = self.next_outcome()
        if outcome.pins != self.outcome.pins:
            self.guard.announce(self.outcome.pins, outcome.whole)
        self.hear_outcome(outcome)
