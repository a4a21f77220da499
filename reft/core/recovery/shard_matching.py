"""Another shape: which old pieces of the state every rank of a new job needs, whatever was sharded how over how many ranks.

    old ranks' leaves ─► pieces: what each is, and where it lies ┐
                         (a cell │ a rank's slot │ its capsule)  ├─► needs: this part of that piece, to these new ranks
    new ranks' leaves ─► wanted: what each is, and who wants it  ┘   or: what does not fit, by name

Invariants
  1. Each element of each wanted leaf is taken from exactly one old piece; each element that was held is wanted by someone.
     Else the leaf is named, and nothing is loaded.
  2. Only a piece of the same name, dtype and global shape is taken: nothing is converted, nothing is guessed.
  3. Bytes of a cell are the same on all its holders. Of pieces that each rank keeps for itself, a new rank takes the one of
     the old rank of its own number; if that had none, the lowest.
  4. The same leaves give the same needs on every rank, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from reft.core.coding.placement import Placement
from reft.core.layout.layout import Leaf
from reft.core.layout.regions import RegionCopy, RegionIndex, overlap

OPTIMIZER = "optimizer."  # what names of leaves begin with that an optimizer may not have made yet


class PieceSource(Enum):
    """What an old piece lies in."""

    CELL = "cell"
    SLOT = "slot"
    CAPSULE = "capsule"


class PieceLocation(NamedTuple):
    """Where a piece lies: at `offset` of cell `owner`, or of the data of old rank `owner`'s slot; or in its capsule."""

    where: PieceSource
    owner: int
    offset: int


@dataclass(frozen=True)
class UnforeseenLeaves:
    """What an old rank's slot or capsule says, beyond what its epoch's manifest had foreseen.

    Attributes:
        absent: names of foreseen leaves that did not exist.
        others: leaves that were not foreseen, or not so, and where they lie in the slot's data; None: in the capsule.
    """

    absent: frozenset[str] = frozenset()
    others: tuple[tuple[Leaf, int | None], ...] = ()

    @property
    def missing(self) -> frozenset[str]:
        """Names that do not lie where the placement says."""
        return self.absent | {leaf.name for leaf, _ in self.others}


@dataclass(frozen=True)
class TensorPiece:
    """One piece of one tensor of the old job, and every place where it lies; one place if that is a cell."""

    leaf: Leaf
    seats: tuple[PieceLocation, ...]


@dataclass(frozen=True)
class PieceTransfer:
    """What goes from one old piece into one leaf of some new ranks.

    Attributes:
        piece: the old leaf.
        seat: where it is taken from.
        leaf: the new one.
        copy: which of its bytes.
        receivers: new ranks, ascending.
    """

    piece: Leaf
    seat: PieceLocation
    leaf: Leaf
    copy: RegionCopy
    receivers: tuple[int, ...]


@dataclass
class ShardMatch:
    """How the old state becomes the new one.

    Attributes:
        needs: in the order of the new leaves' names.
        problems: a line for each leaf that does not fit; with any, nothing may be loaded.
        own: names of leaves of which several old ranks kept their own, perhaps unlike, copies.
    """

    needs: list[PieceTransfer] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)


def is_same(old: Sequence[Iterable[Leaf]], new: Sequence[Iterable[Leaf]]) -> bool:
    """Whether every new rank has the same pieces as the old rank of its number, so that it can take over what that had.

    A leaf that only one of the two jobs has, or has in another global shape, says nothing: it is another model then, and
    refused elsewhere.

    Args:
        old, new: the leaves of each rank; one object for ranks that have the same.
    """
    if len(old) != len(new):
        return False
    seen: set[tuple[int, int]] = set()
    shared = _wholes(old) & _wholes(new)
    for before, after in zip(old, new, strict=True):
        if (id(before), id(after)) in seen:
            continue
        seen.add((id(before), id(after)))
        if _boxes(before, shared) != _boxes(after, shared):
            return False
    return True


def _wholes(ranks: Sequence[Iterable[Leaf]]) -> set[tuple[str, tuple[int, ...]]]:
    """(name, global shape) of all leaves."""
    return {(leaf.name, leaf.global_shape) for leaves in {id(each): each for each in ranks}.values() for leaf in leaves}


def _boxes(
    leaves: Iterable[Leaf], wholes: Collection[tuple[str, tuple[int, ...]]]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    return {leaf.name: (leaf.global_offset, leaf.shape) for leaf in leaves if (leaf.name, leaf.global_shape) in wholes}


# What is held


def pieces_of(
    placement: Placement, leaves_of: Callable[[int], Mapping[str, Leaf]], owns: Mapping[int, UnforeseenLeaves]
) -> tuple[list[TensorPiece], list[str]]:
    """All pieces of the old job's state, and what contradicts itself, a line each.

    Args:
        placement: under which they were written.
        leaves_of: old rank → its foreseen leaves, by name.
        owns: what each old rank says of its own.
    """
    found: dict[Leaf, list[PieceLocation]] = {}
    problems = []
    nothing: frozenset[str] = frozenset()
    missing = [owns[rank].missing if rank in owns else nothing for rank in range(len(placement.domains))]
    for number, cell in enumerate(placement.division.cells):
        sets = {missing[rank] for rank in cell.holders}
        for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
            without = sum(leaf.name in each for each in sets)
            if not without:
                found.setdefault(leaf, []).append(PieceLocation(PieceSource.CELL, number, offset))
            elif without < len(sets):
                problems.append(f"{leaf.name}: some of the ranks that should have had it did not")
    for rank, own in sorted(owns.items()):
        for leaf, seat in _own_pieces(placement, leaves_of(rank), rank, own):
            found.setdefault(replace(leaf, staged=False) if leaf.staged else leaf, []).append(seat)
    return [TensorPiece(leaf, tuple(seats)) for leaf, seats in found.items() if leaf.nbytes], problems


def _own_pieces(
    placement: Placement, leaves: Mapping[str, Leaf], rank: int, own: UnforeseenLeaves
) -> Iterator[tuple[Leaf, PieceLocation]]:
    """What only this rank's slot or capsule has."""
    digest = placement.division.layout_of[rank]
    missing = own.missing
    kept = placement.division.unreplicated[digest]
    if kept.leaves:
        begin = placement.part(rank).unreplicated_offset
        for leaf, offset in zip(kept.leaves, kept.offsets, strict=True):
            if leaf.name not in missing:
                yield leaf, PieceLocation(PieceSource.SLOT, rank, begin + offset)
    for name in placement.division.inline_leaves[digest]:
        if name not in missing:
            yield leaves[name], PieceLocation(PieceSource.CAPSULE, rank, 0)
    for leaf, place in own.others:
        yield (
            leaf,
            PieceLocation(PieceSource.CAPSULE, rank, 0)
            if place is None
            else PieceLocation(PieceSource.SLOT, rank, place),
        )


# What is wanted


def wanted_leaves(new: Sequence[Iterable[Leaf]], pieces: Sequence[TensorPiece]) -> list[tuple[Leaf, ...]]:
    """The leaves that each new rank is to have: all of its own, but of the optimizer's only those that were made.

    Args:
        new: the leaves that are foreseen for each new rank; one object for ranks that have the same.
        pieces: what is held.
    """
    held = {piece.leaf.name for piece in pieces}
    found: dict[int, tuple[Leaf, ...]] = {}
    for leaves in new:
        if id(leaves) not in found:
            found[id(leaves)] = tuple(
                leaf for leaf in leaves if not leaf.name.startswith(OPTIMIZER) or leaf.name in held
            )
    return [found[id(leaves)] for leaves in new]


def match(
    pieces: Sequence[TensorPiece], wanted: Sequence[Sequence[Leaf]], mismatched: Collection[str] = ()
) -> ShardMatch:
    """Which part of which piece goes where.

    Args:
        pieces: what is held.
        wanted: the leaves of each new rank.
        mismatched: names of leaves, foreseen as replicas, that the old ranks were found to hold with unlike bytes.
    """
    done = ShardMatch()
    held: dict[str, list[TensorPiece]] = {}
    for piece in pieces:
        held.setdefault(piece.leaf.name, []).append(piece)
    takers = _takers(wanted)
    fits: dict[object, _Fit] = {}
    for name in sorted(takers):
        _Tensor(name, held.get(name, []), takers[name], name in mismatched).match(done, fits)
    for name in sorted(held.keys() - takers.keys()):
        done.problems.append(f"{name}: held {held[name][0].leaf.describe()}, not in the new job")
    return done


def _takers(wanted: Sequence[Sequence[Leaf]]) -> dict[str, dict[Leaf, list[int]]]:
    """name → leaf → the new ranks that want it."""
    ranks: dict[int, list[int]] = {}
    for rank, leaves in enumerate(wanted):
        ranks.setdefault(id(leaves), []).append(rank)
    found: dict[str, dict[Leaf, list[int]]] = {}
    for leaves in {id(each): each for each in wanted}.values():
        for leaf in leaves:
            whole = replace(leaf, staged=False) if leaf.staged else leaf
            found.setdefault(leaf.name, {}).setdefault(whole, []).extend(ranks[id(leaves)])
    return found


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the state, and who wants it."""

    name: str
    pieces: Sequence[TensorPiece]
    takers: Mapping[Leaf, Sequence[int]]
    is_unequal: bool

    def match(self, done: ShardMatch, fits: dict[object, _Fit]) -> None:
        """Adds its needs, or what does not fit.

        Args:
            fits: of tensors that are cut alike: a model has thousands of leaves, and few ways in which they are cut.
        """
        problem = self._problem()
        pieces, takers = _distinct(self.pieces), list(self.takers)
        if not problem:
            key = (tuple(_cut(piece.leaf) for piece in pieces), tuple(_cut(leaf) for leaf in takers))
            if key not in fits:
                fits[key] = _Fit.of([piece.leaf for piece in pieces], takers)
            problem = "it is held in pieces that overlap" if fits[key].cross else ""
        if problem:
            done.problems.append(f"{self.name}: {problem}")
            return
        if any(len(piece.seats) > 1 for piece in pieces):
            done.own.append(self.name)
        taken = [0] * len(pieces)
        for leaf, copies in zip(takers, fits[key].copies, strict=True):
            ranks = sorted(self.takers[leaf])
            for index, copy in copies:
                taken[index] += copy.nbytes
                for seat, receivers in _seated(pieces[index].seats, ranks):
                    done.needs.append(PieceTransfer(pieces[index].leaf, seat, leaf, copy, receivers))
            lack = leaf.nbytes - sum(copy.nbytes for _, copy in copies)
            if lack:
                done.problems.append(
                    f"{self.name}: {lack} of the {leaf.nbytes} bytes of {leaf.describe()} are not held"
                )
        for piece, nbytes in zip(pieces, taken, strict=True):
            if nbytes < piece.leaf.nbytes:
                lack = piece.leaf.nbytes - nbytes
                done.problems.append(f"{self.name}: {lack} bytes of held {piece.leaf.describe()} find no rank")

    def _problem(self) -> str:
        """Why nothing of this tensor can be taken; empty if it can."""
        wanted = [leaf for leaf in self.takers if leaf.nbytes]
        if not wanted or not self.pieces:
            return f"not held, {wanted[0].describe()} in the new job" if wanted else ""
        held = [piece.leaf for piece in self.pieces]
        kinds = {(leaf.dtype, leaf.global_shape): leaf for leaf in (*held, *wanted)}
        if len(kinds) > 1:
            return f"held {_whole(held[0])}, {_whole(wanted[-1])} in the new job"
        if self.is_unequal and any(len(piece.seats) > 1 for piece in self.pieces):
            return "the ranks held unlike bytes of it, and nobody can say which are right in another shape"
        return ""


def _whole(leaf: Leaf) -> str:
    return f"{leaf.dtype} {list(leaf.global_shape)}"


def _seated(seats: Sequence[PieceLocation], ranks: Sequence[int]) -> Iterator[tuple[PieceLocation, tuple[int, ...]]]:
    """Who takes a piece from which of its seats."""
    if len(seats) == 1:
        yield seats[0], tuple(ranks)
        return
    mine = {seat.owner: seat for seat in sorted(seats, key=lambda seat: seat.owner, reverse=True)}
    lowest = seats[0] if seats[0].where is PieceSource.CELL else mine[min(mine)]
    takers: dict[PieceLocation, list[int]] = {}
    for rank in ranks:
        seat = mine.get(rank, lowest) if lowest.where is not PieceSource.CELL else lowest
        takers.setdefault(seat, []).append(rank)
    for seat, receivers in takers.items():
        yield seat, tuple(receivers)


def _distinct(pieces: Sequence[TensorPiece]) -> list[TensorPiece]:
    """One piece for each box: the same in other strides is held again. In a cell first, then that of the lowest rank."""
    boxes: dict[object, TensorPiece] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.seats[0].where is not PieceSource.CELL, piece.seats[0].owner)):
        boxes.setdefault((piece.leaf.global_offset, piece.leaf.shape), piece)
    return list(boxes.values())


def _cut(leaf: Leaf) -> object:
    """Leaves for which this is equal are cut, and lie, alike."""
    return leaf.global_offset, leaf.shape, leaf.stride, leaf.nbytes


class _Fit(NamedTuple):
    """How old pieces make up new leaves.

    Attributes:
        cross: whether two pieces have elements in common; then nothing else is said.
        copies: for each new leaf what it takes of which piece.
    """

    cross: bool
    copies: list[list[tuple[int, RegionCopy]]]

    @classmethod
    def of(cls, pieces: Sequence[Leaf], takers: Sequence[Leaf]) -> _Fit:
        if not pieces:
            return cls(False, [[] for _ in takers])
        # Disjoint pieces can't have more elements than the whole; many that lie in one place are not searched for one another.
        count, whole = sum(math.prod(leaf.shape) for leaf in pieces), math.prod(pieces[0].global_shape)
        shelf = RegionIndex(dict(enumerate(pieces)))
        if count > whole or any(len(shelf.touching(leaf)) > 1 for leaf in pieces):
            return cls(True, [])
        copies: list[list[tuple[int, RegionCopy]]] = []
        for leaf in takers:
            found = [(i, overlap(pieces[i], leaf)) for i in shelf.touching(leaf)] if leaf.nbytes else []
            copies.append([(i, copy) for i, copy in found if copy is not None])
        return cls(False, copies)
