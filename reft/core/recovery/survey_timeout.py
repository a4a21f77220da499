"""Decides how long an attach waits for nodes that do not answer.

These nodes take no part in the attach.

    OFFLINE in the round before, ─► BRIEF_S ─► silent ─► is the plan settled?
      not heard since                                    ├─ yes ─► continue without the node
    any other ────────────────────► WHOLE_S ─► silent    └─ no ──► ask again, for BRIEF_S at least,
                                                                until WHOLE_S after it was given up

Invariants
  1. Where the plan is settled, no missing answer could change the base. An answer only adds slots
     and capsules, so it can change the base only to a newer version. Suppose that newer version
     could be restored. Then every rank that sealed anything in the history in force sealed that
     version, also a rank of a node that has answered. The slot of that rank, or a later one, is in
     the answer. So if no version newer than the base is known, none exists.
  2. That holds for every node that knows the newest history. A node that was left out of a round
     may give up nodes that continued without it. So what a node says of others counts only in the
     round right after its own.
  3. A node that was given up and spoke since is waited for like any other, even if it spoke of an
     old round.
  4. Where an answer may matter, the node gets the whole time, perhaps split over several calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from reft.core.commit.decision import Decision
from reft.core.recovery.recovery import RecoveryPlan

BRIEF_S = 0.5
WHOLE_S = 3.0


@dataclass(frozen=True)
class GivenUpNodes:
    """The nodes that were given up before a round and not heard since.

    They take no part in the round.

    Attributes:
        launch: launch of the job.
        round: the round that the nodes are missing from.
        nodes: node id → when the node was given up, by the clock of the daemon that reports it.
    """

    launch: str = ""
    round: int = -1
    nodes: Mapping[str, float] = field(default_factory=dict)

    def next(self, launch: str, round: int, members: Collection[str], lost: Mapping[str, float]) -> GivenUpNodes:
        """Returns the given-up nodes when another round begins.

        Args:
            launch: launch of the new round.
            round: number of the new round.
            members: ids of the nodes that take part in the new round.
            lost: id → time of loss, for the nodes that this round lost.
        """
        follows = bool(launch) and launch == self.launch and round == self.round + 1
        known = {**self.nodes, **lost} if follows else {}
        return GivenUpNodes(launch, round, {node: at_s for node, at_s in known.items() if node not in members})

    def without(self, node: str) -> GivenUpNodes:
        """Returns the same nodes without one that was heard."""
        return replace(self, nodes={each: at_s for each, at_s in self.nodes.items() if each != node})


def survey_timeout_s(given_up_s: float | None, is_again: bool) -> float:
    """Returns how many seconds a node may take to answer.

    Args:
        given_up_s: seconds since the node was given up; None: it was not.
        is_again: whether the node already failed to answer once, and its answer may matter.
    """
    if given_up_s is None:
        return WHOLE_S
    return max(BRIEF_S, WHOLE_S - given_up_s) if is_again else BRIEF_S


def is_settled(plan: RecoveryPlan, decision: Decision | None) -> bool:
    """Returns whether no missing answer could give a newer base.

    That is so if no newer version that counts is known.

    Args:
        plan: made from all answers so far.
        decision: the decision in force, by these answers.
    """
    if plan.base is None or decision is None or plan.partial:
        return False
    return plan.base.epoch == decision.epoch or plan.base == decision.base
