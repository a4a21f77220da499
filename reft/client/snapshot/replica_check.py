"""The replica check: ranks that should hold the same bytes compare digests, at attach and with every snapshot.

With every snapshot, so that shards of unlike replicas never make a version:

    first snapshots of an attach     a digest of all of each cell
    later ones                       a digest of WINDOW_BYTES of it; the window wanders with the step

The digests travel with "sealed" (`reft.core.commit.round`), and lie in each rank's capsule: a restore finds all that is
sealed, also what the round never heard of or found to differ, so it compares them before it reads any bytes. It does so with
what is left
of the steps before its base, too: in steps that were sealed before the ranks had heard of a difference, the window may lie
elsewhere. What to digest follows from the step's number alone, so that all ranks digest the same. A difference that lasts is
found within cell / WINDOW_BYTES snapshots; one that spreads, as in weights that were once updated with unlike gradients, with
the next.

At attach, before anything is placed, to find the leaves that differ:

    cells, if all replicas were alike ─► every rank: one digest of each of its cells ─► all the same: done
                                                                                    └► digests of leaves, from one rank of
                                                                                       each kind ─► the leaves that differ

Pieces of a whole that only one rank has are not looked at: nobody is to bring them back from another's bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from reft.client.link.rank_group import RankGroup
from reft.client.snapshot.save_plan import CellRuns, WriteItem
from reft.client.state.tensors import TensorIndex, flat_bytes, is_dense
from reft.core.layout.cells import Division
from reft.core.layout.layout import Leaf
from reft.core.layout.stage_naming import CONSTANT
from reft.errors import FormatError
from reft.wire import capsule_format
from reft.wire.slot_format import Bytes

WINDOW_BYTES = 1 << 20


class DigestSample(NamedTuple):
    """Runs of one cell's bytes; their `at` counts from the beginning of the cell."""

    cell: int
    runs: tuple[WriteItem, ...]


def samples(cells: Sequence[CellRuns], step: int, in_whole: bool) -> list[DigestSample]:
    """What to digest at a step."""
    return [DigestSample(each.cell, tuple(_cut(each, *_window(each.nbytes, step, in_whole)))) for each in cells]


def digest(sample: DigestSample, sources: Sequence[Bytes]) -> int:
    """The digest of a sample.

    Args:
        sources: the bytes of each leaf, by its number.
    """
    return digest_of(sample, [sources[leaf][begin : begin + nbytes] for leaf, begin, nbytes, _ in sample.runs])


def digest_of(sample: DigestSample, parts: Sequence[Bytes]) -> int:
    """The digest of a sample whose runs' bytes are given one by one."""
    found = xxhash.xxh3_64()
    for run, part in zip(sample.runs, parts, strict=True):
        found.update(run.at.to_bytes(8, "little"))  # the same bytes elsewhere are other bytes
        found.update(part.data)
    return found.intdigest()


def compared(tree: Mapping[str, Any]) -> list[list[int]]:
    """What the capsule of a rank says that it had: [step, cell, digest] of each sample."""
    return [[tree["step"], *pair] for pair in tree.get("compared", {}).items()]


def compared_before(capsules: Iterable[bytes]) -> list[list[int]]:
    """The same of capsules that are left of earlier steps; what can't be read says nothing."""
    found = []
    for each in capsules:
        with contextlib.suppress(FormatError):
            found += compared(capsule_format.decode(each))
    return found


def are_mismatched(ranks: Iterable[Iterable[Sequence[int]]]) -> bool:
    """Whether ranks had different bytes where they should be replicas.

    Args:
        ranks: `compared` of each.
    """
    known: dict[tuple[int, int], int] = {}
    return any(known.setdefault((step, cell), digest) != digest for each in ranks for step, cell, digest in each)


def _window(nbytes: int, step: int, in_whole: bool) -> tuple[int, int]:
    if in_whole or nbytes <= WINDOW_BYTES:
        return 0, nbytes
    windows = -(-nbytes // WINDOW_BYTES)
    begin = step % windows * WINDOW_BYTES
    return begin, min(begin + WINDOW_BYTES, nbytes)


def _cut(cell: CellRuns, begin: int, end: int) -> Iterator[WriteItem]:
    for leaf, first, nbytes, at in cell.runs:
        low, high = max(at, begin), min(at + nbytes, end)
        if low < high:
            yield WriteItem(leaf, first + low - at, high - low, low)


def find_mismatched(
    rank_group: RankGroup, division: Division, names: Collection[str], tensor_index: TensorIndex
) -> list[str]:
    """Names of leaves that ranks hold with unlike bytes, or will; all ranks call it together.

    Args:
        division: as if all replicas were alike.
        names: all leaves of all layouts, also those that do not exist yet.
        tensor_index: what this rank has.

    Raises:
        AttachError: a rank could not take part.
    """
    if rank_group.world == 1:
        return []
    values: dict[str, str] = {}

    def cells() -> dict[str, Any]:
        values.update(value_digests(tensor_index, {leaf.name for leaf in shared(division, rank_group.rank)}))
        return {"cells": cell_digests(division, rank_group.rank, values)}

    said = [each["cells"] for each in rank_group.gather_or_raise(cells)]
    if all_match(division, said):
        return []
    kinds = [(division.layout_of[rank], tuple(each)) for rank, each in enumerate(said)]
    is_first = kinds.index(kinds[rank_group.rank]) == rank_group.rank
    described = rank_group.gather_or_raise(lambda: {"values": values} if is_first else {})
    return mismatched_names(described, names)


def shared(division: Division, rank: int) -> list[Leaf]:
    """The leaves that a rank has in common with others."""
    cells = division.cells_of[division.layout_of[rank]]
    return [leaf for cell in cells for leaf in division.cells[cell].leaves]


def value_digests(tensor_index: TensorIndex, names: Iterable[str]) -> dict[str, str]:
    """A digest of the bytes of each of these leaves that exists; after CONSTANT if all elements are equal.

    By name; pieces of a whole by name, a line end, and their place in it: other pieces are other leaves.
    """
    wanted, found = set(names), {}
    for name, tensor in tensor_index.tensors.items():
        if name not in wanted:
            continue
        dense = tensor if is_dense(tensor) else tensor.contiguous()
        data = flat_bytes(dense).to(torch.device("cpu")).numpy()
        size = tensor.element_size()
        is_constant = not data.nbytes or bool((data.reshape(-1, size) == data[:size]).all())
        box = tensor_index.boxes.get(name)
        where = f"\n{list(tensor.shape)} at {list(box.offset)}" if box else ""
        found[name + where] = (CONSTANT if is_constant else "") + xxhash.xxh3_64_hexdigest(data)
    return found


def cell_digests(division: Division, rank: int, values: Mapping[str, str]) -> list[str]:
    """One digest of what a rank has in each of its cells, in their order."""
    by_name = {piece.partition("\n")[0]: digest for piece, digest in values.items()}
    found = []
    for cell in division.cells_of[division.layout_of[rank]]:
        lines = "\n".join(by_name.get(leaf.name, "") for leaf in division.cells[cell].leaves)
        found.append(xxhash.xxh3_64_hexdigest(lines.encode()))
    return found


def all_match(division: Division, said: Sequence[Sequence[str]]) -> bool:
    """Whether all holders of each cell say the same of it.

    Args:
        said: what each rank said, from `cell_digests`.
    """
    seen: dict[int, str] = {}
    return all(
        seen.setdefault(cell, digest) == digest
        for rank, digests in enumerate(said)
        for cell, digest in zip(division.cells_of[division.layout_of[rank]], digests, strict=True)
    )


def mismatched_names(described: Sequence[Mapping[str, Any]], names: Iterable[str]) -> list[str]:
    """Names of leaves that ranks hold with unlike bytes, or will.

    The optimizer's state of such a leaf goes with it. So do leaves of one repeated value once anything differs: that zeros
    are equal proves nothing.

    Args:
        described: the digests of some ranks, as "values".
        names: all leaves of all layouts, also those that do not exist yet.
    """
    seen: dict[str, set[str]] = {}
    for said in described:
        for name, digest in said.get("values", {}).items():
            seen.setdefault(name, set()).add(digest)
    differ = {piece.partition("\n")[0] for piece, digests in seen.items() if len(digests) > 1}
    if not differ:
        return []
    constant = {piece for piece, digests in seen.items() if all(digest.startswith(CONSTANT) for digest in digests)}
    proven = {piece.partition("\n")[0] for piece in seen if piece not in constant}
    differ |= {piece.partition("\n")[0] for piece in constant} - proven
    return sorted({name for name in names if name in differ or any(name.endswith(f".{each}") for each in differ)})
