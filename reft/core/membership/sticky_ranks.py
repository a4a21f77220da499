"""Assigns a group rank to each node in a round of the rendezvous: its previous rank if possible.

    round before        now come             places
    0  a                a                    0  a     kept: the same agent
    1  b                c'  (c's node)       1  e     hole, for a newcomer
    2  c                d                    2  c'    kept: the same node, under a new agent
    3  d                e   (new)            3  d     kept

A node's slots hold the state of its ranks, so a node that keeps its rank reads its own memory.
Ranks are always 0 … n-1, each once. If fewer nodes come, nodes whose ranks would be too high move
into the holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Participant:
    """A participant in a round.

    Attributes:
        agent: distinguishes this agent process from every other.
        home: the node that holds the participant's slots, which outlives the agent; empty if
            unknown.
    """

    agent: str
    home: str = ""


@dataclass(frozen=True)
class PreviousRank:
    """A rank in a completed round, and the participant that had it."""

    rank: int
    member: Participant


def assign(members: Sequence[Participant], before: Sequence[PreviousRank]) -> dict[Participant, int]:
    """Returns a rank for each member: 0 to their number less one.

    Args:
        members: distinct; newcomers take the holes in this order.
        before: the places of the last completed round.
    """
    ranks: dict[Participant, int] = {}
    agents = {member.agent: member for member in members}
    fitting = [place for place in sorted(before, key=lambda each: each.rank) if place.rank < len(members)]
    for place in fitting:
        same = agents.get(place.member.agent)
        if same is not None and same not in ranks:
            ranks[same] = place.rank
    for place in fitting:
        home = place.member.home
        if not home or place.rank in ranks.values():
            continue
        heirs = [member for member in members if member.home == home and member not in ranks]
        if heirs:
            ranks[heirs[0]] = place.rank
    holes = iter(sorted(set(range(len(members))) - set(ranks.values())))
    old = {place.member.agent for place in before} | {place.member.home for place in before if place.member.home}
    rest = [member for member in members if member not in ranks]
    for member in sorted(rest, key=lambda each: each.agent not in old and each.home not in old):  # stable
        ranks[member] = next(holes)
    return ranks
