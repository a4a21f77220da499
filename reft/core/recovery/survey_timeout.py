"""For how long an attach waits for nodes that take no part in it, and do not answer.

    OFFLINE in the round before, not heard since ──► BRIEF_S ──► silent ──► is the plan settled? ── yes ──► go on without it
    any other ─────────────────────────────────────► WHOLE_S ──► silent     └── no ──► asked again, until WHOLE_S after it was
                                                                                       given up, for BRIEF_S at least
Invariants
  1. Where the plan is settled, no answer that is missing would change its base. An answer only adds slots and capsules, so
     it can change the base only to a newer version. For that version every rank that sealed something in the history in
     force sealed just that version; a rank of a node that has answered did so too, and its slot, or what came after it, is
     in the answer. So where nothing is known of a version newer than the base, there is none.
  2. That holds for a node that knows the newest history. A node that was left out of a round may take the others for lost who
     went on without it: what it thinks of them counts only in the round right after, which it has then not missed.
  3. A node that was given up and spoke since, even of a round that is over, is waited for like any other.
  4. Where an answer may matter, the node has had the whole time to show that it lives, if not in one call.
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
    """Who was given up before a round, and neither takes part in it nor was heard since.

    Attributes:
        launch: of the job.
        round: the one that they are missing from.
        nodes: id → when it was given up, by the clock of who says so.
    """

    launch: str = ""
    round: int = -1
    nodes: Mapping[str, float] = field(default_factory=dict)

    def next(self, launch: str, round: int, members: Collection[str], lost: Mapping[str, float]) -> GivenUpNodes:
        """Who is given up when another round begins.

        Args:
            launch, round: of that one.
            members: ids of the nodes that take part in it.
            lost: of those that took part in ours, whom it lost, and when.
        """
        follows = bool(launch) and launch == self.launch and round == self.round + 1
        known = {**self.nodes, **lost} if follows else {}
        return GivenUpNodes(launch, round, {node: at_s for node, at_s in known.items() if node not in members})

    def without(self, node: str) -> GivenUpNodes:
        """The same after a node was heard."""
        return replace(self, nodes={each: at_s for each, at_s in self.nodes.items() if each != node})


def survey_timeout_s(given_up_s: float | None, is_again: bool) -> float:
    """How long a node may take to answer.

    Args:
        given_up_s: seconds since it was given up; None: it was not.
        is_again: whether it has not answered once, and that matters.
    """
    if given_up_s is None:
        return WHOLE_S
    return max(BRIEF_S, WHOLE_S - given_up_s) if is_again else BRIEF_S


def is_settled(plan: RecoveryPlan, decision: Decision | None) -> bool:
    """Whether no answer that is missing could give a newer base: nothing is known of a newer version that counts.

    Args:
        plan: made from all answers that there are.
        decision: the one in force, by these answers.
    """
    if plan.base is None or decision is None or plan.partial:
        return False
    return plan.base.epoch == decision.epoch or plan.base == decision.base
