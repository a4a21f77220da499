"""For how long an attach waits for nodes that take no part in it, and do not answer.

    OFFLINE in the round before, not heard since ──► BRIEF_S ──► silent ──► is the plan settled? ── yes ──► go on without it
    any other ─────────────────────────────────────► WHOLE_S ──► silent     └── no ──► ask it again, for WHOLE_S

Invariants
  1. Waiting briefly never gives an older base than waiting for the whole time would. A node's answer only adds slots and
     capsules, so it can change the base only to a newer version. For that version every rank that sealed something in the
     history in force sealed just that version; a rank of a node that has answered did so too, and its slot, or what came
     after it, is in the answer. So where nothing is known of a version newer than the base, there is none.
  2. That holds for whoever knows the newest history. A node that was left out of a round may take the others for lost who
     went on without it: what it thinks of them counts only in the round right after, which it has then not missed.
  3. Whoever was given up and spoke since, even of a round that is over, is waited for like any other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from reft.core.recovery import Decision, Plan

BRIEF_S = 0.5
WHOLE_S = 3.0


@dataclass(frozen=True)
class GivenUp:
    """Who was given up before a round, and neither takes part in it nor was heard since.

    Attributes:
        launch: of the job.
        round: the one that they are missing from.
        nodes: their ids.
    """

    launch: str = ""
    round: int = -1
    nodes: frozenset[str] = frozenset()

    def next(self, launch: str, round: int, members: Collection[str], lost: Collection[str]) -> GivenUp:
        """Who is given up when another round begins.

        Args:
            launch, round: of that one.
            members: ids of the nodes that take part in it.
            lost: of those that took part in ours, whom it lost.
        """
        follows = bool(launch) and launch == self.launch and round == self.round + 1
        return GivenUp(launch, round, (self.nodes | frozenset(lost)) - frozenset(members) if follows else frozenset())

    def without(self, node: str) -> GivenUp:
        """The same after a node was heard."""
        return replace(self, nodes=self.nodes - {node}) if node in self.nodes else self


def patience_s(node: str, given_up: Collection[str]) -> float:
    """How long a node may take to answer."""
    return BRIEF_S if node in given_up else WHOLE_S


def is_settled(plan: Plan, decision: Decision | None) -> bool:
    """Whether no answer that is missing could give a newer base: nothing is known of a newer version that counts.

    Args:
        plan: made from all answers that there are.
        decision: the newest among them.
    """
    if plan.base is None or decision is None or plan.partial:
        return False
    return plan.base.epoch == decision.epoch or plan.base == decision.base
