"""Describes the protection of a job's state now, from the daemons' inventories.

    plan (newest version that can be restored) ─┐
    slots and capsules of that version ─────────┼─► LossAnalysis ─► Protection: groups,
    placement of its epoch ─────────────────────┘                   what may vanish now, one word

This module only finds words; `loss_analysis` decides.

Invariants
  1. "now" includes earlier losses. After a loss the word is DEGRADED until all bytes lie as the
     placement says.
  2. A job whose placement survives no lost domain is LOCAL if it has one node, since no other node
     could keep anything, and UNPROTECTED if it has more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from reft.core.budget import SLOTS
from reft.core.coding.placement import Exposure, Lane, Placement, exposures
from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.recovery import HeldCapsule, HeldParity, HeldSlot, RecoveryPlan, plan, sealed_parity
from reft.core.status.loss_analysis import LossAnalysis

SCHEMES: Final = ("aec", "arc", "exchange", "aor", "none")
NO_COUNTS: Final = dict.fromkeys(
    (*(f"{scheme}_bytes" for scheme in SCHEMES), "turn_bytes", "parity_bytes", "extra_slot_bytes"), 0
)


class ProtectionWord(Enum):
    PROTECTED = "PROTECTED"
    DEGRADED = "DEGRADED"
    UNPROTECTED = "UNPROTECTED"
    LOCAL = "LOCAL"


@dataclass(frozen=True)
class ProtectionGroup:
    """All lanes of one code among equally many domains.

    Attributes:
        scheme: "aec" (coded), "arc" (copied), "none" (stored once), "exchange" (parity on other
            nodes) or "aor" (copies on other nodes).
        domains: number of failure domains that share the lanes.
        k: data shards of a stripe.
        f: parity shards of a stripe; f shards may be lost.
        nbytes: bytes of the state, each counted once.
        cells: number of cells; of the exchange: of lanes.
        reason: why this scheme, in a few words.
    """

    scheme: str
    domains: int
    k: int
    f: int
    nbytes: int
    cells: int
    reason: str = ""


@dataclass(frozen=True)
class Protection:
    """How a job is protected.

    Attributes:
        version: the newest version that can be restored; None if there is none.
        groups: the lanes by code.
        meant: how many domains may vanish if all bytes lie as placed.
        tolerated: how many domains may vanish now; -1 if nothing can be restored.
        fatal: the nodes whose loss alone would lose the version.
        survives_pairs: whether any two nodes may vanish.
        nodes: number of nodes that hold something.
        exposed: parts of the state that are not protected as requested.
        fatal_pairs: pairs of nodes whose loss would lose the version, though neither node alone
            would; None: too many pairs to try them all.
        domains: number of failure domains of these nodes.
        fatal_domains: the domains whose loss alone would lose the version.
        newest: of a job that exchanges state, the newest version that can be restored now. It is
            newer than `version` while its parity is not made: then it survives processes only. The
            same as `version` for other jobs.
        members: number of nodes of the job, whether they answer or not; 0: unknown.
    """

    version: Version | None
    groups: tuple[ProtectionGroup, ...]
    meant: int
    tolerated: int
    fatal: tuple[str, ...]
    survives_pairs: bool
    nodes: int
    exposed: tuple[Exposure, ...]
    fatal_pairs: tuple[tuple[str, str], ...] | None = ()
    domains: int = 0
    fatal_domains: tuple[str, ...] = ()
    newest: Version | None = None
    members: int = 0

    @property
    def word(self) -> ProtectionWord:
        if self.tolerated < self.meant or self.version is None:
            return ProtectionWord.DEGRADED
        if self.meant > 0:
            return ProtectionWord.PROTECTED
        return ProtectionWord.LOCAL if self.members == 1 else ProtectionWord.UNPROTECTED


def protection(
    held: Collection[HeldSlot],
    copies: Collection[HeldCapsule],
    placements: Mapping[Epoch, Placement],
    decision: Decision | None,
    domains: Mapping[str, str],
    parity: Collection[HeldParity] = (),
) -> tuple[Protection, LossAnalysis | None] | None:
    """Returns the protection now, for the newest version that is stored as placed, parity included.

    If no version is stored as placed, the newest one that can be restored is used. A step that is
    being sealed can be restored before it is protected, so such a step is not what a loss would
    cost.

    Args:
        held: as of `recovery.plan`.
        copies: as of `recovery.plan`.
        placements: as of `recovery.plan`.
        decision: as of `recovery.plan`.
        domains: node that answers → its failure domain.
        parity: as of `recovery.plan`.

    Returns:
        None if no placement is known. The loss analysis is None if nothing can be restored.
    """
    newest = placements.get(decision.epoch) if decision else None
    if newest is None:
        return None
    candidates: list[tuple[Protection, LossAnalysis]] = []
    versions = {slot.version for slot in held if slot.version} | {copy.version for copy in copies}
    for version in sorted(versions, key=lambda version: (*version.order, version.epoch.ident), reverse=True):
        slots = [slot for slot in held if slot.version == version]
        capsules_of = [copy for copy in copies if copy.version == version]
        parity_slots = [each for each in parity if each.version == version]
        recovery_plan = plan(slots, capsules_of, placements, decision, parity=parity_slots)
        if recovery_plan.base is None:
            continue
        placement = placements[version.epoch]
        parity_nodes = {rank: each.node for rank, each in sealed_parity(parity_slots, placement).items()}
        loss_analysis = _loss_analysis(recovery_plan, capsules_of, parity_nodes, placement, domains)
        newest_held = candidates[0][0].version if candidates and placement.guard_lanes else version
        judged = replace(_protection_of(version, placement, loss_analysis), newest=newest_held)
        candidates.append((judged, loss_analysis))
        if candidates[-1][0].tolerated >= candidates[-1][0].meant:
            return candidates[-1]
    if candidates:
        return candidates[0]
    return Protection(None, groups(newest), meant(newest), -1, (), False, len(domains), exposures(newest)), None


def _protection_of(version: Version, placement: Placement, loss_analysis: LossAnalysis) -> Protection:
    fatal = tuple(unit_loss.unit for unit_loss in loss_analysis.nodes() if not unit_loss.survives)
    pairs, domains = loss_analysis.pairs(), loss_analysis.each_domain()
    return Protection(
        version, groups(placement), meant(placement), loss_analysis.tolerated(), fatal, pairs.survives,
        len(loss_analysis.all_nodes), exposures(placement),
        tuple(pair for pair in pairs.fatal if not set(pair) & set(fatal)) if pairs.is_listed else None,
        len(domains), tuple(unit_loss.unit for unit_loss in domains if not unit_loss.survives),
    )  # fmt: skip


def _loss_analysis(
    recovery_plan: RecoveryPlan,
    copies: Iterable[HeldCapsule],
    parity: Mapping[int, str],
    placement: Placement,
    domains: Mapping[str, str],
) -> LossAnalysis:
    capsule_nodes: dict[int, set[str]] = {}
    unreplicated: dict[int, int] = {}
    for copy in copies:
        capsule_nodes.setdefault(copy.rank, set()).add(copy.node)
        unreplicated[copy.rank] = max(copy.unreplicated_bytes, unreplicated.get(copy.rank, 0))
    for rank, digest in enumerate(placement.division.layout_of):
        # No node keeps a capsule of this rank, so no node reports its unreplicated bytes. The
        # layout's prediction is the best known value.
        unreplicated.setdefault(rank, placement.division.unreplicated_bytes[digest])
    slots = {rank: held.node for rank, held in recovery_plan.sources.items()}
    return LossAnalysis(placement, slots, capsule_nodes, unreplicated, domains, parity)


def groups(placement: Placement) -> tuple[ProtectionGroup, ...]:
    """Returns the lanes grouped by code, the largest group first."""
    nbytes: dict[tuple[str, int, int, int, str], int] = {}
    cells: dict[tuple[str, int, int, int, str], set[int]] = {}
    for lane in placement.lanes:
        key = (_scheme(lane), lane.D, lane.code.k, lane.code.f, _reason(lane, placement))
        nbytes[key] = nbytes.get(key, 0) + lane.nbytes
        cells.setdefault(key, set()).add(lane.cell)
    for number, guard in enumerate(placement.guard_lanes):
        key = ("aor" if guard.is_copies else "exchange", guard.D, guard.code.k, guard.code.f, "one holder")
        nbytes[key] = nbytes.get(key, 0) + sum(guard.sizes)
        cells.setdefault(key, set()).add(number)
    protection_groups = [ProtectionGroup(*key[:4], nbytes[key], len(cells[key]), reason=key[-1]) for key in nbytes]
    return tuple(
        sorted(protection_groups, key=lambda group: (-group.nbytes, group.scheme, group.domains, group.k, group.f))
    )


def meant(placement: Placement) -> int:
    """Returns how many domains may vanish while all bytes lie as placed."""
    division = placement.division
    owners = [rank for rank, digest in enumerate(division.layout_of) if division.unreplicated_bytes[digest]]
    if any(placement.guard_lane_of(rank) is None for rank in owners):
        return 0  # unreplicated leaves in no guard lane are lost with their node
    tolerated = [lane.code.f for lane in placement.lanes] + [lane.code.f for lane in placement.guard_lanes]
    return min(tolerated, default=0)


def _scheme(lane: Lane) -> str:
    return "none" if not lane.code.f else "arc" if lane.code.k == 1 else "aec"


def _reason(lane: Lane, placement: Placement) -> str:
    """Returns why the leaves of a lane are kept as they are."""
    if not lane.code.f:
        return "one domain" if lane.D == 1 else "settings"
    if lane.code.k == 1 and lane.D > lane.code.f + 1:
        return "settings" if placement.scheme == "arc" else "small replicas"
    return "replicas"


def protection_counts(placement: Placement, rank: int) -> dict[str, int]:
    """Returns the numbers of `Session.stats` on the job's protection.

    Args:
        placement: the placement of the job.
        rank: whose part of a turn, and of the memory, is counted.
    """
    kept = dict.fromkeys(SCHEMES, 0)
    for group in groups(placement):
        kept[group.scheme] += group.nbytes
    division = placement.division
    kept["none"] += sum(
        division.unreplicated_bytes[digest]
        for number, digest in enumerate(division.layout_of)
        if placement.guard_lane_of(number) is None
    )
    counts = NO_COUNTS | {f"{scheme}_bytes": nbytes for scheme, nbytes in kept.items()}
    place = placement.guard_lane_of(rank)
    if place is not None:
        lane = placement.guard_lanes[place[0]]
        counts["turn_bytes"], counts["parity_bytes"] = lane.sent_bytes(place[1]), lane.buffers_bytes
        counts["extra_slot_bytes"] = (placement.slots - SLOTS) * placement.rank_placement(rank).data_bytes
    return counts
