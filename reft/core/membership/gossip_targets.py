"""Who watches whom, and who passes news on: a ring of a job's living nodes, known alike to all without a message.

    quiet:  each node exchanges beats with the REACH nearest on each side          4 neighbours, however large the job
    news:   it also wakes those at distances 4, 8, 16, … on each side              log2(n) hops to everybody

Nodes stand in the order of a digest of their ids, so that those of one rack, which fail together, are seldom neighbours.
Lost nodes are left out and the ring closes over the gap; so somebody watches every node that lives, whichever are lost.
Up to 2 x REACH + 1 nodes all watch one another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

REACH = 2  # two neighbours of a node on one side may be lost together, and both sides see it


def ring_of(nodes: Iterable[str]) -> list[str]:
    """The nodes' ids in the order of the ring."""
    return sorted(nodes, key=lambda node: (hashlib.blake2b(node.encode(), digest_size=8).digest(), node))


def neighbours(own: str, ring: Sequence[str]) -> list[str]:
    """Whom `own` watches, who also watch it; `ring` must contain it."""
    return _at(own, ring, range(1, REACH + 1))


def gossip_targets(own: str, ring: Sequence[str]) -> list[str]:
    """Whom `own` tells news at once: its neighbours, and nodes at distances that double."""
    distances = list(range(1, REACH + 1))
    while distances[-1] * 2 <= len(ring) // 2:
        distances.append(distances[-1] * 2)
    return _at(own, ring, distances)


def _at(own: str, ring: Sequence[str], distances: Iterable[int]) -> list[str]:
    here, n = ring.index(own), len(ring)
    found = [ring[(here + side * distance) % n] for distance in distances for side in (1, -1)]
    return [node for node in dict.fromkeys(found) if node != own]
