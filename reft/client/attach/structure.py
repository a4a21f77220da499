"""The step structure: the objects become like those of the base, before the layout is judged.

Each rank reads the host state that it goes on from; `reft.client.state.structure` makes frozen
parameters and groups of optimizers like those of the snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from reft.client.attach.arguments import AttachContext
from reft.client.attach.introduce import Introduction, leader_of
from reft.client.attach.restore import remote_slots
from reft.client.link.exchange import RankMessage, gather
from reft.client.restore.host_state_resharding import parent
from reft.client.state import serialization, structure
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.recovery.recovery import RecoveryPlan
from reft.errors import FormatError
from reft.wire import messages
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb


@dataclass(frozen=True)
class StructureReport:
    """What a rank has changed of its objects, as texts for the user."""

    changes: tuple[str, ...]


@dataclass(frozen=True)
class StructureResult:
    """The result of the step structure.

    Attributes:
        changes: what is different now on any rank, as texts for the user.
        capsules: old rank → its capsule at the base, for those that this rank has read.
    """

    changes: tuple[str, ...] = ()
    capsules: Mapping[int, pb.CapsuleRecord] = field(default_factory=dict)


def rebuild_structure(
    context: AttachContext,
    introduction: Introduction,
    tracked: TrackedObjects,
    survey: JobSurvey,
    recovery: RecoveryPlan,
    counts: Sequence[int],
) -> StructureResult:
    """Makes frozen parameters and optimizers' groups like those of the base, on all ranks together.

    Args:
        context: what every step needs.
        introduction: the ranks and nodes that take part.
        tracked: the objects, with the names that the base has.
        survey: what all daemons hold of the job.
        recovery: names the base.
        counts: the groups that the script itself made, for each optimizer.

    Returns:
        What is different now, and the capsules that tell.
    """
    if recovery.base is None:
        return StructureResult()
    capsules = published_capsules(context, introduction, survey, recovery)

    def rebuild() -> StructureReport:
        rank = context.rank
        if rank not in capsules:
            capsules[rank] = held_capsule(context, introduction, survey, recovery, rank)
        return StructureReport(
            structure.rebuild(tracked, counts, tree_of(capsules[rank].capsule, survey, recovery, rank))
        )

    reports = gather(context.rank_group, rebuild, StructureReport)
    changes = dict.fromkeys(change for report in reports for change in report.changes)
    read = {old_rank(survey, recovery, rank): record for rank, record in capsules.items() if record.capsule}
    return StructureResult(tuple(changes), read)


def published_capsules(
    context: AttachContext, introduction: Introduction, survey: JobSurvey, recovery: RecoveryPlan
) -> dict[int, pb.CapsuleRecord]:
    """Returns the capsules for ranks that can't read their own before the decision.

    All ranks call it together. A capsule in a checkpoint is read where the file is open. A daemon
    that does not know the job has no token to ask other daemons: a rank of a node that knows the
    job reads these capsules.
    """
    readers = readers_of(introduction, survey, recovery)

    def read(rank: int) -> RankMessage:
        is_reader = context.rank == readers[rank]
        if not is_reader:
            return RankMessage()
        return RankMessage(held_capsule(context, introduction, survey, recovery, rank).SerializeToString())

    published = {rank: gather(context.rank_group, partial(read, rank), RankMessage) for rank in readers}
    return {rank: arrived(each[readers[rank]].data) for rank, each in published.items()}


def arrived(data: bytes) -> pb.CapsuleRecord:
    """Returns a published capsule; empty if the bytes have changed on their way."""
    try:
        record = pb.CapsuleRecord.FromString(data)
    except DecodeError:
        return pb.CapsuleRecord()
    return record if messages.is_as_sealed(record) else pb.CapsuleRecord()


def readers_of(introduction: Introduction, survey: JobSurvey, recovery: RecoveryPlan) -> dict[int, int]:
    """Returns rank → the rank that reads its capsule, for ranks that can't do so, ascending."""
    nodes = {node.id: node for node in introduction.nodes}
    knowing = [node for node in introduction.nodes if survey.replies[node.id].HasField("decision")]
    readers: dict[int, int] = {}
    for rank in range(len(introduction.ranks.infos)):
        node, source = introduction.node_of(rank), recovery.sources.get(old_rank(survey, recovery, rank))
        if source is not None and source.is_stored:
            if source.node != node.id:
                readers[rank] = leader_of(nodes[source.node])
        elif node not in knowing:
            readers[rank] = leader_of(knowing[0])
    return readers


def held_capsule(
    context: AttachContext, introduction: Introduction, survey: JobSurvey, recovery: RecoveryPlan, rank: int
) -> pb.CapsuleRecord:
    """Returns the capsule from which a rank goes on; empty if it is damaged.

    Damage is found again when all slots are opened, and dealt with there.
    """
    old = old_rank(survey, recovery, rank)
    held = recovery.sources.get(old) or recovery.capsules[old]
    assert held.version is not None, "a source has a version"
    try:
        return remote_slots(context, introduction, survey).capsule(held.node, old, held.version)
    except FormatError:
        return pb.CapsuleRecord()


def tree_of(capsule: bytes, survey: JobSurvey, recovery: RecoveryPlan, rank: int) -> Mapping[str, Any]:
    """Returns the host state in a rank's capsule; empty if the capsule is damaged."""
    assert recovery.base is not None, "a restore has a base"
    layouts, index = survey.layouts[recovery.base.epoch]
    try:
        names = layouts.name_table(index[old_rank(survey, recovery, rank)])
        return serialization.decode(capsule, names) if capsule else {}
    except FormatError:
        return {}


def old_rank(survey: JobSurvey, recovery: RecoveryPlan, rank: int) -> int:
    """Returns the old rank whose host state a rank goes on from."""
    assert recovery.base is not None, "a restore has a base"
    return parent(rank, len(survey.placements[recovery.base.epoch].domains))
