"""What ranks that hold replicas compare with every snapshot, so that shards of unlike replicas never make a version.

    first snapshots of an attach     a digest of all of each cell
    later ones                       a digest of WINDOW_BYTES of it; the window wanders with the step

The digests travel with "sealed" (`reft.core.round`), and lie in each rank's capsule: a restore finds all that is sealed, also
what the round never heard of or found to differ, so it compares them before it reads any bytes. It does so with what is left
of the steps before its base, too: in steps that were sealed before the ranks had heard of a difference, the window may lie
elsewhere. What to digest follows from the step's number alone, so that all ranks digest the same. A difference that lasts is
found within cell / WINDOW_BYTES snapshots; one that spreads, as in weights that were once updated with unlike gradients, with
the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from reft.client.share import CellRuns, Run
from reft.errors import FormatError
from reft.wire import capsule
from reft.wire.slot_format import Bytes

WINDOW_BYTES = 1 << 20


class Sample(NamedTuple):
    """Runs of one cell's bytes; their `at` counts from the beginning of the cell."""

    cell: int
    runs: tuple[Run, ...]


def samples(cells: Sequence[CellRuns], step: int, in_whole: bool) -> list[Sample]:
    """What to digest at a step."""
    return [Sample(each.cell, tuple(_cut(each, *_window(each.nbytes, step, in_whole)))) for each in cells]


def digest(sample: Sample, sources: Sequence[Bytes]) -> int:
    """The digest of a sample.

    Args:
        sources: the bytes of each leaf, by its number.
    """
    return digest_of(sample, [sources[leaf][begin : begin + nbytes] for leaf, begin, nbytes, _ in sample.runs])


def digest_of(sample: Sample, parts: Sequence[Bytes]) -> int:
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
            found += compared(capsule.decode(each))
    return found


def are_unlike(ranks: Iterable[Iterable[Sequence[int]]]) -> bool:
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


def _cut(cell: CellRuns, begin: int, end: int) -> Iterator[Run]:
    for leaf, first, nbytes, at in cell.runs:
        low, high = max(at, begin), min(at + nbytes, end)
        if low < high:
            yield Run(leaf, first + low - at, high - low, low)
