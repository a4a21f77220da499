"""Decodes the lost shards of a band of one stripe into the live tensors: on the host, or on the device where they lie.

On the host:

    data that arrived, in the tensors ─┐   columns, a few KiB at a time: all registers   ┌─► the lost shard, in the tensors
    parity, in a buffer of its group  ─┴── of the program stay in the core's cache ──────┘

A register is live memory, or the parity's buffer; only where a leaf ends within the columns is it a copy.

On a device, with the coder for tensors:

    data that arrived, in the tensors ────┐   columns, as wide as the scratch allows  ┌─► the lost shard, in the tensors
    parity, pinned ─► rows of the scratch ─┴── side stream: one kernel for each step ──┘

A register is the device's live memory, or a row of the scratch: parity, and what a leaf's end or a leaf on the host (a counter
of steps) makes impossible to use as it lies.

Invariants, on a device
  1. The device needs `scratch_bytes` beside the state, whatever is decoded.
  2. The columns of all helper threads are enqueued in one stream, band after band, so that one scratch serves them all.
  3. `decode` returns when the device has passed the band's last column: its parity's memory may be used again, and any stream
     may read what was decoded.

What talks to CUDA is behind `Device`, so that this runs where there is none.
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

Rows = Mapping[tuple[int, int], Bytes]  # (parity shard, packet) → its columns of the band


@dataclass
class Decoder:
    """Remembers its programs; used by several threads.

    Attributes:
        device: where it decodes; None: on the host.
    """

    device: torch.device | None = None
    _programs: dict[tuple[object, ...], XorProgram] = field(default_factory=dict)

    def begin(self) -> None:
        """Called before anything is loaded, by the thread that made the live tensors."""

    def decode(self, group: StripeSlice, lane: Lane, rows: Rows, flat_view: FlatTensorView) -> None:
        """Computes the group's lost shards.

        Args:
            group: with all its pieces in `space` and `rows`.
            lane: of the group.
            rows: the parity's bytes.
            flat_view: of the lane's cell.
        """
        program = self.program(group, lane)
        registers = len(program.inputs) + len(program.outputs) + program.scratch
        width = min(max(CACHE_BYTES // registers, COLUMNS_MIN), COLUMNS_MAX) // ALIGNMENT * ALIGNMENT
        width = min(width, group.end - group.begin)
        room = np.empty((registers, width), np.uint8)
        for first in range(group.begin, group.end, width):
            last = min(first + width, group.end)
            _HostColumns(group, lane, rows, flat_view, first, last).run(program, room[:, : last - first])

    def program(self, group: StripeSlice, lane: Lane) -> XorProgram:
        """What computes the group's lost shards.

        Raises:
            ValueError: they can't be computed from the shards that it reads.
        """
        code = lane.code
        parities = tuple(shard - code.k for shard in group.read.shards if shard >= code.k)
        # Not the code itself: its tables are thousands of entries to hash.
        key = (code.kind, code.k, code.f, code.w, group.read.lost, parities)
        if key not in self._programs:
            self._programs[key] = decode_program(code, group.read.lost, parities)
        return self._programs[key]


@dataclass(frozen=True)
class PacketColumns:
    """Columns first..last of every packet of a stripe; where they are computed is for those that derive from it."""

    group: StripeSlice
    lane: Lane
    rows: Rows
    flat_view: FlatTensorView
    first: int
    last: int

    def parity(self, shard: int, packet: int) -> Bytes:
        """What arrived of a packet of parity."""
        return self.rows[shard, packet][self.first - self.group.begin : self.last - self.group.begin]

    def place(self, shard: int, packet: int) -> tuple[int, int, bool]:
        """Where the columns of a data packet lie in the cell, and whether none of them is padding."""
        start = self.lane.data_range(self.group.read.stripe, shard)[0] + packet * self.lane.packet_bytes
        limit = self.lane.begin + self.lane.nbytes
        begin, end = min(start + self.first, limit), min(start + self.last, limit)
        return begin, end, end - begin == self.last - self.first


class _HostColumns(PacketColumns):
    def run(self, program: XorProgram, room: Bytes) -> None:
        inputs = [self._input(shard, packet, room[i]) for i, (shard, packet) in enumerate(program.inputs)]
        at = len(inputs)
        ranges = [self.place(shard, packet) for shard, packet in program.outputs]
        views = [self.flat_view.view(begin, end) if full else None for begin, end, full in ranges]
        outputs = [room[at + i] if view is None else view for i, view in enumerate(views)]
        run(program, inputs, outputs, [room[at + len(outputs) + i] for i in range(program.scratch)])
        for view, output, (begin, end, _) in zip(views, outputs, ranges, strict=True):
            if view is None:
                self.flat_view.write(begin, output[: end - begin])

    def _input(self, shard: int, packet: int, room: Bytes) -> Bytes:
        if shard >= self.lane.code.k:
            return self.parity(shard, packet)
        begin, end, full = self.place(shard, packet)
        view = self.flat_view.view(begin, end) if full else None
        if view is not None:
            return view
        self.flat_view.read(begin, room[: end - begin])
        room[end - begin :] = 0
        return room


class DeviceDecoder(Decoder):
    """Decodes on one device; cells that lie on the host alone, there.

    Args:
        device: of the state.
        streams: of that device, or what stands for them in the contract test.
        scratch_bytes: of the device, for all registers of a column that are not live memory.
    """

    def __init__(self, device: torch.device, streams: Device, scratch_bytes: int) -> None:
        super().__init__(device)
        self._streams, self._scratch_bytes = streams, scratch_bytes
        self._scratch: torch.Tensor | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Waits until the device has made the live tensors: helper threads, and the side stream, write them next."""
        self._streams.host_waits(self._streams.record_compute())

    def decode(self, group: StripeSlice, lane: Lane, rows: Rows, flat_view: FlatTensorView) -> None:
        """As on the host.

        Raises:
            ValueError: the scratch has no room for the columns of one alignment.
        """
        if not flat_view.is_on_device:
            super().decode(group, lane, rows, flat_view)
            return
        program = self.program(group, lane)
        width = self._width(program, group)
        with self._lock, torch.no_grad(), self._streams.on_side():
            if self._scratch is None:
                self._scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self.device)
            for first in range(group.begin, group.end, width):
                last = min(first + width, group.end)
                _DeviceColumns(group, lane, rows, flat_view, first, last).run(program, self._scratch)
            done = self._streams.record_side()
        self._streams.host_waits(done)

    def _width(self, program: XorProgram, group: StripeSlice) -> int:
        """Columns at a time: a row of the scratch for each register, though most need none."""
        registers = len(program.inputs) + len(program.outputs) + program.scratch
        width = self._scratch_bytes // registers // ALIGNMENT * ALIGNMENT
        if not width:
            raise ValueError(
                f"{self._scratch_bytes} bytes of scratch memory for decoding; {registers} registers need "
                f"{registers * ALIGNMENT} at least (REFT_PARITY_SCRATCH_BYTES)"
            )
        return min(width, group.end - group.begin)


class _DeviceColumns(PacketColumns):
    def run(self, program: XorProgram, scratch: torch.Tensor) -> None:
        n = self.last - self.first
        room: Iterator[torch.Tensor] = (scratch[at : at + n] for at in range(0, scratch.nbytes - n + 1, n))
        inputs = [self._input(shard, packet, room) for shard, packet in program.inputs]
        ranges = [self.place(shard, packet) for shard, packet in program.outputs]
        views = [self.flat_view.device_view(begin, end) if full else None for begin, end, full in ranges]
        outputs = [next(room) if view is None else view for view in views]
        xor.run(program, inputs, outputs, [next(room) for _ in range(program.scratch)])
        for view, output, (begin, end, _) in zip(views, outputs, ranges, strict=True):
            if view is None:
                self.flat_view.scatter(begin, output[: end - begin])

    def _input(self, shard: int, packet: int, room: Iterator[torch.Tensor]) -> torch.Tensor:
        if shard >= self.lane.code.k:
            return next(room).copy_(torch.from_numpy(self.parity(shard, packet)), non_blocking=True)
        begin, end, full = self.place(shard, packet)
        view = self.flat_view.device_view(begin, end) if full else None
        if view is not None:
            return view
        row = next(room)
        self.flat_view.gather(begin, row[: end - begin])
        row[end - begin :].zero_()
        return row


def decoder_for(device: torch.device, scratch_bytes: int) -> Decoder:
    """The decoder for state on a device: there if it is a CUDA device, else on the host.

    Args:
        device: where the state lies.
        scratch_bytes: of a CUDA device, the most that decoding takes.
    """
    return DeviceDecoder(device, Device(device), scratch_bytes) if device.type == "cuda" else Decoder()
