"""Deals the files of a checkpoint to the nodes that open them for a restore.

    old rank's node takes part (the same id, else the same name) ─► that node opens the file
    else ─► the nodes in turn, the one with the fewest files first

The page cache of a node may still have what the node wrote. Each file is opened on one node only;
other nodes read through that node's daemon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reft.core.recovery.inventory import ManifestNode


def deal_files(
    ranks: Sequence[int], wrote: Sequence[ManifestNode], nodes: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """Returns node id → the old ranks whose files that node opens, ascending.

    Args:
        ranks: the old ranks that have a file.
        wrote: the nodes of the checkpoint's manifest.
        nodes: id → name of each node that may open files.
    """
    by_name = {name: ident for ident, name in nodes.items() if list(nodes.values()).count(name) == 1}
    shares: dict[str, list[int]] = {ident: [] for ident in nodes}
    left = set(ranks)
    for node in wrote:
        ident = node.id if node.id in nodes else by_name.get(node.name)
        if ident is not None:
            shares[ident] += sorted(left.intersection(node.ranks))
            left -= set(node.ranks)
    for rank in sorted(left):
        shares[min(shares, key=lambda ident: (len(shares[ident]), ident))].append(rank)
    return {ident: tuple(sorted(share)) for ident, share in shares.items()}
