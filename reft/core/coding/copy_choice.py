"""Decides under protect="auto" whether nodes keep copies or parity of state that one rank holds.

    each rank: can its section be recomputed? bytes of its slots, copies and records ─┐
    each node: memory for this job; why it gave up recomputing copies of this job     ┴─► CopyChoice

Copies take more memory than parity, and nothing is sent while they are recomputed. So they are
chosen where all of the state can be recomputed, and where each node has the memory. Whether a node
recomputes fast enough is judged later, by its first turns (core/commit/replay_trials.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from reft.core.budget import format_bytes

COPIES = "copies, which nodes recompute from gradients: only torch's ZeroRedundancyOptimizer has state of one rank."


@dataclass(frozen=True)
class CopyReport:
    """What one rank says of copies.

    Attributes:
        refusal: why its section can't be recomputed; empty: it can.
        nbytes: bytes of its slots, of the copies that its node keeps with it, and of its records.
    """

    refusal: str
    nbytes: int


@dataclass(frozen=True)
class CopyChoice:
    """What was chosen.

    Attributes:
        is_copies: whether nodes keep copies; else parity.
        reason: what was chosen and why, for people.
    """

    is_copies: bool
    reason: str


def choose_copies(
    reports: Sequence[CopyReport], nodes: Mapping[str, Collection[int]], room: Mapping[str, int], given_up: str
) -> CopyChoice:
    """Returns the choice, the same on every rank.

    Args:
        reports: of all ranks.
        nodes: name of each node → its ranks.
        room: name of each node → bytes that this job may take there.
        given_up: why a node gave up recomputing copies of this job; empty: none did.
    """
    if refusal := next((each.refusal for each in reports if each.refusal), ""):
        return CopyChoice(False, f"parity: {refusal}")
    if given_up:
        return CopyChoice(False, f"parity: copies of this job were given up: {given_up}")
    for node, ranks in nodes.items():
        need_bytes = sum(reports[rank].nbytes for rank in ranks)
        if need_bytes > room[node]:
            return CopyChoice(
                False,
                f"parity: slots, copies and gradient records need {format_bytes(need_bytes)} on node {node}, which has "
                f"{format_bytes(room[node])} for them.",
            )
    return CopyChoice(True, COPIES)
