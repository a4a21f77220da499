"""The copy engine for state in host memory: copies, digests, and computes parity beside training.

    mark:   begin     copies staged leaves aside, in the trainer's thread
            events    in the snapshot thread, with the help of the copy threads:
                        parts:           live bytes ─► slot, digests
                        parity columns:  live bytes of others' shards ─► XOR ─► slot
                      CopiedEvent     no copy reads the state any more
                      DigestedEvent   the parity chunks have their digests, too
    fence:  fence     all tasks at once, and waits for the last read

A parity column is a piece of a parity shard, and the XOR of data that other ranks' slots keep. This
rank needs no message for that: all ranks of a cell hold all bytes of the cell.

engine.py describes what this engine and the CUDA engine have in common.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, repeat

import numpy as np

from reft.client.memory import streaming
from reft.client.memory.threads import TaskThread, run_all
from reft.client.snapshot.cpu_plan import CopyPart, CpuCopyPlan
from reft.client.snapshot.engine import CopiedEvent, CopyEvent, CopyOrder, DigestedEvent, copied_event
from reft.client.snapshot.replica_check import sample_sums, samples
from reft.client.snapshot.save_plan import ParityColumn, ParityTiling, WriteItem
from reft.client.snapshot.stats import CopyStats
from reft.client.snapshot.throttle import CopyThrottle
from reft.client.snapshot.timeline import COPYING, TIERS, TimelineEvent
from reft.core.coding import erasure
from reft.core.pipeline.course import CopyTask, PacedCopy, Priority
from reft.core.pipeline.pacing import Tier
from reft.wire.slot_format import Bytes, SlotMap, chunk_digest


class CpuCopyEngine:
    """Copies state that lies in host memory; at most one snapshot at a time.

    Args:
        cpus: one thread copies on each: the snapshot thread on the first, and threads of this
            engine on the others. Empty lets the snapshot thread copy alone, on any CPU.
        clock: seconds, as `time.perf_counter` gives them.
        has_idle: whether idle threads copy in gaps. False where all cores are busy, as idle threads
            would hardly run.
    """

    keeps_host_time = True
    needs_slot_at_mark = False

    def __init__(self, cpus: list[int], clock: Callable[[], float] = time.perf_counter, has_idle: bool = True) -> None:
        self.copy_stats = CopyStats()
        self.parity_tiling = ParityTiling()
        self.copy_cpu = cpus[0] if cpus else None
        self._clock = clock
        self._throttle = CopyThrottle(clock)
        self._plan: CpuCopyPlan | None = None
        self._current: _CpuCopy | None = None
        self._threads = [TaskThread(f"reft-copier-{i}", cpu) for i, cpu in enumerate(cpus[1:], 1)]
        self._idle_cpus: list[int | None] = ([*cpus] or [None]) if has_idle else []
        self._idle_threads: list[TaskThread] = []  # started with the first paced snapshot

    def note_writer(self) -> None:
        """Does nothing: on the host work is done in the order of the calls."""

    def behind_writer(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, order: CopyOrder, slot: SlotMap | None = None) -> _CpuCopy:
        if self._plan is None or self._plan.save_plan is not order.save_plan:
            self._plan = CpuCopyPlan.of(order.save_plan, order.chunk_bytes, 2 * (1 + len(self._threads)))
        if order.pacing_plan is not None and not self._idle_threads:
            self._idle_threads = [
                TaskThread(f"reft-idle-{i}", cpu, is_idle=True) for i, cpu in enumerate(self._idle_cpus)
            ]
        # Staged leaves: the forward pass may change them, so they are copied before it begins.
        for copy_aside in self._plan.at_mark:
            copy_aside()
        self._throttle.begin()
        self._current = _CpuCopy(self, order, self._plan)
        return self._current

    def fence(self) -> None:
        current, self._current = self._current, None
        if current is None or current.has_read.is_set():
            return
        began_s = self._clock()
        self._throttle.lift(Tier.FENCE)
        current.has_read.wait()
        self.copy_stats.stalled(began_s, self._clock())

    def is_capturing(self) -> bool:
        return False

    def enter(self, index: int, tier: Tier) -> float:
        return self._throttle.enter(index, tier)

    def stamp(self) -> float:
        return self._clock()

    def times(self, stamps: Sequence[float]) -> list[float]:
        return list(stamps)

    def hurry(self) -> None:
        self._throttle.lift()

    def close(self) -> None:
        for thread in [*self._threads, *self._idle_threads]:
            thread.close()

    def copy(self, order: CopyOrder, plan: CpuCopyPlan, slot: SlotMap, digests: np.ndarray) -> CopiedEvent:
        """Copies all bytes and digests them, but for the parity chunks."""
        data = slot.data
        for offset, size in plan.save_plan.zeros if slot.is_new_layout else ():
            data[offset : offset + size] = 0
        # No forward pass changes these leaves, so they are copied aside only now.
        for copy_aside in plan.later:
            copy_aside()
        self._copy(order, plan, data, digests)
        wanted = samples(plan.save_plan.cells, order.step, order.compares_all)
        sums = [(sample, sample_sums(sample, plan.sources)) for sample in wanted]
        inline = {plan.save_plan.leaves[i].name: plan.sources[i].tobytes() for i in plan.save_plan.inline_leaves}
        return copied_event(order, inline, sums)

    def digest_parity(self, plan: CpuCopyPlan, slot: SlotMap, digests: np.ndarray) -> None:
        """Digests the parity chunks. Only the slot is read, so the optimizer may run meanwhile."""
        if parity := plan.save_plan.parity_chunks:
            self._run_in_threads(
                lambda threads: np.linspace(parity.start, parity.stop, threads + 1, dtype=int).tolist(),
                lambda _, chunks: _digest(slot, digests, chunks),
            )

    def _run_in_threads(self, bounds: Callable[[int], list[int]], work: Callable[[int, range], None]) -> None:
        """Runs `work` in this thread and in the engine's, and waits for them.

        It raises an exception that one of them raised.

        Args:
            bounds: from a number of threads: where the tasks of each thread begin, and the end.
            work: called with the thread's index and its tasks.
        """
        starts = bounds(1 + len(self._threads))
        calls = [partial(work, i, range(begin, end)) for i, (begin, end) in enumerate(pairwise(starts))]
        run_all(calls[0], list(zip(self._threads, calls[1:], strict=True)))

    def _copy(self, order: CopyOrder, plan: CpuCopyPlan, data: Bytes, digests: np.ndarray) -> None:
        """Copies all parts and computes all columns.

        Without a pacing plan each thread has its own tasks and begins at once. With one, all
        threads take tasks from one queue, each task when it is due.
        """
        if order.pacing_plan is None:
            self._run_in_threads(plan.bounds, lambda i, tasks: self._copy_at_once(order, plan, data, digests, i, tasks))
            return
        paced_copy = PacedCopy(order.pacing_plan, plan.weights, len(plan.tasks))
        self._throttle.open(paced_copy)

        def copy_paced(thread: int, priority: Priority) -> None:
            try:
                self._copy_paced(order, plan, data, digests, thread, paced_copy, priority)
            except BaseException:
                self._throttle.abandon(paced_copy)  # other threads may be waiting for a gap
                raise

        # IDLE threads run only while no other thread wants their core, and copy only in gaps. Then
        # BUSY threads copy beside training. Without idle threads, ALL threads do both.
        priorities = [Priority.BUSY if self._idle_threads else Priority.ALL] * (1 + len(self._threads))
        priorities += [Priority.IDLE] * len(self._idle_threads)
        calls = [partial(copy_paced, i, priority) for i, priority in enumerate(priorities)]
        run_all(calls[0], list(zip([*self._threads, *self._idle_threads], calls[1:], strict=True)))

    def _copy_paced(
        self,
        order: CopyOrder,
        plan: CpuCopyPlan,
        data: Bytes,
        digests: np.ndarray,
        thread: int,
        paced_copy: PacedCopy,
        priority: Priority,
    ) -> None:
        """Runs the tasks of one thread, each when it is due. It measures the rate of each tier."""
        measured = dict.fromkeys(Tier, (0, 0.0))

        def note(task: CopyTask, begin_s: float, end_s: float, in_one_phase: bool) -> None:
            # Only a task within one phase is measured. If the gap ends first, an idle thread loses
            # its core, and the measured time holds that wait too.
            if in_one_phase:
                nbytes, seconds = measured[task.tier]
                measured[task.tier] = nbytes + plan.weights[task.number], seconds + end_s - begin_s
            name = "chunks" if task.number < len(plan.tasks) else "parity"
            self.copy_stats.timeline.add(
                TimelineEvent(f"{COPYING} {thread}", name, begin_s, end_s, task.tier, task.number)
            )

        self._run_tasks(order, plan, data, digests, thread, self._throttle.tasks(paced_copy, priority, note))
        # The engine's rate is that of all threads together: this thread's rate times their number.
        for tier, (nbytes, seconds) in measured.items():
            self.copy_stats.moved(tier, nbytes * (1 + len(self._threads)), seconds)

    def _copy_at_once(
        self, order: CopyOrder, plan: CpuCopyPlan, data: Bytes, digests: np.ndarray, thread: int, tasks: range
    ) -> None:
        """Runs the tasks of one thread without a pause, and measures their rate."""
        began_s, tier = self._clock(), self._throttle.tier
        self._run_tasks(order, plan, data, digests, thread, zip(tasks, repeat(None), strict=False))
        ended_s = self._clock()
        if len(tasks):
            nbytes = int(plan.work[tasks.stop - 1]) - (int(plan.work[tasks.start - 1]) if tasks.start else 0)
            self.copy_stats.moved(tier, nbytes * (1 + len(self._threads)), ended_s - began_s)
            track = f"{COPYING} {thread}"
            self.copy_stats.timeline.add(
                TimelineEvent(track, f"{len(tasks)} chunks and columns", began_s, ended_s, tier, nbytes)
            )

    def _run_tasks(
        self,
        order: CopyOrder,
        plan: CpuCopyPlan,
        data: Bytes,
        digests: np.ndarray,
        thread: int,
        tasks: Iterable[tuple[int, Tier | None]],
    ) -> None:
        """Copies the parts or computes the column of each task, and counts the bytes written.

        Args:
            tasks: number and tier of each. Numbers below len(plan.tasks) are tasks of parts, the
                following ones columns. A task without a tier counts in the tier that training is
                in.
        """
        # This loop calls no method of the slot. Each call would hold the interpreter's lock longer,
        # and training wants the lock.
        counts = [0] * len(TIERS)
        part_tasks, data = len(plan.tasks), data[: plan.save_plan.data_bytes]
        for task, tier in tasks:
            written = 0
            if task >= part_tasks:
                order.at_parity(task - part_tasks)
                column = plan.save_plan.columns[task - part_tasks]
                _compute(plan, column, data, plan.scratch[thread])
                written = column.nbytes * len(column.outputs)
            else:
                for part in plan.tasks[task]:
                    for chunk in part.chunks:
                        order.at_chunk(chunk)
                    written += _copy_part(part, plan.sources, data, digests, order.chunk_bytes)
            counts[(tier or self._throttle.tier) - 1] += written
        self.copy_stats.wrote(counts)


@dataclass(frozen=True)
class _CpuCopy:
    """One snapshot that the engine copies; set `has_read`: no copy reads the live state."""

    engine: CpuCopyEngine
    order: CopyOrder
    plan: CpuCopyPlan
    has_read: threading.Event = field(default_factory=threading.Event)

    def events(self, slot: SlotMap) -> Generator[CopyEvent, None, None]:
        digests = np.zeros(self.plan.chunks, np.uint64)
        try:
            yield self.engine.copy(self.order, self.plan, slot, digests)
        finally:
            self.has_read.set()
        self.engine.digest_parity(self.plan, slot, digests)
        yield DigestedEvent(digests)

    def drop(self) -> None:
        self.has_read.set()


def _copy_part(part: CopyPart, sources: list[Bytes], data: Bytes, digests: np.ndarray, size: int) -> int:
    """Copies one part and digests each of its chunks; returns how many bytes were copied.

    Args:
        size: of a chunk, in bytes.
    """
    target, copied = data[part.chunks.start * size : part.chunks.stop * size], 0
    if len(part.runs) == 1 and part.runs[0].nbytes == target.nbytes:
        leaf, begin, copied, _ = part.runs[0]
        source = sources[leaf][begin : begin + copied]
        streaming.copy(target, source)
        digest_input = source  # still in the core's cache; the slot's bytes are not
    else:
        for leaf, begin, nbytes, at in part.runs:  # several leaves, with padding between
            np.copyto(data[at : at + nbytes], sources[leaf][begin : begin + nbytes])
            copied += nbytes
        digest_input = target
    for at, chunk in zip(range(0, digest_input.nbytes, size), part.chunks, strict=True):
        digests[chunk] = chunk_digest(digest_input[at : at + size])
    return copied


def _compute(plan: CpuCopyPlan, column: ParityColumn, data: Bytes, scratch: Bytes) -> None:
    """XORs one column of parity from live bytes into the slot."""
    n, program, used_bytes = column.nbytes, column.program, 0
    inputs = []
    for runs in column.inputs:
        if not runs:
            inputs.append(plan.zeros[:n])
        elif plan.save_plan.is_direct(runs, n):
            inputs.append(plan.sources[runs[0].leaf][runs[0].begin : runs[0].begin + n])
        else:
            inputs.append(scratch[used_bytes : used_bytes + n])
            used_bytes += n
            _compose(plan.sources, runs, inputs[-1])
    rows = [scratch[used_bytes + i * n : used_bytes + (i + 1) * n] for i in range(program.scratch)]
    erasure.run(program, inputs, [data[offset : offset + n] for offset in column.outputs], rows)


def _compose(sources: list[Bytes], runs: tuple[WriteItem, ...], target: Bytes) -> None:
    """Fills a register from several runs, with zeros between them."""
    end = 0
    for leaf, begin, size, at in runs:
        if end < at:
            target[end:at] = 0
        np.copyto(target[at : at + size], sources[leaf][begin : begin + size])
        end = at + size
    target[end:] = 0


def _digest(slot: SlotMap, digests: np.ndarray, chunks: range) -> None:
    for index in chunks:
        digests[index] = chunk_digest(slot.chunk(index))
