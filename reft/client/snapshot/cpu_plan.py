"""What one snapshot copies, cut and in order: for the CPU engine, made once for each share.

    share's runs   | w ···················· | b ·· | v ····              live bytes, by their place in the slot
    chunks         |       |       |       |       |       |             digested one by one
    tasks          |               |               |               |     let through the gate one by one (throttle.py)
    parts          | w             | w     | w b   | v     |             copied one by one: what one leaf fills, in one piece

A part is as long as it can be, for a thread that copies asks for the interpreter's lock after each: two that do so at each
chunk of 256 KiB wait for each other half as long again as they copy (bench/save.py, time to sealed).
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

TASK_BYTES = 1 << 20  # what is let through a gate at once: asking has its own cost, and notes an event of the timeline


class CopyPart(NamedTuple):
    """Chunks side by side that one leaf fills, as one run; or one chunk, and the runs in it."""

    chunks: range
    runs: list[WriteItem]


def by_chunk(runs: Sequence[WriteItem], chunk_bytes: int, chunks: int) -> list[list[WriteItem]]:
    """The runs cut at chunk borders."""
    table: list[list[WriteItem]] = [[] for _ in range(chunks)]
    for leaf, begin, nbytes, at in runs:
        done = 0
        while done < nbytes:
            index = (at + done) // chunk_bytes
            stop = min(nbytes, (index + 1) * chunk_bytes - at)
            table[index].append(WriteItem(leaf, begin + done, stop - done, at + done))
            done = stop
    return table


def joined(parts: Sequence[CopyPart], chunk_bytes: int, data_bytes: int) -> list[CopyPart]:
    """Parts of one chunk each, side by side, joined where a leaf that fills one goes on and fills the next."""
    found: list[CopyPart] = []
    for part in parts:
        if found and _goes_on(found[-1], part, chunk_bytes, data_bytes):
            (before,), (run,) = found[-1].runs, part.runs
            chunks = range(found[-1].chunks.start, part.chunks.stop)
            found[-1] = CopyPart(chunks, [before._replace(nbytes=before.nbytes + run.nbytes)])
        else:
            found.append(part)
    return found


def _goes_on(before: CopyPart, part: CopyPart, chunk_bytes: int, data_bytes: int) -> bool:
    for each in (before, part):
        begin, end = each.chunks.start * chunk_bytes, min(each.chunks.stop * chunk_bytes, data_bytes)
        if len(each.runs) != 1 or each.runs[0].nbytes != end - begin:
            return False
    return (
        before.runs[0].leaf == part.runs[0].leaf and before.runs[0].begin + before.runs[0].nbytes == part.runs[0].begin
    )


@dataclass(frozen=True)
class CpuCopyPlan:
    """What to copy, cut and in order; made again only when the share is another.

    Attributes:
        at_mark: copies aside, in the caller, what forward mutates.
        later: copies aside, in the thread, other riders, and leaves whose elements are not one run.
        sources: the bytes of each leaf of the share, live or aside.
        scratch: memory for the registers of one column, for each thread.
        zeros: as many as the widest column has bytes.
    """

    save_plan: SavePlan
    at_mark: list[Callable[[], object]]
    later: list[Callable[[], object]]
    sources: list[Bytes]
    scratch: list[Bytes]
    zeros: Bytes

    @classmethod
    def of(cls, save_plan: SavePlan, chunk_bytes: int, threads: int) -> CpuCopyPlan:
        """The plan of a share.

        Raises:
            ReftError: slots have other chunks than the share was cut for, so that its sections don't begin at chunks.
        """
        if chunk_bytes != save_plan.chunk_bytes:
            raise ReftError(f"slots have chunks of {chunk_bytes} bytes, the placement of {save_plan.chunk_bytes}.")
        sources, at_mark, later = _sources(save_plan)
        room = max(((column.rows - len(column.outputs)) * column.nbytes for column in save_plan.columns), default=0)
        assert room <= save_plan.tiling.scratch, (
            f"{room} bytes of scratch memory, {save_plan.tiling.scratch} were allowed"
        )
        scratch: list[Bytes] = [np.empty(room, np.uint8) for _ in range(threads)]
        zeros = np.zeros(max((column.nbytes for column in save_plan.columns), default=0), np.uint8)
        return cls(save_plan, at_mark, later, sources, scratch, zeros)

    # Made in the thread that needs them first: the mark does not wait for them.

    @property
    def chunks(self) -> int:
        """How many chunks the slot's data has."""
        return -(-self.save_plan.data_bytes // self.save_plan.chunk_bytes)

    @cached_property
    def tasks(self) -> list[list[CopyPart]]:
        """The chunks of each task, TASK_BYTES of them; those of the parity section are in none."""
        parity, most = self.save_plan.parity_chunks, max(1, TASK_BYTES // self.save_plan.chunk_bytes)
        table = by_chunk(self.save_plan.runs, self.save_plan.chunk_bytes, self.chunks)
        parts = [CopyPart(range(i, i + 1), runs) for i, runs in enumerate(table)]
        cut = [
            each[i : i + most]
            for each in (parts[: parity.start], parts[parity.stop :])
            for i in range(0, len(each), most)
        ]
        return [joined(each, self.save_plan.chunk_bytes, self.save_plan.data_bytes) for each in cut]

    @cached_property
    def weights(self) -> list[int]:
        """The bytes that each task moves: those of chunks first, then columns."""
        moved = [sum(run.nbytes for part in task for run in part.runs) for task in self.tasks]
        return moved + [c.nbytes * (len(c.inputs) + len(c.outputs)) for c in self.save_plan.columns]

    @cached_property
    def work(self) -> np.ndarray:
        """The same, int64, added up."""
        return np.cumsum(self.weights, dtype=np.int64)

    def bounds(self, threads: int) -> list[int]:
        """Where each thread's tasks begin and end, so that all move about as many bytes."""
        if not len(self.work):
            return [0] * (threads + 1)
        ends = np.searchsorted(self.work, [self.work[-1] * i // threads for i in range(1, threads)])
        return [0, *ends.tolist(), len(self.work)]


def _sources(save_plan: SavePlan) -> tuple[list[Bytes], list[Callable[[], object]], list[Callable[[], object]]]:
    """The bytes of each leaf: live ones, or where they are copied aside; what copies them at the mark, and what later."""
    inline_leaves = set(save_plan.inline_leaves)
    tensors = [save_plan.tensors[leaf.name].detach() for leaf in save_plan.leaves]
    is_aside = [
        leaf.staged or i in inline_leaves or not is_dense(tensors[i]) for i, leaf in enumerate(save_plan.leaves)
    ]
    sizes = [leaf.nbytes if aside else 0 for leaf, aside in zip(save_plan.leaves, is_aside, strict=True)]
    memory = np.zeros(sum(align(size) for size in sizes), np.uint8)
    sources: list[Bytes] = []
    at_mark: list[Callable[[], object]] = []
    later: list[Callable[[], object]] = []
    end = 0
    for leaf, tensor, aside, size in zip(save_plan.leaves, tensors, is_aside, sizes, strict=True):
        if not aside:
            sources.append(flat_bytes(tensor).numpy())
            continue
        sources.append(memory[end : end + size])
        end += align(size)
        if size:
            (at_mark if leaf.staged else later).append(_gathering(tensor, sources[-1]))
    return sources, at_mark, later


def _gathering(tensor: torch.Tensor, target: Bytes) -> Callable[[], object]:
    """Copies a leaf's bytes: in the order of its memory if it is dense, else in row-major order."""
    if is_dense(tensor):
        return partial(np.copyto, target, flat_bytes(tensor).numpy())
    return partial(torch.from_numpy(target).view(tensor.dtype).view(tensor.shape).copy_, tensor)
