"""What the replayer needs to make the copies of a turn.

parity slot of P, capsules of the owners at P and T, records of P+1 … T, manifest ─► order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reft.core.commit.version import Version
from reft.core.layout.layout import Layout, Leaf
from reft.errors import FormatError, ReftError
from reft.wire import capsule_format, messages
from reft.wire.capsule_format import NameTable
from reft.wire.manifest import layouts_of, placement_of
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import replay_pb2
from reft_daemon.arena.arena import SlotFile
from reft_daemon.jobs import capsules, parity
from reft_daemon.jobs.gradient_records import sealed_records
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.parity import LocalLane


class CannotReplay(ReftError):
    """This node lacks something that the replayer needs."""


class LateRecord(CannotReplay):
    """A record may still come: no later one is sealed."""


class OwnerFacts(NamedTuple):
    """What the manifest says of a rank whose section is copied here.

    Attributes:
        rank: the rank.
        begin: begin of the copy in the parity slots' data.
        first_chunk: of the section, in the rank's slot.
        section: the leaves of the section.
        inline: the other leaves of its optimizers, by name: its capsule has their bytes.
        names: the names that the rank's capsules refer to.
    """

    rank: int
    begin: int
    first_chunk: int
    section: Layout
    inline: Mapping[str, Leaf]
    names: NameTable


class ReplayInputs(NamedTuple):
    """What a turn is recomputed from.

    Attributes:
        base: version of the copies at hand.
        copies: the parity slot that has them.
        records: the sealed records of the epoch, of marks behind the base and up to the turn.
        capsules: for each owner, its capsules at the base and at the turn.
    """

    base: Version
    copies: SlotFile
    records: Sequence[SlotFile]
    capsules: Sequence[tuple[pb.CapsuleRecord, pb.CapsuleRecord]]

    @property
    def marks(self) -> int:
        return len(self.records)


def owner_facts(manifest: pb.Manifest, local: LocalLane) -> list[OwnerFacts]:
    """Returns the facts of the ranks whose sections a lane copies here.

    Raises:
        FormatError: the manifest contradicts itself.
    """
    placement, lane = placement_of(manifest), local.lane
    layouts, index = layouts_of(manifest)
    facts = []
    for column, member in enumerate(lane.copied_members(local.member)):
        rank = lane.members[member]
        digest, place = placement.division.layout_of[rank], placement.rank_placement(rank)
        inline_names = set(placement.division.inline_leaves[digest])
        leaves = {leaf.name: leaf for leaf in layouts[index[rank]].leaves if leaf.name in inline_names}
        first_chunk = place.unreplicated_offset // manifest.chunk_bytes
        names = layouts.name_table(index[rank])
        facts.append(OwnerFacts(rank, column * lane.piece_bytes, first_chunk, place.unreplicated, leaves, names))
    return facts


def replay_inputs(job: JobRecord, local: LocalLane, version: Version) -> ReplayInputs:
    """Returns what this node holds to make the copies of `version`.

    Raises:
        LateRecord: the last records are not sealed yet.
        CannotReplay: something is missing.
    """
    base = parity.kept_version(job)
    if base is None:
        raise CannotReplay("no step is protected yet.")
    decision = messages.decision_from(job.record.decision)
    if base.epoch != job.epoch and base != decision.base:
        raise CannotReplay(f"the copies at hand are of {base}, which no record follows.")
    copies = parity.sealed_parity(job, local, base)
    if copies is None:
        raise CannotReplay(f"the copies of {base} are not at hand.")
    marks, records = range(base.step + 1, version.step + 1), sealed_records(job, local.rank)
    if missing := [mark for mark in marks if mark not in records]:
        refusal = CannotReplay if max(records, default=-1) > missing[0] else LateRecord
        raise refusal(f"the record of mark {missing[0]} is missing.")
    pairs = []
    for member in local.lane.copied_members(local.member):
        rank = local.lane.members[member]
        before, after = (capsules.capsule(job, rank, each) for each in (base, version))
        if before is None or after is None:
            raise CannotReplay(f"the capsule of rank {rank}, {base if before is None else version} is not here.")
        pairs.append((before, after))
    return ReplayInputs(base, copies, [records[mark] for mark in marks], pairs)


def replay_order(
    local: LocalLane, owners: Sequence[OwnerFacts], inputs: ReplayInputs, version: Version, chunk_bytes: int
) -> replay_pb2.ReplayOrder:
    """Returns the order.

    Raises:
        CannotReplay: a leaf did not exist at the base or at the version.
        FormatError: a capsule is damaged, or was written with other names.
    """
    lane = local.lane
    return replay_pb2.ReplayOrder(
        base=messages.version_to(inputs.base), version=messages.version_to(version), lane=lane.digest,
        data_bytes=lane.parity_bytes,
        sections=[
            _section(owner, *pair, chunk_bytes) for owner, pair in zip(owners, inputs.capsules, strict=True)
        ],
    )  # fmt: skip


def _section(
    owner: OwnerFacts, before: pb.CapsuleRecord, after: pb.CapsuleRecord, chunk_bytes: int
) -> replay_pb2.ReplaySection:
    section = owner.section
    trees = [_tree(owner, record) for record in (before, after)]
    absent = {name for tree in trees for name in tree["absent"]}
    if late := next((leaf.name for leaf in section.leaves if leaf.name in absent), None):
        raise CannotReplay(f"{late} of rank {owner.rank} did not exist at both ends of the replay.")
    inline = {name: held for name, held in trees[0]["riders"].items() if name in owner.inline}
    digests = np.frombuffer(after.digests, "<u8")[owner.first_chunk :]
    chunks = -(-section.data_bytes // chunk_bytes)
    return replay_pb2.ReplaySection(
        owner=owner.rank, begin=owner.begin, nbytes=section.data_bytes,
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
