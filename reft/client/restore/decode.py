"""Decodes lost shards into the live tensors, on the host or on the device.

On the host:

    received data, in the tensors ─────┐  columns, a few KiB at a time:  ┌─► the lost shard,
    parity, in the slice's buffer ─────┴─ all registers stay in cache ───┘   in the tensors

A register is live memory or the parity's buffer. A register is a copy only if a leaf ends within
the columns.

On a device, with the coder for tensors:

    received data, in the tensors ─────────┐  columns, as wide as the   ┌─► the lost shard,
    parity, pinned ─► rows of the scratch ─┴─ scratch allows: one ──────┘   in the tensors
                                              kernel a step, side stream

A register is live memory of the device or a row of the scratch. A scratch row holds parity, and
data that cannot be used in place: columns in which a leaf ends, or a leaf on the host (a step
counter).

Invariants on a device
  1. The device needs `scratch_bytes` beside the state, independent of the amount to decode.
  2. The columns of all helper threads go into one stream, slice after slice, so all share one
     scratch.
  3. `decode` returns after the device has finished the slice's last column. Then the parity's
     memory may be reused, and any stream may read the decoded data.

All calls of CUDA are behind `Device`, so this code also runs without CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from reft.client.memory import xor
from reft.client.memory.cuda import Device
from reft.client.restore.load_plan import ALIGNMENT, StripeSlice
from reft.client.restore.tensor_view import FlatTensorView
from reft.core.coding.erasure import XorProgram, decode_program, run
from reft.core.coding.placement import Lane
from reft.core.recovery.rebuild import CACHE_BYTES, COLUMNS_MIN
from reft.wire.slot_format import Bytes

COLUMNS_MAX = 128 << 10

# (parity shard, packet) → the bytes of its columns in the slice
Rows = Mapping[tuple[int, int], Bytes]


@dataclass
class Decoder:
    """Decodes lost shards on the host; caches XOR programs and serves several threads.

    Attributes:
        device: the device that decodes; None: the host.
    """

    device: torch.device | None = None
    _programs: dict[tuple[object, ...], XorProgram] = field(default_factory=dict)

    def begin(self) -> None:
        """Is called before loading, by the thread that created the live tensors."""

    def decode(self, stripe_slice: StripeSlice, lane: Lane, rows: Rows, flat_view: FlatTensorView) -> None:
        """Computes the lost shards of a slice.

        Args:
            stripe_slice: the slice; all its ranges are already in `flat_view` and `rows`.
            lane: the slice's lane.
            rows: the bytes of the parity.
            flat_view: the live memory of the lane's cell.
        """
        program = self.program(stripe_slice, lane)
        registers = len(program.inputs) + len(program.outputs) + program.scratch
        width = min(max(CACHE_BYTES // registers, COLUMNS_MIN), COLUMNS_MAX) // ALIGNMENT * ALIGNMENT
        width = min(width, stripe_slice.end - stripe_slice.begin)
        registers_memory = np.empty((registers, width), np.uint8)
        for first in range(stripe_slice.begin, stripe_slice.end, width):
            last = min(first + width, stripe_slice.end)
            _HostColumns(stripe_slice, lane, rows, flat_view, first, last).run(
                program, registers_memory[:, : last - first]
            )

    def program(self, stripe_slice: StripeSlice, lane: Lane) -> XorProgram:
        """Returns the XOR program that computes the slice's lost shards.

        Raises:
            ValueError: the shards that the slice reads do not suffice.
        """
        code = lane.code
        parities = tuple(shard - code.k for shard in stripe_slice.read.shards if shard >= code.k)
        # The code itself would be a slow key: its tables have thousands of entries to hash.
        key = (code.kind, code.k, code.f, code.w, stripe_slice.read.lost, parities)
        if key not in self._programs:
            self._programs[key] = decode_program(code, stripe_slice.read.lost, parities)
        return self._programs[key]


@dataclass(frozen=True)
class PacketColumns:
    """Columns first..last of every packet of a stripe. Subclasses compute them."""

    stripe_slice: StripeSlice
    lane: Lane
    rows: Rows
    flat_view: FlatTensorView
    first: int
    last: int

    def parity(self, shard: int, packet: int) -> Bytes:
        """Returns the received bytes of these columns of a parity packet."""
        return self.rows[shard, packet][self.first - self.stripe_slice.begin : self.last - self.stripe_slice.begin]

    def cell_range(self, shard: int, packet: int) -> tuple[int, int, bool]:
        """Returns the byte range of a data packet's columns in the cell.

        The third value is whether no column is padding.
        """
        start = self.lane.data_range(self.stripe_slice.read.stripe, shard)[0] + packet * self.lane.packet_bytes
        limit = self.lane.begin + self.lane.nbytes
        begin, end = min(start + self.first, limit), min(start + self.last, limit)
        return begin, end, end - begin == self.last - self.first


class _HostColumns(PacketColumns):
    def run(self, program: XorProgram, memory: Bytes) -> None:
        inputs = [self._input(shard, packet, memory[i]) for i, (shard, packet) in enumerate(program.inputs)]
        first_output = len(inputs)
        ranges = [self.cell_range(shard, packet) for shard, packet in program.outputs]
        views = [self.flat_view.view(begin, end) if is_full else None for begin, end, is_full in ranges]
        outputs = [memory[first_output + i] if view is None else view for i, view in enumerate(views)]
        run(program, inputs, outputs, [memory[first_output + len(outputs) + i] for i in range(program.scratch)])
        for view, output, (begin, end, _) in zip(views, outputs, ranges, strict=True):
            if view is None:
                self.flat_view.write(begin, output[: end - begin])

    def _input(self, shard: int, packet: int, buffer: Bytes) -> Bytes:
        if shard >= self.lane.code.k:
            return self.parity(shard, packet)
        begin, end, is_full = self.cell_range(shard, packet)
        view = self.flat_view.view(begin, end) if is_full else None
        if view is not None:
            return view
        self.flat_view.read(begin, buffer[: end - begin])
        buffer[end - begin :] = 0
        return buffer


class DeviceDecoder(Decoder):
    """Decodes on one device.

    A cell with no leaf on the device is decoded on the host.

    Args:
        device: the device of the state.
        streams: the device's streams, or a replacement in the contract test.
        scratch_bytes: device memory for all registers of a column that are not live memory.
    """

    def __init__(self, device: torch.device, streams: Device, scratch_bytes: int) -> None:
        super().__init__(device)
        self._streams, self._scratch_bytes = streams, scratch_bytes
        self._scratch: torch.Tensor | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Waits until the device has created the live tensors.

        Next, helper threads and the side stream write these tensors.
        """
        self._streams.host_waits(self._streams.record_compute())

    def decode(self, stripe_slice: StripeSlice, lane: Lane, rows: Rows, flat_view: FlatTensorView) -> None:
        """Computes the lost shards of a slice, on the device.

        Raises:
            ValueError: the scratch is too small for columns of one alignment.
        """
        if not flat_view.is_on_device:
            super().decode(stripe_slice, lane, rows, flat_view)
            return
        program = self.program(stripe_slice, lane)
        width = self._width(program, stripe_slice)
        with self._lock, torch.no_grad(), self._streams.on_side():
            if self._scratch is None:
                self._scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self.device)
            for first in range(stripe_slice.begin, stripe_slice.end, width):
                last = min(first + width, stripe_slice.end)
                _DeviceColumns(stripe_slice, lane, rows, flat_view, first, last).run(program, self._scratch)
            done = self._streams.record_side()
        self._streams.host_waits(done)

    def _width(self, program: XorProgram, stripe_slice: StripeSlice) -> int:
        """Returns the number of columns to decode at a time.

        Counts one scratch row for each register, although most registers need none.
        """
        registers = len(program.inputs) + len(program.outputs) + program.scratch
        width = self._scratch_bytes // registers // ALIGNMENT * ALIGNMENT
        if not width:
            raise ValueError(
                f"{self._scratch_bytes} bytes of scratch memory for decoding; {registers} registers need "
                f"{registers * ALIGNMENT} at least (REFT_PARITY_SCRATCH_BYTES)"
            )
        return min(width, stripe_slice.end - stripe_slice.begin)


class _DeviceColumns(PacketColumns):
    def run(self, program: XorProgram, scratch: torch.Tensor) -> None:
        n = self.last - self.first
        scratch_rows: Iterator[torch.Tensor] = (scratch[at : at + n] for at in range(0, scratch.nbytes - n + 1, n))
        inputs = [self._input(shard, packet, scratch_rows) for shard, packet in program.inputs]
        ranges = [self.cell_range(shard, packet) for shard, packet in program.outputs]
        views = [self.flat_view.device_view(begin, end) if is_full else None for begin, end, is_full in ranges]
        outputs = [next(scratch_rows) if view is None else view for view in views]
        run(program, inputs, outputs, [next(scratch_rows) for _ in range(program.scratch)], xor.TORCH)
        for view, output, (begin, end, _) in zip(views, outputs, ranges, strict=True):
            if view is None:
                self.flat_view.scatter(begin, output[: end - begin])

    def _input(self, shard: int, packet: int, scratch_rows: Iterator[torch.Tensor]) -> torch.Tensor:
        if shard >= self.lane.code.k:
            return next(scratch_rows).copy_(torch.from_numpy(self.parity(shard, packet)), non_blocking=True)
        begin, end, is_full = self.cell_range(shard, packet)
        view = self.flat_view.device_view(begin, end) if is_full else None
        if view is not None:
            return view
        row = next(scratch_rows)
        self.flat_view.gather(begin, row[: end - begin])
        row[end - begin :].zero_()
        return row


def decoder_for(device: torch.device, scratch_bytes: int) -> Decoder:
    """Returns the decoder for state on `device`: the device decoder for CUDA, else the host's.

    Args:
        device: the device of the state.
        scratch_bytes: the most memory of a CUDA device that decoding takes.
    """
    return DeviceDecoder(device, Device(device), scratch_bytes) if device.type == "cuda" else Decoder()
