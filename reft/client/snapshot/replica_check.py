"""The replica check: ranks with the same bytes compare digests, at attach and at each snapshot.

With every snapshot, so that shards of mismatched replicas never become one version:

    first snapshots of an attach     a digest of all bytes of each cell
    later snapshots                  a digest of WINDOW_BYTES of each; this window moves each step

A digest is made of sums that a host and a device compute alike (`replica_sums`), so ranks with
different devices compare too, and no bytes leave a device for the check.

The step's number alone decides what is digested, so all ranks digest the same bytes. A lasting
difference is found within cell / WINDOW_BYTES snapshots. A difference that spreads, such as weights
that were once updated with different gradients, is found with the next snapshot.

The digests travel with "sealed" (`reft.core.commit.round`), and lie in each rank's capsule. A
restore finds all sealed slots, also those of which the round never heard, or which it found to
differ. So a restore compares the digests before it reads any bytes. It also compares what is left
of the steps before its base: those were sealed before the ranks had heard of a difference, and
their windows may lie where the bytes differ.

At attach, before anything is placed, to find the mismatched leaves:

    cells, if all replicas were equal
      ─► every rank: one digest of each of its cells ─► all equal: done
                                                     └► else: digests of leaves, from one rank of
                                                        each kind of answer ─► mismatched leaves

Pieces of a leaf that only one rank has are not checked: no rank restores them from another rank's
bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from reft.client.link.exchange import gather, share
from reft.client.link.rank_group import RankGroup
from reft.client.snapshot.replica_sums import pieces_of, sums_of, tensor_sums
from reft.client.snapshot.save_plan import CellRuns, WriteItem
from reft.client.state.tensors import TensorIndex
from reft.core.layout.cells import Division
from reft.core.layout.layout import Leaf
from reft.core.layout.stage_naming import CONSTANT
from reft.core.recovery.replica_samples import capsule_digests
from reft.core.text import counted
from reft.errors import FormatError
from reft.wire import capsule_format
from reft.wire.slot_format import Bytes

WINDOW_BYTES = 1 << 20
CONSTANT_PIECE = 256 << 10  # bytes that are compared at once


@dataclass(frozen=True)
class CellDigests:
    """What a rank tells of its cells at attach: one digest for each, in the order of the cells."""

    digests: tuple[str, ...]


@dataclass(frozen=True)
class LeafDigests:
    """What a rank tells of its leaves at attach: name → digest; empty if another rank speaks."""

    digests: dict[str, str]


class DigestSample(NamedTuple):
    """The bytes of one cell to digest. `at` in `runs` counts from the beginning of the cell."""

    cell: int
    runs: tuple[WriteItem, ...]


def samples(cells: Sequence[CellRuns], step: int, in_whole: bool) -> list[DigestSample]:
    """Returns the bytes to digest at a step.

    They are all bytes of each cell (`in_whole`), or a window.
    """
    return [DigestSample(each.cell, tuple(_clip(each, *_window(each.nbytes, step, in_whole)))) for each in cells]


def sample_sums(sample: DigestSample, sources: Sequence[Bytes]) -> list[Bytes]:
    """Returns the sums of each of the sample's runs.

    Args:
        sample: the bytes to digest.
        sources: the bytes of each leaf in the host's memory, by number.
    """
    return [sums_of(sources[leaf][begin : begin + nbytes]) for leaf, begin, nbytes, _ in sample.runs]


def digest_of(sample: DigestSample, sums: Sequence[Bytes]) -> int:
    """Returns the digest of a sample.

    Args:
        sample: the bytes to digest.
        sums: the sums of each of the sample's runs; see `replica_sums`.
    """
    hasher = xxhash.xxh3_64()
    for run, sums_of_run in zip(sample.runs, sums, strict=True):
        # Equal bytes at another place must give another digest.
        hasher.update(run.at.to_bytes(8, "little"))
        hasher.update(sums_of_run.data)
    return hasher.intdigest()


def leaf_digests(sample: DigestSample, sums: Sequence[Bytes], leaves: Sequence[Leaf]) -> dict[str, str]:
    """Returns a digest of each leaf in a sample of a whole cell.

    The key is the name, a line end, and the cell, so that pieces that other ranks have count as
    different leaves.

    Args:
        sample: all bytes of a cell.
        sums: the sums of each of the sample's runs.
        leaves: the leaves, by number.
    """
    return {
        f"{leaves[run.leaf].name}\n{sample.cell}": xxhash.xxh3_64_hexdigest(sums_of_run.data)
        for run, sums_of_run in zip(sample.runs, sums, strict=True)
    }


def earlier_digests(capsules: Iterable[bytes]) -> list[list[int]]:
    """Returns the sample digests in capsules of earlier steps; skips unreadable capsules."""
    samples = []
    for capsule in capsules:
        with contextlib.suppress(FormatError):
            samples += capsule_digests(capsule_format.decode(capsule))
    return samples


def mismatch(division: Division, cells: Collection[int]) -> str:
    """Returns which replicas differ, so that no step becomes whole; empty if all are equal.

    Args:
        division: the cells of the placement.
        cells: the cells in which ranks found a difference.
    """
    if not cells:
        return ""
    leaves = [leaf.name for cell in sorted(cells) for leaf in division.cells[cell].leaves]
    where = f"in {counted(len(leaves), 'leaf', 'leaves')} at most, e.g. {leaves[0]}"
    return (
        f"ranks hold different bytes where they should be replicas: {where}. No step becomes whole meanwhile."
        "\nFix: wrap the model in DDP; if ranks shall differ, attach with protect='none'"
    )


def _window(nbytes: int, step: int, in_whole: bool) -> tuple[int, int]:
    if in_whole or nbytes <= WINDOW_BYTES:
        return 0, nbytes
    windows = -(-nbytes // WINDOW_BYTES)
    begin = step % windows * WINDOW_BYTES
    return begin, min(begin + WINDOW_BYTES, nbytes)


def _clip(cell: CellRuns, begin: int, end: int) -> Iterator[WriteItem]:
    for leaf, first, nbytes, at in cell.runs:
        low, high = max(at, begin), min(at + nbytes, end)
        if low < high:
            yield WriteItem(leaf, first + low - at, high - low, low)


def find_mismatched(
    rank_group: RankGroup, division: Division, names: Collection[str], tensor_index: TensorIndex
) -> list[str]:
    """Returns the names of mismatched leaves, existing or predicted. All ranks call it together.

    Args:
        rank_group: exchanges the digests.
        division: the cells, if all replicas were equal.
        names: all leaves of all layouts, also those that do not exist yet.
        tensor_index: the leaves of this rank.

    Raises:
        AttachError: a rank could not take part.
    """
    if rank_group.world == 1:
        return []

    def digest_cells() -> tuple[dict[str, str], CellDigests]:
        values = value_digests(tensor_index, {leaf.name for leaf in shared(division, rank_group.rank)})
        return values, CellDigests(tuple(cell_digests(division, rank_group.rank, values)))

    values, answers = share(rank_group, digest_cells, CellDigests)
    digests_by_rank = [answer.digests for answer in answers]
    if all_match(division, digests_by_rank):
        return []
    kinds = [(division.layout_of[rank], tuple(digests)) for rank, digests in enumerate(digests_by_rank)]
    is_first = kinds.index(kinds[rank_group.rank]) == rank_group.rank
    leaves = gather(rank_group, lambda: LeafDigests(values if is_first else {}), LeafDigests)
    return mismatched_names([answer.digests for answer in leaves], names)


def shared(division: Division, rank: int) -> list[Leaf]:
    """Returns the leaves in the cells of a rank: those that other ranks have, too."""
    cells = division.cells_of[division.layout_of[rank]]
    return [leaf for cell in cells for leaf in division.cells[cell].leaves]


def value_digests(tensor_index: TensorIndex, names: Iterable[str]) -> dict[str, str]:
    """Returns a digest of the bytes of each existing leaf in `names`.

    The prefix CONSTANT is added to a digest if all elements of the leaf are equal.

    Returns:
        Digests by name. The key of a piece of a leaf is the name, a line end, and the place of the
        piece, so that different pieces count as different leaves.
    """
    wanted, digests = set(names), {}
    for name, tensor in tensor_index.tensors.items():
        if name not in wanted:
            continue
        box = tensor_index.boxes.get(name)
        where = f"\n{list(tensor.shape)} at {list(box.offset)}" if box else ""
        digest = xxhash.xxh3_64_hexdigest(tensor_sums(tensor).data)
        digests[name + where] = (CONSTANT if _is_constant(tensor) else "") + digest
    return digests


def _is_constant(tensor: torch.Tensor) -> bool:
    """Returns whether all elements have the same bytes; reads on only while they do."""
    size, first = tensor.element_size(), None
    for piece in pieces_of(tensor, CONSTANT_PIECE):
        # numpy on the host: torch's threads cost more than the comparison where all cores are busy.
        data: Any = piece.numpy() if piece.device.type == "cpu" else piece
        first = data[:size] if first is None else first
        if not (data[:size] == first).all() or not (data[:-size] == data[size:]).all():
            return False
    return True


def cell_digests(division: Division, rank: int, values: Mapping[str, str]) -> list[str]:
    """Returns one digest for each cell of a rank, in the order of the cells.

    Args:
        values: the digests of the rank's leaves, from `value_digests`.
    """
    by_name = {piece.partition("\n")[0]: digest for piece, digest in values.items()}
    digests = []
    for cell in division.cells_of[division.layout_of[rank]]:
        lines = "\n".join(by_name.get(leaf.name, "") for leaf in division.cells[cell].leaves)
        digests.append(xxhash.xxh3_64_hexdigest(lines.encode()))
    return digests


def all_match(division: Division, digests_by_rank: Sequence[Sequence[str]]) -> bool:
    """Tells whether all holders of each cell have the same digest of it.

    Args:
        digests_by_rank: the result of `cell_digests` on each rank.
    """
    seen: dict[int, str] = {}
    return all(
        seen.setdefault(cell, digest) == digest
        for rank, digests in enumerate(digests_by_rank)
        for cell, digest in zip(division.cells_of[division.layout_of[rank]], digests, strict=True)
    )


def mismatched_names(answers: Sequence[Mapping[str, str]], names: Iterable[str]) -> list[str]:
    """Returns the names of mismatched leaves, existing or predicted.

    The optimizer's state of a mismatched leaf counts as mismatched, too. So does each leaf of one
    repeated value as soon as any leaf differs: two leaves of zeros may be equal by chance.

    Args:
        answers: the result of `value_digests` on some ranks; empty for the others.
        names: all leaves of all layouts, also those that do not exist yet.
    """
    seen: dict[str, set[str]] = {}
    for answer in answers:
        for name, digest in answer.items():
            seen.setdefault(name, set()).add(digest)
    differ = {piece.partition("\n")[0] for piece, digests in seen.items() if len(digests) > 1}
    if not differ:
        return []
    constant = {piece for piece, digests in seen.items() if all(digest.startswith(CONSTANT) for digest in digests)}
    not_constant = {piece.partition("\n")[0] for piece in seen if piece not in constant}
    differ |= {piece.partition("\n")[0] for piece in constant} - not_constant
    return sorted({name for name in names if name in differ or any(name.endswith(f".{each}") for each in differ)})
