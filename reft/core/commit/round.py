"""The round: one small, asynchronous agreement for each snapshot, never waited for in a step.

    rank 0 ─┐ said: sealed {s}, until n                              whole(s), void up to n but for …
    rank 1 ─┴► node 1 ──what its subtree said──► node 0, the coordinator ──outcome──► node 1 ─► rank 0, rank 1
    rank 2 ──► node 2 ─────────────────────────►     (a tree of fan-out 16; every node runs this file)

Invariants
  1. A rank answers steps in their order, each once, sealed or void. What it says is complete: up to its newest answer, every
     step that it does not name is void. So each message says all that there is, and its size does not grow with time.
  2. whole(s) is announced only if every rank of the job sealed exactly s. "At least s" would be wrong: a rank that
     skipped s and sealed s+1 holds nothing of s.
  3. void(s) is announced as soon as one rank said void; s never becomes whole after that.
  4. Outcomes only permit reuse. Recovery never trusts them: it reads slot headers.
  5. Ranks that hold replicas say with "sealed" what the bytes of each cell look like: a digest of all of it, or of a
     window that wanders with the step. Two that differ make s void, and all that comes later in this epoch, whose windows
     may lie elsewhere: shards of unlike replicas are no state.
  6. Reports carry the interval that each rank requests, outcomes the agreed interval
     (core/commit/snapshot_interval.py). A step that only some of them take, because not all have heard of a pace, is void by
     what the others say of a later one.

Nothing is forgotten but what is decided, however long daemons are away, and nothing is kept but a few steps: of those that
somebody has sealed, or may still seal. The sender says also which step it knows to be whole, of older steps it says nothing:
he may have forgotten them because they are decided. So a restarted coordinator learns what the one before it announced.

A lost message is repaired by the next, which says all. A late or repeated one says less than is known; what was said once
stays. One `Round` belongs to one epoch; messages of another epoch never reach it (the daemon refuses them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType

from reft.core.commit.snapshot_interval import SnapshotInterval, next_interval

FAN_OUT = 16
UNDECIDED_MAX = (
    32  # steps that one rank has sealed, or may still seal, without a decision: as many as it may have slots
)
Digests = Mapping[int, Mapping[int, int]]  # step → cell → digest
NO_DIGESTS: Digests = MappingProxyType({})


class StepAnswer(IntEnum):
    SEALED = 1
    VOID = 2


@dataclass(frozen=True)
class StepReport:
    """What a rank, or all ranks below a node together, say of an epoch's steps; every other one up to `until` is void.

    Attributes:
        since: the newest step that is known there to be whole; nothing is said of it and of older ones. -1: none.
        until: the newest answered step; -1: none.
        sealed: by this rank, or by all of these ranks.
        pending: not answered yet though a later step is, and nobody said void.
    """

    since: int = -1
    until: int = -1
    sealed: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()

    def answer(self, step: int) -> StepAnswer | None:
        """What is said of the step; None: nothing."""
        if step in self.sealed:
            return StepAnswer.SEALED
        if step <= self.since or step > self.until or step in self.pending:
            return None
        return StepAnswer.VOID

    def then(self, said: StepReport) -> StepReport:
        """With what was heard later, which may be older: the first answer to a step counts."""
        sealed = self.sealed | {step for step in said.sealed if self.answer(step) is None}
        either = (self.pending | said.pending) - sealed
        pending = {step for step in either if self.answer(step) is None and said.answer(step) is None}
        since, until = max(self.since, said.since), max(self.until, said.until)
        return StepReport(since, until, _newest(sealed), _newest(pending))

    def without(self, outcome: Outcome) -> StepReport:
        """Without the steps that are decided."""
        sealed, pending = (
            frozenset(step for step in each if not outcome.decides(step)) for each in (self.sealed, self.pending)
        )
        return replace(self, since=max(self.since, outcome.whole), sealed=sealed, pending=pending)


NOTHING = StepReport()


@dataclass(frozen=True)
class Outcome:
    """What is decided: every step up to `until`, but for those that are open.

    Attributes:
        whole: the newest whole step; -1: none yet. Newer ones up to `until` are void, but for those that are open.
        until: the newest step that a rank has answered.
        open: newer than the whole one, not decided: sealed by some rank, said void by none.
        mismatched: the cells whose replicas were once found to differ.
        interval: the newest.
    """

    whole: int = -1
    until: int = -1
    open: frozenset[int] = frozenset()
    mismatched: frozenset[int] = frozenset()
    interval: SnapshotInterval = SnapshotInterval()  # noqa: RUF009 - a named tuple never changes

    def decides(self, step: int) -> bool:
        """Whether it is known what became of the step."""
        return step <= self.whole or (step <= self.until and step not in self.open)

    def voids(self, step: int) -> bool:
        """Whether the step is known never to become whole, and no newer one is known to be."""
        return step > self.whole and self.decides(step)

    def then(self, outcome: Outcome) -> Outcome:
        """With another one, older or newer: what either decides is decided."""
        still = {step for step in self.open | outcome.open if not self.decides(step) and not outcome.decides(step)}
        return Outcome(
            max(self.whole, outcome.whole),
            max(self.until, outcome.until),
            frozenset(still),
            self.mismatched | outcome.mismatched,
            max(self.interval, outcome.interval),
        )


def _newest(steps: Iterable[int]) -> frozenset[int]:
    """No more than UNDECIDED_MAX: a rank that says more has broken the bound, and finds older ones void."""
    return frozenset(sorted(steps)[-UNDECIDED_MAX:])


def parent_of(index: int) -> int | None:
    """The node that `index` reports to; None for the coordinator, node 0."""
    return None if index == 0 else (index - 1) // FAN_OUT


def children_of(index: int, nodes: int) -> range:
    """The nodes that report to `index`."""
    first = index * FAN_OUT + 1
    return range(min(first, nodes), min(first + FAN_OUT, nodes))


@dataclass
class Round:
    """One node's part in the rounds of one epoch.

    Args:
        index: this node's place in the manifest.
        nodes: how many nodes the manifest names.
        ranks: the ranks that train on this node.
    """

    index: int
    nodes: int
    ranks: frozenset[int]
    outcome: Outcome = field(default_factory=Outcome)
    _said: dict[tuple[str, int], StepReport] = field(default_factory=dict)
    _digests: dict[int, dict[int, int]] = field(default_factory=dict)
    _mismatched: set[int] = field(default_factory=set)  # undecided steps whose replicas differ
    _requests: dict[tuple[str, int], int] = field(default_factory=dict)

    def hear_rank(self, rank: int, said: StepReport, digests: Digests = NO_DIGESTS) -> bool:
        """Takes what a local rank says; True if something changed and must be passed on.

        Args:
            digests: step → cell → digest, of the steps that are sealed.

        Raises:
            ValueError: the rank does not train on this node.
        """
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not one of this node's ranks {sorted(self.ranks)}")
        return self._hear(("rank", rank), said, digests)

    def hear_node(
        self,
        child: int,
        said: StepReport,
        digests: Digests = NO_DIGESTS,
        mismatched: Iterable[int] = (),
        requested_every: int = 0,
    ) -> bool:
        """Takes what the subtree below `child` says; True if something changed.

        Args:
            mismatched: cells that were found to differ below it.
            requested_every: see `requested_every`, of the subtree.

        Raises:
            ValueError: the node does not report to this one.
        """
        if child not in children_of(self.index, self.nodes):
            raise ValueError(f"node {child} does not report to node {self.index}")
        self._requests["node", child] = requested_every
        is_news = self._note_mismatched(mismatched)
        return self._hear(("node", child), said, digests) or is_news

    def hear_request(self, rank: int, every: int) -> None:
        """Takes a local rank's request: a snapshot each `every`-th step; 0 means no request yet."""
        self._requests["rank", rank] = every

    @property
    def requested_every(self) -> int:
        """The greatest interval that a rank of the subtree requests; 0 until all have requested one."""
        requests = self._requests.values()
        return max(requests) if requests and len(requests) == self._sources and all(requests) else 0

    def hear_outcome(self, outcome: Outcome) -> bool:
        """Takes what the coordinator decided; True if it was news."""
        merged = self.outcome.then(outcome)
        if merged == self.outcome:
            return False
        self.outcome = merged
        for source, said in self._said.items():
            self._said[source] = said.without(merged)
        self._mismatched = {step for step in self._mismatched if not merged.decides(step)}
        self._digests = {step: cells for step, cells in self._digests.items() if not merged.decides(step)}
        return True

    @property
    def is_open(self) -> bool:
        """Whether a step that somebody below has sealed is not decided yet."""
        return any(said.sealed or said.pending for said in self._said.values())

    @property
    def has_news(self) -> bool:
        """Whether `said` says more than what the coordinator has decided: of newer steps, or of one that is open."""
        said = self.report()
        is_answered = any(said.answer(step) is not None for step in self.outcome.open)
        return bool(said.sealed or said.pending) or said.until > self.outcome.until or is_answered

    def report(self) -> StepReport:
        """What the parent must know: what the subtree says, whole, every time."""
        heard = self._said.values()
        until = max((said.until for said in heard), default=-1)
        sealed, pending = set(), set()
        for step in frozenset().union(*(said.sealed | said.pending for said in heard)) - self._mismatched:
            answers = [said.answer(step) for said in heard]
            if StepAnswer.VOID in answers:
                continue
            if None not in answers and len(answers) == self._sources:
                sealed.add(step)
            elif step <= until:
                pending.add(step)
        whole = self.outcome.whole  # every rank has sealed it, so every rank has answered it
        return StepReport(whole, max(until, whole), frozenset(sealed), frozenset(pending))

    def digests(self) -> dict[int, dict[int, int]]:
        """The digests that go with `said`, of its sealed steps."""
        return {step: dict(self._digests[step]) for step in self.report().sealed if step in self._digests}

    @property
    def _sources(self) -> int:
        """How many ranks and nodes report to this one."""
        return len(self.ranks) + len(children_of(self.index, self.nodes))

    def _hear(self, source: tuple[str, int], said: StepReport, digests: Digests) -> bool:
        is_news = self.hear_outcome(Outcome(said.since, said.since))
        before = self._said.get(source, NOTHING)
        after = before.then(said).without(self.outcome)
        self._said[source] = after
        for step in sorted(after.sealed - before.sealed):
            self._compare(step, digests.get(step, {}))
        changed = after != before or is_news  # which is in `before` already
        if changed and self.index == 0:
            self._decide()
        return changed

    def _compare(self, step: int, digests: Mapping[int, int]) -> None:
        """Holds a source's digests against those of the others; the source itself is not to blame, so the step is void."""
        known = self._digests.setdefault(step, {})
        mismatched = {cell for cell, digest in digests.items() if known.setdefault(cell, digest) != digest}
        if mismatched:
            self._mismatched.add(step)
            self._note_mismatched(mismatched)

    def _note_mismatched(self, cells: Iterable[int]) -> bool:
        before = self.outcome
        self.outcome = replace(before, mismatched=before.mismatched | frozenset(cells))
        return self.outcome != before

    def _decide(self) -> None:
        said = self.report()
        whole = -1 if self.outcome.mismatched else max(said.sealed, default=-1)
        pace = (
            next_interval(self.outcome.interval, self.requested_every, whole)
            if whole > self.outcome.whole
            else self.outcome.interval
        )
        self.hear_outcome(Outcome(whole, said.until, said.pending, interval=pace))
