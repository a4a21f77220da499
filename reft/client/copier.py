"""The copying engine on the CPU: copies one snapshot beside training, chunk by chunk, and digests it on the way.

    mark:   begin(job)      staged leaves are copied aside here, in the caller; the thread starts on the rest
            job.open        in the thread: waits for a slot if none may be reused yet
    fence:  fence()         no slot until now: given up; else waits until the last byte is read, which it almost always is

A contract test runs this engine and the CUDA engine of `reft.client.cuda_copier` alike. Both call `job.landed()` after
the last byte and `job.sealed(digests)` or `job.failed(error)` from a thread of theirs.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from reft.client.state import flat_bytes, is_dense
from reft.core.layout import Layout
from reft.wire.slot_format import Bytes, SlotMap, chunk_digest


@dataclass
class CopyJob:
    """One snapshot to take.

    Attributes:
        open: the slot to write, WRITING by then; called in the engine's thread, may wait for one if its argument is true,
            raises if there is none.
        give_up: makes a waiting `open` raise.
        chunk_bytes: of each slot.
        layout: where the leaves go.
        tensors: the live leaves, by name.
        at_chunk: called with each chunk's index before it is copied; may raise.
        intact: called after the last byte was read and before anything writes the state again; raises if it was written.
        landed, sealed, failed: what to do when the bytes are there, when the digests are, or instead of both.
    """

    open: Callable[[bool], SlotMap]
    give_up: Callable[[], None]
    chunk_bytes: int
    layout: Layout
    tensors: Mapping[str, torch.Tensor]
    at_chunk: Callable[[int], object]
    intact: Callable[[], None]
    landed: Callable[[], None]
    sealed: Callable[[np.ndarray], None]
    failed: Callable[[Exception], None]


class Copier(Protocol):
    """The seam between a session and what moves its bytes."""

    copied_bytes: int
    idle_bytes: int

    def begin(self, job: CopyJob) -> None:
        """Starts one snapshot; the earlier one must have passed its fence."""

    def fence(self) -> float:
        """Makes sure that nothing reads the state any more; the seconds for which the caller was held up."""

    def idle(self, is_idle: bool) -> None:
        """Tells whether the trainer is in a marked idle time."""

    def submit(self, task: Callable[[], None]) -> None:
        """Runs a small task in the engine's thread."""

    def close(self) -> None:
        """Ends the thread, after the snapshot that it works on."""


class Piece(NamedTuple):
    """A run of bytes of one leaf, and where it goes in the slot's data. `strided` is set if the leaf has no plain bytes."""

    source: Bytes
    offset: int
    strided: torch.Tensor | None = None


def pieces_of(layout: Layout, tensors: Mapping[str, torch.Tensor], staged: bool) -> list[Piece]:
    """The runs of all leaves that are staged, or of all that are not; views of the live tensors' memory."""
    found = []
    for leaf, offset in zip(layout.leaves, layout.offsets, strict=True):
        if leaf.staged is not staged or not leaf.nbytes:
            continue
        tensor = tensors[leaf.name]
        if is_dense(tensor):
            found.append(Piece(flat_bytes(tensor).numpy(), offset))
        else:
            found.append(Piece(np.empty(0, np.uint8), offset, tensor.detach()))
    return found


def by_chunk(pieces: list[Piece], chunk_bytes: int, chunks: int) -> list[list[Piece]]:
    """The pieces cut at chunk borders; a strided leaf goes whole to the chunk in which it begins."""
    table: list[list[Piece]] = [[] for _ in range(chunks)]
    for piece in pieces:
        if piece.strided is not None:
            table[piece.offset // chunk_bytes].append(piece)
            continue
        at, end = piece.offset, piece.offset + piece.source.nbytes
        while at < end:
            stop = min(end, (at // chunk_bytes + 1) * chunk_bytes)
            table[at // chunk_bytes].append(Piece(piece.source[at - piece.offset : stop - piece.offset], at))
            at = stop
    return table


def copy_piece(piece: Piece, data: Bytes) -> None:
    """Copies one piece into the slot's data."""
    if piece.strided is None:
        np.copyto(data[piece.offset : piece.offset + piece.source.nbytes], piece.source)
        return
    nbytes = piece.strided.numel() * piece.strided.element_size()
    target = torch.from_numpy(data[piece.offset : piece.offset + nbytes]).view(piece.strided.dtype)
    target.view(piece.strided.shape).copy_(piece.strided)


def copy_cpus() -> list[int]:
    """The CPUs to bind copy threads to; empty: one thread, left to the scheduler.

    A copy thread on a core that also computes makes the other threads of torch's team wait at their next barrier. Where
    torch has a thread for every core, two copy threads on two cores halve that wait; where a core is free, one thread
    finds it. Measured with bench/save.py.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2 or torch.get_num_threads() < len(cpus):
        return []
    first = os.getpid() % len(cpus)  # trainers that share the machine should not choose the same two
    return [cpus[first], cpus[(first + len(cpus) // 2) % len(cpus)]]


@dataclass(frozen=True)
class Plan:
    """What to copy, cut and in order; made again only when the tensors are others."""

    tensors: Mapping[str, torch.Tensor]
    staged: list[Piece]
    mark: Bytes  # the staged leaves as they were at the mark: the beginning of a slot's data
    table: list[list[Piece]]


class CpuCopier:
    """Copies state that lies in host memory. At most one snapshot and a few small tasks are waiting.

    Args:
        cpus: one copy thread for each, bound to it; empty means one thread that runs anywhere.
    """

    def __init__(self, cpus: list[int]) -> None:
        self.copied_bytes = 0
        self.idle_bytes = 0
        self._reading = threading.Event()
        self._reading.set()  # set: nothing is being read
        self._is_idle = False
        self._plan: Plan | None = None
        self._job: CopyJob | None = None
        self._threads = [Worker(f"reft-copier-{i}", cpu) for i, cpu in enumerate(cpus or [None])]

    def begin(self, job: CopyJob) -> None:
        plan = self._planned(job)
        for piece in plan.staged:
            copy_piece(piece, plan.mark)
        self._reading.clear()
        self._job = job
        self._threads[0].submit(lambda: self._copy(job, plan))

    def fence(self) -> float:
        if self._reading.is_set() or self._job is None:
            return 0.0
        began = time.perf_counter()
        self._job.give_up()
        self._reading.wait()
        return time.perf_counter() - began

    def idle(self, is_idle: bool) -> None:
        self._is_idle = is_idle

    def submit(self, task: Callable[[], None]) -> None:
        self._threads[0].submit(task)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()

    def _planned(self, job: CopyJob) -> Plan:
        if self._plan is None or self._plan.tensors is not job.tensors:
            pieces = pieces_of(job.layout, job.tensors, staged=False)
            table = by_chunk(pieces, job.chunk_bytes, -(-job.layout.data_bytes // job.chunk_bytes))
            staged = pieces_of(job.layout, job.tensors, staged=True)
            mark = np.zeros(job.layout.staged_bytes, np.uint8)
            self._plan = Plan(job.tensors, staged, mark, table)
        return self._plan

    def _copy(self, job: CopyJob, plan: Plan) -> None:
        """One snapshot, in the first thread; the others take their share of the chunks."""
        digests = np.zeros(len(plan.table), np.uint64)
        bounds = np.linspace(0, len(digests), len(self._threads) + 1, dtype=int).tolist()
        try:
            slot = job.open(True)
            np.copyto(slot.data[: len(plan.mark)], plan.mark)
            shares = [
                thread.submit(functools.partial(self._copy_chunks, job, slot, plan, digests, range(first, last)))
                for thread, first, last in zip(self._threads[1:], bounds[1:], bounds[2:], strict=False)
            ]
            try:
                self._copy_chunks(job, slot, plan, digests, range(bounds[0], bounds[1]))
            finally:
                # Whatever happened here, nothing may read the state once the fence is open.
                failures = [share.exception() for share in shares]
            for failure in filter(None, failures):
                raise failure
            job.intact()
            job.landed()
        except Exception as error:
            job.failed(error)
            return
        finally:
            self._reading.set()
        job.sealed(digests)

    def _copy_chunks(self, job: CopyJob, slot: SlotMap, plan: Plan, digests: np.ndarray, chunks: range) -> None:
        # Python holds the interpreter's lock while training wants it: this loop asks the slot nothing.
        data, size = slot.data[: job.layout.data_bytes], job.chunk_bytes
        for index in chunks:
            job.at_chunk(index)
            pieces, chunk = plan.table[index], data[index * size : (index + 1) * size]
            for piece in pieces:
                copy_piece(piece, data)
            # The source is still in the core's cache; the slot is not. A chunk of several leaves has padding between.
            is_whole = len(pieces) == 1 and pieces[0].source.nbytes == chunk.nbytes
            digests[index] = chunk_digest(pieces[0].source if is_whole else chunk)
            self.copied_bytes += chunk.nbytes
            self.idle_bytes += chunk.nbytes if self._is_idle else 0


class Worker:
    """A thread that runs tasks one after the other.

    Args:
        cpu: the only CPU that it runs on; None leaves it to the scheduler.
    """

    def __init__(self, name: str, cpu: int | None) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._cpu = cpu
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._tasks.put((task, done))
        return done

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._cpu is not None:
            os.sched_setaffinity(0, {self._cpu})  # of this thread alone
        while (item := self._tasks.get()) is not None:
            task, done = item
            try:
                task()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)
