"""How one share travels from a device into a slot: what is gathered first, in which pieces the rest is copied, parity.

    parity column    live bytes where they lie ─┐
                     what must be put together ─┼► scratch: XOR ─► slot, and the same scratch for the next column
                     zeros ─────────────────────┘

Parity needs no more memory of the device than `parity_scratch_bytes`, a row of zeros, and the gathered leaves: the scratch
is allocated once, and every register of a column is a row of it or the live tensor itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from reft.client.memory import xor
from reft.client.snapshot.save_plan import ParityColumn, SavePlan
from reft.client.state.tensors import device_of, flat_bytes, is_dense
from reft.core.layout.layout import ALIGNMENT, SMALL_BYTES, align
from reft.errors import ReftError, UnsupportedState

TRANSFER_BYTES = 8 << 20  # one copy on the side stream; large enough for full bandwidth, small enough to stop between


@dataclass(frozen=True)
class CudaCopyPlan:
    """How one share travels. Gathered leaves have the same place in `gathered` and in the host's memory of a snapshot.

    Attributes:
        gathered: of the device: riders, then small leaves in the order of the slot, then what lies on the host.
        small: (live tensor of the device, its place in `gathered`).
        host: (live tensor of the host, where it begins in the host's memory).
        riders_bytes: size of the riders' run at the beginning.
        host_offset: where the run of the host's leaves begins.
        places: leaf number → where a gathered leaf begins.
        sources: the bytes of each leaf: live, or in `gathered`.
        parts: (source, offset in the slot) of what is copied from the device, each TRANSFER_BYTES at most.
        written: bytes that each part, then each column of parity, writes into the slot, zeros between leaves not counted.
        late: (begin in the host's memory, size, offset in the slot) of what the worker copies.
        large: (live bytes of the host, offset in the slot): copied at the mark, which blocks.
        scratch: rows for the registers of a column.
        zeros: as many as the widest column has bytes.
    """

    save_plan: SavePlan
    gathered: torch.Tensor
    small: list[tuple[torch.Tensor, torch.Tensor]]
    host: list[tuple[torch.Tensor, int]]
    riders_bytes: int
    host_offset: int
    places: dict[int, int]
    sources: list[torch.Tensor]
    parts: list[tuple[torch.Tensor, int]]
    written: list[int]
    late: list[tuple[int, int, int]]
    large: list[tuple[torch.Tensor, int]]
    scratch: torch.Tensor
    zeros: torch.Tensor


def compute(transfers: CudaCopyPlan, column: ParityColumn, data: torch.Tensor) -> None:
    """Enqueues one column of parity: everything that it needs beside live bytes is a row of the scratch."""
    n, program = column.nbytes, column.program
    assert column.rows * n <= transfers.scratch.nbytes, f"{column.rows} rows of {n} bytes outgrow the scratch"
    rows: Iterator[torch.Tensor] = (transfers.scratch[i * n : (i + 1) * n] for i in range(column.rows))
    inputs = []
    for runs in column.inputs:
        if not runs:
            inputs.append(transfers.zeros[:n])
        elif transfers.save_plan.is_direct(runs, n):
            inputs.append(transfers.sources[runs[0].leaf][runs[0].begin : runs[0].begin + n])
        else:
            row = next(rows)
            if sum(run.nbytes for run in runs) < n:
                row.zero_()
            for leaf, begin, size, at in runs:
                row[at : at + size].copy_(transfers.sources[leaf][begin : begin + size], non_blocking=True)
            inputs.append(row)
    outputs = [next(rows) for _ in column.outputs]
    xor.run(program, inputs, outputs, list(rows))
    for output, offset in zip(outputs, column.outputs, strict=True):
        data[offset : offset + n].copy_(output, non_blocking=True)


def plan_transfers(save_plan: SavePlan, chunk_bytes: int) -> CudaCopyPlan:
    """Sorts the leaves of a share by how they travel.

    Raises:
        UnsupportedState: they lie on more than one device, or a large one has gaps between its elements.
        ReftError: slots have other chunks than the share was cut for.
    """
    if chunk_bytes != save_plan.chunk_bytes:
        raise ReftError(f"slots have chunks of {chunk_bytes} bytes, the placement of {save_plan.chunk_bytes}.")
    tensors = [save_plan.tensors[leaf.name].detach() for leaf in save_plan.leaves]
    device = device_of(tensors)
    places, riders_bytes, host_offset, end = _seats(save_plan)
    gathered = torch.zeros(end, dtype=torch.uint8, device=device)
    small, host, sources = [], [], []
    for i, (leaf, tensor) in enumerate(zip(save_plan.leaves, tensors, strict=True)):
        if i not in places:
            if not is_dense(tensor):
                raise UnsupportedState(f"{leaf.name} has gaps between its elements and is too large to gather.")
            sources.append(flat_bytes(tensor))
            continue
        run = gathered[places[i] : places[i] + leaf.nbytes]
        sources.append(run)
        if i in save_plan.host_resident:
            host.append((tensor, places[i]))
        elif leaf.nbytes:
            small.append((tensor, run.view(tensor.dtype).as_strided(tensor.shape, leaf.stride)))
    pieces, late, large = _sorted_runs(save_plan, places, sources, gathered)
    parts = [
        (source[at : at + TRANSFER_BYTES], offset + at)
        for source, offset, _ in pieces
        for at in range(0, source.nbytes, TRANSFER_BYTES)
    ]
    written = [
        max(0, min(TRANSFER_BYTES, live - at))
        for source, _, live in pieces
        for at in range(0, source.nbytes, TRANSFER_BYTES)
    ]
    written += [column.nbytes * len(column.outputs) for column in save_plan.columns]
    columns = save_plan.columns
    room = max((column.rows * column.nbytes for column in columns), default=0)
    assert room <= save_plan.tiling.scratch, f"{room} bytes of scratch memory, {save_plan.tiling.scratch} were allowed"
    return CudaCopyPlan(
        save_plan, gathered, small, host, riders_bytes, host_offset, places, sources, parts, written, late, large,
        scratch=torch.empty(room, dtype=torch.uint8, device=device),
        zeros=torch.zeros(max((column.nbytes for column in columns), default=0), dtype=torch.uint8, device=device),
    )  # fmt: skip


def _seats(save_plan: SavePlan) -> tuple[dict[int, int], int, int, int]:
    """Where each gathered leaf begins; where riders end, where the host's leaves begin, and where all end."""
    inline_leaves = set(save_plan.inline_leaves)
    small = [
        i for i, leaf in enumerate(save_plan.leaves) if leaf.staged or leaf.nbytes < SMALL_BYTES or i in inline_leaves
    ]
    at = {run.leaf: run.at for run in reversed(save_plan.runs)}
    # In the order of the slot, so that neighbours there are neighbours here, and travel together.
    small.sort(key=lambda i: (i in save_plan.host_resident, i not in inline_leaves, at.get(i, 0)))
    places: dict[int, int] = {}
    riders_bytes, host_offset, end = 0, -1, 0
    for i in small:
        if i in save_plan.host_resident and host_offset < 0:
            host_offset = end
        places[i] = end
        end = align(end + save_plan.leaves[i].nbytes)
        if i in inline_leaves and i not in save_plan.host_resident:
            riders_bytes = end
    return places, riders_bytes, end if host_offset < 0 else host_offset, end


def _sorted_runs(
    save_plan: SavePlan, places: dict[int, int], sources: list[torch.Tensor], gathered: torch.Tensor
) -> tuple[list[tuple[torch.Tensor, int, int]], list[tuple[int, int, int]], list[tuple[torch.Tensor, int]]]:
    """Runs as Transfers has them: pieces with the bytes of leaves in them, late, large.

    Gathered neighbours become one piece, the zeros between included.
    """
    pieces: list[tuple[torch.Tensor, int, int]] = []
    late: list[tuple[int, int, int]] = []
    large: list[tuple[torch.Tensor, int]] = []
    merged: list[list[int]] = []  # begin and end in `gathered`, offset in the slot, bytes of leaves
    for leaf, begin, size, at in save_plan.runs:
        if leaf not in places:
            run = sources[leaf][begin : begin + size]
            if leaf in save_plan.host_resident:
                large.append((run, at))
            else:
                pieces.append((run, at, size))
            continue
        first = places[leaf] + begin
        if leaf in save_plan.host_resident:
            late.append((first, size, at))
        elif merged and at - merged[-1][2] == first - merged[-1][0] and 0 <= first - merged[-1][1] < ALIGNMENT:
            merged[-1][1] = first + size
            merged[-1][3] += size
        else:
            merged.append([first, first + size, at, size])
    return [(gathered[first:last], at, live) for first, last, at, live in merged] + pieces, late, large
