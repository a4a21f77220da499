"""Makes the recovery plan: what every rank loads, or what is missing, from all surviving headers.

    headers of every reachable ─► plan ─► decision record (new epoch, ─► load
    daemon                         ▲      base) on every daemon           │
                                   └─ a slot that failed its digest is an erasure

    rank        0        1        2        3       each lane needs k shards of every stripe
    slot      sealed   sealed   erased   sealed    each rank needs its own slot, or a capsule; for
    capsule                     node 3             unreplicated leaves also the slots and the parity
    parity    sealed   sealed   gone     sealed    of others of its guard lane

Invariants
  1. The same inputs give the same plan on every rank. The order of the inputs does not matter.
  2. A version can be restored only under two conditions. Every lane can be decoded from slots that
     are sealed at exactly that (epoch, step). Every rank has such a slot, or a capsule of exactly
     that version. If the lost slot had unreplicated leaves, at most f members of its guard lane
     lack a slot of exactly that version, and D - f other members have such parity. In a copy lane,
     older copies and a sealed record of each mark since may stand for such parity: a trainer
     replays them, and compares the result with the digests in the capsule. The newest version that
     can be restored is the base.
  3. A slot that is torn, stale, damaged or of a foreign history is an erasure. It counts as if its
     node were lost.
  4. Only some versions count: those of the epoch of the decision in force, its base, and the
     versions that led to the base. Versions that an older history wrote after the base are dropped.
     A node that came back, or an orphan, may hold such versions. Capsules and parity count by the
     same rule.
     Which decision is in force: reft/core/recovery/lineage.py.
  5. A version is read by the placement of the epoch that wrote it, whatever the nodes are called
     now. A rank's slot may be found on any node.
  6. The plan never uses what the round announced.
  7. One more slot, capsule or parity slot never gives an older base.
  8. The guard is the newest version, not newer than the base, that the loss of any one node more
     leaves restorable. If nothing of it is lost, any f nodes may be lost. It may be older than the
     base: parity is made after the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from reft.core.coding.exchange import GuardLane
from reft.core.coding.placement import Placement
from reft.core.commit.decision import Decision, counts
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.gather import LaneGroup, group_lanes, undecodable
from reft.core.text import counted, more

Slot = TypeVar("Slot", bound="HeldSlot")

REPLAY = "replay-"  # begin of a replay's name among the names of slots
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
        is_stored: whether the slot is a file of a checkpoint, which the daemon has open. Like any
            slot it can be read, but it is never written.
    """

    node: str
    rank: int
    slot: str
    state: SlotState
    version: Version | None
    layout: bytes = b""
    data_bytes: int = 0
    is_stored: bool = False


@dataclass(frozen=True)
class HeldParity(HeldSlot):
    """The header of a parity slot of a guard lane, as its daemon read it.

    `rank` is the member of the lane on whose node the parity was made. `layout` is the digest of
    the lane.
    """


@dataclass(frozen=True)
class HeldRecord(HeldSlot):
    """The header of a slot with a gradient record, as its daemon read it.

    `rank` is the rank that recorded, `version` is the epoch and the mark.
    """


@dataclass(frozen=True)
class HeldCapsule:
    """One capsule in the store of a node other than its rank's own.

    Attributes:
        node: id of the node whose daemon has the capsule.
        rank: the rank that the capsule belongs to.
        version: the version of the capsule.
        unreplicated_bytes: size of the unreplicated leaves in the rank's slot. If it is above 0,
            the capsule can replace the slot only together with the rank's guard lane.
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
class SectionReplay:
    """A way to make a lost rank's section again: older copies, and the gradients since.

    Attributes:
        rank: the lost rank.
        copies: the parity slot with a copy of its section.
        capsule: its capsule of the version of the copies.
        records: of the marks behind the copies, ascending, up to the version to make.
    """

    rank: int
    copies: HeldParity
    capsule: HeldCapsule
    records: tuple[HeldRecord, ...]

    @property
    def node(self) -> str:
        return self.copies.node

    @property
    def slot(self) -> str:
        """Returns the name by which a refused replay is reported, as a slot's name."""
        return f"{REPLAY}{self.rank}"

    @property
    def version(self) -> Version:
        """The version that the replay begins from. A refused replay is given up for all steps."""
        return self.capsule.version


@dataclass(frozen=True)
class Shortfall:
    """The reasons why a version can't be restored.

    Attributes:
        version: the version.
        ranks: the ranks without a sealed slot of it, ascending.
        lanes: indices of the lanes that can't be decoded, ascending.
        bare: of `ranks`, those that no capsule can replace.
        unreplicated: of `bare`, those with a capsule whose slot held unreplicated leaves that no
            guard lane gives back.
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
        parity: rank → the parity slot of the base on its node, for the guard lanes from which
            `sections` are decoded.
        guard: the newest version, not newer than the base, that survives the loss of any node; None
            if there is none.
        replays: rank → how its section is made, for those of `sections` that no parity gives back.
    """

    base: Version | None
    sources: dict[int, HeldSlot] = field(default_factory=dict)
    capsules: dict[int, HeldCapsule] = field(default_factory=dict)
    dropped: tuple[HeldSlot, ...] = ()
    partial: tuple[Shortfall, ...] = ()
    earlier: dict[int, tuple[tuple[Version, str], ...]] = field(default_factory=dict)
    parity: dict[int, HeldParity] = field(default_factory=dict)
    guard: Version | None = None
    replays: dict[int, SectionReplay] = field(default_factory=dict)

    def source(self, number: int, world: int) -> HeldSlot | HeldCapsule | SectionReplay:
        """Returns the slot, parity slot, capsule or replay that stands for a number.

        Args:
            number: an old rank; or a `stripes.parity_number`, or a `stripes.replay_number`.
            world: the number of old ranks.
        """
        if number >= 2 * world:
            return self.replays[number - 2 * world]
        if number >= world:
            return self.parity[number - world]
        return self.sources.get(number) or self.capsules[number]

    def numbers(self, world: int) -> set[int]:
        """Returns the old ranks, and parity numbers, whose slots are at hand."""
        return {*self.sources, *(world + rank for rank in self.parity)}

    @property
    def sections(self) -> tuple[int, ...]:
        """The lost ranks whose unreplicated leaves guard lanes give back, ascending."""
        return tuple(rank for rank, copy in sorted(self.capsules.items()) if copy.unreplicated_bytes)


def is_replay(name: str) -> bool:
    """Whether the name of something that was given up is that of a replay."""
    return name.startswith(REPLAY)


def plan(
    held: Collection[HeldSlot],
    copies: Collection[HeldCapsule],
    placements: Mapping[Epoch, Placement],
    decision: Decision | None,
    erased: Collection[tuple[str, str, Version]] = (),
    parity: Collection[HeldParity] = (),
    records: Collection[HeldRecord] = (),
) -> RecoveryPlan:
    """Returns the newest restorable version, and the place of each rank's part of it.

    Args:
        held: the headers of all slots of the job on all reachable daemons.
        copies: all capsules in the stores of those daemons.
        placements: epoch → the placement of the versions of that epoch. Versions of other epochs
            can't be used.
        decision: the newest decision record; None if the job never attached.
        erased: (node, slot, version) of slots, parity slots and capsules that failed their digests.
            They count as missing.
        parity: the headers of all parity slots of the job on all reachable daemons.
        records: the headers of all record slots there; none, if the caller can't replay.
    """
    by_version = _by_version(held, copies, erased, parity)
    groups: dict[Epoch, list[LaneGroup]] = {}
    partial: list[Shortfall] = []
    base: RecoveryPlan | None = None
    for version in sorted(by_version, key=lambda version: (*version.order, version.epoch.ident), reverse=True):
        evidence = by_version[version]
        if not counts(version, decision) or not (evidence.slots or evidence.capsules):
            continue
        placement = placements.get(version.epoch)
        if base is not None:
            if placement is not None and _is_guarded(evidence, placement):
                return replace(base, guard=version)
            continue
        if placement is None:
            partial.append(Shortfall(version, is_placed=False))
            continue
        if version.epoch not in groups:
            groups[version.epoch] = group_lanes(placement.lanes)
        shortfall = _shortfall(version, evidence, groups[version.epoch], placement)
        replays = _replays(version, shortfall, by_version, placement, decision, records)
        if shortfall.lanes or replays.keys() != set(shortfall.bare):
            partial.append(shortfall)
            continue
        base = RecoveryPlan(
            version,
            {rank: evidence.slots[rank] for rank in range(len(placement.domains)) if rank in evidence.slots},
            {rank: evidence.capsules[rank] for rank in shortfall.ranks},
            _dropped(by_version, version),
            tuple(partial),
            _earlier(by_version, version),
            replays=replays,
        )
        base = replace(base, parity=_parity_of(set(base.sections) - replays.keys(), evidence, placement))
        if _is_guarded(evidence, placement):
            return replace(base, guard=version)
    return base or RecoveryPlan(None, {}, {}, _dropped(by_version, None), tuple(partial))


def lane_partners(placement: Placement, rank: int, unreplicated_bytes: int) -> tuple[int, ...]:
    """Returns the ranks whose slots and parity can give back a lost rank's unreplicated leaves.

    In a copy lane these are the ranks whose nodes keep copies. `GuardLane.gives_back` tells how
    many are needed. Empty if nothing can: the rank is in no guard lane, or its slot held leaves
    that the manifest did not foresee. Such leaves lie outside the section that the lane guards.

    Args:
        placement: of the version's epoch.
        rank: the lost rank.
        unreplicated_bytes: size of the unreplicated leaves in its slot.
    """
    where = placement.guard_lane_of(rank)
    foreseen = placement.division.unreplicated_bytes[placement.division.layout_of[rank]]
    if where is None or unreplicated_bytes > foreseen:
        return ()
    lane, member = placement.guard_lanes[where[0]], where[1]
    return tuple(lane.members[holder] for holder in sorted(lane.holders_of(member)))


def sealed_parity(parity: Iterable[HeldParity], placement: Placement) -> dict[int, HeldParity]:
    """Returns rank → its sealed parity of the rank's guard lane, from headers of one version."""
    return _Evidence(parities=[*parity]).parity(placement)


def _is_of_its_lane(parity: HeldParity, placement: Placement) -> bool:
    where = placement.guard_lane_of(parity.rank)
    return where is not None and parity.layout == placement.guard_lanes[where[0]].digest


def _gives_back(copy: HeldCapsule, slots: Collection[int], parity: Collection[int], placement: Placement) -> bool:
    """Whether a lost rank's capsule, with its guard lane if needed, replaces its slot."""
    if not copy.unreplicated_bytes:
        return True
    where = placement.guard_lane_of(copy.rank)
    if where is None or not lane_partners(placement, copy.rank, copy.unreplicated_bytes):
        return False
    return placement.guard_lanes[where[0]].gives_back(copy.rank, slots, parity)


def _parity_of(sections: Iterable[int], evidence: _Evidence, placement: Placement) -> dict[int, HeldParity]:
    parity = evidence.parity(placement)
    useful = {rank for lost in sections for rank in lane_partners(placement, lost, 0)}
    return {rank: parity[rank] for rank in sorted(useful.intersection(parity))}


def _replays(
    version: Version,
    shortfall: Shortfall,
    by_version: Mapping[Version, _Evidence],
    placement: Placement,
    decision: Decision | None,
    records: Collection[HeldRecord],
) -> dict[int, SectionReplay]:
    """Returns how sections of lost ranks are replayed that no parity gives back."""
    sealed = {(each.rank, each.version): each for each in records if each.state is SlotState.SEALED}
    bases = [base for base in by_version if _leads_to(base, version, decision)]
    replays = {}
    for rank in shortfall.unreplicated if sealed else ():
        if lane_partners(placement, rank, by_version[version].capsules[rank].unreplicated_bytes):
            ways = (
                _replay_from(base, rank, version, by_version[base], placement, sealed)
                for base in sorted(bases, key=lambda base: base.order, reverse=True)
            )
            if way := next(filter(None, ways), None):
                replays[rank] = way
    return replays


def _leads_to(base: Version, version: Version, decision: Decision | None) -> bool:
    """Whether the records of the version's epoch may begin at a base."""
    is_begin = decision is not None and decision.epoch == version.epoch and decision.base == base
    return base.step < version.step and (base.epoch == version.epoch or is_begin)


def _replay_from(
    base: Version,
    rank: int,
    version: Version,
    evidence: _Evidence,
    placement: Placement,
    sealed: Mapping[tuple[int, Version | None], HeldRecord],
) -> SectionReplay | None:
    """Returns the replay of a section that begins at a base; None: something is missing.

    Args:
        base: the version of the copies.
        rank: the lost rank.
        version: the version to make.
        evidence: of the base.
        placement: of the version to make.
        sealed: rank and mark → its sealed record.
    """
    where, capsule = placement.guard_lane_of(rank), evidence.capsules.get(rank)
    if where is None or capsule is None or not placement.guard_lanes[where[0]].is_copies:
        return None
    lane, parity = placement.guard_lanes[where[0]], evidence.parity(placement)
    marks = [Version(version.epoch, mark) for mark in range(base.step + 1, version.step + 1)]
    for recorder in (lane.members[holder] for holder in lane.holders_of(where[1])):
        chain = tuple(sealed[recorder, mark] for mark in marks if (recorder, mark) in sealed)
        if recorder in parity and len(chain) == len(marks):
            replay = SectionReplay(rank, parity[recorder], capsule, chain)
            if not evidence.is_erased(replay):
                return replay
    return None


def _is_guarded(evidence: _Evidence, placement: Placement) -> bool:
    """Whether any one node more may be lost, but for state that is exposed.

    With f > 1 this may hold although nodes were lost: up to f - 1 members of a lane.
    """
    slots, parity = evidence.slots, evidence.parity(placement)
    ranks = range(len(placement.domains))
    coded = {(lane.members, lane.code.f) for lane in placement.lanes}
    if not (any(f for _, f in coded) or placement.guard_lanes):
        return False
    return (
        all(_is_replaceable(rank, evidence, placement) for rank in ranks)
        and all(_survives_another(members, f, slots) for members, f in coded)
        and all(_gives_back_another(lane, slots, parity) for lane in placement.guard_lanes)
    )


def _is_replaceable(rank: int, evidence: _Evidence, placement: Placement) -> bool:
    """Whether a rank's part comes back without any one node, given its lanes.

    Either a capsule lies on another node than the rank's slot, or capsules lie on two nodes. A rank
    with a slot but without a guard lane is exposed, while others have one.
    """
    slot = evidence.slots.get(rank)
    is_exposed = slot is not None and bool(placement.guard_lanes) and placement.guard_lane_of(rank) is None
    nodes = {
        copy.node
        for copy in evidence.copies_of.get(rank, ())
        if not copy.unreplicated_bytes or is_exposed or lane_partners(placement, rank, copy.unreplicated_bytes)
    }
    return len(nodes) > 1 if slot is None else bool(nodes - {slot.node})


def _survives_another(members: Sequence[int], f: int, slots: Mapping[int, HeldSlot]) -> bool:
    """Whether a lane can be decoded without any one node; if f = 0, at all."""
    nodes = [slots[rank].node for rank in members if rank in slots]
    lost = len(members) - len(nodes)
    return lost + 1 <= f and len(set(nodes)) == len(nodes) if f else not lost


def _gives_back_another(lane: GuardLane, slots: Mapping[int, HeldSlot], parity: Mapping[int, HeldParity]) -> bool:
    """Whether a guard lane gives back all lost members without any one node."""
    nodes = [{held[rank].node for held in (slots, parity) if rank in held} for rank in lane.members]
    if len(set().union(*nodes)) != sum(map(len, nodes)):
        return False
    for member in lane.members:
        left, holders = slots.keys() - {member}, parity.keys() - {member}
        if not all(lane.gives_back(rank, left, holders) for rank in lane.members if rank not in left):
            return False
    return True


@dataclass(frozen=True)
class _Evidence:
    """The slots in any state, the capsules and the parity of one version.

    `erased` has (node, slot) of damaged ones, and of refused replays.
    """

    held: list[HeldSlot] = field(default_factory=list)
    copies: list[HeldCapsule] = field(default_factory=list)
    parities: list[HeldParity] = field(default_factory=list)
    erased: set[tuple[str, str]] = field(default_factory=set)

    @cached_property
    def slots(self) -> dict[int, HeldSlot]:
        """Rank → its sealed slot; of several, the lexically first (node, slot)."""
        return self._first_sealed(self.held)

    def parity(self, placement: Placement) -> dict[int, HeldParity]:
        """Returns rank → its sealed parity of the rank's guard lane in this placement."""
        return self._first_sealed(each for each in self.parities if _is_of_its_lane(each, placement))

    @cached_property
    def copies_of(self) -> dict[int, list[HeldCapsule]]:
        """Rank → its capsules. Those that need no guard lane come first, then the first node."""
        by_rank: dict[int, list[HeldCapsule]] = {}
        for copy in sorted(self.copies, key=lambda copy: (copy.unreplicated_bytes > 0, copy.node)):
            if not self.is_erased(copy):
                by_rank.setdefault(copy.rank, []).append(copy)
        return by_rank

    @cached_property
    def capsules(self) -> dict[int, HeldCapsule]:
        """Rank → the capsule that is used."""
        return {rank: copies[0] for rank, copies in self.copies_of.items()}

    def dead(self, is_newer: bool) -> list[HeldSlot]:
        """Returns the slots to empty.

        Older sealed slots are kept. They are needed if the base turns out to be damaged.
        """
        slots: list[HeldSlot] = [*self.held, *self.parities]
        return [slot for slot in slots if is_newer or slot.state is not SlotState.SEALED or self.is_erased(slot)]

    def _first_sealed(self, slots: Iterable[Slot]) -> dict[int, Slot]:
        by_rank: dict[int, Slot] = {}
        for slot in slots:
            if slot.state is SlotState.SEALED and not self.is_erased(slot):
                other = by_rank.setdefault(slot.rank, slot)
                if other is not slot and _preference(slot) < _preference(other):
                    by_rank[slot.rank] = slot
        return by_rank

    def is_erased(self, each: HeldSlot | HeldCapsule | SectionReplay) -> bool:
        return bool(self.erased) and (each.node, each.slot) in self.erased


def _preference(slot: HeldSlot) -> tuple[object, ...]:
    """Orders equal slots: memory first."""
    return slot.is_stored, slot.node, slot.slot


def _by_version(
    held: Iterable[HeldSlot],
    copies: Iterable[HeldCapsule],
    erased: Iterable[tuple[str, str, Version]],
    parity: Iterable[HeldParity],
) -> dict[Version, _Evidence]:
    by_version: defaultdict[Version, _Evidence] = defaultdict(_Evidence)
    for slot in held:
        if slot.version is not None and slot.state is not SlotState.EMPTY:
            by_version[slot.version].held.append(slot)
    for copy in copies:
        by_version[copy.version].copies.append(copy)
    for each in parity:
        if each.version is not None and each.state is not SlotState.EMPTY:
            by_version[each.version].parities.append(each)
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
                **by_version[version].capsules,
                **by_version[version].slots,
            }
            for rank, each in holders.items():
                earlier[rank].append((version, each.node))
    return {rank: tuple(versions) for rank, versions in sorted(earlier.items())}


def _shortfall(version: Version, evidence: _Evidence, groups: Sequence[LaneGroup], placement: Placement) -> Shortfall:
    """Returns the missing parts of the version.

    With no lanes and no bare ranks, it can be restored.
    """
    world, capsules = len(placement.domains), evidence.capsules
    have = np.zeros(world, np.bool_)
    have[[rank for rank in evidence.slots if 0 <= rank < world]] = True
    lost = tuple(np.flatnonzero(~have).tolist())
    slots, parity = evidence.slots, evidence.parity(placement)
    bare = tuple(
        rank for rank in lost if rank not in capsules or not _gives_back(capsules[rank], slots, parity, placement)
    )
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
    return lines + _describe_unreplicated(shortfall, placement)


def _describe_unreplicated(shortfall: Shortfall, placement: Placement) -> list[str]:
    """Returns why leaves that only lost slots held can't be decoded, reason by reason."""
    ranks_of: dict[str, list[int]] = {}
    for rank in shortfall.unreplicated:
        where = placement.guard_lane_of(rank)
        lane = placement.guard_lanes[where[0]] if where else None
        lost = sum(member in shortfall.ranks for member in lane.members) if lane else 0
        if lane is None:
            why = ""
        elif lane.is_copies:
            why = ", and no node at hand keeps a complete copy of them at this step"
        elif lost > lane.f:
            why = f", and their guard lane gives back {counted(lane.f, 'lost rank')} at most, and lost {lost}"
        else:
            why = ", and their guard lane has no complete parity of this step"
        ranks_of.setdefault(why, []).append(rank)
    return [f"The slots of {_ranks(ranks)} held leaves that no other rank has{why}." for why, ranks in ranks_of.items()]


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
