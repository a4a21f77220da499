"""The step structure: the objects become like those of the base, before the layout is judged.

Each rank reads the host state that it goes on from; `reft.client.state.structure` makes frozen
parameters and groups of optimizers like those of the snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reft.client.attach.arguments import AttachContext
from reft.client.attach.introduce import Introduction
from reft.client.attach.restore import remote_slots
from reft.client.link.exchange import gather
from reft.client.restore.host_state_resharding import parent
from reft.client.state import serialization, structure
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.recovery.recovery import RecoveryPlan
from reft.errors import FormatError
from reft.wire import rpc
from reft.wire.inventory import JobSurvey
from reft.wire.manifest import layouts_of


@dataclass(frozen=True)
class StructureReport:
    """What a rank has changed of its objects, as texts for the user."""

    changes: tuple[str, ...]


def rebuild_structure(
    context: AttachContext,
    introduction: Introduction,
    tracked: TrackedObjects,
    survey: JobSurvey,
    recovery: RecoveryPlan,
    counts: Sequence[int],
) -> tuple[str, ...]:
    """Makes frozen parameters and optimizers' groups like those of the base, on all ranks together.

    Args:
        context: what every step needs.
        introduction: the ranks and nodes that take part.
        tracked: the objects, with the names that the base has.
        survey: what all daemons hold of the job.
        recovery: names the base.
        counts: the groups that the script itself made, for each optimizer.

    Returns:
        What is different now on any rank, as texts for the user.
    """
    if recovery.base is None:
        return ()
    reports = gather(
        context.rank_group,
        lambda: StructureReport(structure.rebuild(tracked, counts, held_tree(context, introduction, survey, recovery))),
        StructureReport,
    )
    return tuple(dict.fromkeys(change for report in reports for change in report.changes))


def held_tree(
    context: AttachContext, introduction: Introduction, survey: JobSurvey, recovery: RecoveryPlan
) -> Mapping[str, Any]:
    """Returns the host state that this rank goes on from; empty if it is damaged.

    Damage is found again when all slots are opened, and dealt with there.
    """
    assert recovery.base is not None, "a restore has a base"
    old = parent(context.rank, len(survey.placements[recovery.base.epoch].domains))
    remote = remote_slots(context, introduction, survey)
    layouts, index = layouts_of(survey.manifests[recovery.base.epoch])
    names = layouts.name_table(index[old])
    try:
        if source := recovery.sources.get(old):
            with rpc.channel(remote.address) as channel:
                return serialization.decode(remote.slot(source, channel).capsule(), names)
        held = recovery.capsules[old]
        return serialization.decode(remote.capsule(held.node, old, held.version).capsule, names)
    except FormatError:
        return {}
