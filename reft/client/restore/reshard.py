"""Decides, equally on every rank, what goes where in a restore into another shape.

leaves in the old manifest ─┐
leaves that lie elsewhere   ├─► which bytes make which new leaves, or LayoutChanged
leaves predicted now       ─┘
host state of the old ranks ─► each distinct part is published once; then the rules of
                               host_state_resharding, or LayoutChanged
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reft.client.link.exchange import gather
from reft.client.link.rank_group import RankGroup
from reft.client.restore import host_state_resharding
from reft.client.restore.host_state_resharding import HostStateResharding
from reft.client.restore.opened import CapsuleFacts, OldRank, RestoreContext, RestoreMatch
from reft.client.restore.unforeseen_state import with_unforeseen_state
from reft.core.coding.placement import Placement
from reft.core.layout.layout import Layout, Leaf, pack
from reft.core.recovery.plan import TransferPlan, TransferSizes, is_made
from reft.core.recovery.shard_matching import (
    ShardMatch,
    UnforeseenLeaves,
    is_same,
    leaves_elsewhere,
    match,
    pieces_of,
    wanted_leaves,
)
from reft.core.text import counted, more
from reft.errors import LayoutChanged
from reft.wire import capsule_format
from reft.wire.manifest import layouts_of
from reft.wire.messages import places_from, table_from, table_to
from reft.wire.v1 import daemon_pb2 as pb

LINES_MAX = 8  # problems that one error lists


@dataclass(frozen=True)
class PublishedState:
    """Host state that other ranks may need: digest → the encoded value."""

    values: dict[str, bytes]


@dataclass(frozen=True)
class ShapeChange:
    """The shapes before and after a restore into another shape.

    Args:
        before: for each old rank the leaves in the manifest of the base's epoch.
        after: for each new rank the leaves predicted now, in the order in which they are created.
        mismatched: names of leaves whose bytes differed between old ranks.
    """

    before: Sequence[Sequence[Leaf]]
    after: Sequence[Sequence[Leaf]]
    mismatched: Sequence[str]

    def publish(
        self,
        context: RestoreContext,
        opened: Mapping[int, OldRank],
        facts: Mapping[int, CapsuleFacts],
        rank_group: RankGroup,
    ) -> PublishedState:
        """Returns the host state that ranks may need, each part once. All ranks call it together.

        Args:
            context: what every step needs.
            opened: what this rank opened.
            facts: old rank → its facts, for all old ranks.
            rank_group: all ranks of the job.
        """
        published = gather(rank_group, lambda: self._publish(context, opened, facts), PublishedState)
        return PublishedState({digest: data for each in published for digest, data in each.values.items()})

    def match(
        self,
        context: RestoreContext,
        opened: Mapping[int, OldRank],
        facts: Mapping[int, CapsuleFacts],
        published: PublishedState,
        sizes: TransferSizes,
    ) -> RestoreMatch:
        """Decides what goes where.

        Args:
            context: what every step needs.
            opened: what this rank opened.
            facts: old rank → its facts, for all old ranks.
            published: the host state that ranks need of others.
            sizes: of messages and buffers.

        Raises:
            LayoutChanged: a leaf does not fit, on all ranks alike; or a part of host state does
                not, perhaps on this rank alone.
        """
        placement, readers = context.placement, context.readers
        shard_match, wanted = self._match_leaves(placement, facts)
        values = {digest: capsule_format.decode(data) for digest, data in published.values.items()}
        host_state = self._host_state(context, opened, facts, values)
        tree = host_state.tree(facts[0].step, facts[0].marked)
        lost = [old for old in context.lost if is_made(placement, old)]
        leaves = wanted[context.rank]
        layout = pack(leaves)
        return RestoreMatch(
            opened,
            leaves,
            (
                TransferPlan(
                    shard_match.needs,
                    placement,
                    readers,
                    lost,
                    sizes=sizes,
                    sections=context.plan.sections,
                    stored=context.stored,
                ),
            ),
            layout,
            {leaf.name: at for leaf, at in zip(layout.leaves, layout.offsets, strict=True)},
            tree,
            host_state.lists,
            (*host_state.lines, *_own_leaves(shard_match)),
        )

    def _publish(
        self, context: RestoreContext, opened: Mapping[int, OldRank], facts: Mapping[int, CapsuleFacts]
    ) -> PublishedState:
        values = {}
        for old, part in parts_to_publish(facts, context.readers.keeper_of, len(self.after), context.rank):
            value = host_state_resharding.parts(opened[old].tree)[part]
            values[facts[old].digests[part]] = capsule_format.encode(value)
        return PublishedState(values)

    def _host_state(
        self,
        context: RestoreContext,
        opened: Mapping[int, OldRank],
        facts: Mapping[int, CapsuleFacts],
        values: Mapping[str, Any],
    ) -> HostStateResharding:
        """Returns the rules for this rank's host state; `values` has the published ones."""
        kept = dict(values)
        for old, each in opened.items():
            parts = host_state_resharding.parts(each.tree)
            kept |= {digest: parts[part] for part, digest in facts[old].digests.items()}
        digests = [facts[old].digests for old in range(len(self.before))]
        return HostStateResharding.of(context.rank, len(self.after), digests, kept, context.host)

    def _match_leaves(
        self, placement: Placement, facts: Mapping[int, CapsuleFacts]
    ) -> tuple[ShardMatch, Sequence[Sequence[Leaf]]]:
        """Returns which bytes go where, and the leaves of each new rank.

        Args:
            placement: the placement that the base was written with.
            facts: old rank → its facts.

        Raises:
            LayoutChanged: a leaf does not fit.
        """
        tables: dict[int, dict[str, Leaf]] = {}
        unforeseen = {old: _unforeseen_leaves(each) for old, each in facts.items()}

        def leaves_of(old: int) -> dict[str, Leaf]:
            leaves = self.before[old]
            return tables.setdefault(id(leaves), {leaf.name: leaf for leaf in leaves})

        pieces, problems = pieces_of(placement, leaves_of, unforeseen)
        wanted = wanted_leaves(with_unforeseen_state(self.after, [piece.leaf for piece in pieces]), pieces)
        shard_match = match(pieces, wanted, self.mismatched)
        lines = sorted(problems + shard_match.problems)
        if lines:
            rest = [f"and {len(lines) - LINES_MAX} more"] if len(lines) > LINES_MAX else []
            raise LayoutChanged(
                f"the snapshot of {counted(len(self.before), 'rank')} cannot be restored into this job of "
                f"{len(self.after)}:\n  " + "\n  ".join(lines[:LINES_MAX] + rest),
                "start the job in its old shape, or under another name, or delete the snapshots: reft-cli purge JOB --yes",
            )
        return shard_match, wanted


def facts_of(placement: Placement, old: int, opened: OldRank, predicted: Sequence[Leaf]) -> CapsuleFacts:
    """Returns what all ranks must know of an old rank.

    Args:
        placement: the placement that the base was written with.
        old: the old rank.
        opened: its slot or capsule.
        predicted: the leaves of that rank in the manifest.
    """
    parts = host_state_resharding.parts(opened.tree)
    digests = {part: host_state_resharding.digest(value) for part, value in parts.items()}
    others, tree = _leaves_elsewhere(placement, old, opened, predicted), opened.tree
    return CapsuleFacts(tuple(tree["absent"]), others, digests, tree["step"], tree["marked"])


def _leaves_elsewhere(placement: Placement, old: int, opened: OldRank, predicted: Sequence[Leaf]) -> bytes:
    """Returns the table of a slot's leaves that lie elsewhere than the placement says.

    Empty if there are none.
    """
    places = opened.places
    in_cells, inline = ({name for name, each in places.items() if each == place} for place in (pb.CELL, pb.INLINE))
    foreseen = {leaf.name: leaf for leaf in predicted}
    moved = leaves_elsewhere(placement, old, opened.layout, in_cells, foreseen, inline)
    if not moved:
        return b""
    leaves, offsets = tuple(leaf for leaf, _ in moved), tuple(at or 0 for _, at in moved)
    return table_to(Layout(leaves, offsets, opened.layout.data_bytes), places)


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


def _unforeseen_leaves(facts: CapsuleFacts) -> UnforeseenLeaves:
    """Returns which leaves an old rank had otherwise than predicted."""
    other_leaves: list[tuple[Leaf, int | None]] = []
    if facts.others:
        layout, places = table_from(facts.others), places_from(facts.others)
        for leaf, at in zip(layout.leaves, layout.offsets, strict=True):
            other_leaves.append((replace(leaf, staged=False), at if places[leaf.name] == pb.UNREPLICATED else None))
    return UnforeseenLeaves(frozenset(facts.absent), tuple(other_leaves))


def _own_leaves(shard_match: ShardMatch) -> list[str]:
    """Returns a line about leaves of which each old rank had its own."""
    if not shard_match.own:
        return []
    return [
        f"each old rank had its own {shard_match.own[0]}{more(len(shard_match.own) - 1, 'leaf', 'leaves')}: "
        "a rank gets that of the old rank with its number, a new rank that of the lowest old rank."
    ]
