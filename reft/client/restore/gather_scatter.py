"""Packs byte runs into messages, and unpacks messages into live tensors.

    source   ..▓▓▓....▓▓▓....▓▓▓..   ─ gather ─►  ▓▓▓▓▓▓▓▓▓  ─ scatter ─►  the runs of a live tensor

Long runs are copied one by one. Short runs, possibly millions of them, are copied with one index.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from reft.client.restore.tensor_view import FlatTensorView
from reft.wire.slot_format import Bytes

LONG_BYTES = 2048  # from this length on, one copy is cheaper than an index
UNIT_MAX = 8
Starts = npt.NDArray[np.int64]


def gather(source: Bytes, starts: Starts, nbytes: Starts, into: Bytes) -> int:
    """Packs runs of `source` end to end into `into`; returns the number of bytes.

    Args:
        source: uint8 [n].
        starts: int64 [runs], the offset of each run in `source`.
        nbytes: int64 [runs], the length of each run.
        into: uint8, large enough for all runs.
    """
    done = 0
    for first, last, run in _groups(nbytes):
        size = run * (last - first)
        packed = into[done : done + size]
        if run >= LONG_BYTES or last - first == 1:
            for i in range(first, last):
                begin = int(starts[i])
                packed[(i - first) * run : (i - first + 1) * run] = source[begin : begin + run]
        else:
            units, index = _index(source, starts[first:last], run)
            packed[:] = units[index].reshape(-1).view(np.uint8)
        done += size
    return done


def scatter(data: Bytes, flat_view: FlatTensorView, begin: int, starts: Starts, nbytes: Starts) -> None:
    """Unpacks runs that lie end to end in `data` into live memory.

    Args:
        data: uint8 [sum of nbytes].
        flat_view: live memory.
        begin: the offset in `flat_view` from which `starts` count.
        starts: int64 [runs], the target offset of each run.
        nbytes: int64 [runs], the length of each run.
    """
    if not len(starts):
        return
    target = flat_view.view(begin, begin + int((starts + nbytes).max()))
    done = 0
    for first, last, run in _groups(nbytes):
        packed = data[done : done + run * (last - first)]
        if target is None or run >= LONG_BYTES or last - first == 1:
            for i in range(first, last):
                flat_view.write(begin + int(starts[i]), packed[(i - first) * run : (i - first + 1) * run])
        else:
            units, index = _index(target, starts[first:last], run)
            units[index] = packed.copy().view(units.dtype).reshape(index.shape)
        done += packed.nbytes


def _groups(nbytes: Starts) -> list[tuple[int, int, int]]:
    """Returns (first, last, length) of runs of equal length.

    Few groups result: only the first and the last run of a range may be cut.
    """
    if not len(nbytes):
        return []
    borders = [0, *(np.flatnonzero(np.diff(nbytes)) + 1).tolist(), len(nbytes)]
    return [(a, b, int(nbytes[a])) for a, b in pairwise(borders)]


def _index(memory: Bytes, starts: Starts, run: int) -> tuple[npt.NDArray[np.unsignedinteger], Starts]:
    """Returns memory in units, and an index of each run's units.

    The units are the largest that all runs consist of. The index has shape [runs, units].
    """
    bits = run | int(np.bitwise_or.reduce(starts))
    unit = min(bits & -bits, UNIT_MAX)
    units = memory[: memory.nbytes // unit * unit].view(f"<u{unit}")
    return units, starts[:, None] // unit + np.arange(run // unit)
