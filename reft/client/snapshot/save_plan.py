"""The save plan: what one rank writes in one snapshot, as work that a copy engine carries out.

    blocks of this rank (placement) ─┐              ┌─► runs           live bytes ─► slot
    live leaves, as they are now ────┼─► SavePlan ──┼─► columns        k data shards ─► XOR ─► slot
    unreplicated, unplanned leaves ──┘              ├─► inline leaves  they go into the capsule
                                                    └─► zeros          padding, absent leaves

    slot data   | data shards   | parity shards   | unreplicated leaves | unplanned leaves |
                | runs, zeros   | columns         | runs, zeros                            |

Invariants
  1. Runs, zeros and the columns' outputs cover the slot's data, each byte once.
  2. Where the bytes lie depends on the placement alone. A predicted leaf that does not exist (yet)
     is zeros. A leaf is unplanned if it was not predicted, or predicted with another shape or
     dtype; it lies after the unreplicated leaves.
  3. A plan names leaves by number and never reads their bytes, so it is made anew only when other
     leaves exist.
  4. No column needs more registers than fit into the allowed scratch memory; see `ParityTiling`.
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
from reft.core.layout.cells import INLINE_BYTES_MAX
from reft.core.layout.layout import Layout, Leaf, align, pack
from reft.errors import ConfigError
from reft.wire.messages import table_to
from reft.wire.v1 import daemon_pb2 as pb

UNIT = 64  # bytes: a cache line; columns begin at multiples of it


class WriteItem(NamedTuple):
    """A run: `nbytes` from byte `begin` of leaf number `leaf` go to byte `at` of the target.

    The target is the slot's data, or a register of a parity column.
    """

    leaf: int
    begin: int
    nbytes: int
    at: int


class CellRuns(NamedTuple):
    """The live bytes of one cell. `at` in `runs` counts from the beginning of the cell."""

    cell: int
    nbytes: int
    runs: tuple[WriteItem, ...]


class ParityColumn(NamedTuple):
    """A parity shard between two offsets of its packets; every register has `nbytes` bytes.

    Attributes:
        program: computes the output registers from the input registers.
        nbytes: size of each register.
        inputs: the runs in each input register of the program; bytes outside the runs are zeros.
        outputs: where in the slot's data each output register goes.
        rows: number of registers that need memory: outputs, the program's scratch, and inputs of
            not just one run.
    """

    program: XorProgram
    nbytes: int
    inputs: tuple[tuple[WriteItem, ...], ...]
    outputs: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class ParityTiling:
    """The sizes of parity columns that suit an engine, in bytes.

    Attributes:
        register: the largest size of a register.
        hot: the target size of a column's outputs and the program's scratch together. Both are read
            and written many times, while each input is read once. The register is at least
            `register` / 4 all the same.
        scratch: the limit for all registers of one column together.
    """

    register: int = 256 << 10
    hot: int = 1 << 20
    scratch: int = 64 << 20

    def width(self, program: XorProgram) -> int:
        """Returns the column width to try first."""
        rows = len(program.outputs) + program.scratch
        return align(max(self.register // 4, min(self.register, self.hot // rows)), UNIT)


@dataclass(frozen=True)
class SavePlan:
    """The writes of one rank, as the module describes them.

    Offsets count in the slot's data, sizes are in bytes.

    Attributes:
        tensors: the live leaves, by name.
        leaves: the leaves that exist, sorted by name; runs name a leaf by its index here.
        placement: this rank's part of the placement.
        chunk_bytes: size of a chunk.
        tiling: the sizes of parity columns.
        layout: the leaves in the order of the slot's table; an offset has a meaning for
            unreplicated leaves only.
        runs: the live bytes to copy, in the order of their place in the slot.
        columns: the parity to compute, in the order of its place in the slot.
        zeros: (offset, size) of each place that neither runs nor columns write.
        cells: all live bytes of the cells that this rank holds.
        inline_leaves: numbers of the leaves that travel in the capsule.
        absent: names of predicted leaves that do not exist.
        unplanned: names of leaves that exist and were not predicted.
        host_resident: numbers of the leaves that lie on the host while the state lies on a device.
        table: the leaf table's bytes.
        digest: 16 bytes: digest of the table and of all else that decides where bytes lie.
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
        """Live bytes and parity that one snapshot writes; zeros are written once a layout."""
        return sum(run.nbytes for run in self.runs) + sum(
            column.nbytes * len(column.outputs) for column in self.columns
        )

    @property
    def parity_chunks(self) -> range:
        """The chunks of the parity section, which begins and ends at a chunk border."""
        first = self.placement.parity_offset // self.chunk_bytes
        return (
            range(first, self.placement.unreplicated_offset // self.chunk_bytes)
            if self.columns
            else range(first, first)
        )

    def is_direct(self, runs: Sequence[WriteItem], nbytes: int) -> bool:
        """Tells whether a register equals one run of a leaf. Then no copy of the run is needed."""
        return len(runs) == 1 and runs[0].nbytes == nbytes and runs[0].leaf not in self.host_resident

    def with_tensors(self, leaves: Iterable[Leaf], tensors: Mapping[str, torch.Tensor]) -> SavePlan | None:
        """Returns this plan for the same leaves in other memory.

        Returns:
            None if the leaves are not the same, or not the same ones lie on the host.
        """
        ordered = tuple(sorted(leaves, key=lambda leaf: leaf.name))
        if ordered != self.leaves or _host_resident(ordered, tensors) != self.host_resident:
            return None
        return replace(self, tensors=tensors)


def plan_save(
    placement: Placement, rank: int, leaves: Sequence[Leaf], tensors: Mapping[str, torch.Tensor], tiling: ParityTiling
) -> SavePlan:
    """Returns the save plan of a rank for the leaves that it has now.

    Args:
        placement: where the bytes lie, fixed for the epoch.
        rank: the rank that writes.
        leaves: the leaves that exist, predicted or not.
        tensors: the live tensors of the leaves, by name. Empty before the leaves exist, when only
            sizes are needed.
        tiling: the sizes of parity columns that suit the engine.

    Raises:
        ConfigError: even a column of the smallest size does not fit into the scratch memory.
    """
    return _Builder(placement, rank, leaves, tensors, tiling).build()


def _host_resident(leaves: Sequence[Leaf], tensors: Mapping[str, torch.Tensor]) -> frozenset[int]:
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return frozenset()
    return frozenset(i for i, leaf in enumerate(leaves) if tensors[leaf.name].device.type == "cpu")


class _Builder:
    """Builds the save plan of one rank."""

    def __init__(
        self,
        placement: Placement,
        rank: int,
        leaves: Iterable[Leaf],
        tensors: Mapping[str, torch.Tensor],
        tiling: ParityTiling,
    ) -> None:
        self.lanes = placement.lanes
        self.placement = placement
        self.leaves = leaves = tuple(sorted(leaves, key=lambda leaf: leaf.name))
        self.tensors = tensors
        self.tiling = tiling
        self.layout_digest = placement.division.layout_of[rank]
        self.cells = placement.division.cells_of[self.layout_digest]
        self.own_placement = placement.rank_placement(rank)
        self.number = {leaf.name: i for i, leaf in enumerate(leaves)}
        # The leaf numbers in each cell; -1 where the leaf does not exist and the cell has zeros.
        self.members = {c: [self._find(leaf) for leaf in placement.division.cells[c].leaves] for c in self.cells}
        self.host_resident = _host_resident(leaves, tensors)

    def _find(self, leaf: Leaf) -> int:
        """Returns the number of a predicted leaf; -1 if no leaf exists exactly as predicted."""
        number = self.number.get(leaf.name, -1)
        return number if number >= 0 and self.leaves[number] == leaf else -1

    def build(self) -> SavePlan:
        in_cells = {number for members in self.members.values() for number in members if number >= 0}
        inline_leaves = self._inline_leaves()
        section = self.own_placement.unreplicated
        unreplicated = [
            (self._find(leaf), offset) for leaf, offset in zip(section.leaves, section.offsets, strict=True)
        ]
        planned = in_cells | set(inline_leaves) | {number for number, _ in unreplicated}
        unplanned = pack(leaf for i, leaf in enumerate(self.leaves) if i not in planned)
        begin = self.own_placement.unplanned_offset
        # (leaf number, offset in the slot) of the leaves that lie in this rank's slot only
        own = [
            (number, self.own_placement.unreplicated_offset + offset) for number, offset in unreplicated if number >= 0
        ]
        own += [
            (self.number[leaf.name], begin + at) for leaf, at in zip(unplanned.leaves, unplanned.offsets, strict=True)
        ]
        data_bytes = begin + unplanned.data_bytes if unplanned.leaves else self.own_placement.data_bytes

        runs = [
            run
            for block in self.own_placement.blocks[: self.own_placement.data_blocks]
            for run in self._block_runs(block)
        ]
        runs += [
            WriteItem(number, 0, self.leaves[number].nbytes, at) for number, at in own if self.leaves[number].nbytes
        ]
        parity = self.own_placement.blocks[self.own_placement.data_blocks :]
        layout, table = self._table(own, in_cells, inline_leaves, data_bytes)
        return SavePlan(
            tensors=self.tensors, leaves=self.leaves, placement=self.own_placement, chunk_bytes=self.placement.chunk_bytes,
            tiling=self.tiling, layout=layout, runs=tuple(runs),
            columns=tuple(c for block in parity for c in self._columns(block)),
            zeros=tuple(_uncovered(runs, parity, data_bytes)), cells=tuple(self._live_cells()),
            inline_leaves=tuple(inline_leaves), absent=self._absent(),
            unplanned=tuple(leaf.name for leaf in unplanned.leaves), host_resident=self.host_resident,
            table=table, digest=self._digest(table),
        )  # fmt: skip

    def _inline_leaves(self) -> list[int]:
        """Returns the numbers of the inline leaves that exist and fit into the capsule.

        A leaf that is larger than predicted may not fit; it becomes an unplanned leaf.
        """
        numbers = []
        free_bytes = INLINE_BYTES_MAX
        for name in self.placement.division.inline_leaves[self.layout_digest]:
            number = self.number.get(name, -1)
            if number >= 0 and self.leaves[number].nbytes <= free_bytes:
                numbers.append(number)
                free_bytes -= self.leaves[number].nbytes
        return numbers

    def _absent(self) -> tuple[str, ...]:
        division = self.placement.division
        predicted = {leaf.name for c in self.cells for leaf in division.cells[c].leaves}
        predicted |= set(division.inline_leaves[self.layout_digest]) | {
            leaf.name for leaf in self.own_placement.unreplicated.leaves
        }
        return tuple(sorted(predicted - set(self.number)))

    def _table(
        self, own: Iterable[tuple[int, int]], in_cells: set[int], inline_leaves: Sequence[int], data_bytes: int
    ) -> tuple[Layout, bytes]:
        """Returns the slot's leaf table, as a layout and as bytes.

        Args:
            own: (leaf number, offset in the slot) of unreplicated and unplanned leaves.
        """
        offsets = dict(own)
        order = sorted(range(len(self.leaves)), key=lambda i: (offsets.get(i, -1), self.leaves[i].name))
        places = {self.leaves[i].name: pb.CELL for i in in_cells} | {
            self.leaves[i].name: pb.INLINE for i in inline_leaves
        }
        layout = Layout(tuple(self.leaves[i] for i in order), tuple(offsets.get(i, 0) for i in order), data_bytes)
        return layout, table_to(layout, places)

    def _digest(self, table: bytes) -> bytes:
        digest = hashlib.blake2b(table, digest_size=16)
        for block in self.own_placement.blocks:
            lane = self.lanes[block.lane]
            code = (lane.code.kind, lane.code.k, lane.code.f, lane.code.w, lane.packet_bytes)
            digest.update(repr((block, lane.cell, lane.begin, lane.nbytes, code)).encode())
        for c in self.cells:
            cell = self.placement.division.cells[c]
            names = [(leaf.name, at) for leaf, at in zip(cell.leaves, cell.offsets, strict=True)]
            digest.update(repr((c, names)).encode())
        return digest.digest()

    # Bytes of cells

    def _cell_runs(self, lane: Lane, begin: int, end: int, at: int) -> Iterator[WriteItem]:
        """Yields the live runs between two offsets of a lane's cell. Byte `begin` goes to `at`."""
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
            members = zip(self.members[c], cell.leaves, cell.offsets, strict=True)
            yield CellRuns(c, cell.nbytes, tuple(WriteItem(n, 0, leaf.nbytes, at) for n, leaf, at in members if n >= 0))

    def _block_runs(self, block: ShardBlock) -> Iterator[WriteItem]:
        lane = self.lanes[block.lane]
        yield from self._cell_runs(lane, *lane.data_range(block.stripe, block.shard), block.offset)

    # Parity

    def _columns(self, block: ShardBlock) -> Iterator[ParityColumn]:
        lane = self.lanes[block.lane]
        program = encode_program(lane.code, block.shard - lane.code.k)
        width = self.tiling.width(program)
        count = -(-lane.packet_bytes // width)
        # Columns of equal size, so that all threads get equal work.
        width = align(-(-lane.packet_bytes // count), UNIT)
        at = 0
        while at < lane.packet_bytes:
            column = self._column(block, program, at, min(width, lane.packet_bytes - at))
            while column.rows * column.nbytes > self.tiling.scratch:
                # Many small leaves, so that inputs must be composed of runs: a narrower column has
                # fewer of these.
                if column.nbytes <= UNIT:
                    raise ConfigError(
                        f"a column of {column.rows} registers needs {column.rows * column.nbytes} bytes of scratch memory; "
                        f"the limit is {self.tiling.scratch}.",
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
            1
            for runs in inputs
            if runs and (len(runs) > 1 or runs[0].nbytes < nbytes or runs[0].leaf in self.host_resident)
        )
        rows = len(program.outputs) + program.scratch + composed
        outputs = tuple(block.offset + packet * lane.packet_bytes + at for _, packet in program.outputs)
        return ParityColumn(program, nbytes, tuple(inputs), outputs, rows)


def _uncovered(runs: Iterable[WriteItem], parity: Iterable[ShardBlock], data_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (offset, size) of each place that neither runs nor parity blocks cover."""
    covered = sorted([(run.at, run.nbytes) for run in runs] + [(block.offset, block.nbytes) for block in parity])
    end = 0
    for offset, nbytes in [*covered, (data_bytes, 0)]:
        if end < offset:
            yield end, offset - end
        end = offset + nbytes
