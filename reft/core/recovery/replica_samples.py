"""Judges whether ranks had equal replicas, from the samples in their capsules.

A sample is a digest of some bytes of one cell. Ranks that hold the cell digest the same bytes at
the same step: see reft/client/snapshot/replica_check.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def capsule_digests(tree: Mapping[str, Any]) -> list[list[int]]:
    """Returns the sample digests in a decoded capsule: [step, cell, digest] of each sample."""
    return [[tree["step"], *pair] for pair in tree.get("compared", {}).items()]


def are_mismatched(ranks: Iterable[Iterable[Sequence[int]]]) -> bool:
    """Tells whether ranks had different bytes where they should be replicas.

    Args:
        ranks: [step, cell, digest] of each sample, for each rank.
    """
    known: dict[tuple[int, int], int] = {}
    return any(known.setdefault((step, cell), digest) != digest for each in ranks for step, cell, digest in each)
