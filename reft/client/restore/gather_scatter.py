"""Packs runs of bytes into messages, and unpacks them where they belong.

    source   ..▓▓▓....▓▓▓....▓▓▓..   ─ gather ─►  ▓▓▓▓▓▓▓▓▓  ─ scatter ─►  the runs of a live tensor

Long runs are copied one by one; short ones, of which there may be millions, by one index of all.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from reft.client.restore.tensor_view import FlatTensorView
from reft.wire.slot_format import Bytes

LONG_BYTES = 2048  # a copy of its own costs as much as an index of so many bytes
UNIT_MAX = 8
Starts = npt.NDArray[np.int64]


def gather(source: Bytes, starts: Starts, nbytes: Starts, into: Bytes) -> int:
    """Packs runs of `source` end to end into `into`; how many bytes.

    Args:
        source: uint8 [n].
        starts: int64 [runs], where each begins.
        nbytes: int64 [runs].
        into: uint8, large enough.
    """
    at = 0
    for first, last, run in _groups(nbytes):
        size = run * (last - first)
        whole = into[at : at + size]
        if run >= LONG_BYTES or last - first == 1:
            for i in range(first, last):
                begin = int(starts[i])
                whole[(i - first) * run : (i - first + 1) * run] = source[begin : begin + run]
        else:
            units, index = _index(source, starts[first:last], run)
            whole[:] = units[index].reshape(-1).view(np.uint8)
        at += size
    return at


def scatter(data: Bytes, flat_view: FlatTensorView, begin: int, starts: Starts, nbytes: Starts) -> None:
    """Unpacks runs that lie end to end in `data`.

    Args:
        data: uint8 [sum of nbytes].
        flat_view: live memory; `starts` count from its byte `begin`.
        starts: int64 [runs], where each goes.
        nbytes: int64 [runs].
    """
    if not len(starts):
        return
    target = flat_view.view(begin, begin + int((starts + nbytes).max()))
    at = 0
    for first, last, run in _groups(nbytes):
        whole = data[at : at + run * (last - first)]
        if target is None or run >= LONG_BYTES or last - first == 1:
            for i in range(first, last):
                flat_view.write(begin + int(starts[i]), whole[(i - first) * run : (i - first + 1) * run])
        else:
            units, index = _index(target, starts[first:last], run)
            units[index] = whole.copy().view(units.dtype).reshape(index.shape)
        at += whole.nbytes


def _groups(nbytes: Starts) -> list[tuple[int, int, int]]:
    """(first, last, length) of runs of equal length: only the first and the last run of a range may be cut."""
    if not len(nbytes):
        return []
    borders = [0, *(np.flatnonzero(np.diff(nbytes)) + 1).tolist(), len(nbytes)]
    return [(a, b, int(nbytes[a])) for a, b in pairwise(borders)]


def _index(memory: Bytes, starts: Starts, run: int) -> tuple[npt.NDArray[np.unsignedinteger], Starts]:
    """The memory in the largest units that all runs consist of, and the index of each unit of each run: [runs, units]."""
    bits = run | int(np.bitwise_or.reduce(starts))
    unit = min(bits & -bits, UNIT_MAX)
    units = memory[: memory.nbytes // unit * unit].view(f"<u{unit}")
    return units, starts[:, None] // unit + np.arange(run // unit)
