"""Finds the old pieces of state that each rank of a reshaped job needs.

    old ranks' leaves ─► pieces: what each is, and where it lies ┐  needs: this part of that piece
                         (a cell │ a rank's slot │ its capsule)  ├─►      goes to these new ranks
    new ranks' leaves ─► wanted: what each is, and for which rank┘  or: the leaves that do not fit

Any sharding over any number of ranks can become any other.

Invariants
  1. Each element of each wanted leaf is taken from exactly one old piece. Each element that was
     held is wanted by some rank. Otherwise the leaf is named, and nothing is loaded.
  2. A piece is taken only by a leaf of the same name, dtype and global shape. Nothing is converted
     or guessed.
  3. Bytes of a cell are the same on all its holders. If each old rank kept its own piece, a new
     rank takes the piece of the old rank with its own number; if that rank had none, the lowest
     rank's.
  4. The same leaves give the same needs on every rank, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from reft.core.coding.placement import Placement
from reft.core.layout.layout import Layout, Leaf
from reft.core.layout.regions import RegionCopy, RegionIndex, overlap

OPTIMIZER = "optimizer."  # prefix of leaf names; an optimizer may not have made these leaves yet


class PieceSource(Enum):
    """The kind of place that holds an old piece."""

    CELL = "cell"
    SLOT = "slot"
    CAPSULE = "capsule"


class PieceLocation(NamedTuple):
    """Where a piece lies: in a cell, in an old rank's slot, or in its capsule.

    Attributes:
        where: the kind of place.
        owner: number of the cell, or the old rank.
        offset: in the cell, in the data of the slot, or in all inline leaves of the capsule.
    """

    where: PieceSource
    owner: int
    offset: int


@dataclass(frozen=True)
class UnforeseenLeaves:
    """How an old rank's slot or capsule differs from its epoch's manifest.

    Attributes:
        absent: names of foreseen leaves that did not exist.
        others: leaves that the manifest did not foresee, or not in this form. With each: its offset
            in the slot's data; None: it lies in the capsule.
    """

    absent: frozenset[str] = frozenset()
    others: tuple[tuple[Leaf, int | None], ...] = ()

    @property
    def missing(self) -> frozenset[str]:
        """Returns the names that do not lie where the placement says."""
        return self.absent | {leaf.name for leaf, _ in self.others}


@dataclass(frozen=True)
class TensorPiece:
    """One piece of one tensor of the old job, and every place where it lies.

    A piece in a cell has one place.
    """

    leaf: Leaf
    locations: tuple[PieceLocation, ...]


@dataclass(frozen=True)
class PieceTransfer:
    """The bytes that go from one old piece into one target of some new ranks.

    Attributes:
        name: the target: a leaf, or what else the plan names so.
        nbytes: size of the piece.
        location: the place that the bytes are taken from.
        copy: which bytes of the piece, and where they go in the target.
        receivers: new ranks, ascending.
    """

    name: str
    nbytes: int
    location: PieceLocation
    copy: RegionCopy
    receivers: tuple[int, ...]


@dataclass
class ShardMatch:
    """The transfers that turn the old state into the new one.

    Attributes:
        needs: in the order of the new leaves' names.
        problems: a line for each leaf that does not fit; with any, nothing may be loaded.
        own: names of leaves of which several old ranks each kept a copy; the copies may differ.
    """

    needs: list[PieceTransfer] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)


def is_same(old: Sequence[Iterable[Leaf]], new: Sequence[Iterable[Leaf]]) -> bool:
    """Whether each new rank has the same pieces as the old rank of its number.

    Then the new rank can take over what the old rank had. A leaf that only one job has, or has in
    another global shape, is ignored here. The model has changed then, and other code refuses it.

    Args:
        old: the leaves of each old rank; one object for ranks that have the same.
        new: the leaves of each new rank, likewise.
    """
    if len(old) != len(new):
        return False
    seen: set[tuple[int, int]] = set()
    shared = _names_and_shapes(old) & _names_and_shapes(new)
    for before, after in zip(old, new, strict=True):
        if (id(before), id(after)) in seen:
            continue
        seen.add((id(before), id(after)))
        if _boxes_by_name(before, shared) != _boxes_by_name(after, shared):
            return False
    return True


def _names_and_shapes(ranks: Sequence[Iterable[Leaf]]) -> set[tuple[str, tuple[int, ...]]]:
    """Returns (name, global shape) of all leaves."""
    return {(leaf.name, leaf.global_shape) for leaves in {id(each): each for each in ranks}.values() for leaf in leaves}


def _boxes_by_name(
    leaves: Iterable[Leaf], wholes: Collection[tuple[str, tuple[int, ...]]]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    return {leaf.name: (leaf.global_offset, leaf.shape) for leaf in leaves if (leaf.name, leaf.global_shape) in wholes}


# What is held


def pieces_of(
    placement: Placement, leaves_of: Callable[[int], Mapping[str, Leaf]], owns: Mapping[int, UnforeseenLeaves]
) -> tuple[list[TensorPiece], list[str]]:
    """Returns all pieces of the old job's state, and its contradictions, a line each.

    Empty pieces are left out, except those of tensors without elements: a step expects these, too.

    Args:
        placement: under which the pieces were written.
        leaves_of: old rank → its foreseen leaves, by name.
        owns: old rank → how its slot or capsule differs from the manifest.
    """
    locations: dict[Leaf, list[PieceLocation]] = {}
    problems = []
    nothing: frozenset[str] = frozenset()
    missing = [owns[rank].missing if rank in owns else nothing for rank in range(len(placement.domains))]
    for number, cell in enumerate(placement.division.cells):
        sets = {missing[rank] for rank in cell.holders}
        for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
            without = sum(leaf.name in each for each in sets)
            if not without:
                locations.setdefault(leaf, []).append(PieceLocation(PieceSource.CELL, number, offset))
            elif without < len(sets):
                problems.append(f"{leaf.name}: some of its ranks did not have it")
    for rank, own in sorted(owns.items()):
        for leaf, seat in _own_pieces(placement, leaves_of(rank), rank, own):
            locations.setdefault(replace(leaf, staged=False) if leaf.staged else leaf, []).append(seat)
    kept = [(leaf, seats) for leaf, seats in locations.items() if leaf.nbytes or 0 in leaf.global_shape]
    return [TensorPiece(leaf, tuple(seats)) for leaf, seats in kept], problems


def leaves_elsewhere(
    placement: Placement, rank: int, layout: Layout, in_cells: Collection[str], foreseen: Mapping[str, Leaf],
    inline: Collection[str],
) -> list[tuple[Leaf, int | None]]:  # fmt: skip
    """Returns the leaves of a slot that lie elsewhere than the placement says.

    With each: its offset in the slot's data; None: it lies in the capsule.

    Args:
        placement: under which the slot was written.
        rank: the slot's rank.
        layout: the leaves in the slot's table.
        in_cells: names of those that lie in cells.
        foreseen: the rank's foreseen leaves, by name.
        inline: names of those that lie in the capsule.
    """
    part = placement.rank_placement(rank)
    foreseen_at = {
        leaf.name: part.unreplicated_offset + at
        for leaf, at in zip(part.unreplicated.leaves, part.unreplicated.offsets, strict=True)
    }
    return [
        (leaf, None if leaf.name in inline else at)
        for leaf, at in zip(layout.leaves, layout.offsets, strict=True)
        if leaf.name not in in_cells
        and (foreseen.get(leaf.name) != leaf or (leaf.name not in inline and foreseen_at.get(leaf.name) != at))
    ]


def _own_pieces(
    placement: Placement, leaves: Mapping[str, Leaf], rank: int, own: UnforeseenLeaves
) -> Iterator[tuple[Leaf, PieceLocation]]:
    """Yields the pieces that only this rank's slot or capsule has."""
    digest = placement.division.layout_of[rank]
    missing = own.missing
    unreplicated = placement.division.unreplicated[digest]
    if unreplicated.leaves:
        begin = placement.rank_placement(rank).unreplicated_offset
        for leaf, offset in zip(unreplicated.leaves, unreplicated.offsets, strict=True):
            if leaf.name not in missing:
                yield leaf, PieceLocation(PieceSource.SLOT, rank, begin + offset)
    inline = [leaves[name] for name in placement.division.inline_leaves[digest] if name not in missing]
    for leaf, place in own.others:
        if place is None:
            inline.append(leaf)
        else:
            yield leaf, PieceLocation(PieceSource.SLOT, rank, place)
    at = 0
    for leaf in inline:
        yield leaf, PieceLocation(PieceSource.CAPSULE, rank, at)
        at += leaf.nbytes


# What is wanted


def wanted_leaves(new: Sequence[Iterable[Leaf]], pieces: Sequence[TensorPiece]) -> list[tuple[Leaf, ...]]:
    """Returns the leaves of each new rank, without optimizer leaves that the old job lacks.

    Args:
        new: the foreseen leaves of each new rank; one object for ranks that have the same.
        pieces: the pieces of the old job.
    """
    held = {piece.leaf.name for piece in pieces}
    by_identity: dict[int, tuple[Leaf, ...]] = {}
    for leaves in new:
        if id(leaves) not in by_identity:
            by_identity[id(leaves)] = tuple(
                leaf for leaf in leaves if not leaf.name.startswith(OPTIMIZER) or leaf.name in held
            )
    return [by_identity[id(leaves)] for leaves in new]


def match(
    pieces: Sequence[TensorPiece], wanted: Sequence[Sequence[Leaf]], mismatched: Collection[str] = ()
) -> ShardMatch:
    """Returns which part of which piece goes to which ranks.

    Args:
        pieces: the pieces of the old job.
        wanted: the leaves of each new rank.
        mismatched: names of leaves that were foreseen as replicas, but differed between old ranks.
    """
    shard_match = ShardMatch()
    held: dict[str, list[TensorPiece]] = {}
    for piece in pieces:
        if piece.leaf.nbytes:
            held.setdefault(piece.leaf.name, []).append(piece)
    takers = _takers(wanted)
    fits: dict[object, _PieceFit] = {}
    for name in sorted(takers):
        _Tensor(name, held.get(name, []), takers[name], name in mismatched).match(shard_match, fits)
    for name in sorted(held.keys() - takers.keys()):
        shard_match.problems.append(f"{name}: the old job held {held[name][0].leaf.describe()}, the new job has none")
    return shard_match


def _takers(wanted: Sequence[Sequence[Leaf]]) -> dict[str, dict[Leaf, list[int]]]:
    """Returns name → leaf → the new ranks that want the leaf."""
    ranks: dict[int, list[int]] = {}
    for rank, leaves in enumerate(wanted):
        ranks.setdefault(id(leaves), []).append(rank)
    takers: dict[str, dict[Leaf, list[int]]] = {}
    for leaves in {id(each): each for each in wanted}.values():
        for leaf in leaves:
            whole = replace(leaf, staged=False) if leaf.staged else leaf
            takers.setdefault(leaf.name, {}).setdefault(whole, []).extend(ranks[id(leaves)])
    return takers


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the state, its old pieces, and the new ranks that want it."""

    name: str
    pieces: Sequence[TensorPiece]
    takers: Mapping[Leaf, Sequence[int]]
    is_mismatched: bool

    def match(self, done: ShardMatch, fits: dict[object, _PieceFit]) -> None:
        """Adds the transfers of this tensor to `done`, or its problem.

        Args:
            done: the result, which grows.
            fits: cache of fits. A model has thousands of leaves, but they are cut in few ways.
        """
        problem = self._problem()
        pieces, takers = _distinct(self.pieces), list(self.takers)
        if not problem:
            key = (tuple(_geometry(piece.leaf) for piece in pieces), tuple(_geometry(leaf) for leaf in takers))
            if key not in fits:
                fits[key] = _PieceFit.of([piece.leaf for piece in pieces], takers)
            problem = "the old job held it in pieces that overlap" if fits[key].cross else ""
        if problem:
            done.problems.append(f"{self.name}: {problem}")
            return
        if any(len(piece.locations) > 1 for piece in pieces):
            done.own.append(self.name)
        bytes_taken = [0] * len(pieces)
        for leaf, copies in zip(takers, fits[key].copies, strict=True):
            ranks = sorted(self.takers[leaf])
            for index, copy in copies:
                bytes_taken[index] += copy.nbytes
                nbytes = pieces[index].leaf.nbytes
                for seat, receivers in _by_location(pieces[index].locations, ranks):
                    done.needs.append(PieceTransfer(self.name, nbytes, seat, copy, receivers))
            missing = leaf.nbytes - sum(copy.nbytes for _, copy in copies)
            if missing:
                done.problems.append(
                    f"{self.name}: {missing} of the {leaf.nbytes} bytes of {leaf.describe()} were not held"
                )
        for piece, nbytes in zip(pieces, bytes_taken, strict=True):
            if nbytes < piece.leaf.nbytes:
                missing = piece.leaf.nbytes - nbytes
                done.problems.append(
                    f"{self.name}: no new rank wants {missing} bytes of the old {piece.leaf.describe()}"
                )

    def _problem(self) -> str:
        """Returns why nothing of this tensor can be taken; empty if it can."""
        wanted = [leaf for leaf in self.takers if leaf.nbytes]
        if not wanted or not self.pieces:
            return f"the old job held none, the new job has {wanted[0].describe()}" if wanted else ""
        held = [piece.leaf for piece in self.pieces]
        kinds = {(leaf.dtype, leaf.global_shape): leaf for leaf in (*held, *wanted)}
        if len(kinds) > 1:
            return f"the old job held {_whole(held[0])}, the new job has {_whole(wanted[-1])}"
        if self.is_mismatched and any(len(piece.locations) > 1 for piece in self.pieces):
            return "the old ranks held different bytes of it, so another shape can't tell which are right"
        return ""


def _whole(leaf: Leaf) -> str:
    return f"{leaf.dtype} {list(leaf.global_shape)}"


def _by_location(
    seats: Sequence[PieceLocation], ranks: Sequence[int]
) -> Iterator[tuple[PieceLocation, tuple[int, ...]]]:
    """Yields the places to take a piece from, each with its receivers."""
    if len(seats) == 1:
        yield seats[0], tuple(ranks)
        return
    by_owner = {seat.owner: seat for seat in sorted(seats, key=lambda seat: seat.owner, reverse=True)}
    lowest = seats[0] if seats[0].where is PieceSource.CELL else by_owner[min(by_owner)]
    takers: dict[PieceLocation, list[int]] = {}
    for rank in ranks:
        seat = by_owner.get(rank, lowest) if lowest.where is not PieceSource.CELL else lowest
        takers.setdefault(seat, []).append(rank)
    for seat, receivers in takers.items():
        yield seat, tuple(receivers)


def _distinct(pieces: Sequence[TensorPiece]) -> list[TensorPiece]:
    """Returns one piece for each box.

    The same box in other strides counts as the same piece. A piece in a cell is preferred, then the
    piece of the lowest rank.
    """
    boxes: dict[object, TensorPiece] = {}
    for piece in sorted(
        pieces, key=lambda piece: (piece.locations[0].where is not PieceSource.CELL, piece.locations[0].owner)
    ):
        boxes.setdefault((piece.leaf.global_offset, piece.leaf.shape), piece)
    return list(boxes.values())


def _geometry(leaf: Leaf) -> object:
    """Returns a key; leaves with the same key have the same box, strides and size."""
    return leaf.global_offset, leaf.shape, leaf.stride, leaf.nbytes


class _PieceFit(NamedTuple):
    """How old pieces make up new leaves.

    Attributes:
        cross: whether two pieces have elements in common; then `copies` is empty.
        copies: for each new leaf: (index of a piece, bytes taken from it).
    """

    cross: bool
    copies: list[list[tuple[int, RegionCopy]]]

    @classmethod
    def of(cls, pieces: Sequence[Leaf], takers: Sequence[Leaf]) -> _PieceFit:
        if not pieces:
            return cls(False, [[] for _ in takers])
        # Disjoint pieces can't have more elements than the whole. The count comes first: it spares
        # the search for overlaps where many pieces lie in one place.
        count, whole = sum(math.prod(leaf.shape) for leaf in pieces), math.prod(pieces[0].global_shape)
        index = RegionIndex(dict(enumerate(pieces)))
        if count > whole or any(len(index.overlapping(leaf)) > 1 for leaf in pieces):
            return cls(True, [])
        copies: list[list[tuple[int, RegionCopy]]] = []
        for leaf in takers:
            overlaps = [(i, overlap(pieces[i], leaf)) for i in index.overlapping(leaf)] if leaf.nbytes else []
            copies.append([(i, copy) for i, copy in overlaps if copy is not None])
        return cls(False, copies)
