"""What an agent does about the signals of the other nodes of its round.

    signal of another node          this agent
    JOINING, HEALTHY, SNAP, SUSPECT goes on
    COMPLETED                       goes on: its own workers end by themselves
    UNHEALTHY                       restarts its workers at once: that node's agent will, or has ended
    OFFLINE                         the same, and counts the node out of the round: it will not leave by itself

Nothing follows from this node's own signal: its agent knows its workers better, and whether the others went on without
it stands in the state of the rendezvous. Nor from signals of another launch or round: those were acted on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reft.core.membership.failure_detector import NodeReport, Signal


@dataclass(frozen=True)
class AgentReaction:
    """What follows.

    Attributes:
        lost: homes of nodes that are counted out.
        reason: why the workers restart, in words; empty if they go on.
    """

    lost: frozenset[str] = frozenset()
    reason: str = ""


def react(own: str, signs: Iterable[NodeReport]) -> AgentReaction:
    """What the signals of one round mean for the agent of the node `own`."""
    bad = [sign for sign in signs if sign.node != own and sign.signal in (Signal.UNHEALTHY, Signal.OFFLINE)]
    lost = frozenset(sign.node for sign in bad if sign.signal is Signal.OFFLINE)
    worst = max(bad, key=lambda sign: sign.signal, default=None)
    return AgentReaction(lost, f"{worst.signal.name}: {worst.reason}" if worst else "")
