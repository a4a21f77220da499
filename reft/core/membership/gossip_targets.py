"""Decides which nodes watch which, and which pass news on: a ring of a job's living nodes.

    quiet:  each node exchanges beats with the REACH nearest on each side    4 neighbours in any job
    news:   it also wakes those at distances 4, 8, 16, … on each side        log2(n) hops to all

All daemons compute the same ring without a message. Nodes are ordered by a digest of their ids. So
nodes of one rack, which fail together, are seldom neighbours. Lost nodes are left out and the ring
closes over the gap. So every living node is watched, whichever nodes are lost. Up to 2 x REACH + 1
nodes all watch one another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

REACH = 2  # two neighbours of a node on one side may be lost together, and both sides see it


def ring_of(nodes: Iterable[str]) -> list[str]:
    """Returns the ids of the nodes in the order of the ring."""
    return sorted(nodes, key=lambda node: (hashlib.blake2b(node.encode(), digest_size=8).digest(), node))


def neighbours(own: str, ring: Sequence[str]) -> list[str]:
    """Returns the nodes that `own` watches, which also watch `own`; `ring` must contain `own`."""
    return _at(own, ring, range(1, REACH + 1))


def gossip_targets(own: str, ring: Sequence[str]) -> list[str]:
    """Returns the nodes that `own` tells news at once.

    These are its neighbours, and nodes at doubling distances.
    """
    distances = list(range(1, REACH + 1))
    while distances[-1] * 2 <= len(ring) // 2:
        distances.append(distances[-1] * 2)
    return _at(own, ring, distances)


def _at(own: str, ring: Sequence[str], distances: Iterable[int]) -> list[str]:
    here, n = ring.index(own), len(ring)
    at_distance = [ring[(here + side * distance) % n] for distance in distances for side in (1, -1)]
    return [node for node in dict.fromkeys(at_distance) if node != own]
