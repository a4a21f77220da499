"""The round: one small, asynchronous agreement for each snapshot, never waited for in a step.

    rank 0 ─┐ sealed(s) | void(s)                                    whole(s) | void(s)
    rank 1 ─┴► node 1 ──subtree answers──► node 0, the coordinator ──outcome──► node 1 ─► rank 0, rank 1
    rank 2 ──► node 2 ──────────────────►       (a tree of fan-out 16; every node runs this file)

Invariants
  1. A rank answers each scheduled step exactly once, sealed or void; the first answer counts.
  2. whole(s) is announced only if every rank of the job sealed exactly s. "At least s" would be wrong: a rank that
     skipped s and sealed s+1 holds nothing of s.
  3. void(s) is announced as soon as one rank said void; s never becomes whole after that.
  4. Outcomes only permit reuse. Recovery never trusts them: it reads slot headers.
  5. Ranks that hold replicas say with "sealed" what the bytes of each cell look like: a digest of all of it, or of a
     window that wanders with the step. Two that differ make s void: shards of unlike replicas are no state.
  6. Answers carry each rank's wish how often to snapshot, outcomes the agreed pace (core/frequency.py). A step that the
     pace leaves out is void once a later one is answered: it was sealed by ranks that had not heard of the pace.

A lost answer leaves s undecided: its slot is kept until a newer step is whole. Each message repeats all that is still
undecided below its sender, so the next one repairs the loss. Late and repeated messages change nothing.

While a daemon is away nothing is decided: ranks fill their slots with the first steps, and say void to all that follow. What
was sealed then, and the voids of those first steps, are what the round goes on with, however long it stood still: so they
outlast the voids in the middle, which nobody has a slot for (`ends_of`).
One `Round` belongs to one epoch; messages of another epoch never reach it (the daemon refuses them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType

from reft.core.frequency import Pace, next_pace

FAN_OUT = 16
UNDECIDED_MAX = 16  # sealed steps, and as many void ones, kept without a decision: more than a rank has slots
VOIDS_MAX = 64  # voids remembered: a rank asks about at most as many as it has slots
Digests = Mapping[int, Mapping[int, int]]  # step → cell → digest
NO_DIGESTS: Digests = MappingProxyType({})
_NOBODY = ("node", -1)  # whose answer is the verdict of a comparison


class Answer(IntEnum):
    SEALED = 1
    VOID = 2


@dataclass(frozen=True)
class Outcome:
    """What is decided: the newest whole step (-1: none yet), the steps newer than it that are void, the cells whose
    replicas were once found to differ, and the newest pace."""

    whole: int = -1
    voids: frozenset[int] = frozenset()
    unlike: frozenset[int] = frozenset()
    pace: Pace = Pace()  # noqa: RUF009 - a named tuple never changes

    def decides(self, step: int) -> bool:
        return step <= self.whole or step in self.voids


def ends_of(steps: Iterable[int], limit: int) -> list[int]:
    """At most `limit` of the steps: the oldest and the newest, see the module."""
    ordered, half = sorted(steps), limit // 2
    return ordered if len(ordered) <= limit else ordered[:half] + ordered[-half:]


def crowded_out(answers: Mapping[int, Answer]) -> set[int]:
    """The undecided steps that are more than what is kept; sealed ones are never crowded out by void ones."""
    kept = (step for wanted in Answer for step in ends_of(_steps(answers, wanted), UNDECIDED_MAX))
    return set(answers).difference(kept)


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
    _answers: dict[int, dict[tuple[str, int], Answer]] = field(default_factory=dict)
    _digests: dict[int, dict[int, int]] = field(default_factory=dict)
    _wishes: dict[tuple[str, int], int] = field(default_factory=dict)

    def hear_rank(self, rank: int, answers: Mapping[int, Answer], digests: Digests = NO_DIGESTS) -> bool:
        """Takes a local rank's answers; True if something changed and must be passed on.

        Args:
            digests: step → cell → digest, of the steps that are sealed.

        Raises:
            ValueError: the rank does not train on this node.
        """
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not one of this node's ranks {sorted(self.ranks)}")
        return self._hear(("rank", rank), answers, digests)

    def hear_node(
        self, child: int, answers: Mapping[int, Answer], digests: Digests = NO_DIGESTS, unlike: Iterable[int] = (),
        wish: int = 0,
    ) -> bool:  # fmt: skip
        """Takes the answers of the subtree below `child`; True if something changed.

        Args:
            unlike: cells that were found to differ below it.
            wish: see `wish`, of the subtree.

        Raises:
            ValueError: the node does not report to this one.
        """
        if child not in children_of(self.index, self.nodes):
            raise ValueError(f"node {child} does not report to node {self.index}")
        self._wishes["node", child] = wish
        is_news = self._note_unlike(unlike)
        return self._hear(("node", child), answers, digests) or is_news

    def hear_wish(self, rank: int, wish: int) -> None:
        """Takes how often a local rank wants to snapshot: each how many-th step; 0: it has no wish yet."""
        self._wishes["rank", rank] = wish

    @property
    def wish(self) -> int:
        """The greatest wish of the subtree; 0 as long as one has none."""
        expected = len(self.ranks) + len(children_of(self.index, self.nodes))
        wishes = self._wishes.values()
        return max(wishes) if wishes and len(wishes) == expected and all(wishes) else 0

    def hear_outcome(self, outcome: Outcome) -> bool:
        """Takes what the coordinator decided; True if it was news."""
        whole = max(self.outcome.whole, outcome.whole)
        voids = frozenset(step for step in self.outcome.voids | outcome.voids if step > whole)
        unlike, pace = self.outcome.unlike | outcome.unlike, max(self.outcome.pace, outcome.pace)
        merged = Outcome(whole, frozenset(ends_of(voids, VOIDS_MAX)), unlike, pace)
        is_news = merged != self.outcome
        self.outcome = merged
        for step in [step for step in self._answers if merged.decides(step)]:
            self._forget(step)
        return is_news

    @property
    def is_open(self) -> bool:
        """Whether a step was answered for, by anybody below, and is not decided yet."""
        return bool(self._answers)

    def undecided(self) -> dict[int, Answer]:
        """The subtree's answers that the parent must know: what is sent up, whole, every time."""
        found = {step: self._subtree(answers) for step, answers in self._answers.items()}
        return {step: answer for step, answer in found.items() if answer is not None}

    def digests(self) -> dict[int, dict[int, int]]:
        """The digests that go with `undecided`, of its sealed steps."""
        sealed = [step for step, answer in self.undecided().items() if answer is Answer.SEALED]
        return {step: dict(self._digests[step]) for step in sealed if step in self._digests}

    def _hear(self, source: tuple[str, int], answers: Mapping[int, Answer], digests: Digests) -> bool:
        changed = False
        for step, answer in answers.items():
            if step < 0 or self.outcome.decides(step):
                continue
            heard = self._answers.setdefault(step, {})
            if source not in heard:
                heard[source] = answer
                self._compare(step, digests.get(step, {}))
                changed = True
        self._void_left_out()
        void = {step: Answer.VOID for step, heard in self._answers.items() if Answer.VOID in heard.values()}
        for step in crowded_out(dict.fromkeys(self._answers, Answer.SEALED) | void):
            self._forget(step)
        if changed and self.index == 0:
            self._decide()
        return changed

    def _void_left_out(self) -> None:
        """See 6. A step that users asked for themselves (`seal`) is answered by all before any later one."""
        newest = max(self._answers, default=-1)
        for step, heard in self._answers.items():
            if step < newest and self.outcome.pace.leaves_out(step):
                heard[_NOBODY] = Answer.VOID

    def _compare(self, step: int, digests: Mapping[int, int]) -> None:
        """Holds a source's digests against those of the others; the source itself is not to blame, so the step is void."""
        known = self._digests.setdefault(step, {})
        unlike = {cell for cell, digest in digests.items() if known.setdefault(cell, digest) != digest}
        if unlike:
            self._answers[step][_NOBODY] = Answer.VOID
            self._note_unlike(unlike)

    def _note_unlike(self, cells: Iterable[int]) -> bool:
        before = self.outcome
        self.outcome = replace(before, unlike=before.unlike | frozenset(cells))
        return self.outcome != before

    def _subtree(self, heard: Mapping[tuple[str, int], Answer]) -> Answer | None:
        if Answer.VOID in heard.values():
            return Answer.VOID
        expected = len(self.ranks) + len(children_of(self.index, self.nodes))
        return Answer.SEALED if len(heard) == expected else None

    def _decide(self) -> None:
        answers = self.undecided()
        whole = max(_steps(answers, Answer.SEALED), default=-1)
        pace = next_pace(self.outcome.pace, self.wish, whole) if whole > self.outcome.whole else self.outcome.pace
        self.hear_outcome(Outcome(whole, frozenset(_steps(answers, Answer.VOID)), pace=pace))

    def _forget(self, step: int) -> None:
        self._answers.pop(step, None)
        self._digests.pop(step, None)


def _steps(answers: Mapping[int, Answer], wanted: Answer) -> Iterable[int]:
    return [step for step, answer in answers.items() if answer is wanted]
