"""What a replay must know of the ranks whose sections it makes: see reft.replay.section_replay.

manifest ──────────────────────────► OwnerFacts ─┐
capsules of the owner, before and after the marks ┴─► ReplaySection: leaves, digests to reach
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from reft.core.coding.placement import Placement
from reft.core.layout.layout import Layout, Leaf
from reft.errors import FormatError, ReftError
from reft.wire import capsule_format, messages
from reft.wire.capsule_format import NameTable
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import replay_pb2


class CannotReplay(ReftError):
    """Something that a replay needs is missing."""


class OwnerFacts(NamedTuple):
    """What the manifest says of a rank whose section is replayed.

    Attributes:
        rank: the rank.
        first_chunk: of the section, in the rank's slot.
        section: the leaves of the section.
        inline: the other leaves of its optimizers, by name: its capsule has their bytes.
        names: the names that the rank's capsules refer to.
    """

    rank: int
    first_chunk: int
    section: Layout
    inline: Mapping[str, Leaf]
    names: NameTable


def owner_facts(placement: Placement, rank: int, leaves: Iterable[Leaf], names: NameTable) -> OwnerFacts:
    """Returns the facts of a rank.

    Args:
        placement: under which its slots were written.
        rank: the rank.
        leaves: its leaves in the manifest.
        names: the names in the manifest.
    """
    digest, place = placement.division.layout_of[rank], placement.rank_placement(rank)
    inline_names: Collection[str] = set(placement.division.inline_leaves[digest])
    inline = {leaf.name: leaf for leaf in leaves if leaf.name in inline_names}
    return OwnerFacts(rank, place.unreplicated_offset // placement.chunk_bytes, place.unreplicated, inline, names)


def replay_section(
    owner: OwnerFacts, before: pb.CapsuleRecord, after: pb.CapsuleRecord, chunk_bytes: int, base_begin: int, begin: int
) -> replay_pb2.ReplaySection:
    """Returns what a replay must know of a rank's section.

    Args:
        owner: the rank.
        before: its capsule at the version of the copies at hand.
        after: its capsule at the version to make.
        chunk_bytes: size of a chunk of the slots.
        base_begin: where the section begins in the data of the copies at hand.
        begin: where the section begins in the data of the copies to make.

    Raises:
        CannotReplay: a leaf did not exist at both versions.
        FormatError: a capsule is damaged, or was written with other names.
    """
    section = owner.section
    trees = [_tree(owner, record) for record in (before, after)]
    absent = {name for tree in trees for name in tree["absent"]}
    if late := next((leaf.name for leaf in section.leaves if leaf.name in absent), None):
        raise CannotReplay(f"{late} of rank {owner.rank} did not exist at both ends of the replay.")
    inline = {name: held for name, held in trees[0]["riders"].items() if name in owner.inline}
    digests = np.frombuffer(after.digests, "<u8")[owner.first_chunk :]
    chunks = -(-section.data_bytes // chunk_bytes)
    return replay_pb2.ReplaySection(
        owner=owner.rank, base_begin=base_begin, begin=begin, nbytes=section.data_bytes,
        leaves=[messages.leaf_to(*each) for each in zip(section.leaves, section.offsets, strict=True)],
        inline_leaves=[messages.leaf_to(owner.inline[name], place=pb.INLINE) for name in inline],
        inline_bytes=list(inline.values()), digests=digests[:chunks].tolist(), chunk_bytes=chunk_bytes,
        has_whole_chunks=len(digests) > chunks,
    )  # fmt: skip


def _tree(owner: OwnerFacts, record: pb.CapsuleRecord) -> Mapping[str, Any]:
    tree = capsule_format.decode(record.capsule, owner.names)
    if not isinstance(tree, dict) or not isinstance(tree.get("riders"), dict) or "absent" not in tree:
        raise FormatError(f"the capsule of rank {owner.rank}, step {record.version.step} lacks inline leaves.")
    return tree
