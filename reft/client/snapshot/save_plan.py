"""The share: what one rank writes in one snapshot, cut into work that an engine only has to carry out.

    placement ─► blocks of this rank ─┐             ┌─► runs      live bytes ─► slot
    live leaves, as they are now ─────┼─► Share ────┼─► columns   live bytes of k data shards ─► XOR ─► slot
    kept leaves, and extra ones ──────┘             ├─► riders    names: they go into the capsule
                                                    └─► zeros     what is neither: padding, absent leaves

    slot data   | data shards           | parity shards        | kept leaves | extra leaves |
                | runs, zeros           | columns              | runs, zeros                |

Invariants
  1. Runs, zeros and the columns' outputs cover the slot's data, each byte once.
  2. Where the bytes lie depends on the placement alone. A predicted leaf that does not exist (yet) is zeros; one that exists
     and was not predicted, or is of another kind than was predicted, is extra: kept after the kept leaves.
  3. A share names leaves by number and never looks at their bytes, so it is made again only when other leaves exist.
  4. No column needs more registers than fit into the scratch memory that was allowed; see `ParityTiling`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from reft.core.coding.erasure import XorProgram, encode_program
from reft.core.coding.placement import Lane, Placement, RankPlacement, ShardBlock
from reft.core.layout.cells import RIDERS_MAX
from reft.core.layout.layout import Layout, Leaf, align, pack
from reft.errors import ConfigError
from reft.wire.messages import table_to
from reft.wire.v1 import daemon_pb2 as pb

UNIT = 64  # bytes: a cache line; columns begin at multiples of it


class WriteItem(NamedTuple):
    """`nbytes` from `begin` of leaf number `leaf`; they go to `at` of the slot's data, or of a column's register."""

    leaf: int
    begin: int
    nbytes: int
    at: int


class CellRuns(NamedTuple):
    """The live bytes of one cell; `at` of its runs counts from the beginning of the cell."""

    cell: int
    nbytes: int
    runs: tuple[WriteItem, ...]


class ParityColumn(NamedTuple):
    """One parity shard between two offsets of its packets: every register has `nbytes`.

    Attributes:
        inputs: for each input register of the program the runs in it; what they leave out is zeros.
        outputs: where in the slot's data each output register goes.
        rows: registers that an engine needs room for: outputs, the program's scratch, and inputs that are no single run.
    """

    program: XorProgram
    nbytes: int
    inputs: tuple[tuple[WriteItem, ...], ...]
    outputs: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class ParityTiling:
    """How an engine wants parity cut; all sizes in bytes.

    Attributes:
        register: the largest column.
        hot: aimed at for all outputs of a column and the program's scratch together, but not below `register` / 4: they are
            read and written again and again, while inputs pass by.
        scratch: the most that the registers of one column may need together.
    """

    register: int = 256 << 10
    hot: int = 1 << 20
    scratch: int = 64 << 20

    def width(self, program: XorProgram) -> int:
        """The column width to begin with."""
        rows = len(program.outputs) + program.scratch
        return align(max(self.register // 4, min(self.register, self.hot // rows)), UNIT)


@dataclass(frozen=True)
class SavePlan:
    """See the module. Offsets count in the slot's data, sizes are in bytes.

    Attributes:
        tensors: the live leaves, by name.
        leaves: the leaves that exist, by name; runs name them by their number here.
        placement: what the placement gives this rank.
        layout: the leaves as the slot's table lists them; the offset of those that are not kept says nothing.
        runs: in the order of their place in the slot.
        columns: the parity, in the order of its place in the slot.
        zeros: (offset, size) of what nobody else writes.
        cells: all live bytes of the cells that this rank holds.
        inline_leaves: numbers of the leaves that travel in the capsule.
        absent: predicted leaves that do not exist.
        unplanned: leaves that exist and were not predicted.
        host_resident: numbers of the leaves that lie on the host while the state lies on a device.
        table: the leaf table's bytes.
        digest: 16 bytes, of the table and of all else that decides where bytes lie.
    """

    tensors: Mapping[str, torch.Tensor]
    leaves: tuple[Leaf, ...]
    placement: RankPlacement
    chunk_bytes: int
    tiling: ParityTiling
    layout: Layout
    runs: tuple[WriteItem, ...]
    columns: tuple[ParityColumn, ...]
    zeros: tuple[tuple[int, int], ...]
    cells: tuple[CellRuns, ...]
    inline_leaves: tuple[int, ...]
    absent: tuple[str, ...]
    unplanned: tuple[str, ...]
    host_resident: frozenset[int]
    table: bytes
    digest: bytes

    @property
    def data_bytes(self) -> int:
        """Size of the slot's data."""
        return self.layout.data_bytes

    @cached_property
    def written_bytes(self) -> int:
        """What one snapshot writes into the slot's data: live bytes and parity. Zeros are written once, not each time."""
        return sum(run.nbytes for run in self.runs) + sum(
            column.nbytes * len(column.outputs) for column in self.columns
        )

    @property
    def parity_chunks(self) -> range:
        """The chunks of the parity section: sections begin at chunks."""
        first = self.placement.parity_offset // self.chunk_bytes
        return (
            range(first, self.placement.unreplicated_offset // self.chunk_bytes)
            if self.columns
            else range(first, first)
        )

    def is_direct(self, runs: Sequence[WriteItem], nbytes: int) -> bool:
        """Whether a register is one run where its leaf lies, so that nothing needs to be put together."""
        return len(runs) == 1 and runs[0].nbytes == nbytes and runs[0].leaf not in self.host_resident

    def with_tensors(self, leaves: Iterable[Leaf], tensors: Mapping[str, torch.Tensor]) -> SavePlan | None:
        """The same share of the same leaves in other memory; None if other leaves exist now, or lie elsewhere."""
        ordered = tuple(sorted(leaves, key=lambda leaf: leaf.name))
        if ordered != self.leaves or _apart(ordered, tensors) != self.host_resident:
            return None
        return replace(self, tensors=tensors)


def plan_save(
    placement: Placement, rank: int, leaves: Sequence[Leaf], tensors: Mapping[str, torch.Tensor], cut: ParityTiling
) -> SavePlan:
    """What a rank writes, given the leaves that it has now.

    Args:
        placement: fixed for the epoch.
        rank: whose share.
        leaves: what exists, whether predicted or not.
        tensors: their live tensors, by name; empty if only sizes are asked for, before the leaves exist.
        cut: how the engine wants its parity.

    Raises:
        ConfigError: a column of the smallest size does not fit into the scratch memory.
    """
    return _Builder(placement, rank, leaves, tensors, cut).build()


def _apart(leaves: Sequence[Leaf], tensors: Mapping[str, torch.Tensor]) -> frozenset[int]:
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return frozenset()
    return frozenset(i for i, leaf in enumerate(leaves) if tensors[leaf.name].device.type == "cpu")


class _Builder:
    """Puts one share together."""

    def __init__(
        self,
        placement: Placement,
        rank: int,
        leaves: Iterable[Leaf],
        tensors: Mapping[str, torch.Tensor],
        cut: ParityTiling,
    ) -> None:
        self.lanes = placement.lanes
        self.placement = placement
        self.leaves = leaves = tuple(sorted(leaves, key=lambda leaf: leaf.name))
        self.tensors = tensors
        self.cut = cut
        self.layout_digest = placement.division.layout_of[rank]
        self.cells = placement.division.cells_of[self.layout_digest]
        self.part = placement.part(rank)
        self.number = {leaf.name: i for i, leaf in enumerate(leaves)}
        # Leaf numbers of each cell, -1 for zeros.
        self.members = {c: [self._find(leaf) for leaf in placement.division.cells[c].leaves] for c in self.cells}
        self.apart = _apart(leaves, tensors)
        self.programs: dict[tuple[int, int], XorProgram] = {}

    def _find(self, leaf: Leaf) -> int:
        """The number of a predicted leaf; -1 if it does not exist, or not as predicted."""
        number = self.number.get(leaf.name, -1)
        return number if number >= 0 and self.leaves[number] == leaf else -1

    def build(self) -> SavePlan:
        in_cells = {number for members in self.members.values() for number in members if number >= 0}
        inline_leaves = self._inline_leaves()
        kept = [
            (self._find(leaf), offset)
            for leaf, offset in zip(self.part.unreplicated.leaves, self.part.unreplicated.offsets, strict=True)
        ]
        placed = in_cells | set(inline_leaves) | {number for number, _ in kept}
        extra = pack(leaf for i, leaf in enumerate(self.leaves) if i not in placed)
        begin = align(self.part.data_bytes)
        kept = [(number, self.part.unreplicated_offset + offset) for number, offset in kept if number >= 0]
        kept += [(self.number[leaf.name], begin + at) for leaf, at in zip(extra.leaves, extra.offsets, strict=True)]
        data_bytes = begin + extra.data_bytes if extra.leaves else self.part.data_bytes

        runs = [run for block in self.part.blocks[: self.part.data_blocks] for run in self._block_runs(block)]
        runs += [
            WriteItem(number, 0, self.leaves[number].nbytes, at) for number, at in kept if self.leaves[number].nbytes
        ]
        parity = self.part.blocks[self.part.data_blocks :]
        layout, table = self._table(kept, in_cells, inline_leaves, data_bytes)
        return SavePlan(
            tensors=self.tensors, leaves=self.leaves, placement=self.part, chunk_bytes=self.placement.chunk_bytes,
            tiling=self.cut, layout=layout, runs=tuple(runs), columns=tuple(c for block in parity for c in self._columns(block)),
            zeros=tuple(_gaps(runs, parity, data_bytes)), cells=tuple(self._live_cells()),
            inline_leaves=tuple(inline_leaves), absent=self._absent(),
            unplanned=tuple(leaf.name for leaf in extra.leaves), host_resident=self.apart,
            table=table, digest=self._digest(table),
        )  # fmt: skip

    def _inline_leaves(self) -> list[int]:
        """Riders that exist, while they fit: a leaf that turned out larger than predicted must not burst the capsule."""
        found = []
        room = RIDERS_MAX
        for name in self.placement.division.inline_leaves[self.layout_digest]:
            number = self.number.get(name, -1)
            if number >= 0 and self.leaves[number].nbytes <= room:
                found.append(number)
                room -= self.leaves[number].nbytes
        return found

    def _absent(self) -> tuple[str, ...]:
        division = self.placement.division
        predicted = {leaf.name for c in self.cells for leaf in division.cells[c].leaves}
        predicted |= set(division.inline_leaves[self.layout_digest]) | {
            leaf.name for leaf in self.part.unreplicated.leaves
        }
        return tuple(sorted(predicted - set(self.number)))

    def _table(
        self, kept: Iterable[tuple[int, int]], in_cells: set[int], inline_leaves: Sequence[int], data_bytes: int
    ) -> tuple[Layout, bytes]:
        offsets = dict(kept)
        order = sorted(range(len(self.leaves)), key=lambda i: (offsets.get(i, -1), self.leaves[i].name))
        places = {self.leaves[i].name: pb.CELL for i in in_cells} | {
            self.leaves[i].name: pb.INLINE for i in inline_leaves
        }
        layout = Layout(tuple(self.leaves[i] for i in order), tuple(offsets.get(i, 0) for i in order), data_bytes)
        return layout, table_to(layout, places)

    def _digest(self, table: bytes) -> bytes:
        found = hashlib.blake2b(table, digest_size=16)
        for block in self.part.blocks:
            lane = self.lanes[block.lane]
            code = (lane.code.kind, lane.code.k, lane.code.f, lane.code.w, lane.packet_bytes)
            found.update(repr((block, lane.cell, lane.begin, lane.nbytes, code)).encode())
        for c in self.cells:
            cell = self.placement.division.cells[c]
            names = [(leaf.name, at) for leaf, at in zip(cell.leaves, cell.offsets, strict=True)]
            found.update(repr((c, names)).encode())
        return found.digest()

    # Bytes of cells

    def _cell_runs(self, lane: Lane, begin: int, end: int, at: int) -> Iterator[WriteItem]:
        """The runs of live bytes between two offsets of a lane's cell; byte `begin` goes to `at`."""
        cell, members = self.placement.division.cells[lane.cell], self.members[lane.cell]
        end = min(end, lane.begin + lane.nbytes)
        index = max(bisect_right(cell.offsets, begin) - 1, 0)
        while index < len(members) and cell.offsets[index] < end:
            offset, number = cell.offsets[index], members[index]
            first, last = max(begin, offset), min(end, offset + cell.leaves[index].nbytes)
            if number >= 0 and first < last:
                yield WriteItem(number, first - offset, last - first, at + first - begin)
            index += 1

    def _live_cells(self) -> Iterator[CellRuns]:
        for c in self.cells:
            cell = self.placement.division.cells[c]
            found = zip(self.members[c], cell.leaves, cell.offsets, strict=True)
            yield CellRuns(c, cell.nbytes, tuple(WriteItem(n, 0, leaf.nbytes, at) for n, leaf, at in found if n >= 0))

    def _block_runs(self, block: ShardBlock) -> Iterator[WriteItem]:
        lane = self.lanes[block.lane]
        yield from self._cell_runs(lane, *lane.data_range(block.stripe, block.shard), block.offset)

    # Parity

    def _columns(self, block: ShardBlock) -> Iterator[ParityColumn]:
        lane = self.lanes[block.lane]
        program = self._program(lane, block.shard - lane.code.k)
        width = self.cut.width(program)
        parts = -(-lane.packet_bytes // width)
        width = align(-(-lane.packet_bytes // parts), UNIT)  # of like size, so that threads can share them out
        at = 0
        while at < lane.packet_bytes:
            column = self._column(block, program, at, min(width, lane.packet_bytes - at))
            while column.rows * column.nbytes > self.cut.scratch:
                # Leaves so small that inputs must be put together: fewer of them fall into a narrower column.
                if column.nbytes <= UNIT:
                    raise ConfigError(
                        f"a column of {column.rows} registers needs {column.rows * column.nbytes} bytes of scratch memory; "
                        f"the limit is {self.cut.scratch}.",
                        "raise REFT_PARITY_SCRATCH_BYTES",
                    )
                column = self._column(block, program, at, max(column.nbytes // 2 // UNIT * UNIT, UNIT))
            yield column
            at += column.nbytes

    def _column(self, block: ShardBlock, program: XorProgram, at: int, nbytes: int) -> ParityColumn:
        lane = self.lanes[block.lane]
        inputs = []
        for shard, packet in program.inputs:
            begin = lane.data_range(block.stripe, shard)[0] + packet * lane.packet_bytes + at
            inputs.append(tuple(self._cell_runs(lane, begin, begin + nbytes, 0)))
        composed = sum(
            1 for runs in inputs if runs and (len(runs) > 1 or runs[0].nbytes < nbytes or runs[0].leaf in self.apart)
        )
        rows = len(program.outputs) + program.scratch + composed
        outputs = tuple(block.offset + packet * lane.packet_bytes + at for _, packet in program.outputs)
        return ParityColumn(program, nbytes, tuple(inputs), outputs, rows)

    def _program(self, lane: Lane, parity: int) -> XorProgram:
        key = (id(lane.code), parity)
        if key not in self.programs:
            self.programs[key] = encode_program(lane.code, parity)
        return self.programs[key]


def _gaps(runs: Iterable[WriteItem], parity: Iterable[ShardBlock], data_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of what lies between runs and parity blocks."""
    taken = sorted([(run.at, run.nbytes) for run in runs] + [(block.offset, block.nbytes) for block in parity])
    end = 0
    for offset, nbytes in [*taken, (data_bytes, 0)]:
        if end < offset:
            yield end, offset - end
        end = offset + nbytes
