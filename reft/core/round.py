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

A lost answer leaves s undecided: its slot is kept until a newer step is whole. Each message repeats all that is still
undecided below its sender, so the next one repairs the loss. Late and repeated messages change nothing.
One `Round` belongs to one epoch; messages of another epoch never reach it (the daemon refuses them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

FAN_OUT = 16
UNDECIDED_MAX = 16  # steps kept without a decision: more than a rank has slots, so nothing useful is forgotten
VOIDS_MAX = 64  # voids remembered: a rank asks about at most as many as it has slots


class Answer(IntEnum):
    SEALED = 1
    VOID = 2


@dataclass(frozen=True)
class Outcome:
    """What is decided: the newest whole step (-1: none yet) and the steps newer than it that are void."""

    whole: int = -1
    voids: frozenset[int] = frozenset()

    def decides(self, step: int) -> bool:
        return step <= self.whole or step in self.voids


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

    def hear_rank(self, rank: int, answers: Mapping[int, Answer]) -> bool:
        """Takes a local rank's answers; True if something changed and must be passed on.

        Raises:
            ValueError: the rank does not train on this node.
        """
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not one of this node's ranks {sorted(self.ranks)}")
        return self._hear(("rank", rank), answers)

    def hear_node(self, child: int, answers: Mapping[int, Answer]) -> bool:
        """Takes the answers of the subtree below `child`; True if something changed.

        Raises:
            ValueError: the node does not report to this one.
        """
        if child not in children_of(self.index, self.nodes):
            raise ValueError(f"node {child} does not report to node {self.index}")
        return self._hear(("node", child), answers)

    def hear_outcome(self, outcome: Outcome) -> bool:
        """Takes what the coordinator decided; True if it was news."""
        whole = max(self.outcome.whole, outcome.whole)
        voids = frozenset(step for step in self.outcome.voids | outcome.voids if step > whole)
        merged = Outcome(whole, frozenset(sorted(voids)[-VOIDS_MAX:]))
        is_news = merged != self.outcome
        self.outcome = merged
        for step in [step for step in self._answers if merged.decides(step)]:
            del self._answers[step]
        return is_news

    def undecided(self) -> dict[int, Answer]:
        """The subtree's answers that the parent must know: what is sent up, whole, every time."""
        found = {step: self._subtree(answers) for step, answers in self._answers.items()}
        return {step: answer for step, answer in found.items() if answer is not None}

    def _hear(self, source: tuple[str, int], answers: Mapping[int, Answer]) -> bool:
        changed = False
        for step, answer in answers.items():
            if step < 0 or self.outcome.decides(step):
                continue
            heard = self._answers.setdefault(step, {})
            if source not in heard:
                heard[source] = answer
                changed = True
        self._forget_oldest()
        if changed and self.index == 0:
            self._decide()
        return changed

    def _subtree(self, heard: Mapping[tuple[str, int], Answer]) -> Answer | None:
        if Answer.VOID in heard.values():
            return Answer.VOID
        expected = len(self.ranks) + len(children_of(self.index, self.nodes))
        return Answer.SEALED if len(heard) == expected else None

    def _decide(self) -> None:
        answers = self.undecided()
        whole = max(_steps(answers, Answer.SEALED), default=-1)
        self.hear_outcome(Outcome(whole, frozenset(_steps(answers, Answer.VOID))))

    def _forget_oldest(self) -> None:
        for step in sorted(self._answers)[:-UNDECIDED_MAX]:
            del self._answers[step]


def _steps(answers: Mapping[int, Answer], wanted: Answer) -> Iterable[int]:
    return [step for step, answer in answers.items() if answer is wanted]
