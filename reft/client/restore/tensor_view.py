"""A flat view of the live tensors of a cell.

Each byte of the cell is a byte of a live tensor, or of no tensor:

    cell      | leaf a          |gap| leaf b          | leaf c (absent) | leaf d (not dense,
                 │                      │                 zeros            or on a device)
    memory    flat bytes of a     flat bytes of b                      not dense: host copy, which
                                                                       `finish` writes back
                                                                       device: copied at once

`view` works without a copy: a message may arrive in its memory. If a range of the cell is not one
run of plain host memory, `write` scatters and `read` gathers. Gaps and absent leaves read as zeros,
and writes to them are dropped. `device_view` and `gather` do the same on the device, in the current
stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch

from reft.client.restore.device_copies import DeviceCopier
from reft.client.state.tensors import flat_bytes, is_dense
from reft.core.layout.layout import Leaf
from reft.errors import LayoutChanged
from reft.wire.slot_format import Bytes


class FlatTensorView:
    """The live memory of leaves that lie one after the other.

    Args:
        leaves: in the order of their offsets.
        offsets: of each leaf, in bytes.
        tensors: live tensors by name.
        absent: names of leaves that do not exist; they read as zeros.
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
        absent: Collection[str] = (),
        copies: DeviceCopier | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._copies, self._device = copies or DeviceCopier(None), device
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._runs: list[Bytes | torch.Tensor] = []  # host memory, or flat bytes on a device
        # (tensor, host memory that replaces it until `finish`)
        self._host_copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for leaf, offset in zip(leaves, offsets, strict=True):
            if leaf.name in absent or not leaf.nbytes:
                continue
            self._begins.append(offset)
            self._ends.append(offset + leaf.nbytes)
            self._runs.append(self._run(leaf, tensors))
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

    def gather(self, begin: int, out: torch.Tensor) -> None:
        """Enqueues reading bytes begin..begin+n into uint8 [n] of the device; gaps are zero."""
        done = 0
        for run, first, last, at in self.parts(begin, begin + out.nbytes):
            if done < at:
                out[done:at].zero_()
            done = at + last - first
            out[at:done].copy_(_as_tensor(run[first:last]), non_blocking=True)
        if done < out.nbytes:
            out[done:].zero_()

    def write(self, begin: int, data: Bytes) -> None:
        """Writes uint8[n] to bytes begin..begin+n; for a device it only begins, see `wait`."""
        for run, first, last, at in self.parts(begin, begin + data.nbytes):
            if isinstance(run, torch.Tensor):
                self._copies.copy(run[first:last], data[at : at + last - first])
            else:
                np.copyto(run[first:last], data[at : at + last - first])

    def read(self, begin: int, out: Bytes) -> None:
        """Reads bytes begin..begin+n into uint8[n]; gaps are zero."""
        done = 0
        for run, first, last, at in self.parts(begin, begin + out.nbytes):
            out[done:at] = 0
            done = at + last - first
            if isinstance(run, torch.Tensor):
                torch.from_numpy(out[at:done]).copy_(run[first:last])
            else:
                np.copyto(out[at:done], run[first:last])
        out[done:] = 0

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


def _as_tensor(run: Bytes | torch.Tensor) -> torch.Tensor:
    return run if isinstance(run, torch.Tensor) else torch.from_numpy(run)
