"""Cuts a save plan into copy tasks for the CPU engine. This is done once for each save plan.

    runs     | w ···················· | b ·· | v ····      live bytes, by their place in the slot
    chunks   |       |       |       |       |       |     each has a digest
    tasks    |               |               |       |     each starts when throttle.py allows it
    parts    | w             | w     | w b   | v     |     each is one copy of one leaf's bytes

Parts are as long as possible, because a copy thread takes the interpreter's lock after each part.
Two threads that take it after each chunk of 256 KiB wait for each other half of the time that they
copy (bench/save.py, time to sealed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch

from reft.client.snapshot.save_plan import SavePlan, WriteItem
from reft.client.state.tensors import flat_bytes, is_dense
from reft.core.layout.layout import align
from reft.errors import ReftError
from reft.wire.slot_format import Bytes

TASK_BYTES = 1 << 20  # each task costs a call of the throttle and an event of the timeline


class CopyPart(NamedTuple):
    """Adjacent chunks that one run of a leaf fills, or one chunk with its runs."""

    chunks: range
    runs: list[WriteItem]


def by_chunk(runs: Sequence[WriteItem], chunk_bytes: int, chunks: int) -> list[list[WriteItem]]:
    """Cuts the runs at chunk borders; returns the runs of each chunk."""
    table: list[list[WriteItem]] = [[] for _ in range(chunks)]
    for leaf, begin, nbytes, at in runs:
        done = 0
        while done < nbytes:
            index = (at + done) // chunk_bytes
            stop = min(nbytes, (index + 1) * chunk_bytes - at)
            table[index].append(WriteItem(leaf, begin + done, stop - done, at + done))
            done = stop
    return table


def join_parts(parts: Sequence[CopyPart], chunk_bytes: int, data_bytes: int) -> list[CopyPart]:
    """Joins adjacent parts of one chunk each, where one leaf fills both without a break."""
    result: list[CopyPart] = []
    for part in parts:
        if result and _is_continued(result[-1], part, chunk_bytes, data_bytes):
            (before,), (run,) = result[-1].runs, part.runs
            chunks = range(result[-1].chunks.start, part.chunks.stop)
            result[-1] = CopyPart(chunks, [before._replace(nbytes=before.nbytes + run.nbytes)])
        else:
            result.append(part)
    return result


def _is_continued(before: CopyPart, part: CopyPart, chunk_bytes: int, data_bytes: int) -> bool:
    for each in (before, part):
        begin, end = each.chunks.start * chunk_bytes, min(each.chunks.stop * chunk_bytes, data_bytes)
        if len(each.runs) != 1 or each.runs[0].nbytes != end - begin:
            return False
    return (
        before.runs[0].leaf == part.runs[0].leaf and before.runs[0].begin + before.runs[0].nbytes == part.runs[0].begin
    )


@dataclass(frozen=True)
class CpuCopyPlan:
    """The copies of the CPU engine, in order. They are made anew only for another save plan.

    Attributes:
        at_mark: copy leaves that forward mutates aside, and leaves on a device; called in the
            trainer's thread, whose stream has written the latter.
        later: copy other inline leaves, and leaves with gaps between their elements, aside; called
            in a copy thread.
        sources: the bytes of each leaf of the save plan, live or copied aside.
        scratch: memory for the registers of one column, for each thread.
        zeros: as many zeros as the widest column has bytes.
    """

    save_plan: SavePlan
    at_mark: list[Callable[[], object]]
    later: list[Callable[[], object]]
    sources: list[Bytes]
    scratch: list[Bytes]
    zeros: Bytes

    @classmethod
    def of(cls, save_plan: SavePlan, chunk_bytes: int, threads: int) -> CpuCopyPlan:
        """Returns the copy plan for a save plan.

        Raises:
            ReftError: the slots' chunk size is not the save plan's, so its sections would not begin
                at chunks.
        """
        if chunk_bytes != save_plan.chunk_bytes:
            raise ReftError(f"slots have chunks of {chunk_bytes} bytes, the placement of {save_plan.chunk_bytes}.")
        sources, at_mark, later = _sources(save_plan)
        nbytes = max(((column.rows - len(column.outputs)) * column.nbytes for column in save_plan.columns), default=0)
        assert nbytes <= save_plan.tiling.scratch, (
            f"{nbytes} bytes of scratch memory, {save_plan.tiling.scratch} were allowed"
        )
        scratch: list[Bytes] = [np.empty(nbytes, np.uint8) for _ in range(threads)]
        zeros = np.zeros(max((column.nbytes for column in save_plan.columns), default=0), np.uint8)
        return cls(save_plan, at_mark, later, sources, scratch, zeros)

    # Computed in the copy thread that needs them first, so that the mark does not wait for them.

    @property
    def chunks(self) -> int:
        """Number of chunks of the slot's data."""
        return -(-self.save_plan.data_bytes // self.save_plan.chunk_bytes)

    @cached_property
    def tasks(self) -> list[list[CopyPart]]:
        """The parts of each task, TASK_BYTES in all. No task has chunks of the parity section."""
        parity, most = self.save_plan.parity_chunks, max(1, TASK_BYTES // self.save_plan.chunk_bytes)
        table = by_chunk(self.save_plan.runs, self.save_plan.chunk_bytes, self.chunks)
        parts = [CopyPart(range(i, i + 1), runs) for i, runs in enumerate(table)]
        tasks = [
            section[i : i + most]
            for section in (parts[: parity.start], parts[parity.stop :])
            for i in range(0, len(section), most)
        ]
        return [join_parts(task, self.save_plan.chunk_bytes, self.save_plan.data_bytes) for task in tasks]

    @cached_property
    def weights(self) -> list[int]:
        """The bytes that each task moves: first the tasks of parts, then the columns."""
        moved = [sum(run.nbytes for part in task for run in part.runs) for task in self.tasks]
        return moved + [c.nbytes * (len(c.inputs) + len(c.outputs)) for c in self.save_plan.columns]

    @cached_property
    def work(self) -> np.ndarray:
        """The cumulative sums of `weights`, int64."""
        return np.cumsum(self.weights, dtype=np.int64)

    def bounds(self, threads: int) -> list[int]:
        """Returns where each thread's tasks begin, and the end; the work is shared evenly."""
        if not len(self.work):
            return [0] * (threads + 1)
        ends = np.searchsorted(self.work, [self.work[-1] * i // threads for i in range(1, threads)])
        return [0, *ends.tolist(), len(self.work)]


def _sources(save_plan: SavePlan) -> tuple[list[Bytes], list[Callable[[], object]], list[Callable[[], object]]]:
    """Returns the bytes of each leaf, live or aside; copies at the mark; later copies."""
    inline_leaves = set(save_plan.inline_leaves)
    tensors = [save_plan.tensors[leaf.name].detach() for leaf in save_plan.leaves]
    is_at_mark = [
        leaf.staged or tensor.device.type != "cpu" for leaf, tensor in zip(save_plan.leaves, tensors, strict=True)
    ]
    is_aside = [each or i in inline_leaves or not is_dense(tensors[i]) for i, each in enumerate(is_at_mark)]
    sizes = [leaf.nbytes if aside else 0 for leaf, aside in zip(save_plan.leaves, is_aside, strict=True)]
    memory = np.zeros(sum(align(size) for size in sizes), np.uint8)
    sources: list[Bytes] = []
    at_mark: list[Callable[[], object]] = []
    later: list[Callable[[], object]] = []
    end = 0
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        if not is_aside[i]:
            sources.append(flat_bytes(tensor).numpy())
            continue
        sources.append(memory[end : end + size])
        end += align(size)
        if size:
            (at_mark if is_at_mark[i] else later).append(_copy_call(tensor, sources[-1]))
    return sources, at_mark, later


def _copy_call(tensor: torch.Tensor, target: Bytes) -> Callable[[], object]:
    """Returns a call that copies a leaf: in memory order if dense, else in row-major order."""
    if is_dense(tensor) and tensor.device.type != "cpu":
        return partial(torch.from_numpy(target).copy_, flat_bytes(tensor))
    if is_dense(tensor):
        return partial(np.copyto, target, flat_bytes(tensor).numpy())
    return partial(torch.from_numpy(target).view(tensor.dtype).view(tensor.shape).copy_, tensor)
