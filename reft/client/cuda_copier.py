"""The copying engine on CUDA: everything is enqueued at the mark, on a side stream; the host never waits in a step.

    compute stream   … optimizer t │ gather riders + small leaves │ forward, backward t+1 │ wait(done) │ optimizer t+1
    side stream                    └► wait(gathered) ► riders ► live bytes, piece by piece ► parity, column by column ► done
    worker thread                                                   done ► zeros ► intact? ► LANDED ► digests ► SEALED

    parity column    live bytes where they lie ─┐
                     what must be put together ─┼► scratch: XOR ─► slot, and the same scratch for the next column
                     zeros ─────────────────────┘

The fence is a wait of the compute stream, so every copy and the event behind the last one are enqueued before the
optimizer's pre-hook returns: an event that is not recorded yet would be no fence. Whether the state was written in between
is decided by whoever comes first, the fence or the worker; after the fence the optimizer itself changes the counters that
tell. LANDED is written by the host once the event has passed: in the order of a tag in the stream, and never before it.

Parity needs no more memory of the device than `parity_scratch_bytes`, a row of zeros, and the gathered leaves: the scratch
is allocated once, and every register of a column is a row of it or the live tensor itself.

What talks to CUDA is behind `Device`, so that the contract test can run this engine where there is none. On a GPU this
version has not been run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reft.client import coding
from reft.client.comparing import Sample, digest_of
from reft.client.copier import CopyJob, Worker
from reft.client.share import Column, Cut, Share
from reft.client.state import flat_bytes, is_dense
from reft.core.layout import ALIGNMENT, SMALL_BYTES, align
from reft.errors import ReftError, UnsupportedState
from reft.wire.slot_format import SlotMap, chunk_digest

TRANSFER_BYTES = 8 << 20  # one copy on the side stream; large enough for full bandwidth, small enough to stop between


class Device:
    """What the engine needs of CUDA."""

    def __init__(self) -> None:
        self.side = torch.cuda.Stream(priority=0)  # 0 is the lowest priority: compute goes first

    def record_compute(self) -> Any:
        """An event behind all that is enqueued for computing."""
        return torch.cuda.current_stream().record_event()

    def record_side(self) -> Any:
        """An event behind all that is enqueued for copying."""
        return self.side.record_event()

    def side_waits(self, event: Any) -> None:
        self.side.wait_event(event)

    def compute_waits(self, event: Any) -> None:
        torch.cuda.current_stream().wait_event(event)

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.side)

    def host_waits(self, event: Any) -> None:
        event.synchronize()


@dataclass(frozen=True)
class Transfers:
    """How one share travels. Gathered leaves have the same place in `gathered` and in the host's memory of a snapshot.

    Attributes:
        gathered: of the device: riders, then small leaves in the order of the slot, then what lies on the host.
        small: (live tensor of the device, its place in `gathered`).
        host: (live tensor of the host, where it begins in the host's memory).
        riders_bytes: size of the riders' run at the beginning.
        host_offset: where the run of the host's leaves begins.
        places: leaf number → where a gathered leaf begins.
        sources: the bytes of each leaf: live, or in `gathered`.
        pieces: (source, offset in the slot) of what is copied from the device.
        late: (begin in the host's memory, size, offset in the slot) of what the worker copies.
        large: (live bytes of the host, offset in the slot): copied at the mark, which blocks.
        scratch: rows for the registers of a column.
        zeros: as many as the widest column has bytes.
    """

    share: Share
    gathered: torch.Tensor
    small: list[tuple[torch.Tensor, torch.Tensor]]
    host: list[tuple[torch.Tensor, int]]
    riders_bytes: int
    host_offset: int
    places: dict[int, int]
    sources: list[torch.Tensor]
    pieces: list[tuple[torch.Tensor, int]]
    late: list[tuple[int, int, int]]
    large: list[tuple[torch.Tensor, int]]
    scratch: torch.Tensor
    zeros: torch.Tensor


class CudaCopier:
    """Copies state that lies on one CUDA device. At most one snapshot is under way.

    Args:
        device: CUDA, or what stands for it in the contract test.
        parity_scratch_bytes: the most memory of the device for computing parity.
    """

    def __init__(self, device: Device | None = None, parity_scratch_bytes: int = 64 << 20) -> None:
        self.copied_bytes = 0
        self.idle_bytes = 0
        # A launch costs more than a small column, so columns are as wide as the scratch allows.
        self.cut = Cut(TRANSFER_BYTES, parity_scratch_bytes // 2, parity_scratch_bytes)
        self.compares_all = False  # all bytes of a cell over PCIe would undo what sharding saves
        self._device = device or Device()
        self._transfers: Transfers | None = None
        self._worker = Worker("reft-copier", None)
        self._lock = threading.Lock()
        self._verdict: Future[None] | None = None
        self._job: CopyJob | None = None
        self._done: Any = None
        self._is_idle = False

    def begin(self, job: CopyJob) -> None:
        if self._transfers is None or self._transfers.share is not job.share:
            self._transfers = plan_transfers(job.share, job.chunk_bytes)
        transfers = self._transfers
        slot = job.open(False)
        # Fresh for each snapshot: the worker reads it when the next one may have begun. torch reuses pinned memory.
        on_cuda = transfers.gathered.device.type != "cpu"
        aside = torch.empty(transfers.gathered.nbytes, dtype=torch.uint8, pin_memory=on_cuda)
        verdict: Future[None] = Future()
        compared: list[tuple[Sample, list[torch.Tensor]]] = []
        try:
            self._enqueue(job, transfers, aside, torch.from_numpy(slot.data))
            compared = self._enqueue_samples(job, transfers, on_cuda)
        except Exception as error:
            # What is enqueued already still reads the state, so there is a fence, and then the failure.
            verdict.set_exception(error)
        done = self._device.record_side()
        self._job, self._verdict, self._done = job, verdict, done
        self._worker.submit(lambda: self._finish(job, slot, transfers, aside, compared, done, verdict))

    def fence(self) -> float:
        if self._job is not None and self._verdict is not None:
            self._decide(self._job, self._verdict)
            self._device.compute_waits(self._done)
            self._job = None
        return 0.0

    def idle(self, is_idle: bool) -> None:
        self._is_idle = is_idle

    def submit(self, task: Callable[[], None]) -> None:
        self._worker.submit(task)

    def close(self) -> None:
        self._worker.close()

    def _decide(self, job: CopyJob, verdict: Future[None]) -> None:
        """Whether the state was left alone so far; the first answer holds."""
        with self._lock:
            if verdict.done():
                return
            try:
                job.intact()
                verdict.set_result(None)
            except Exception as error:
                verdict.set_exception(error)

    def _gather(self, transfers: Transfers, aside: torch.Tensor, data: torch.Tensor) -> None:
        """At the mark, in the compute stream: what forward mutates and what is small; what lies on the host, at once."""
        for tensor, place in transfers.small:
            place.copy_(tensor, non_blocking=True)
        for tensor, at in transfers.host:
            run = flat_bytes(tensor.contiguous() if not is_dense(tensor) else tensor)
            aside[at : at + run.nbytes].copy_(run)
        at = transfers.host_offset
        transfers.gathered[at:].copy_(aside[at:], non_blocking=True)
        for tensor, offset in transfers.large:
            data[offset : offset + tensor.nbytes].copy_(tensor)

    def _enqueue(self, job: CopyJob, transfers: Transfers, aside: torch.Tensor, data: torch.Tensor) -> None:
        riders = transfers.riders_bytes
        with torch.no_grad():
            self._gather(transfers, aside, data)
            self._device.side_waits(self._device.record_compute())
            with self._device.on_side():
                aside[:riders].copy_(transfers.gathered[:riders], non_blocking=True)
                self._enqueue_pieces(job, transfers, data)
                for index, column in enumerate(job.share.columns):
                    job.at_parity(index)
                    _compute(transfers, column, data)
        self.copied_bytes += job.share.written_bytes
        self.idle_bytes += job.share.written_bytes if self._is_idle else 0

    def _enqueue_pieces(self, job: CopyJob, transfers: Transfers, data: torch.Tensor) -> None:
        index = 0
        for source, offset in transfers.pieces:
            for at in range(0, source.nbytes, TRANSFER_BYTES):
                job.at_chunk(index)
                part = source[at : at + TRANSFER_BYTES]
                data[offset + at : offset + at + part.nbytes].copy_(part, non_blocking=True)
                index += 1

    def _enqueue_samples(
        self, job: CopyJob, transfers: Transfers, on_cuda: bool
    ) -> list[tuple[Sample, list[torch.Tensor]]]:
        """Copies of what is compared with other ranks, a small window of each cell, in host memory of their own."""
        found = []
        with torch.no_grad(), self._device.on_side():
            for sample in job.samples():
                parts = []
                for leaf, begin, nbytes, _ in sample.runs:
                    part = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_cuda)
                    part.copy_(transfers.sources[leaf][begin : begin + nbytes], non_blocking=True)
                    parts.append(part)
                found.append((sample, parts))
        return found

    def _finish(
        self, job: CopyJob, slot: SlotMap, transfers: Transfers, aside: torch.Tensor,
        compared: list[tuple[Sample, list[torch.Tensor]]], done: Any, verdict: Future[None],
    ) -> None:  # fmt: skip
        """In the worker: what follows the last byte."""
        try:
            self._device.host_waits(done)
            self._decide(job, verdict)
            verdict.result()
            memory, data = aside.numpy(), slot.data
            for begin, size, offset in transfers.late:
                np.copyto(data[offset : offset + size], memory[begin : begin + size])
            for offset, size in job.share.zeros if slot.is_new_layout else ():
                data[offset : offset + size] = 0
            job.compared(
                {sample.cell: digest_of(sample, [part.numpy() for part in parts]) for sample, parts in compared}
            )
            leaves = [(job.share.leaves[i], transfers.places[i]) for i in job.share.riders]
            job.landed({leaf.name: memory[at : at + leaf.nbytes].tobytes() for leaf, at in leaves})
            digests = np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], np.uint64)
        except Exception as error:
            job.failed(error)
            return
        job.sealed(digests)


def _compute(transfers: Transfers, column: Column, data: torch.Tensor) -> None:
    """Enqueues one column of parity: everything that it needs beside live bytes is a row of the scratch."""
    n, program = column.nbytes, column.program
    assert column.rows * n <= transfers.scratch.nbytes, f"{column.rows} rows of {n} bytes outgrow the scratch"
    rows: Iterator[torch.Tensor] = (transfers.scratch[i * n : (i + 1) * n] for i in range(column.rows))
    inputs = []
    for runs in column.inputs:
        if not runs:
            inputs.append(transfers.zeros[:n])
        elif transfers.share.is_direct(runs, n):
            inputs.append(transfers.sources[runs[0].leaf][runs[0].begin : runs[0].begin + n])
        else:
            row = next(rows)
            if sum(run.nbytes for run in runs) < n:
                row.zero_()
            for leaf, begin, size, at in runs:
                row[at : at + size].copy_(transfers.sources[leaf][begin : begin + size], non_blocking=True)
            inputs.append(row)
    outputs = [next(rows) for _ in column.outputs]
    coding.run(program, inputs, outputs, list(rows))
    for output, offset in zip(outputs, column.outputs, strict=True):
        data[offset : offset + n].copy_(output, non_blocking=True)


def plan_transfers(share: Share, chunk_bytes: int) -> Transfers:
    """Sorts the leaves of a share by how they travel.

    Raises:
        UnsupportedState: they lie on more than one device, or a large one has gaps between its elements.
        ReftError: slots have other chunks than the share was cut for.
    """
    if chunk_bytes != share.chunk_bytes:
        raise ReftError(f"slots have chunks of {chunk_bytes} bytes, the placement of {share.chunk_bytes}.")
    tensors = [share.tensors[leaf.name].detach() for leaf in share.leaves]
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise UnsupportedState(f"the state lies on {len(devices)} devices; one a process is held.")
    device = next(iter(devices), torch.device("cpu"))
    places, riders_bytes, host_offset, end = _seats(share)
    gathered = torch.zeros(end, dtype=torch.uint8, device=device)
    small, host, sources = [], [], []
    for i, (leaf, tensor) in enumerate(zip(share.leaves, tensors, strict=True)):
        if i not in places:
            if not is_dense(tensor):
                raise UnsupportedState(f"{leaf.name} has gaps between its elements and is too large to gather.")
            sources.append(flat_bytes(tensor))
            continue
        run = gathered[places[i] : places[i] + leaf.nbytes]
        sources.append(run)
        if i in share.apart:
            host.append((tensor, places[i]))
        elif leaf.nbytes:
            small.append((tensor, run.view(tensor.dtype).as_strided(tensor.shape, leaf.stride)))
    pieces, late, large = _sorted_runs(share, places, sources, gathered)
    columns = share.columns
    room = max((column.rows * column.nbytes for column in columns), default=0)
    assert room <= share.cut.scratch, f"{room} bytes of scratch memory, {share.cut.scratch} were allowed"
    return Transfers(
        share, gathered, small, host, riders_bytes, host_offset, places, sources, pieces, late, large,
        scratch=torch.empty(room, dtype=torch.uint8, device=device),
        zeros=torch.zeros(max((column.nbytes for column in columns), default=0), dtype=torch.uint8, device=device),
    )  # fmt: skip


def _seats(share: Share) -> tuple[dict[int, int], int, int, int]:
    """Where each gathered leaf begins; where riders end, where the host's leaves begin, and where all end."""
    riders = set(share.riders)
    small = [i for i, leaf in enumerate(share.leaves) if leaf.staged or leaf.nbytes < SMALL_BYTES or i in riders]
    at = {run.leaf: run.at for run in reversed(share.runs)}
    # In the order of the slot, so that neighbours there are neighbours here, and travel together.
    small.sort(key=lambda i: (i in share.apart, i not in riders, at.get(i, 0)))
    places: dict[int, int] = {}
    riders_bytes, host_offset, end = 0, -1, 0
    for i in small:
        if i in share.apart and host_offset < 0:
            host_offset = end
        places[i] = end
        end = align(end + share.leaves[i].nbytes)
        if i in riders and i not in share.apart:
            riders_bytes = end
    return places, riders_bytes, end if host_offset < 0 else host_offset, end


def _sorted_runs(
    share: Share, places: dict[int, int], sources: list[torch.Tensor], gathered: torch.Tensor
) -> tuple[list[tuple[torch.Tensor, int]], list[tuple[int, int, int]], list[tuple[torch.Tensor, int]]]:
    """Runs as Transfers has them: pieces, late, large. Gathered neighbours become one piece, the zeros between included."""
    pieces: list[tuple[torch.Tensor, int]] = []
    late: list[tuple[int, int, int]] = []
    large: list[tuple[torch.Tensor, int]] = []
    merged: list[list[int]] = []  # begin and end in `gathered`, offset in the slot
    for leaf, begin, size, at in share.runs:
        if leaf not in places:
            (large if leaf in share.apart else pieces).append((sources[leaf][begin : begin + size], at))
            continue
        first = places[leaf] + begin
        if leaf in share.apart:
            late.append((first, size, at))
        elif merged and at - merged[-1][2] == first - merged[-1][0] and 0 <= first - merged[-1][1] < ALIGNMENT:
            merged[-1][1] = first + size
        else:
            merged.append([first, first + size, at])
    return [(gathered[first:last], at) for first, last, at in merged] + pieces, late, large
