"""Plans the copies of a save plan from a device into a slot: gathered leaves, the rest, parity.

    parity column    live bytes where they lie ─┐
                     composed registers ────────┼► scratch: XOR ─► slot; reused for the next column
                     zeros ─────────────────────┘

Parity needs memory of the device for the scratch (`parity_scratch_bytes`), a row of zeros, and the
gathered leaves, and no more. The scratch is allocated once. Each register of a column is a row of
the scratch, or the live tensor itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from reft.client.memory import xor
from reft.client.memory.cuda import Device
from reft.client.snapshot.save_plan import ParityColumn, SavePlan
from reft.client.state.tensors import device_of, flat_bytes, is_dense
from reft.client.torch_internals import copy_each
from reft.core.coding import erasure
from reft.core.layout.layout import ALIGNMENT, SMALL_BYTES, align
from reft.errors import ReftError, UnsupportedState
from reft.wire.slot_format import Bytes

# One copy on the side stream; large enough for full bandwidth, small enough to stop between.
TRANSFER_BYTES = 8 << 20
# From here on small leaves are gathered by a graph. The call alone takes 1 ms for 2,000 of them.
GRAPH_COPIES = 2000

log = logging.getLogger("reft")


@dataclass(frozen=True)
class CudaCopyPlan:
    """The copies of one save plan.

    A gathered leaf has the same offset in `gathered` and in the snapshot's host copy, which is as
    large.

    Attributes:
        gathered: memory of the device: inline leaves, small leaves in the order of the slot, leaves
            of the host.
        gather_small: enqueues the copies of dense tensors on the device into `gathered`. They are
            copied as bytes: a copy of elements may convert them, and change NaNs.
        gapped: (live tensor with gaps between its elements, its place in `gathered` or `host`).
        host: the bytes of all leaves of the host, end to end, in the order of `gathered`: live
            bytes of dense tensors, and between them padding and copies of gapped ones.
        riders_bytes: size of all inline leaves of the device; they begin at offset 0.
        host_offset: where the leaves of the host begin.
        places: leaf number → offset of a gathered leaf.
        sources: the bytes of each leaf: live, or in `gathered`.
        parts: (source, offset in the slot) of each copy from the device, each TRANSFER_BYTES at
            most.
        written: bytes that each part, then each parity column, writes into the slot, without zeros
            between leaves.
        late: (offset in the host copy, size, offset in the slot) of what the worker thread copies.
        large: (live bytes on the host, offset in the slot): copied at the mark, which waits for it.
        scratch: the rows for the registers of a column.
        zeros: as many zeros as the widest column has bytes.
    """

    save_plan: SavePlan
    gathered: torch.Tensor
    gather_small: Callable[[], object]
    gapped: list[tuple[torch.Tensor, torch.Tensor]]
    host: list[memoryview]
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
    """Enqueues one parity column; its registers are live bytes, zeros, or rows of the scratch."""
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
    erasure.run(program, inputs, outputs, list(rows), xor.TORCH)
    for output, offset in zip(outputs, column.outputs, strict=True):
        data[offset : offset + n].copy_(output, non_blocking=True)


def plan_transfers(save_plan: SavePlan, chunk_bytes: int, streams: Device) -> CudaCopyPlan:
    """Returns the copies for a save plan. They come with the memory of the device that they need.

    Args:
        streams: make the graph of many small copies.

    Raises:
        UnsupportedState: leaves lie on more than one device, or a large leaf has gaps between its
            elements.
        ReftError: the slots' chunk size is not the save plan's.
    """
    if chunk_bytes != save_plan.chunk_bytes:
        raise ReftError(f"slots have chunks of {chunk_bytes} bytes, the placement of {save_plan.chunk_bytes}.")
    tensors = [save_plan.tensors[leaf.name].detach() for leaf in save_plan.leaves]
    device = device_of(tensors)
    places, riders_bytes, host_offset, end = _gathered_offsets(save_plan)
    gathered = torch.zeros(end, dtype=torch.uint8, device=device)
    staging = torch.zeros(end - host_offset, dtype=torch.uint8, device="cpu")
    small: list[torch.Tensor] = []
    small_places: list[torch.Tensor] = []
    on_host: dict[int, Bytes] = {}  # place in `staging` → live bytes
    gapped, sources = [], []
    for i, (leaf, tensor) in enumerate(zip(save_plan.leaves, tensors, strict=True)):
        if i not in places:
            if not is_dense(tensor):
                raise UnsupportedState(f"{leaf.name} has gaps between its elements and is too large to gather.")
            sources.append(flat_bytes(tensor))
            continue
        at = places[i]
        sources.append(gathered[at : at + leaf.nbytes])
        is_host = i in save_plan.host_resident
        place = staging[at - host_offset :][: leaf.nbytes] if is_host else sources[-1]
        if not is_dense(tensor):
            gapped.append((tensor, place.view(tensor.dtype).as_strided(tensor.shape, leaf.stride)))
        elif leaf.nbytes and is_host:
            on_host[at - host_offset] = flat_bytes(tensor).numpy()
        elif leaf.nbytes:
            small.append(flat_bytes(tensor))
            small_places.append(place)
    pieces, late, large = _classify_runs(save_plan, places, sources, gathered)
    cuts = [(*piece, at) for piece in pieces for at in range(0, piece[0].nbytes, TRANSFER_BYTES)]
    parts = [(source[at : at + TRANSFER_BYTES], offset + at) for source, offset, _, at in cuts]
    written = [max(0, min(TRANSFER_BYTES, live - at)) for _, _, live, at in cuts]
    written += [column.nbytes * len(column.outputs) for column in save_plan.columns]
    columns = save_plan.columns
    scratch_bytes = max((column.rows * column.nbytes for column in columns), default=0)
    assert scratch_bytes <= save_plan.tiling.scratch, (
        f"{scratch_bytes} bytes of scratch memory, {save_plan.tiling.scratch} were allowed"
    )
    gather_small = _as_one_call(small_places, small, streams)
    return CudaCopyPlan(
        save_plan, gathered, gather_small, gapped, _with_padding(on_host, staging.numpy()), riders_bytes,
        host_offset, places, sources, parts, written, late, large,
        scratch=torch.empty(scratch_bytes, dtype=torch.uint8, device=device),
        zeros=torch.zeros(max((column.nbytes for column in columns), default=0), dtype=torch.uint8, device=device),
    )  # fmt: skip


def _as_one_call(
    places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], streams: Device
) -> Callable[[], object]:
    """Returns a call that enqueues the copy of each tensor to its place."""
    copy = partial(copy_each, places, tensors)
    if len(tensors) < GRAPH_COPIES:
        return copy
    try:
        return streams.as_graph(copy)
    except torch.OutOfMemoryError:
        raise  # the device is full: the snapshot ends, and a later one tries again
    except RuntimeError as error:
        log.warning(
            "%d small tensors are copied without a CUDA graph, and each mark takes longer: %s", len(tensors), error
        )
        return copy


def _with_padding(live: Mapping[int, Bytes], staging: Bytes) -> list[memoryview]:
    """Returns the pieces of `staging`, end to end, with live bytes in their places."""
    pieces: list[Bytes] = []
    end = 0
    for at in sorted(live):
        pieces += [staging[end:at], live[at]]
        end = at + live[at].nbytes
    return [piece.data for piece in (*pieces, staging[end:])]


def _gathered_offsets(save_plan: SavePlan) -> tuple[dict[int, int], int, int, int]:
    """Returns each gathered leaf's offset, inline leaves' end, host leaves' begin, the end."""
    inline_leaves = set(save_plan.inline_leaves)
    small = [
        i for i, leaf in enumerate(save_plan.leaves) if leaf.staged or leaf.nbytes < SMALL_BYTES or i in inline_leaves
    ]
    at = {run.leaf: run.at for run in reversed(save_plan.runs)}
    # In the order of the slot, so that neighbours in the slot are neighbours here, and one copy
    # moves both.
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


def _classify_runs(
    save_plan: SavePlan, places: dict[int, int], sources: list[torch.Tensor], gathered: torch.Tensor
) -> tuple[list[tuple[torch.Tensor, int, int]], list[tuple[int, int, int]], list[tuple[torch.Tensor, int]]]:
    """Sorts the runs into pieces of the device, `late` and `large` as in CudaCopyPlan.

    A piece is (source, offset in the slot, bytes of leaves in it). Gathered neighbours become one
    piece, with the zeros between them.
    """
    pieces: list[tuple[torch.Tensor, int, int]] = []
    late: list[tuple[int, int, int]] = []
    large: list[tuple[torch.Tensor, int]] = []
    # Begin and end in `gathered`, offset in the slot, bytes of leaves.
    merged: list[list[int]] = []
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
