"""Makes the recovery plan: what every rank loads, or what is missing, from all surviving headers.

    headers of every reachable ─► plan ─► decision record (new epoch, ─► load
    daemon                         ▲      base) on every daemon           │
                                   └─ a slot that failed its digest is an erasure

    rank        0        1        2        3       each lane needs k shards of every stripe
    slot      sealed   sealed   erased   sealed    each rank needs its own slot, or a capsule
    capsule                     node 3             if its slot had no unreplicated leaves

Invariants
  1. The same inputs give the same plan on every rank. The order of the inputs does not matter.
  2. A version can be restored only under two conditions. Every lane can be decoded from slots that
     are sealed at exactly that (epoch, step). Every rank has such a slot, or a capsule of exactly
     that version and no unreplicated leaves. The newest version that can be restored is the base.
  3. A slot that is torn, stale, damaged or of a foreign history is an erasure. It counts as if its
     node were lost.
  4. Only some versions count: those of the epoch of the decision in force, its base, and the
     versions that led to the base. Versions that an older history wrote after the base are dropped.
     A node that came back, or an orphan, may hold such versions. Capsules count by the same rule.
     Which decision is in force: reft/core/recovery/lineage.py.
  5. A version is read by the placement of the epoch that wrote it, whatever the nodes are called
     now. A rank's slot may be found on any node.
  6. The plan never uses what the round announced.
  7. One more slot or capsule never gives an older base.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reft.core.coding.placement import Placement
from reft.core.commit.decision import Decision, counts
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.gather import LaneGroup, group_lanes, undecodable
from reft.core.text import more

RUNS_MAX = 8  # one line names at most so many runs of ranks, or nodes


@dataclass(frozen=True)
class HeldSlot:
    """One slot's header as its daemon read it.

    Attributes:
        node: id of the node whose daemon holds the slot.
        rank: the rank that wrote the slot.
        slot: name of the slot in that daemon's arena.
        state: state of the slot.
        version: the version in the slot; None: none.
        layout: digest of the leaf table.
        data_bytes: size of the slot's data.
    """

    node: str
    rank: int
    slot: str
    state: SlotState
    version: Version | None
    layout: bytes = b""
    data_bytes: int = 0


@dataclass(frozen=True)
class HeldCapsule:
    """One capsule in the store of a node other than its rank's own.

    Attributes:
        node: id of the node whose daemon has the capsule.
        rank: the rank that the capsule belongs to.
        version: the version of the capsule.
        unreplicated_bytes: size of the unreplicated leaves in the rank's slot. If it is above 0,
            the capsule can't replace the slot.
    """

    node: str
    rank: int
    version: Version
    unreplicated_bytes: int

    @property
    def slot(self) -> str:
        """Returns the name that reports of damage use in place of a slot's name."""
        return f"capsule-{self.rank}"


@dataclass(frozen=True)
class Shortfall:
    """The reasons why a version can't be restored.

    Attributes:
        version: the version.
        ranks: the ranks without a sealed slot of it, ascending.
        lanes: indices of the lanes that can't be decoded, ascending.
        bare: of `ranks`, those that no capsule can replace.
        unreplicated: of `bare`, those with a capsule whose slot held unreplicated leaves.
        is_placed: whether the placement of its bytes is known; if not, all other fields are empty.
    """

    version: Version
    ranks: tuple[int, ...] = ()
    lanes: tuple[int, ...] = ()
    bare: tuple[int, ...] = ()
    unreplicated: tuple[int, ...] = ()
    is_placed: bool = True


@dataclass(frozen=True)
class RecoveryPlan:
    """The base, and where each rank's part of it is found.

    Attributes:
        base: the version to load; None means a fresh start, if nothing was whole before.
        sources: rank → its sealed slot of the base, for the ranks that have one.
        capsules: rank → where its capsule of the base is, for all other ranks.
        dropped: slots to empty before any rank writes. They are open, newer than the base, or of a
            dead history.
        partial: newer versions that can't be restored, newest first.
        earlier: rank → older versions of the base's epoch whose capsule is left, each with the node
            that has it.
    """

    base: Version | None
    sources: dict[int, HeldSlot] = field(default_factory=dict)
    capsules: dict[int, HeldCapsule] = field(default_factory=dict)
    dropped: tuple[HeldSlot, ...] = ()
    partial: tuple[Shortfall, ...] = ()
    earlier: dict[int, tuple[tuple[Version, str], ...]] = field(default_factory=dict)


def plan(
    held: Collection[HeldSlot],
    copies: Collection[HeldCapsule],
    placements: Mapping[Epoch, Placement],
    decision: Decision | None,
    erased: Collection[tuple[str, str, Version]] = (),
) -> RecoveryPlan:
    """Returns the newest restorable version, and the place of each rank's part of it.

    Args:
        held: the headers of all slots of the job on all reachable daemons.
        copies: all capsules in the stores of those daemons.
        placements: epoch → the placement of the versions of that epoch. Versions of other epochs
            can't be used.
        decision: the newest decision record; None if the job never attached.
        erased: (node, slot, version) of slots and capsules that failed their digests. They count as
            missing.
    """
    by_version = _by_version(held, copies, erased)
    groups: dict[Epoch, list[LaneGroup]] = {}
    partial = []
    for version in sorted(by_version, key=lambda version: (*version.order, version.epoch.ident), reverse=True):
        slots, capsules = by_version[version].slots(), by_version[version].capsules()
        if not counts(version, decision) or not (slots or capsules):
            continue
        placement = placements.get(version.epoch)
        if placement is None:
            partial.append(Shortfall(version, is_placed=False))
            continue
        if version.epoch not in groups:
            groups[version.epoch] = group_lanes(placement.lanes)
        world = len(placement.domains)
        shortfall = _shortfall(version, slots, capsules, groups[version.epoch], world)
        if shortfall.lanes or shortfall.bare:
            partial.append(shortfall)
            continue
        sources = {rank: slots[rank] for rank in range(world) if rank in slots}
        chosen_capsules = {rank: capsules[rank] for rank in shortfall.ranks}
        return RecoveryPlan(
            version,
            sources,
            chosen_capsules,
            _dropped(by_version, version),
            tuple(partial),
            _earlier(by_version, version),
        )
    return RecoveryPlan(None, {}, {}, _dropped(by_version, None), tuple(partial))


@dataclass(frozen=True)
class _Evidence:
    """The slots in any state and the capsules of one version.

    `erased` has (node, slot) of damaged ones.
    """

    held: list[HeldSlot] = field(default_factory=list)
    copies: list[HeldCapsule] = field(default_factory=list)
    erased: set[tuple[str, str]] = field(default_factory=set)

    def slots(self) -> dict[int, HeldSlot]:
        """Returns rank → its sealed slot; of several, the lexically first (node, slot)."""
        by_rank: dict[int, HeldSlot] = {}
        for slot in self.held:
            if slot.state is SlotState.SEALED and not self._is_erased(slot):
                other = by_rank.setdefault(slot.rank, slot)
                if other is not slot and (slot.node, slot.slot) < (other.node, other.slot):
                    by_rank[slot.rank] = slot
        return by_rank

    def capsules(self) -> dict[int, HeldCapsule]:
        """Returns rank → one capsule.

        Of several, one that can replace the slot is preferred, then the lexically first node.
        """
        by_rank: dict[int, HeldCapsule] = {}
        for copy in self.copies:
            if not self._is_erased(copy):
                other = by_rank.setdefault(copy.rank, copy)
                if other is not copy and (copy.unreplicated_bytes > 0, copy.node) < (
                    other.unreplicated_bytes > 0,
                    other.node,
                ):
                    by_rank[copy.rank] = copy
        return by_rank

    def dead(self, is_newer: bool) -> list[HeldSlot]:
        """Returns the slots to empty.

        Older sealed slots are kept. They are needed if the base turns out to be damaged.
        """
        return [slot for slot in self.held if is_newer or slot.state is not SlotState.SEALED or self._is_erased(slot)]

    def _is_erased(self, each: HeldSlot | HeldCapsule) -> bool:
        return bool(self.erased) and (each.node, each.slot) in self.erased


def _by_version(
    held: Iterable[HeldSlot], copies: Iterable[HeldCapsule], erased: Iterable[tuple[str, str, Version]]
) -> dict[Version, _Evidence]:
    by_version: defaultdict[Version, _Evidence] = defaultdict(_Evidence)
    for slot in held:
        if slot.version is not None and slot.state is not SlotState.EMPTY:
            by_version[slot.version].held.append(slot)
    for copy in copies:
        by_version[copy.version].copies.append(copy)
    for node, name, version in erased:
        by_version[version].erased.add((node, name))
    return by_version


def _dropped(by_version: Mapping[Version, _Evidence], base: Version | None) -> tuple[HeldSlot, ...]:
    dead = []
    for version, evidence in by_version.items():
        dead += evidence.dead(base is None or not (version == base or version.is_older_than(base)))
    return tuple(sorted(dead, key=lambda slot: (slot.node, slot.slot)))


def _earlier(by_version: Mapping[Version, _Evidence], base: Version) -> dict[int, tuple[tuple[Version, str], ...]]:
    earlier: defaultdict[int, list[tuple[Version, str]]] = defaultdict(list)
    for version in sorted(by_version, key=lambda version: version.order):
        if version.epoch == base.epoch and version.step < base.step:
            holders: dict[int, HeldSlot | HeldCapsule] = {
                **by_version[version].capsules(),
                **by_version[version].slots(),
            }
            for rank, each in holders.items():
                earlier[rank].append((version, each.node))
    return {rank: tuple(versions) for rank, versions in sorted(earlier.items())}


def _shortfall(
    version: Version,
    slots: Collection[int],
    capsules: Mapping[int, HeldCapsule],
    groups: Sequence[LaneGroup],
    world: int,
) -> Shortfall:
    """Returns the missing parts of the version.

    With no lanes and no bare ranks, it can be restored.
    """
    have = np.zeros(world, np.bool_)
    have[[rank for rank in slots if 0 <= rank < world]] = True
    lost = tuple(np.flatnonzero(~have).tolist())
    bare = tuple(rank for rank in lost if rank not in capsules or capsules[rank].unreplicated_bytes)
    unreplicated = tuple(rank for rank in bare if rank in capsules)
    return Shortfall(version, lost, undecodable(groups, have), bare, unreplicated)


def describe(shortfall: Shortfall, placement: Placement | None, nodes: Mapping[int, str]) -> list[str]:
    """Explains in lines why a version can't be restored.

    The lines are for a person, and the first names the version.

    Args:
        shortfall: from the plan.
        placement: of the version's epoch; None only if the placement is not known.
        nodes: rank → name of the node where the rank ran; ranks may be missing.
    """
    if placement is None or not shortfall.is_placed:
        return [f"{shortfall.version}: no daemon that answers knows how its bytes were placed."]
    lines = [f"{shortfall.version}: no sealed slot of {_ranks(shortfall.ranks)}{_on(shortfall.ranks, nodes)}."]
    if shortfall.lanes:
        lines.append(describe_lost_cells(placement, shortfall.lanes, shortfall.ranks))
    without = sorted(set(shortfall.bare) - set(shortfall.unreplicated))
    if without:
        lines.append(f"No capsule of {_ranks(without)} is left.")
    if shortfall.unreplicated:
        lines.append(f"The slots of {_ranks(shortfall.unreplicated)} held leaves that no other rank has.")
    return lines


def describe_lost_cells(placement: Placement, lanes: Sequence[int], ranks: Collection[int]) -> str:
    """Returns a sentence on cells that can't be decoded without these ranks' slots."""
    cells = sorted({placement.lanes[lane].cell for lane in lanes})
    first, lane = placement.division.cells[cells[0]], placement.lanes[lanes[0]]
    lost = sum(member in ranks for member in lane.members)
    others = more(len(first.leaves) - 1, "leaf", "leaves") + more(len(cells) - 1, "cell")
    return (
        f"the cell of {first.leaves[0].name}{others} can't be decoded: {lost} of {lane.D} slots are gone, "
        f"with more than {lane.code.f} of the {lane.code.k + lane.code.f} shards of a stripe."
    )


def _on(ranks: Iterable[int], nodes: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(nodes[rank] for rank in ranks if rank in nodes))
    if not names:
        return ""
    more = f" and {len(names) - RUNS_MAX} more" if len(names) > RUNS_MAX else ""
    return f" (on {', '.join(names[:RUNS_MAX])}{more})"


def _ranks(ranks: Sequence[int]) -> str:
    """Formats ranks as runs, for example "ranks 0-7, 9"; names only the first few runs."""
    if not ranks:
        return "no rank"
    runs = [[ranks[0], ranks[0]]]
    for rank in ranks[1:]:
        if rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:RUNS_MAX])
    rest = sum(last - first + 1 for first, last in runs[RUNS_MAX:])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}" + (f" and {rest} more" if rest else "")
