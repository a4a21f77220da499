"""Exposure: what may be lost now, and what would go with it.

    where each rank's newest whole slot lies ─┐
    where its capsules lie                    ├─► LossAnalysis ─► each node, each pair of nodes, each domain: survived, or lost
    what its slot alone holds                 ┘             how many of any may vanish; what if these vanish

Nodes (or domains) are *units*: all ranks and capsules of a unit vanish together. A loss is survived if each stripe of each
lane keeps k of its k + f shards, and each rank keeps its slot or, if that held nothing alone, a capsule.

Invariants
  1. The verdicts say exactly what recovery.plan would find after that loss; tests compare them by brute force.
  2. What is gone already counts: after a loss, and until the state is protected again, less survives.

Lanes with the same code whose members lie in units the same way share one verdict; in an intact job that is one for each
code. So the work grows with the sum of the lanes' members, and not with the number of losses that are asked about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reft.core.coding.placement import Placement
from reft.core.recovery.gather import LaneGroup, group_lanes, lost_shards, undecodable

PAIRS_MAX = 256  # nodes: up to here every pair is named; 32,640 of them take about a second
GONE = -1


@dataclass(frozen=True)
class LossReport:
    """What is gone for good after some loss.

    Attributes:
        lanes: indices of the lanes that can't be decoded, ascending.
        bare: ranks without slot and capsule, ascending.
        unreplicated: ranks whose slot held leaves that nobody else has, ascending.
        words: a sentence.
    """

    lanes: tuple[int, ...]
    bare: tuple[int, ...]
    unreplicated: tuple[int, ...]
    words: str


@dataclass(frozen=True)
class UnitLoss:
    """The loss of one unit: what is lost in words, empty if it is survived."""

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
        fatal: the pairs that are not, sorted; empty if there are too many nodes to try them all.
        is_listed: whether every pair was tried; if not, `survives` is by the formula of `LossAnalysis.tolerated`.
    """

    survives: bool
    fatal: tuple[tuple[str, str], ...]
    is_listed: bool


@dataclass(frozen=True)
class LossAnalysis:
    """Where the newest whole version lies.

    Attributes:
        placement: of the epoch that wrote it.
        slots: rank → node of its sealed slot; without the ranks whose slot is gone.
        copies: rank → nodes that keep its capsule besides its own.
        unreplicated: rank → bytes that only its own slot holds; 0 if it is missing.
        domains: node → its failure domain; a node that is missing is a domain of its own.
    """

    placement: Placement
    slots: Mapping[int, str]
    copies: Mapping[int, Collection[str]]
    unreplicated: Mapping[int, int]
    domains: Mapping[str, str]

    @cached_property
    def all_nodes(self) -> tuple[str, ...]:
        """Every node that is known, sorted."""
        return tuple(
            sorted({*self.slots.values(), *self.domains, *(n for nodes in self.copies.values() for n in nodes)})
        )

    def what_if(self, lost: Collection[str]) -> LossReport | None:
        """What is gone if all of these nodes vanish; None if everything can be restored."""
        lost = frozenset(lost)
        world = len(self.placement.domains)
        have = np.array([rank in self.slots and self.slots[rank] not in lost for rank in range(world)], np.bool_)
        lanes = undecodable(self._groups, have)
        without = np.flatnonzero(~have).tolist()
        kept = tuple(rank for rank in without if self.unreplicated.get(rank))
        bare = tuple(
            rank for rank in without if not self.unreplicated.get(rank) and lost.issuperset(self.copies.get(rank, ()))
        )
        if not (lanes or bare or kept):
            return None
        return LossReport(lanes, bare, kept, self._words(_Count.of(lanes), _Count.of(bare), _Count.of(kept)))

    def nodes(self) -> list[UnitLoss]:
        """One verdict for the loss of each node, by name."""
        return self._singles(self._by_node)

    def each_domain(self) -> list[UnitLoss]:
        """One verdict for the loss of each failure domain, by name."""
        return self._singles(self._by_domain)

    def pairs(self) -> PairLosses:
        """The losses of two nodes; up to PAIRS_MAX nodes each pair is tried."""
        units = self._by_node
        if len(units.names) > PAIRS_MAX:
            return PairLosses(_tolerated(units, self._groups) >= 2, (), False)
        alone = np.array([not verdict.survives for verdict in self.nodes()], np.bool_)
        fatal = alone[:, None] | alone
        for group in self._groups:
            for pattern, _, rows in units.patterns(group):
                one, other = np.nonzero(pattern.pairs())
                rows = np.unique(rows, axis=0)
                fatal[rows[:, one], rows[:, other]] = True
        for homes in units.homes:
            if len(homes) == 2:
                fatal[tuple(homes)] = True
        first, second = np.nonzero(np.triu(fatal | fatal.T, 1))
        names = units.names
        found = tuple((names[i], names[j]) for i, j in zip(first.tolist(), second.tolist(), strict=True))
        return PairLosses(not found, found, True)

    def tolerated(self) -> int:
        """The greatest number f such that any f domains may vanish; -1 if something is lost already.

        It is the least over all lanes, stripes and ranks: a stripe bears the loss of f shards less those that are gone,
        a rank that of as many domains as keep its slot or its capsule, less one, or none if its slot held something alone.
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
        units = [number[label[self.slots[rank]]] if rank in self.slots else GONE for rank in range(world)]
        homes = []
        for rank, unit in enumerate(units):
            copies = () if self.unreplicated.get(rank) else self.copies.get(rank, ())
            homes.append({number[label[node]] for node in copies} | ({unit} - {GONE}))
        return _Units(names, np.array(units, np.int32), homes)

    def _singles(self, units: _Units) -> list[UnitLoss]:
        already = self.what_if(())
        if already is not None:
            return [UnitLoss(name, already.words) for name in units.names]
        count = len(units.names)
        lanes, bare, kept = ([_Count() for _ in range(count)] for _ in range(3))
        for group in self._groups:
            for pattern, indices, rows in units.patterns(group):
                for lane, row in zip(indices.tolist(), rows[:, pattern.singles()].tolist(), strict=True):
                    for unit in row:
                        lanes[unit].add(lane)
        for rank, homes in enumerate(units.homes):
            if len(homes) == 1:
                (kept if self.unreplicated.get(rank) else bare)[min(homes)].add(rank)
        return [UnitLoss(name, self._words(lanes[i], bare[i], kept[i])) for i, name in enumerate(units.names)]

    def _words(self, lanes: _Count, bare: _Count, kept: _Count) -> str:
        parts = []
        if lanes.count:
            cell = self.placement.division.cells[self.placement.lanes[lanes.first].cell]
            rest = f" and what else lies in {lanes.count} parts" if lanes.count > 1 else ""
            parts.append(f"{cell.leaves[0].name}{rest} can't be decoded")
        if bare.count:
            parts.append(f"no capsule of {bare.ranks} is left")
        if kept.count:
            parts.append(f"leaves that only {kept.ranks} held are gone")
        return "; ".join(parts)


@dataclass
class _Count:
    """How many there are, and the least of them."""

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


@dataclass(frozen=True)
class _Pattern:
    """How the members of a lane lie in units: how many shards each stripe has in each unit, and can still spare.

    Attributes:
        shards: int32 [D, units], counted within the lane.
        spare: int32 [D, 1]; negative if the stripe is lost already.
    """

    shards: NDArray[np.int32]
    spare: NDArray[np.int32]

    def singles(self) -> NDArray[np.bool_]:
        """bool [units]: the units that some stripe does not survive."""
        return np.asarray((self.shards > self.spare).any(0))

    def pairs(self) -> NDArray[np.bool_]:
        """bool [units, units]: the pairs of unlike units that some stripe does not survive."""
        fatal = np.zeros((self.shards.shape[1],) * 2, np.bool_)
        for count in range(int(self.shards.max(initial=0)) + 1):
            one = (self.shards == count).astype(np.float32)  # float32: only then does numpy multiply at speed
            other = (self.shards > self.spare - count).astype(np.float32)
            np.logical_or(fatal, one.T @ other > 0, out=fatal)
        np.fill_diagonal(fatal, False)
        return fatal

    def tolerated(self) -> int:
        """How many units any stripe survives whichever they are: those with most of its shards may go first."""
        sums = np.cumsum(-np.sort(-self.shards, 1), 1)
        return int(np.where(self.spare[:, 0] < 0, -1, (sums <= self.spare).sum(1)).min())


@dataclass(frozen=True)
class _Units:
    """What vanishes together.

    Attributes:
        names: of the units, sorted.
        unit_of: int32 [rank], unit of the rank's slot, GONE if it has none.
        homes: for each rank the units of which one must survive, so that its own state does.
    """

    names: tuple[str, ...]
    unit_of: NDArray[np.int32]
    homes: Sequence[Collection[int]]

    def patterns(self, group: LaneGroup) -> Iterator[tuple[_Pattern, NDArray[np.int64], NDArray[np.int32]]]:
        """For each way in which members lie in units: the pattern, the lanes, and int32 [lanes, units] which units they are."""
        units = self.unit_of[group.members]
        ordered = np.sort(units, 1)
        is_plain = (ordered[:, 0] != GONE) & (ordered[:, 1:] != ordered[:, :-1]).all(1)
        plain = np.flatnonzero(is_plain)
        if len(plain):
            chosen = is_plain[group.row]
            yield _pattern(np.arange(group.D), group), group.lanes[chosen], units[group.row[chosen]]
        alike_rows: dict[bytes, list[int]] = {}
        for row in np.flatnonzero(~is_plain).tolist():
            alike_rows.setdefault(_places(units[row]).tobytes(), []).append(row)
        for places, rows in alike_rows.items():
            place = np.frombuffer(places, np.int64)
            # the first member in each place says which unit it is
            firsts = [int(np.flatnonzero(place == i)[0]) for i in range(place.max(initial=GONE) + 1)]
            chosen = np.isin(group.row, rows)
            yield _pattern(place, group), group.lanes[chosen], units[group.row[chosen]][:, firsts]


def _places(units: NDArray[np.int32]) -> NDArray[np.int64]:
    """The units of a lane's members, numbered in the order in which they appear."""
    number = {GONE: GONE}
    for unit in units.tolist():
        number.setdefault(unit, len(number) - 1)
    return np.array([number[unit] for unit in units.tolist()], np.int64)


def _pattern(places: NDArray[np.int64], group: LaneGroup) -> _Pattern:
    has = places == np.arange(places.max(initial=GONE) + 1)[:, None]
    gone = lost_shards((places == GONE)[None], group.width)
    return _Pattern(lost_shards(has, group.width).T, np.int32(group.f) - gone.T)


def _tolerated(units: _Units, groups: Sequence[LaneGroup]) -> int:
    lanes = (pattern.tolerated() for group in groups for pattern, _, _ in units.patterns(group))
    return min([len(units.names), *lanes, *(len(homes) - 1 for homes in units.homes)])
