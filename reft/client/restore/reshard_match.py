"""Decides, equally on every rank, what goes where in a restore into another shape.

leaves in the old manifest ─┐
leaves that lie elsewhere   ├─► which bytes make which new leaves, or LayoutChanged
leaves predicted now       ─┘
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from reft.client.restore.run import CapsuleFacts
from reft.core.coding.placement import Placement
from reft.core.layout.layout import Layout, Leaf
from reft.core.recovery.shard_matching import ShardMatch, UnforeseenLeaves, is_same, match, pieces_of, wanted_leaves
from reft.core.text import counted
from reft.errors import LayoutChanged
from reft.wire.manifest import layouts_of
from reft.wire.messages import places_from, table_from, table_to
from reft.wire.v1 import daemon_pb2 as pb

LINES_MAX = 8  # problems that one error lists


def leaves_by_rank(manifest: pb.Manifest) -> list[tuple[Leaf, ...]]:
    """Returns the predicted leaves of each rank, in the order of the placement.

    Ranks with the same leaves share one tuple.
    """
    layouts, index = layouts_of(manifest)
    leaves = [tuple(form.leaves()) for form in layouts.symbolic]
    return [leaves[i] for i in index]


def is_reshaped(before: pb.Manifest, after: pb.Manifest) -> bool:
    """Returns whether the ranks of the new job have other leaves than the old ranks."""
    if [before.layouts[i].digest for i in before.layout_of] == [after.layouts[i].digest for i in after.layout_of]:
        return False  # the usual and quick case: thousands of layouts need not be expanded
    return not is_same(leaves_by_rank(before), leaves_by_rank(after))


def leaves_elsewhere(placement: Placement, old: int, predicted: Sequence[Leaf], table: bytes) -> tuple[bytes, int]:
    """Returns a slot's leaves that lie elsewhere than the placement says, and the data's end.

    Args:
        placement: the placement that the slot was written with.
        old: the slot's old rank.
        predicted: the leaves of that rank in the manifest.
        table: the slot's table.

    Returns:
        The table of these leaves, empty if there are none; the end of the slot's data to read.

    Raises:
        FormatError: the table is damaged.
    """
    layout, places = table_from(table), places_from(table)
    leaf_of = {leaf.name: leaf for leaf in predicted}
    part = placement.rank_placement(old)
    unreplicated_at = {
        leaf.name: part.unreplicated_offset + at
        for leaf, at in zip(part.unreplicated.leaves, part.unreplicated.offsets, strict=True)
    }
    moved = [
        (leaf, at)
        for leaf, at in zip(layout.leaves, layout.offsets, strict=True)
        if places[leaf.name] != pb.CELL
        and (
            leaf_of.get(leaf.name) != leaf
            or (places[leaf.name] == pb.UNREPLICATED and unreplicated_at.get(leaf.name) != at)
        )
    ]
    if not moved:
        return b"", part.data_bytes
    elsewhere = Layout(tuple(leaf for leaf, _ in moved), tuple(at for _, at in moved), layout.data_bytes)
    return table_to(elsewhere, places), max(part.data_bytes, *(at + leaf.nbytes for leaf, at in moved))


def parts_to_publish(
    facts: Mapping[int, CapsuleFacts], keepers: Mapping[int, int], world: int, rank: int
) -> Iterator[tuple[int, str]]:
    """Yields old rank and part of each value of host state to publish.

    The keeper of the lowest old rank that had a value publishes it.

    Args:
        facts: old rank → its facts.
        keepers: old rank → the new rank that has its capsule.
        world: the number of new ranks.
        rank: this new rank.
    """
    seen = set()
    is_shared = len({each.digests["random"] for each in facts.values()}) == 1
    for old, each in sorted(facts.items()):
        for part, digest in each.digests.items():
            if part == "random" and not is_shared and (old >= world or keepers[old] == old):
                continue  # no other rank continues these generators
            if digest not in seen and keepers[old] == rank:
                yield old, part
            seen.add(digest)


def match_leaves(
    placement: Placement,
    before: Sequence[Sequence[Leaf]],
    after: Sequence[Sequence[Leaf]],
    mismatched: Sequence[str],
    facts: Mapping[int, CapsuleFacts],
) -> tuple[ShardMatch, Sequence[Sequence[Leaf]]]:
    """Returns which bytes go where, and the leaves of each new rank.

    Args:
        placement: the placement that the base was written with.
        before: for each old rank its leaves in the manifest of the base's epoch.
        after: for each new rank the leaves predicted now.
        mismatched: names of leaves whose bytes differed between old ranks.
        facts: old rank → its facts.

    Raises:
        LayoutChanged: a leaf does not fit.
    """
    tables: dict[int, dict[str, Leaf]] = {}
    unforeseen = {old: _unforeseen_leaves(each) for old, each in facts.items()}

    def leaves_of(old: int) -> dict[str, Leaf]:
        leaves = before[old]
        return tables.setdefault(id(leaves), {leaf.name: leaf for leaf in leaves})

    pieces, problems = pieces_of(placement, leaves_of, unforeseen)
    wanted = wanted_leaves(after, pieces)
    shard_match = match(pieces, wanted, mismatched)
    lines = sorted(problems + shard_match.problems)
    if lines:
        rest = [f"and {len(lines) - LINES_MAX} more"] if len(lines) > LINES_MAX else []
        raise LayoutChanged(
            f"the snapshot of {counted(len(before), 'rank')} cannot be restored into this job of {len(after)}:\n  "
            + "\n  ".join(lines[:LINES_MAX] + rest),
            "start the job in its old shape, or under another name, or delete the snapshots with reft-cli purge",
        )
    return shard_match, wanted


def _unforeseen_leaves(facts: CapsuleFacts) -> UnforeseenLeaves:
    """Returns which leaves an old rank had otherwise than predicted."""
    other_leaves: list[tuple[Leaf, int | None]] = []
    if facts.others:
        layout, places = table_from(facts.others), places_from(facts.others)
        for leaf, at in zip(layout.leaves, layout.offsets, strict=True):
            other_leaves.append((replace(leaf, staged=False), at if places[leaf.name] == pb.UNREPLICATED else None))
    return UnforeseenLeaves(frozenset(facts.absent), tuple(other_leaves))
