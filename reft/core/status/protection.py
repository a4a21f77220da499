"""How well a job's state is protected now: from what daemons hold to what a person asks. Words only; `exposure` decides.

    plan (newest version that can be restored) ─┐
    slots and capsules of that version ─────────┼─► LossAnalysis ─► Protection: groups, what may vanish now, one word
    placement of its epoch ─────────────────────┘

Invariants
  1. "now" counts what is gone already: after a loss the word is DEGRADED until all is as the placement meant it to be.
  2. A job that was never meant to survive a domain is UNPROTECTED, whatever holds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from reft.core.coding.placement import Exposure, Lane, Placement, exposed
from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.recovery import HeldCapsule, HeldSlot, RecoveryPlan, plan
from reft.core.status.loss_analysis import LossAnalysis


class ProtectionWord(Enum):
    PROTECTED = "PROTECTED"
    DEGRADED = "DEGRADED"
    UNPROTECTED = "UNPROTECTED"


@dataclass(frozen=True)
class ProtectionGroup:
    """All lanes that are coded alike among equally many domains.

    Attributes:
        scheme: "aec" (coded), "arc" (copied) or "none" (stored once).
        domains: how many failure domains share them.
        k, f: data and parity shards of a stripe; f of them may be lost.
        nbytes: of the state, each byte once.
        cells: how many.
    """

    scheme: str
    domains: int
    k: int
    f: int
    nbytes: int
    cells: int


@dataclass(frozen=True)
class Protection:
    """What of a job is protected, and how.

    Attributes:
        version: the newest that can be restored; None if there is none.
        meant: how many domains may vanish if everything is where it should be.
        tolerated: how many may vanish now; -1 if nothing can be restored.
        fatal: the nodes whose loss alone would lose the version.
        survives_pairs: whether any two nodes may vanish.
        nodes: how many nodes hold something.
        exposed: what is not protected as was asked for.
        fatal_pairs: two nodes whose loss would lose the version though neither's alone would; None: too many to try them all.
        domains: how many failure domains these nodes are.
        fatal_domains: the domains whose loss alone would lose the version.
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

    @property
    def word(self) -> ProtectionWord:
        if self.tolerated < self.meant or self.version is None:
            return ProtectionWord.DEGRADED
        return ProtectionWord.PROTECTED if self.meant > 0 else ProtectionWord.UNPROTECTED


def protection(
    held: Collection[HeldSlot],
    copies: Collection[HeldCapsule],
    placements: Mapping[Epoch, Placement],
    decision: Decision | None,
    domains: Mapping[str, str],
) -> tuple[Protection, LossAnalysis | None] | None:
    """What survives what now, by the newest version that lies as it should; if none does, by the newest that is left.

    While a step is being sealed, it can be restored before it is protected: it is not what a loss would cost.

    Args:
        held, copies, placements, decision: as of `recovery.plan`.
        domains: node that answers → its failure domain.

    Returns:
        None if it is not known how anything was placed; no outlook if nothing can be restored.
    """
    newest = placements.get(decision.epoch) if decision else None
    if newest is None:
        return None
    found: list[tuple[Protection, LossAnalysis]] = []
    versions = {slot.version for slot in held if slot.version} | {copy.version for copy in copies}
    for version in sorted(versions, key=lambda version: (*version.order, version.epoch.ident), reverse=True):
        slots = [slot for slot in held if slot.version == version]
        capsules = [copy for copy in copies if copy.version == version]
        chosen = plan(slots, capsules, placements, decision)
        if chosen.base is None:
            continue
        placement = placements[version.epoch]
        loss_analysis = _outlook(chosen, capsules, placement, domains)
        found.append((_judged(version, placement, loss_analysis), loss_analysis))
        if found[-1][0].tolerated >= found[-1][0].meant:
            return found[-1]
    if found:
        return found[0]
    return Protection(None, groups(newest), meant(newest), -1, (), False, len(domains), exposed(newest)), None


def _judged(version: Version, placement: Placement, loss_analysis: LossAnalysis) -> Protection:
    fatal = tuple(verdict.unit for verdict in loss_analysis.nodes() if not verdict.survives)
    pairs, domains = loss_analysis.pairs(), loss_analysis.each_domain()
    return Protection(
        version, groups(placement), meant(placement), loss_analysis.tolerated(), fatal, pairs.survives,
        len(loss_analysis.all_nodes), exposed(placement),
        tuple(pair for pair in pairs.fatal if not set(pair) & set(fatal)) if pairs.is_listed else None,
        len(domains), tuple(verdict.unit for verdict in domains if not verdict.survives),
    )  # fmt: skip


def _outlook(
    chosen: RecoveryPlan, copies: Iterable[HeldCapsule], placement: Placement, domains: Mapping[str, str]
) -> LossAnalysis:
    found: dict[int, set[str]] = {}
    kept: dict[int, int] = {}
    for copy in copies:
        found.setdefault(copy.rank, set()).add(copy.node)
        kept[copy.rank] = max(copy.unreplicated_bytes, kept.get(copy.rank, 0))
    for rank, digest in enumerate(placement.division.layout_of):
        # Nobody keeps its capsule, and so nobody says it; what was foreseen is the best that is known.
        kept.setdefault(rank, placement.division.unreplicated_bytes[digest])
    slots = {rank: held.node for rank, held in chosen.sources.items()}
    return LossAnalysis(placement, slots, found, kept, domains)


def groups(placement: Placement) -> tuple[ProtectionGroup, ...]:
    """The lanes by how they are coded, the largest group first."""
    nbytes: dict[tuple[str, int, int, int], int] = {}
    cells: dict[tuple[str, int, int, int], set[int]] = {}
    for lane in placement.lanes:
        key = (_scheme(lane), lane.D, lane.code.k, lane.code.f)
        nbytes[key] = nbytes.get(key, 0) + lane.nbytes
        cells.setdefault(key, set()).add(lane.cell)
    found = [ProtectionGroup(*key, nbytes[key], len(cells[key])) for key in nbytes]
    return tuple(sorted(found, key=lambda group: (-group.nbytes, group.scheme, group.domains, group.k, group.f)))


def meant(placement: Placement) -> int:
    """How many domains may vanish while everything is where the placement puts it."""
    division = placement.division
    if any(division.unreplicated_bytes[digest] for digest in division.layout_of):
        return 0  # lost with their node
    return min((lane.code.f for lane in placement.lanes), default=0)


def _scheme(lane: Lane) -> str:
    return "none" if not lane.code.f else "arc" if lane.code.k == 1 else "aec"
