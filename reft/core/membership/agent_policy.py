"""Decides an agent's reaction to the signals of the other nodes of its round.

    signal of another node          this agent
    JOINING, HEALTHY, SNAP, SUSPECT continues
    COMPLETED                       continues: its own workers end by themselves
    UNHEALTHY                       restarts its workers at once
    OFFLINE                         restarts its workers, and removes the node from the round

The agent of an UNHEALTHY node restarts its own workers, or has ended. An OFFLINE node can't leave
the round itself. A node's own signal is ignored: its agent knows its workers better. The state of
the rendezvous says whether the other nodes continued without this one. Signals of another launch or
round are ignored: they were already handled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reft.core.membership.failure_detector import NodeReport, Signal


@dataclass(frozen=True)
class AgentReaction:
    """The reaction of an agent.

    Attributes:
        lost: homes of nodes to remove from the round.
        reason: why the workers restart, in words; empty if they continue.
    """

    lost: frozenset[str] = frozenset()
    reason: str = ""


def react(own: str, reports: Iterable[NodeReport]) -> AgentReaction:
    """Returns the reaction of the agent of node `own` to one round's signals."""
    bad = [report for report in reports if report.node != own and report.signal in (Signal.UNHEALTHY, Signal.OFFLINE)]
    lost = frozenset(report.node for report in bad if report.signal is Signal.OFFLINE)
    worst = max(bad, key=lambda report: report.signal, default=None)
    return AgentReaction(lost, f"{worst.signal.name}: {worst.reason}" if worst else "")
