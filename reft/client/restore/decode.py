"""Makes the shards of a stripe's slice from the columns that the keeper has.

    received columns, in rows of the slice ──┐                                    ┌─► made packets,
    live columns, in the keeper's tensors ───┴─ program, block of columns by ─────┘   in host memory
                                                block, on the host or the device

A register is live memory or a row. A register is a copy only if a leaf ends within the columns.

Invariants on a device
  1. The device needs `scratch_bytes` beside the state, independent of the amount to decode.
  2. The columns of all helper threads go into one stream, slice after slice, so all share one
     scratch.
  3. `decode` returns after the device has finished the slice's last column.

All calls of CUDA are behind `Device`, so this code also runs without CUDA.
"""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import torch

from reft.client.memory.cuda import Device
from reft.client.memory.xor import TORCH
from reft.client.restore.device_copies import DeviceCopier
from reft.client.restore.tensor_view import FlatTensorView
from reft.core.coding.erasure import XorProgram, run, run_columns
from reft.core.layout.layout import ALIGNMENT
from reft.core.recovery.stripes import StripeSlice
from reft.wire.slot_format import Bytes


class StripeDecoder:
    """Makes shards on the host; serves several threads."""

    def begin(self) -> DeviceCopier:
        """Returns the copies to a device; called by the thread that created the live tensors."""
        return DeviceCopier(None)

    def decode(self, stripe_slice: StripeSlice, rows: Bytes, live: FlatTensorView, base: int) -> Bytes:
        """Returns the made packets of a slice, uint8 [packets, width].

        Args:
            stripe_slice: the slice; all its columns have arrived.
            rows: the received columns, uint8 [read packets x width], at the rows of the slice.
            live: the keeper's live memory.
            base: where the lane's cell begins in `live`.
        """
        program, packets = stripe_slice.stripe.program, stripe_slice.packets(rows)
        made = np.empty((len(program.outputs), stripe_slice.width), np.uint8)
        inputs = [
            self._input(stripe_slice, packets[shard][packet], live, base, shard, packet)
            for shard, packet in program.inputs
        ]
        run_columns(program, inputs, list(made))
        return made

    def _input(
        self, stripe_slice: StripeSlice, row: Bytes, live: FlatTensorView, base: int, shard: int, packet: int
    ) -> Bytes:
        if shard not in stripe_slice.stripe.live:
            return row
        begin, end = stripe_slice.cell_range(shard, packet)
        view = live.view(base + begin, base + end) if end - begin == stripe_slice.width else None
        if view is None:
            live.read(base + begin, torch.from_numpy(row[: end - begin]))
            row[end - begin :] = 0
        return row if view is None else view


class DeviceDecoder(StripeDecoder):
    """Makes shards on one device, where the live columns are; others on the host.

    Args:
        streams: the device's streams, or a replacement in the contract test.
        device: the device of the state.
        scratch_bytes: device memory for all registers of a column that are not live memory.

    Attributes:
        device: the device of the state.
    """

    def __init__(self, streams: Device, device: torch.device, scratch_bytes: int) -> None:
        self._streams, self.device, self._scratch_bytes = streams, device, scratch_bytes
        self._scratch: torch.Tensor | None = None
        self._lock = threading.Lock()

    def begin(self) -> DeviceCopier:
        """Waits until the device has created the live tensors; returns the copies to the device.

        Next, helper threads and the side stream write these tensors.
        """
        self._streams.host_waits(self._streams.record_compute())
        return DeviceCopier(self._streams)

    def decode(self, stripe_slice: StripeSlice, rows: Bytes, live: FlatTensorView, base: int) -> Bytes:
        """Returns the made packets; decodes on the device if live columns lie there.

        Raises:
            ValueError: the scratch is too small for columns of one alignment.
        """
        if not (live.is_on_device and stripe_slice.stripe.live):
            return super().decode(stripe_slice, rows, live, base)
        program, packets = stripe_slice.stripe.program, stripe_slice.packets(rows)
        made = np.empty((len(program.outputs), stripe_slice.width), np.uint8)
        width = self._width(program, stripe_slice)
        with self._lock, torch.no_grad(), self._streams.on_side():
            if self._scratch is None:
                self._scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self.device)
            for first in range(0, stripe_slice.width, width):
                n = min(width, stripe_slice.width - first)
                scratch_rows = (self._scratch[at : at + n] for at in range(0, self._scratch_bytes - n + 1, n))
                inputs = [
                    self._device_input(
                        stripe_slice, packets[shard][packet], live, base, first, next(scratch_rows), shard, packet
                    )
                    for shard, packet in program.inputs
                ]
                outputs = list(islice(scratch_rows, len(program.outputs)))
                run(program, inputs, outputs, list(islice(scratch_rows, program.scratch)), TORCH)
                for result, output in zip(made, outputs, strict=True):
                    torch.from_numpy(result[first : first + n]).copy_(output, non_blocking=True)
            done = self._streams.record_side()
        self._streams.host_waits(done)
        return made

    def _device_input(
        self, stripe_slice: StripeSlice, row: Bytes, live: FlatTensorView, base: int, first: int,
        scratch: torch.Tensor, shard: int, packet: int,
    ) -> torch.Tensor:  # fmt: skip
        n = scratch.nbytes
        if shard not in stripe_slice.stripe.live:
            return scratch.copy_(torch.from_numpy(row[first : first + n]), non_blocking=True)
        begin, end = stripe_slice.cell_range(shard, packet)
        begin, end = min(begin + first, end), min(begin + first + n, end)
        view = live.device_view(base + begin, base + end) if end - begin == n else None
        if view is None:
            live.read(base + begin, scratch[: end - begin])
            scratch[end - begin :].zero_()
        return scratch if view is None else view

    def _width(self, program: XorProgram, stripe_slice: StripeSlice) -> int:
        """Returns the number of columns to decode at a time.

        Counts one scratch row for each register, although some registers need none.
        """
        registers = len(program.inputs) + len(program.outputs) + program.scratch
        width = self._scratch_bytes // registers // ALIGNMENT * ALIGNMENT
        if not width:
            raise ValueError(
                f"{self._scratch_bytes} bytes of scratch memory for decoding; {registers} registers need "
                f"{registers * ALIGNMENT} at least (REFT_PARITY_SCRATCH_BYTES)"
            )
        return min(width, stripe_slice.width)


def decoder_for(device: torch.device, scratch_bytes: int) -> StripeDecoder:
    """Returns the decoder for state on `device`: the device decoder for CUDA, else the host's.

    Args:
        device: the device of the state.
        scratch_bytes: the most memory of a CUDA device that decoding takes.
    """
    return DeviceDecoder(Device(device), device, scratch_bytes) if device.type == "cuda" else StripeDecoder()
