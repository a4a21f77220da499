"""Decodes the lost shards of a band of one stripe into the live tensors.

    data that arrived, in the tensors ─┐   columns, a few KiB at a time: all registers   ┌─► the lost shard, in the tensors
    parity, in a buffer of its group  ─┴── of the program stay in the core's cache ──────┘

A register is live memory, or the parity's buffer; only where a leaf ends within the columns is it a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from reft.client.restore.load_plan import ALIGNMENT, Group
from reft.client.restore.tensor_view import CellSpace
from reft.core.coding.erasure import Program, decode_program, run
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
    _programs: dict[tuple[object, ...], Program] = field(default_factory=dict)

    def begin(self) -> None:
        """Called before anything is loaded, by the thread that made the live tensors."""

    def decode(self, group: Group, lane: Lane, rows: Rows, space: CellSpace) -> None:
        """Computes the group's lost shards.

        Args:
            group: with all its pieces in `space` and `rows`.
            lane: of the group.
            rows: the parity's bytes.
            space: of the lane's cell.
        """
        program = self.program(group, lane)
        registers = len(program.inputs) + len(program.outputs) + program.scratch
        width = min(max(CACHE_BYTES // registers, COLUMNS_MIN), COLUMNS_MAX) // ALIGNMENT * ALIGNMENT
        width = min(width, group.end - group.begin)
        room = np.empty((registers, width), np.uint8)
        for first in range(group.begin, group.end, width):
            last = min(first + width, group.end)
            _HostColumns(group, lane, rows, space, first, last).run(program, room[:, : last - first])

    def program(self, group: Group, lane: Lane) -> Program:
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
class Columns:
    """Columns first..last of every packet of a stripe; where they are computed is for those that derive from it."""

    group: Group
    lane: Lane
    rows: Rows
    space: CellSpace
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


class _HostColumns(Columns):
    def run(self, program: Program, room: Bytes) -> None:
        inputs = [self._input(shard, packet, room[i]) for i, (shard, packet) in enumerate(program.inputs)]
        at = len(inputs)
        ranges = [self.place(shard, packet) for shard, packet in program.outputs]
        views = [self.space.view(begin, end) if full else None for begin, end, full in ranges]
        outputs = [room[at + i] if view is None else view for i, view in enumerate(views)]
        run(program, inputs, outputs, [room[at + len(outputs) + i] for i in range(program.scratch)])
        for view, output, (begin, end, _) in zip(views, outputs, ranges, strict=True):
            if view is None:
                self.space.write(begin, output[: end - begin])

    def _input(self, shard: int, packet: int, room: Bytes) -> Bytes:
        if shard >= self.lane.code.k:
            return self.parity(shard, packet)
        begin, end, full = self.place(shard, packet)
        view = self.space.view(begin, end) if full else None
        if view is not None:
            return view
        self.space.read(begin, room[: end - begin])
        room[end - begin :] = 0
        return room
