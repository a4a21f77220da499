"""The copying engine on the CPU: copies one snapshot beside training, part by part, digests it on the way, adds parity.

    mark:   begin(job)      staged leaves are copied aside here, in the caller; the threads do the rest
            job.open        in the thread: waits for a slot if none may be reused yet
            read            parts:  live bytes ─► slot, digests │ parity columns: live bytes of others' shards ─► XOR ─► slot
            job.landed      nothing reads the state any more; the digests of the parity's chunks follow
    fence:  fence()         no slot until now: given up; else waits until the last byte is read, which it almost always is

A contract test runs this engine and the CUDA engine alike (engine.py). Both call `job.landed(riders)`
after the last byte and `job.sealed(digests)` from a thread of theirs, and `job.failed(error)` if anything raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, repeat

import numpy as np

from reft.client.memory import streaming
from reft.client.memory.threads import TaskThread, run_all
from reft.client.snapshot.cpu_plan import CopyPart, CpuCopyPlan
from reft.client.snapshot.engine import CopyJob
from reft.client.snapshot.replica_check import digest
from reft.client.snapshot.save_plan import ParityColumn, ParityTiling, WriteItem
from reft.client.snapshot.stats import CopyStats
from reft.client.snapshot.throttle import CopyThrottle
from reft.client.snapshot.timeline import COPYING, TIERS, TimelineEvent
from reft.core.coding import erasure
from reft.core.pipeline.course import CopyTask, PacedCopy, Priority
from reft.core.pipeline.pacing import Tier
from reft.wire.slot_format import Bytes, SlotMap, chunk_digest


class CpuCopyEngine:
    """Copies state that lies in host memory. At most one snapshot and a few small tasks are waiting.

    Args:
        cpus: one copy thread for each, bound to it; empty means one thread that runs anywhere.
        clock: seconds, as `time.perf_counter` gives them.
        has_idle: whether gaps are for threads that give way to all others; not where these would hardly ever run.
    """

    def __init__(self, cpus: list[int], clock: Callable[[], float] = time.perf_counter, has_idle: bool = True) -> None:
        self.copy_stats = CopyStats()
        self.cut = ParityTiling()
        self.compares_all = self.keeps_host_time = True
        self._reading = threading.Event()
        self._reading.set()  # set: nothing is being read
        self._clock = clock
        self._throttle = CopyThrottle(clock)
        self._plan: CpuCopyPlan | None = None
        self._job: CopyJob | None = None
        self._threads = [TaskThread(f"reft-copier-{i}", cpu) for i, cpu in enumerate(cpus or [None])]
        self._idle_cpus: list[int | None] = ([*cpus] or [None]) if has_idle else []
        self._idle: list[TaskThread] = []  # there once a snapshot takes a course

    def begin(self, job: CopyJob) -> None:
        if self._plan is None or self._plan.save_plan is not job.save_plan:
            self._plan = CpuCopyPlan.of(job.save_plan, job.chunk_bytes, 2 * len(self._threads))
        plan = self._plan
        if job.pacing_plan is not None and not self._idle:
            self._idle = [TaskThread(f"reft-idle-{i}", cpu, is_idle=True) for i, cpu in enumerate(self._idle_cpus)]
        for copy_aside in plan.at_mark:
            copy_aside()
        self._throttle.begin()
        self._reading.clear()
        self._job = job
        self._threads[0].submit(lambda: self._take(job, plan))

    def fence(self) -> None:
        if self._reading.is_set() or self._job is None:
            return
        began_s = self._clock()
        self._job.give_up()
        self._throttle.lift(Tier.FENCE)
        self._reading.wait()
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

    def submit(self, task: Callable[[], None]) -> None:
        self._threads[0].submit(task)

    def close(self) -> None:
        for thread in [*self._threads, *self._idle]:
            thread.close()

    def _take(self, job: CopyJob, plan: CpuCopyPlan) -> None:
        """One snapshot, in the first thread; the others take their share of the work."""
        try:
            digests = np.zeros(plan.chunks, np.uint64)
            slot = job.open(True)
            data = slot.data
            for offset, size in plan.save_plan.zeros if slot.is_new_layout else ():
                data[offset : offset + size] = 0
            for copy_aside in plan.later:
                copy_aside()
            self._copy(job, plan, data, digests)
            found = {sample.cell: digest(sample, plan.sources) for sample in job.samples()}
            job.intact()
            job.compared(found)
            job.landed({plan.save_plan.leaves[i].name: plan.sources[i].tobytes() for i in plan.save_plan.inline_leaves})
        except Exception as error:
            job.failed(error)
            return
        finally:
            self._reading.set()
        # The optimizer may run now: only the slot is read from here on.
        try:
            parity = plan.save_plan.parity_chunks
            if parity:
                self._shared_out(
                    lambda threads: np.linspace(parity.start, parity.stop, threads + 1, dtype=int).tolist(),
                    lambda _, chunks: _digest(slot, digests, chunks),
                )
            job.sealed(digests)
        except Exception as error:
            job.failed(error)

    def _shared_out(self, bounds: Callable[[int], list[int]], work: Callable[[int, range], None]) -> None:
        """Runs work(thread's index, its tasks) in all threads; returns when all have ended, and raises what one raised."""
        at = bounds(len(self._threads))
        parts = [partial(work, i, range(begin, end)) for i, (begin, end) in enumerate(pairwise(at))]
        run_all(parts[0], list(zip(self._threads[1:], parts[1:], strict=True)))

    def _copy(self, job: CopyJob, plan: CpuCopyPlan, data: Bytes, digests: np.ndarray) -> None:
        """All parts and columns: each thread its part, at once; or, along a course, from one queue, each when it is due."""
        if job.pacing_plan is None:
            self._shared_out(plan.bounds, lambda i, tasks: self._read_at_once(job, plan, data, digests, i, tasks))
            return
        paced_copy = PacedCopy(job.pacing_plan, plan.weights, len(plan.tasks))
        self._throttle.open(paced_copy)

        def read(thread: int, hands: Priority) -> None:
            try:
                self._read_along(job, plan, data, digests, thread, paced_copy, hands)
            except BaseException:
                self._throttle.abandon(paced_copy)  # the others may wait for a gap
                raise

        hands = [Priority.BUSY if self._idle else Priority.ALL] * len(self._threads) + [Priority.IDLE] * len(self._idle)
        parts = [partial(read, i, each) for i, each in enumerate(hands)]
        run_all(parts[0], list(zip([*self._threads[1:], *self._idle], parts[1:], strict=True)))

    def _read_along(
        self,
        job: CopyJob,
        plan: CpuCopyPlan,
        data: Bytes,
        digests: np.ndarray,
        thread: int,
        paced_copy: PacedCopy,
        hands: Priority,
    ) -> None:
        spent = dict.fromkeys(Tier, (0, 0.0))

        def note(task: CopyTask, begin_s: float, end_s: float, is_whole: bool) -> None:
            if is_whole:  # else it also waited for what came after the gap
                nbytes, seconds = spent[task.tier]
                spent[task.tier] = nbytes + plan.weights[task.number], seconds + end_s - begin_s
            name = "chunks" if task.number < len(plan.tasks) else "parity"
            self.copy_stats.timeline.add(
                TimelineEvent(f"{COPYING} {thread}", name, begin_s, end_s, task.tier, task.number)
            )

        self._read(job, plan, data, digests, thread, self._throttle.tasks(paced_copy, hands, note))
        for tier, (nbytes, seconds) in spent.items():
            self.copy_stats.moved(tier, nbytes * len(self._threads), seconds)

    def _read_at_once(
        self, job: CopyJob, plan: CpuCopyPlan, data: Bytes, digests: np.ndarray, thread: int, tasks: range
    ) -> None:
        began_s, tier = self._clock(), self._throttle.tier
        self._read(job, plan, data, digests, thread, zip(tasks, repeat(None), strict=False))
        ended_s = self._clock()
        if len(tasks):
            nbytes = int(plan.work[tasks.stop - 1]) - (int(plan.work[tasks.start - 1]) if tasks.start else 0)
            self.copy_stats.moved(tier, nbytes * len(self._threads), ended_s - began_s)
            track = f"{COPYING} {thread}"
            self.copy_stats.timeline.add(
                TimelineEvent(track, f"{len(tasks)} chunks and columns", began_s, ended_s, tier, nbytes)
            )

    def _read(
        self,
        job: CopyJob,
        plan: CpuCopyPlan,
        data: Bytes,
        digests: np.ndarray,
        thread: int,
        tasks: Iterable[tuple[int, Tier | None]],
    ) -> None:
        """Tasks of parts come first, columns after them; those without a tier count as what training does meanwhile."""
        # Python holds the interpreter's lock while training wants it: this loop asks the slot nothing.
        counts = [0] * len(TIERS)
        of_chunks, data = len(plan.tasks), data[: plan.save_plan.data_bytes]
        for task, tier in tasks:
            written = 0
            if task >= of_chunks:
                job.at_parity(task - of_chunks)
                column = plan.save_plan.columns[task - of_chunks]
                _compute(plan, column, data, plan.scratch[thread])
                written = column.nbytes * len(column.outputs)
            else:
                for part in plan.tasks[task]:
                    for chunk in part.chunks:
                        job.at_chunk(chunk)
                    written += _copy_part(part, plan.sources, data, digests, job.chunk_bytes)
            counts[(tier or self._throttle.tier) - 1] += written
        self.copy_stats.wrote(counts)


def _copy_part(part: CopyPart, sources: list[Bytes], data: Bytes, digests: np.ndarray, size: int) -> int:
    """Copies one part and digests each of its chunks; how many bytes were copied."""
    target, copied = data[part.chunks.start * size : part.chunks.stop * size], 0
    if len(part.runs) == 1 and part.runs[0].nbytes == target.nbytes:
        leaf, begin, copied, _ = part.runs[0]
        digested = sources[leaf][begin : begin + copied]  # still in the core's cache; the slot is not
        streaming.copy(target, digested)
    else:
        for leaf, begin, nbytes, at in part.runs:  # of several leaves, with padding between
            np.copyto(data[at : at + nbytes], sources[leaf][begin : begin + nbytes])
            copied += nbytes
        digested = target
    for at, chunk in zip(range(0, digested.nbytes, size), part.chunks, strict=True):
        digests[chunk] = chunk_digest(digested[at : at + size])
    return copied


def _compute(plan: CpuCopyPlan, column: ParityColumn, data: Bytes, scratch: Bytes) -> None:
    """XORs one column of parity from live bytes into the slot."""
    n, program, used = column.nbytes, column.program, 0
    inputs = []
    for runs in column.inputs:
        if not runs:
            inputs.append(plan.zeros[:n])
        elif plan.save_plan.is_direct(runs, n):
            inputs.append(plan.sources[runs[0].leaf][runs[0].begin : runs[0].begin + n])
        else:
            inputs.append(scratch[used : used + n])
            used += n
            _compose(plan.sources, runs, inputs[-1])
    rows = [scratch[used + i * n : used + (i + 1) * n] for i in range(program.scratch)]
    erasure.run(program, inputs, [data[offset : offset + n] for offset in column.outputs], rows)


def _compose(sources: list[Bytes], runs: tuple[WriteItem, ...], target: Bytes) -> None:
    """Puts together a register from several runs, zeros between."""
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
