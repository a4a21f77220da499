"""Decides which losses the state survives now, and the lost parts otherwise.

    nodes of each rank's newest whole slot ─┐                ┌─► each node, pair of nodes, domain:
    nodes of its capsules, of its parity    ├─► LossAnalysis ┤   survived, or lost
    its unreplicated bytes                  ┘                ├─► how many of any may vanish
                                                             └─► what if these vanish

A *unit* is a node (or a domain): all ranks and capsules of a unit vanish together. A loss is
survived under two conditions. Each stripe of each lane keeps k of its k + f shards. Each rank keeps
its slot, or a capsule. If its slot had unreplicated leaves, the capsule counts only together with
the rank's guard lane: at most f members lack a slot, and D - f others have parity.

Invariants
  1. The results equal what recovery.plan would find after that loss. Tests compare them by brute
     force.
  2. Earlier losses count. After a loss, until the state is protected again, less survives.

Lanes with the same code share one result if their members lie in units in the same way. In an
intact job there is one result for each code. So the work grows with the total number of lane
members, not with the number of losses asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reft.core.coding.exchange import GuardLane
from reft.core.coding.placement import Placement
from reft.core.recovery.gather import LaneGroup, group_lanes, lost_shards, undecodable
from reft.core.recovery.recovery import lane_partners

PAIRS_MAX = 256  # nodes: up to so many, every pair is tried; 32,640 pairs take about a second
NO_UNIT = -1


@dataclass(frozen=True)
class LossReport:
    """The parts that are lost for good after some loss.

    Attributes:
        lanes: indices of the lanes that can't be decoded, ascending.
        bare: ranks without slot and capsule, ascending.
        unreplicated: lost ranks with unreplicated leaves that nothing gives back, ascending.
        words: a sentence.
    """

    lanes: tuple[int, ...]
    bare: tuple[int, ...]
    unreplicated: tuple[int, ...]
    words: str


@dataclass(frozen=True)
class UnitLoss:
    """The loss of one unit. `words` names the lost parts, and is empty if the loss is survived."""

    unit: str
    words: str

    @property
    def survives(self) -> bool:
        return not self.words


@dataclass(frozen=True)
class PairLosses:
    """The losses of two nodes.

    Attributes:
        survives: whether every pair is survived.
        fatal: the pairs that are not, sorted; empty if there are too many nodes to try all pairs.
        is_listed: whether every pair was tried; if not, `survives` follows from
            `LossAnalysis.tolerated`'s formula.
    """

    survives: bool
    fatal: tuple[tuple[str, str], ...]
    is_listed: bool


@dataclass(frozen=True)
class LossAnalysis:
    """Where the newest whole version is stored, and which losses it survives.

    Attributes:
        placement: of the epoch that wrote the version.
        slots: rank → node of its sealed slot; without the ranks whose slot is lost.
        copies: rank → nodes that keep its capsule, besides its own.
        unreplicated: rank → bytes that only its own slot holds; 0 if missing.
        domains: node → its failure domain; a missing node is a domain of its own.
        parity: rank → node of its sealed parity of the version; without those that are lost.
    """

    placement: Placement
    slots: Mapping[int, str]
    copies: Mapping[int, Collection[str]]
    unreplicated: Mapping[int, int]
    domains: Mapping[str, str]
    parity: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def all_nodes(self) -> tuple[str, ...]:
        """Returns every known node, sorted."""
        return tuple(
            sorted(
                {
                    *self.slots.values(),
                    *self.domains,
                    *self.parity.values(),
                    *(n for nodes in self.copies.values() for n in nodes),
                }
            )
        )

    def what_if(self, lost: Collection[str]) -> LossReport | None:
        """Returns the loss if all of these nodes vanish.

        The result is None if everything can be restored.
        """
        lost = frozenset(lost)
        world = len(self.placement.domains)
        have = np.array([rank in self.slots and self.slots[rank] not in lost for rank in range(world)], np.bool_)
        lanes = undecodable(self._groups, have)
        lost_ranks = np.flatnonzero(~have).tolist()
        unreplicated = tuple(
            rank for rank in lost_ranks if self.unreplicated.get(rank) and not self._gives_back(rank, lost)
        )
        bare = tuple(
            rank for rank in lost_ranks if rank not in unreplicated and lost.issuperset(self.copies.get(rank, ()))
        )
        if not (lanes or bare or unreplicated):
            return None
        return LossReport(
            lanes, bare, unreplicated, self._words(_Count.of(lanes), _Count.of(bare), _Count.of(unreplicated))
        )

    def nodes(self) -> list[UnitLoss]:
        """Returns the result of each node's loss, sorted by name."""
        return self._singles(self._by_node)

    def each_domain(self) -> list[UnitLoss]:
        """Returns the result of each failure domain's loss, sorted by name."""
        return self._singles(self._by_domain)

    def pairs(self) -> PairLosses:
        """Returns the losses of two nodes; with up to PAIRS_MAX nodes each pair is tried."""
        units = self._by_node
        if len(units.names) > PAIRS_MAX:
            return PairLosses(_tolerated(units, self._groups) >= 2, (), False)
        is_fatal_alone = np.array([not unit_loss.survives for unit_loss in self.nodes()], np.bool_)
        fatal = is_fatal_alone[:, None] | is_fatal_alone
        for group in self._groups:
            for pattern, _, rows in units.patterns(group):
                one, other = np.nonzero(pattern.pairs())
                rows = np.unique(rows, axis=0)
                fatal[rows[:, one], rows[:, other]] = True
        for homes in units.homes:
            if len(homes) == 2:
                fatal[tuple(homes)] = True
        for guard in units.guards.values():
            for pair in guard.pairs():
                fatal[pair] = True
        first, second = np.nonzero(np.triu(fatal | fatal.T, 1))
        names = units.names
        fatal_pairs = tuple((names[i], names[j]) for i, j in zip(first.tolist(), second.tolist(), strict=True))
        return PairLosses(not fatal_pairs, fatal_pairs, True)

    def tolerated(self) -> int:
        """Returns the greatest f such that any f domains may vanish.

        It is -1 after a loss for good. It is the least number over all lanes, stripes and ranks. A
        stripe bears the loss of f shards, less the shards already lost. A rank bears the loss of
        all but one of the domains that keep its slot or its capsule. If its slot held unreplicated
        leaves, the rank bears what its guard lane bears. Without a lane it bears none.
        """
        return _tolerated(self._by_domain, self._groups)

    @cached_property
    def _groups(self) -> list[LaneGroup]:
        return group_lanes(self.placement.lanes)

    @cached_property
    def _by_node(self) -> _Units:
        return self._units({node: node for node in self.all_nodes})

    @cached_property
    def _by_domain(self) -> _Units:
        return self._units({node: self.domains.get(node, f"node {node}") for node in self.all_nodes})

    def _units(self, label: Mapping[str, str]) -> _Units:
        names = tuple(sorted(set(label.values())))
        number = {name: i for i, name in enumerate(names)}
        world = len(self.placement.domains)
        units = [number[label[self.slots[rank]]] if rank in self.slots else NO_UNIT for rank in range(world)]
        homes = []
        for rank, unit in enumerate(units):
            copies = () if self.unreplicated.get(rank) and not self._partners(rank) else self.copies.get(rank, ())
            homes.append({number[label[node]] for node in copies} | ({unit} - {NO_UNIT}))
        guards = {
            rank: self._guard(rank, lambda node: number[label[node]])
            for rank in range(world)
            if self.unreplicated.get(rank) and self._partners(rank)
        }
        return _Units(names, np.array(units, np.int32), homes, guards)

    def _partners(self, rank: int) -> tuple[int, ...]:
        return lane_partners(self.placement, rank, self.unreplicated.get(rank, 0))

    def _lane(self, rank: int) -> GuardLane:
        where = self.placement.guard_lane_of(rank)
        assert where is not None, "a rank with partners is in a lane"
        return self.placement.guard_lanes[where[0]]

    def _guard(self, rank: int, unit_of: Callable[[str], int]) -> _Guard:
        lane = self._lane(rank)
        parity = Counter(unit_of(self.parity[each]) for each in self._partners(rank) if each in self.parity)
        own = unit_of(self.slots[rank]) if rank in self.slots else NO_UNIT
        if lane.is_copies:  # other members' slots do not matter
            return _Guard(own, Counter(), parity, 0, parity.total() - lane.k)
        slots = Counter(unit_of(self.slots[member]) for member in lane.members if member in self.slots)
        return _Guard(own, slots, parity, lane.f - lane.D + slots.total(), parity.total() - lane.k)

    def _gives_back(self, rank: int, lost: Collection[str]) -> bool:
        """Whether a rank's guard lane gives back its unreplicated leaves without these nodes."""
        if not self._partners(rank):
            return False
        slots = {each for each, node in self.slots.items() if node not in lost}
        parity = {each for each, node in self.parity.items() if node not in lost}
        return self._lane(rank).gives_back(rank, slots, parity)

    def _singles(self, units: _Units) -> list[UnitLoss]:
        already = self.what_if(())
        if already is not None:
            return [UnitLoss(name, already.words) for name in units.names]
        count = len(units.names)
        lanes, bare, unreplicated = ([_Count() for _ in range(count)] for _ in range(3))
        for group in self._groups:
            for pattern, indices, rows in units.patterns(group):
                for lane, row in zip(indices.tolist(), rows[:, pattern.singles()].tolist(), strict=True):
                    for unit in row:
                        lanes[unit].add(lane)
        for rank, homes in enumerate(units.homes):
            if len(homes) == 1:
                is_alone = self.unreplicated.get(rank) and rank not in units.guards
                (unreplicated if is_alone else bare)[min(homes)].add(rank)
        for rank, guard in units.guards.items():
            for unit in guard.singles():
                unreplicated[unit].add(rank)
        return [UnitLoss(name, self._words(lanes[i], bare[i], unreplicated[i])) for i, name in enumerate(units.names)]

    def _words(self, lanes: _Count, bare: _Count, unreplicated: _Count) -> str:
        parts = []
        if lanes.count:
            cell = self.placement.division.cells[self.placement.lanes[lanes.first].cell]
            rest = f" and other leaves ({lanes.count} lanes)" if lanes.count > 1 else ""
            parts.append(f"{cell.leaves[0].name}{rest} can't be decoded")
        if bare.count:
            parts.append(f"no capsule of {bare.ranks} is left")
        if unreplicated.count:
            parts.append(f"leaves that only {unreplicated.ranks} held are gone")
        return "; ".join(parts)


@dataclass
class _Count:
    """How many indices there are, and the least of them."""

    count: int = 0
    first: int = -1

    @classmethod
    def of(cls, ascending: Sequence[int]) -> _Count:
        return cls(len(ascending), ascending[0] if ascending else -1)

    def add(self, index: int) -> None:
        self.first = index if not self.count else min(self.first, index)
        self.count += 1

    @property
    def ranks(self) -> str:
        return f"rank {self.first}" + (f" and {self.count - 1} more" if self.count > 1 else "")


class _Guard(NamedTuple):
    """Where a rank's unreplicated leaves, and what gives them back, lie.

    Attributes:
        slot: unit of the rank's slot; NO_UNIT if it is lost already.
        slots: unit → how many slots of the guard lane are there.
        parity: unit → how many parity slots of the other members are there.
        spare_slots: slots that the lane can still lose; negative if the leaves need a lost slot.
        spare_parity: parity slots that it can still lose.
    """

    slot: int
    slots: Counter[int]
    parity: Counter[int]
    spare_slots: int
    spare_parity: int

    def is_fatal(self, lost: Collection[int]) -> bool:
        """Whether the leaves are lost with these units, all different."""
        if self.slot not in (NO_UNIT, *lost):
            return False
        slots, parity = (sum(each[unit] for unit in lost) for each in (self.slots, self.parity))
        return slots > self.spare_slots or parity > self.spare_parity

    def singles(self) -> list[int]:
        """Returns the units whose loss alone loses the leaves; they are not lost already."""
        candidates = (self.slot,) if self.slot != NO_UNIT else {**self.slots, **self.parity}
        return [unit for unit in candidates if self.is_fatal((unit,))]

    def pairs(self) -> list[tuple[int, int]]:
        """Returns the pairs of units whose loss loses the leaves, but for those of `singles`."""
        others = {**self.slots, **self.parity}
        first = (self.slot,) if self.slot != NO_UNIT else others
        return [(one, other) for one in first for other in others if one != other and self.is_fatal((one, other))]

    def tolerated(self) -> int:
        """Returns how many units, whichever they are, may vanish."""
        began = () if self.slot == NO_UNIT else (self.slot,)
        fewest = len({*self.slots, *self.parity}) + 1
        for counts in (self.slots, self.parity):
            worst = sorted(counts.keys() - {*began}, key=lambda unit: -counts[unit])
            for count in range(len(worst) + 1):
                lost = (*began, *worst[:count])
                if self.is_fatal(lost):
                    fewest = min(fewest, len(lost))
        return fewest - 1


@dataclass(frozen=True)
class _Pattern:
    """How the members of a lane lie in units.

    Attributes:
        shards: int32 [D, units], shards of each stripe in each unit, counted within the lane.
        spare: int32 [D, 1], shards that each stripe can still lose; negative if the stripe is lost
            already.
    """

    shards: NDArray[np.int32]
    spare: NDArray[np.int32]

    def singles(self) -> NDArray[np.bool_]:
        """Returns bool [units]: True for units whose loss some stripe does not survive."""
        return np.asarray((self.shards > self.spare).any(0))

    def pairs(self) -> NDArray[np.bool_]:
        """Returns bool [units, units]: True for pairs whose loss some stripe does not survive."""
        fatal = np.zeros((self.shards.shape[1],) * 2, np.bool_)
        for count in range(int(self.shards.max(initial=0)) + 1):
            one = (self.shards == count).astype(np.float32)  # numpy multiplies float32 fast, integers slowly
            other = (self.shards > self.spare - count).astype(np.float32)
            np.logical_or(fatal, one.T @ other > 0, out=fatal)
        np.fill_diagonal(fatal, False)
        return fatal

    def tolerated(self) -> int:
        """Returns how many units, whichever they are, every stripe survives.

        The worst units are those with most shards of the stripe.
        """
        sums = np.cumsum(-np.sort(-self.shards, 1), 1)
        return int(np.where(self.spare[:, 0] < 0, -1, (sums <= self.spare).sum(1)).min())


@dataclass(frozen=True)
class _Units:
    """The groups of ranks that vanish together.

    Attributes:
        names: of the units, sorted.
        unit_of: int32 [rank], unit of the rank's slot; NO_UNIT if it has none.
        homes: for each rank the units that hold its own state; one of them must survive.
        guards: of the ranks whose unreplicated leaves their guard lane gives back.
    """

    names: tuple[str, ...]
    unit_of: NDArray[np.int32]
    homes: Sequence[Collection[int]]
    guards: Mapping[int, _Guard]

    def patterns(self, group: LaneGroup) -> Iterator[tuple[_Pattern, NDArray[np.int64], NDArray[np.int32]]]:
        """Yields each pattern of members in units, with its lanes.

        Yields (pattern, indices of the lanes, int32 [lanes, units]: the unit numbers of each lane).
        """
        units = self.unit_of[group.members]
        ordered = np.sort(units, 1)
        is_plain = (ordered[:, 0] != NO_UNIT) & (ordered[:, 1:] != ordered[:, :-1]).all(1)
        plain = np.flatnonzero(is_plain)
        if len(plain):
            chosen = is_plain[group.row]
            yield _pattern(np.arange(group.D), group), group.lanes[chosen], units[group.row[chosen]]
        rows_by_places: dict[bytes, list[int]] = {}
        for row in np.flatnonzero(~is_plain).tolist():
            rows_by_places.setdefault(_places(units[row]).tobytes(), []).append(row)
        for places, rows in rows_by_places.items():
            place = np.frombuffer(places, np.int64)
            # the first member in each place names its unit
            firsts = [int(np.flatnonzero(place == i)[0]) for i in range(place.max(initial=NO_UNIT) + 1)]
            chosen = np.isin(group.row, rows)
            yield _pattern(place, group), group.lanes[chosen], units[group.row[chosen]][:, firsts]


def _places(units: NDArray[np.int32]) -> NDArray[np.int64]:
    """Numbers the units of a lane's members in the order of their first appearance."""
    number = {NO_UNIT: NO_UNIT}
    for unit in units.tolist():
        number.setdefault(unit, len(number) - 1)
    return np.array([number[unit] for unit in units.tolist()], np.int64)


def _pattern(places: NDArray[np.int64], group: LaneGroup) -> _Pattern:
    is_member = places == np.arange(places.max(initial=NO_UNIT) + 1)[:, None]
    lost = lost_shards((places == NO_UNIT)[None], group.width)
    return _Pattern(lost_shards(is_member, group.width).T, np.int32(group.f) - lost.T)


def _tolerated(units: _Units, groups: Sequence[LaneGroup]) -> int:
    lanes = (pattern.tolerated() for group in groups for pattern, _, _ in units.patterns(group))
    guards = (guard.tolerated() for guard in units.guards.values())
    return min([len(units.names), *lanes, *guards, *(len(homes) - 1 for homes in units.homes)])
