"""Makes the request to rebuild slots of lost ranks.

It also makes the leaf tables of these slots. A leaf table is the one that the rank's trainer would
have written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

from reft.core.coding.placement import Placement
from reft.core.layout.layout import Layout
from reft.core.recovery.recovery import RecoveryPlan, lane_partners
from reft.wire import messages
from reft.wire.inventory import JobSurvey
from reft.wire.messages import table_to
from reft.wire.v1 import daemon_pb2 as pb


def rebuilt_table(placement: Placement, predicted: Layout, rank: int, absent: Collection[str]) -> bytes:
    """Returns the leaf table's bytes.

    Args:
        placement: of the version's epoch.
        predicted: the rank's leaves as predicted when that epoch began.
        rank: the lost rank.
        absent: predicted leaves that did not exist, by the rank's capsule. Unreplicated ones among
            them have no bytes.
    """
    division, part = placement.division, placement.rank_placement(rank)
    digest = division.layout_of[rank]
    places = {leaf.name: pb.CELL for cell in division.cells_of[digest] for leaf in division.cells[cell].leaves}
    places |= dict.fromkeys(division.inline_leaves[digest], pb.INLINE)
    offsets = {
        leaf.name: part.unreplicated_offset + at
        for leaf, at in zip(part.unreplicated.leaves, part.unreplicated.offsets, strict=True)
    }
    leaves = [leaf for leaf in predicted.leaves if leaf.name not in absent]
    leaves.sort(key=lambda leaf: (offsets.get(leaf.name, -1), leaf.name))
    at = tuple(offsets.get(leaf.name, 0) for leaf in leaves)
    return table_to(Layout(tuple(leaves), at, part.data_bytes), places)


def layout_mark(table: bytes) -> bytes:
    """Returns the layout digest for a rebuilt slot's header: 16 bytes that no trainer's layout has.

    So the next trainer that writes the slot writes table and zeros again.
    """
    return hashlib.blake2b(table, digest_size=16, person=b"reft rebuilt").digest()


def rebuild_request(
    job_survey: JobSurvey, plan: RecoveryPlan, ranks: Sequence[int], addresses: Mapping[str, Sequence[str]]
) -> pb.RebuildRequest:
    """Returns the request for some lost ranks' slots, from a plan with a base.

    Args:
        job_survey: the survey that the plan was made from.
        plan: a plan with a base.
        ranks: of one lost node, not empty; the plan has a capsule of each.
        addresses: id of a node → its addresses, for nodes that no manifest names.
    """
    base, decision, manifest = plan.base, job_survey.decision, job_survey.manifest
    assert base is not None and decision is not None and manifest is not None, "a plan without a base"
    sources = [plan.sources[rank] for rank in sorted(plan.sources)]
    sections = set(plan.sections).intersection(ranks)
    placement = job_survey.placements[base.epoch]
    partners = {partner for rank in sections for partner in lane_partners(placement, rank, 0)}
    parity = [plan.parity[rank] for rank in sorted(partners.intersection(plan.parity))]
    ids = sorted({held.node for held in (*sources, *parity)} | {plan.capsules[rank].node for rank in ranks})
    number = {ident: i for i, ident in enumerate(ids)}
    request = pb.RebuildRequest(
        manifest=manifest, decision=messages.decision_to(decision), version=messages.version_to(base),
        node_index=next((i for i, node in enumerate(manifest.nodes) if ranks[0] in node.ranks), 0),
        nodes=[
            pb.Node(
                name=job_survey.names[ident],
                id=ident,
                addresses=[*job_survey.nodes[ident].addresses, *addresses.get(ident, ())],
            )
            for ident in ids
        ],
        slots=[pb.SlotSource(rank=held.rank, node=number[held.node], slot=held.slot) for held in sources],
        lost=[
            pb.LostRank(rank=rank, keeper=number[plan.capsules[rank].node], section=rank in sections) for rank in ranks
        ],
        parity=[pb.SlotSource(rank=held.rank, node=number[held.node], slot=held.slot) for held in parity],
    )  # fmt: skip
    if decision.base is not None and decision.base.epoch in job_survey.manifests:
        request.base_manifest.CopyFrom(job_survey.manifests[decision.base.epoch])
    if decision.guard is not None and decision.guard.epoch in job_survey.manifests:
        request.guard_manifest.CopyFrom(job_survey.manifests[decision.guard.epoch])
    return request
