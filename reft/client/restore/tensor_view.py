"""A flat view of live tensors, and copies between byte runs and packed bytes.

Each byte of the view is a byte of a live tensor, or of no tensor:

    view      | leaf a          |gap| leaf b          | leaf c (absent) | leaf d (not dense,
                 │                      │                 zeros            or on a device)
    memory    flat bytes of a     flat bytes of b                      not dense: host copy, which
                                                                       `finish` writes back
                                                                       device: copied at once

    source   ..▓▓▓....▓▓▓....▓▓▓..   ─ gather ─►  ▓▓▓▓▓▓▓▓▓  ─ scatter ─►  the runs of a live tensor

`view` works without a copy: a message may arrive in its memory. If a range is not one run of plain
host memory, `scatter` writes and `read` reads it. Gaps and absent leaves read as zeros, and writes
to them are dropped. Long runs are copied one by one. Short runs, possibly millions of them, are
copied with one index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from reft.client.restore.device_copies import DeviceCopier
from reft.client.state.tensors import flat_bytes, is_dense
from reft.core.layout.layout import Leaf
from reft.core.layout.regions import LONG_BYTES, UNIT_MAX, equal_runs
from reft.errors import LayoutChanged
from reft.wire.slot_format import Bytes

Starts = npt.NDArray[np.int64]


class FlatTensorView:
    """The live memory of leaves that lie one after the other.

    Args:
        leaves: in the order of their offsets.
        offsets: of each leaf, in bytes.
        tensors: live tensors by name.
        copies: copies of bytes to a device; None: they block the host.
        device: leaves on this device count as a device's. Leaves off the host always do (the
            contract test passes the CPU).

    Attributes:
        is_on_device: whether any leaf lies on a device.

    Raises:
        LayoutChanged: a leaf has no tensor, or a tensor of another size.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        offsets: Sequence[int],
        tensors: Mapping[str, torch.Tensor],
        copies: DeviceCopier | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._copies, self._device = copies or DeviceCopier(None), device
        placed = [(at, leaf) for at, leaf in zip(offsets, leaves, strict=True) if leaf.nbytes]
        self._begins = [at for at, _ in placed]
        self._ends = [at + leaf.nbytes for at, leaf in placed]
        # (tensor, host memory that replaces it until `finish`)
        self._host_copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Host memory, or flat bytes on a device
        self._runs: list[Bytes | torch.Tensor] = [self._run(leaf, tensors) for _, leaf in placed]
        self.is_on_device = any(isinstance(run, torch.Tensor) for run in self._runs)

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves."""
        return sum(run.nbytes for run in self._runs)

    def view(self, begin: int, end: int) -> Bytes | None:
        """Returns live memory of bytes begin..end, uint8[end - begin].

        None if the range is not one run of plain host memory.
        """
        run = self._within(begin, end)
        return None if isinstance(run, torch.Tensor) else run

    def device_view(self, begin: int, end: int) -> torch.Tensor | None:
        """Returns live memory of bytes begin..end, uint8 [end - begin].

        None if the range is not one run of a device's memory.
        """
        run = self._within(begin, end)
        return run if isinstance(run, torch.Tensor) else None

    def read(self, begin: int, out: torch.Tensor) -> None:
        """Reads bytes begin..begin+n into uint8 [n]; gaps are zero. On a device it is enqueued."""
        done = 0
        for run, first, last, at in self.parts(begin, begin + out.nbytes):
            out[done:at].zero_()
            done = at + last - first
            source = run if isinstance(run, torch.Tensor) else torch.from_numpy(run)
            out[at:done].copy_(source[first:last], non_blocking=out.device.type != "cpu")
        out[done:].zero_()

    def write(self, begin: int, data: Bytes) -> None:
        """Writes uint8[n] to bytes begin..begin+n; for a device it only begins, see `wait`."""
        for run, first, last, at in self.parts(begin, begin + data.nbytes):
            if isinstance(run, torch.Tensor):
                self._copies.copy(run[first:last], data[at : at + last - first])
            else:
                np.copyto(run[first:last], data[at : at + last - first])

    def scatter(self, begin: int, starts: Starts, nbytes: Starts, data: Bytes) -> None:
        """Writes runs that lie end to end in `data`; for a device see `write`.

        Args:
            begin: the offset from which `starts` count.
            starts: int64 [runs], the target offset of each run.
            nbytes: int64 [runs], the length of each run.
            data: uint8 [sum of nbytes].
        """
        if not len(starts):
            return
        target = self.view(begin, begin + int((starts + nbytes).max()))
        done = 0
        for first, last, run in equal_runs(nbytes):
            packed = data[done : done + run * (last - first)]
            if target is None or run >= LONG_BYTES or last - first == 1:
                for i in range(first, last):
                    self.write(begin + int(starts[i]), packed[(i - first) * run : (i - first + 1) * run])
            else:
                units, index = _index(target, starts[first:last], run)
                units[index] = packed.copy().view(units.dtype).reshape(index.shape)
            done += packed.nbytes

    def wait(self) -> None:
        """Returns when a device has all bytes that were written so far."""
        if self.is_on_device:
            self._copies.wait()

    def are_copies_right(self) -> bool:
        """Returns whether a device has the bytes that were written."""
        return self._copies.are_right()

    def finish(self) -> None:
        """Copies the written bytes into tensors that are not dense."""
        with torch.no_grad():
            for tensor, copy in self._host_copies:
                tensor.copy_(copy)

    def _within(self, begin: int, end: int) -> Bytes | torch.Tensor | None:
        """Returns bytes begin..end if one leaf has them all, else None."""
        at = bisect_right(self._begins, begin) - 1
        if at < 0 or end > self._ends[at]:
            return None
        return self._runs[at][begin - self._begins[at] : end - self._begins[at]]

    def parts(self, begin: int, end: int) -> Iterator[tuple[Bytes | torch.Tensor, int, int, int]]:
        """Yields (run, first, last, at) of each leaf in begin..end.

        Bytes first..last of the leaf's memory `run` lie `at` bytes after begin.
        """
        index = max(bisect_right(self._begins, begin) - 1, 0)
        while index < len(self._begins) and self._begins[index] < end:
            start = self._begins[index]
            first, last = max(begin, start), min(end, self._ends[index])
            if first < last:
                yield self._runs[index], first - start, last - start, first - begin
            index += 1

    def _run(self, leaf: Leaf, tensors: Mapping[str, torch.Tensor]) -> Bytes | torch.Tensor:
        tensor = tensors.get(leaf.name)
        nbytes = tensor.numel() * tensor.element_size() if tensor is not None else 0
        if tensor is None or nbytes != leaf.nbytes:
            raise LayoutChanged(f"{leaf.name} has {leaf.nbytes} bytes in the snapshot and {nbytes} in this job.")
        if is_dense(tensor):
            flat = flat_bytes(tensor)
            return flat if flat.device.type != "cpu" or flat.device == self._device else flat.numpy()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._host_copies.append((tensor, copy))
        return flat_bytes(copy).numpy()


def gather(source: Bytes, starts: Starts, nbytes: Starts, into: Bytes) -> int:
    """Packs runs of `source` end to end into `into`; returns the number of bytes.

    Args:
        source: uint8 [n].
        starts: int64 [runs], the offset of each run in `source`.
        nbytes: int64 [runs], the length of each run.
        into: uint8, large enough for all runs.
    """
    done = 0
    for first, last, run in equal_runs(nbytes):
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


def _index(memory: Bytes, starts: Starts, run: int) -> tuple[npt.NDArray[np.unsignedinteger], Starts]:
    """Returns memory in units, and an index of each run's units.

    The units are the largest that all runs consist of. The index has shape [runs, units].
    """
    bits = run | int(np.bitwise_or.reduce(starts))
    unit = min(bits & -bits, UNIT_MAX)
    units = memory[: memory.nbytes // unit * unit].view(f"<u{unit}")
    return units, starts[:, None] // unit + np.arange(run // unit)
