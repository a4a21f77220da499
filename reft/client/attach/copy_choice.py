"""Asks all ranks whether nodes can recompute copies, where protect="auto" leaves it open.

manifest with protect="aor" ─► each rank: section, records, bytes ═► all ranks
                            ─► core/coding/copy_choice.py ─► protect and choice of the manifest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from reft.client.attach.arguments import AttachContext
from reft.client.attach.introduce import Description, Introduction
from reft.client.attach.plan import place, slots_of
from reft.client.attach.records import plan_of
from reft.client.link.exchange import gather
from reft.client.link.slots import capacities
from reft.client.state.extract import recomputable
from reft.core.coding.copy_choice import CopyReport, choose_copies
from reft.core.coding.exchange import PARITY_BUFFERS
from reft.core.coding.placement import Placement
from reft.core.commit.gradient_records import record_slots
from reft.errors import UnsupportedState
from reft.wire.inventory import JobSurvey
from reft.wire.slot_format import Geometry
from reft.wire.v1 import daemon_pb2 as pb


def choose(
    context: AttachContext,
    introduction: Introduction,
    description: Description,
    survey: JobSurvey,
    mismatched: Sequence[str],
) -> Description:
    """Returns the description with what auto has chosen. All ranks call it together.

    The description stays as it is if the user has chosen, or if nothing exists once.

    Args:
        context: what every step needs.
        introduction: the ranks and nodes that take part.
        description: the new manifest.
        survey: what all daemons hold of the job, and the memory that they have.
        mismatched: names of the leaves of which each rank keeps its own copy.

    Raises:
        AttachError: a rank could not take part.
    """
    if context.request.protect != "auto":
        return description
    unreplicated = description.division.unreplicated.values()
    if not mismatched and not any(layout.leaves for layout in unreplicated):
        return description
    manifest = pb.Manifest()
    manifest.CopyFrom(description.manifest)
    manifest.protect = "aor"
    manifest.mismatched.extend(mismatched)
    placement = place(manifest, description.division)
    if not placement.guard_lanes:
        return description
    slots = slots_of(context.settings, manifest)
    reports = gather(context.rank_group, lambda: report(context, introduction, placement, slots), CopyReport)
    nodes = {node.id: list(node.ranks) for node in introduction.nodes}
    names = {node.id: node.name or node.id for node in introduction.nodes}
    choice = choose_copies(
        reports,
        {names[node]: ranks for node, ranks in nodes.items()},
        {names[node]: survey.replies[node].room_bytes for node in nodes},
        survey.not_recomputed,
    )
    chosen = pb.Manifest()
    chosen.CopyFrom(description.manifest)
    chosen.choice = choice.reason
    if choice.is_copies:
        chosen.protect = "aor"
    return replace(description, manifest=chosen)


def report(context: AttachContext, introduction: Introduction, placement: Placement, slots: int) -> CopyReport:
    """Returns what this rank says of copies.

    Args:
        context: what every step needs.
        introduction: the state of this rank.
        placement: the placement with copies.
        slots: the number of slots of this rank.
    """
    rank, state, chunk_bytes = context.rank, introduction.state, placement.chunk_bytes
    own, lane = placement.rank_placement(rank), placement.guard_lane_of(rank)
    data_bytes, table_bytes = capacities(own.unplanned_offset, len(state.table))
    nbytes = slots * Geometry(table_bytes, data_bytes, chunk_bytes).file_bytes
    if lane is None:
        return CopyReport("", nbytes)
    nbytes += PARITY_BUFFERS * Geometry(0, placement.guard_lanes[lane[0]].parity_bytes, chunk_bytes).file_bytes
    try:
        recomputable.check_optimizers(state.tracked.items())
        recomputable.check_section(own.unreplicated.leaves, state.tracked.items())
        recomputable.check_threads(own.unreplicated.leaves, state.tracked.items(), torch.get_num_threads())
        plan = plan_of(placement, rank, state.tracked)
    except UnsupportedState as error:
        return CopyReport(error.message, nbytes)
    if plan is not None:
        records = Geometry(0, plan.layout.data_bytes, chunk_bytes).file_bytes
        nbytes += record_slots(context.request.every) * records
    return CopyReport("", nbytes)
