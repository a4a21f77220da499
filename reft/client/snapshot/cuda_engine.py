"""The copy engine for CUDA: enqueues all copies on a side stream; the host never waits in a step.

    compute stream  … optimizer t │ gather small leaves │ F0 │ gap │ F1 │ … │ wait(read) │ optimizer
    side stream           wait(gathered) ► inline leaves ► wait(gap begins) ► parts ► … ► read, done
    snapshot thread            done ► late leaves, zeros ► CopiedEvent ► digests ► DigestedEvent

At the mark the digests' sums are enqueued too (`replica_sums`): the bytes stay on the device.
Without a pacing plan all tasks are enqueued at the mark. With one, the task plan
(core/pipeline/pacing.py) assigns tasks to the phases of the window. A phase's tasks are enqueued
when Python enters the phase, behind an event of the compute stream, because the device enters it
later. Tasks without a phase are enqueued at the fence. Where scratch memory of the device was
granted, they go there first: the optimizer then waits only for that copy, and the copies from the
scratch memory to the slot run beside the optimizer.

The fence is a wait of the compute stream. An event that is not recorded yet would stop nothing. So
all copies, and the event behind the last one, are enqueued before the optimizer's pre-hook returns.
The snapshot thread gets `CopiedEvent` after the last event has passed, never before.

A loop may train in another stream than the one in which it marks. So the pre-hooks note the stream
that writes the state. At a mark the current stream waits for that one, and that one for the mark.

While training is captured into a CUDA graph nothing is enqueued: the side stream would become part
of the graph, or the capture would fail. A captured optimizer calls no hook when the graph is
replayed, so the session then calls `fence` right after each mark.

All calls of CUDA are in `Device`, so that the contract test can run this engine on a machine
without CUDA.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from reft.client.memory.cuda import Device
from reft.client.snapshot.cuda_plan import TRANSFER_BYTES, CudaCopyPlan, compute, plan_transfers
from reft.client.snapshot.engine import CopyEvent, CopyOrder, DigestedEvent, copied_event
from reft.client.snapshot.replica_check import DigestSample, samples
from reft.client.snapshot.replica_sums import copy_sums, sums_bytes
from reft.client.snapshot.save_plan import ParityTiling
from reft.client.snapshot.stats import CopyStats
from reft.client.snapshot.timeline import COPYING, TimelineEvent
from reft.core.pipeline import pacing
from reft.core.pipeline.course import PacingPlan
from reft.core.pipeline.pacing import Tier
from reft.errors import ReftError
from reft.wire.slot_format import SlotMap, chunk_digest

log = logging.getLogger("reft")
# Snapshots between two task plans from newer measurements; one costs the host up to a millisecond.
PLAN_EVERY = 16
PENDING_MAX = 256  # measurements that the device has not finished yet


class CudaCopyEngine:
    """Copies state that lies on one CUDA device; one snapshot is open at a time.

    The snapshot thread may finish one snapshot while the next one begins.

    Args:
        device: the streams of CUDA, or a substitute in the contract test.
        parity_scratch_bytes: the limit for memory of the device in which parity is computed.
        overrun_scratch_bytes: memory of the device for bytes that are not copied yet at the fence.
            With 0 the optimizer waits until these bytes are in the slot.
    """

    keeps_host_time = False
    needs_slot_at_mark = True
    copy_cpu: int | None = None  # the device copies

    def __init__(
        self, device: Device | None = None, parity_scratch_bytes: int = 64 << 20, overrun_scratch_bytes: int = 0
    ) -> None:
        self.copy_stats = CopyStats()
        # A launch costs more than a small column, so columns are as wide as the scratch allows.
        self.parity_tiling = ParityTiling(TRANSFER_BYTES, parity_scratch_bytes // 2, parity_scratch_bytes)
        self._device = device or Device()
        self._overrun_bytes = overrun_scratch_bytes
        self._overrun: torch.Tensor | None = None
        self._transfers: CudaCopyPlan | None = None
        self._out_of_memory = 0  # snapshots in a row for which the device had no memory
        self._task_plan: tuple[CudaCopyPlan, tuple[Tier, ...], pacing.TaskPlan] | None = None
        self._plan_age = 0
        self._current: _CudaCopy | None = None
        self._tier = Tier.COMPUTE
        self._pending: deque[_Measured] = deque(maxlen=PENDING_MAX)

    def note_writer(self) -> None:
        self._device.note_writer()

    def behind_writer(self) -> contextlib.AbstractContextManager[None]:
        return self._device.behind_writer()

    def begin(self, order: CopyOrder, slot: SlotMap | None) -> _CudaCopy:
        assert slot is not None, "copies are enqueued at the mark, so the slot must be known"
        if self._transfers is None or self._transfers.save_plan is not order.save_plan:
            self._transfers = self._new_transfers(order)
        self._collect_times()
        plan = self._plan(self._transfers, order.pacing_plan) if order.pacing_plan else None
        current = _CudaCopy(order, self._transfers, slot, plan, self._device, self._pending)
        current.start()
        self._current = current
        # Leaves on the host are copied at once.
        host_bytes = order.save_plan.written_bytes - sum(self._transfers.written)
        self.copy_stats.wrote([host_bytes if tier is self._tier else 0 for tier in Tier])
        self._launch(list(current.todo) if plan is None else [*plan.tasks(pacing.AT_MARK), *plan.tasks(0)], self._tier)
        return current

    def is_capturing(self) -> bool:
        return self._device.is_capturing()

    def enter(self, index: int, tier: Tier) -> Any:
        event = self._device.record_compute()
        self._tier = tier
        if index and self._current is not None and self._current.todo:
            self._device.side_waits(event)
            self._launch(self._current.tasks(index, tier), tier)
        return event

    def stamp(self) -> Any:
        return self._device.record_compute()

    def times(self, stamps: Sequence[Any]) -> list[float] | None:
        return self._device.times(stamps)

    def hurry(self) -> None:
        if self._current is not None:
            self._launch(list(self._current.todo), self._tier)

    def fence(self) -> None:
        current, self._current = self._current, None
        if current is None:
            return
        if current.todo:
            self.copy_stats.wrote(current.overrun(self._scratch()))
        before = self._device.record_compute()
        self._device.compute_waits(current.read)
        self._pending.append(_Measured(before, self._device.record_compute(), Tier.FENCE, 0))

    def close(self) -> None:
        """Does nothing, because the engine has no thread of its own."""

    def _launch(self, tasks: Sequence[int], tier: Tier) -> None:
        """Enqueues tasks of the current snapshot; after the last, the snapshot thread goes on."""
        current = self._current
        if current is None or current.read is not None:
            return
        if len(tasks):
            self.copy_stats.wrote(current.launch(tasks, tier))
        if not current.todo:
            current.end_reads()

    def _new_transfers(self, order: CopyOrder) -> CudaCopyPlan:
        """Returns the copy plan for a new save plan.

        It comes with the memory of the device that it needs. If the device has too little memory,
        only the 1st, 2nd, 4th, 8th, … snapshot tries again. Each failure makes torch empty its
        cache first, and training then has to get this memory from the driver again.

        Raises:
            ReftError: the device has too little memory.
        """
        if not self._out_of_memory & (self._out_of_memory - 1):
            with contextlib.suppress(torch.OutOfMemoryError):
                transfers = plan_transfers(order.save_plan, order.chunk_bytes, self._device)
                self._out_of_memory = 0
                return transfers
        self._out_of_memory += 1
        raise ReftError(
            f"the device has no room for small leaves and parity, "
            f"at most {order.save_plan.tiling.scratch} bytes of scratch memory.",
            "lower REFT_PARITY_SCRATCH_BYTES",
        )

    def _scratch(self) -> torch.Tensor:
        """Returns the scratch memory for an overrun; empty if the device is full.

        It is allocated on the side stream: memory that torch allocates for the compute stream may
        still be in use there, by work that the device has not done yet.
        """
        if self._overrun is None:
            assert self._transfers is not None
            device = self._transfers.gathered.device
            try:
                with self._device.on_side():
                    self._overrun = torch.empty(self._overrun_bytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                log.warning(
                    "%d bytes of scratch memory for overruns are more than the device has left: the optimizer waits for "
                    "bytes that are not copied at the fence. Lower REFT_OVERRUN_SCRATCH_BYTES.",
                    self._overrun_bytes,
                )
                self._overrun = torch.empty(0, dtype=torch.uint8, device=device)
        return self._overrun

    def _plan(self, transfers: CudaCopyPlan, pacing_plan: PacingPlan) -> pacing.TaskPlan:
        """Returns the phase of each part and column.

        A task plan is made anew every PLAN_EVERY snapshots, and when the phases or the save plan
        are others.
        """
        tiers = tuple(phase.tier for phase in pacing_plan.phases)
        self._plan_age += 1
        cached = self._task_plan
        if cached is not None and cached[0] is transfers and cached[1] == tiers and self._plan_age % PLAN_EVERY:
            return cached[2]
        ends = list(accumulate((phase.seconds for phase in pacing_plan.phases), initial=0.0))
        windows = [pacing.CopyWindow(tier, *span) for tier, span in zip(tiers, pairwise(ends), strict=True)]
        beside = pacing_plan.beside_bytes_per_s
        rates = pacing.CopyRates(
            pacing_plan.bytes_per_s, beside, beside, self.copy_stats.parity_rate() or pacing_plan.bytes_per_s / 2
        )
        sizes = [source.nbytes for source, _ in transfers.parts]
        parity = transfers.written[len(sizes) :]
        plan = pacing.plan(sizes, parity, windows, rates, pacing_plan.guard_s, pacing_plan.seconds)
        self._task_plan = transfers, tiers, plan
        return plan

    def _collect_times(self) -> None:
        """Adds the measurements that the device has finished to the statistics."""
        while self._pending and (times := self._device.times(self._pending[0][:2])):
            measured = self._pending.popleft()
            begin_s, end_s = times
            if measured.tier is Tier.FENCE and not measured.nbytes:
                self.copy_stats.stalled(begin_s, end_s)
                continue
            self.copy_stats.moved(measured.tier, measured.nbytes, end_s - begin_s, measured.is_parity)
            name = "parity" if measured.is_parity else "chunks"
            self.copy_stats.timeline.add(TimelineEvent(COPYING, name, begin_s, end_s, measured.tier, measured.nbytes))


class _Measured(NamedTuple):
    """Two events, and the work enqueued between them.

    In FENCE, 0 bytes mean a wait of the stream.
    """

    begin: Any
    end: Any
    tier: Tier
    nbytes: int
    is_parity: bool = False


class _CudaCopy:
    """One snapshot: the trainer's thread enqueues it, the snapshot thread finishes it.

    Attributes:
        todo: the tasks that are not enqueued yet, in order.
        read: the event behind the last byte that is read from the live state; None until all
            copies are enqueued.
    """

    def __init__(
        self,
        order: CopyOrder,
        transfers: CudaCopyPlan,
        slot: SlotMap,
        plan: pacing.TaskPlan | None,
        device: Device,
        pending: deque[_Measured],
    ) -> None:
        self._order, self._transfers, self._plan = order, transfers, plan
        self._device, self._pending = device, pending
        # New for each snapshot, as the snapshot thread may read it after the next one has begun.
        # torch reuses pinned memory.
        self._on_cuda = transfers.gathered.device.type != "cpu"
        self._host_copy = torch.empty(
            transfers.gathered.nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._on_cuda
        )
        self._data = torch.from_numpy(slot.data)
        self._error: Exception | None = None
        self._samples: list[tuple[DigestSample, list[torch.Tensor]]] = []
        self._is_enqueued = threading.Event()
        self._done: Any = None
        self.read: Any = None
        self.todo = dict.fromkeys(range(len(transfers.parts) + len(transfers.save_plan.columns)))

    def tasks(self, index: int, tier: Tier) -> Sequence[int]:
        """Returns the tasks of a phase.

        If training does not follow the plan, these are all remaining tasks.
        """
        windows = self._plan.windows if self._plan else ()
        if self._plan is None or index >= len(windows) or windows[index].tier is not tier:
            return list(self.todo)
        return self._plan.tasks(index).tolist()

    def start(self) -> None:
        """At the mark: gathers leaves that are small or mutated by forward."""
        self._attempt(self._start, on_side=False)

    def _start(self) -> None:
        self._gather()
        self._device.side_waits(self._device.record_compute())
        inline_bytes = self._transfers.riders_bytes
        with self._device.on_side():
            self._host_copy[:inline_bytes].copy_(self._transfers.gathered[:inline_bytes], non_blocking=True)
            wanted = samples(self._order.save_plan.cells, self._order.step, self._order.compares_all)
            self._enqueue_samples(wanted)

    def launch(self, tasks: Iterable[int], tier: Tier) -> list[int]:
        """Enqueues the tasks that are still to do; returns the bytes written, by tier."""
        remaining = [task for task in tasks if task in self.todo]
        self._batch(remaining, tier, self._copy)
        for task in remaining:
            self.todo.pop(task, None)
        return self._bytes_by_tier(remaining, tier)

    def end_reads(self) -> None:
        """Records the event behind the last copy; called when all tasks are enqueued."""
        self._done = self.read = self._device.record_side()
        self._is_enqueued.set()

    def overrun(self, scratch: torch.Tensor) -> list[int]:
        """At the fence: enqueues the remaining tasks, through the scratch memory while it lasts.

        Returns:
            The bytes written, by tier.
        """
        remaining = list(self.todo)
        staged: dict[int, torch.Tensor] = {}
        used_bytes = 0
        for task in remaining:
            nbytes = self._transfers.parts[task][0].nbytes if task < len(self._transfers.parts) else 0
            if nbytes and used_bytes + nbytes <= scratch.nbytes:
                staged[task] = scratch[used_bytes : used_bytes + nbytes]
                used_bytes += nbytes
        self._batch([task for task in remaining if task not in staged], Tier.FENCE, self._copy)
        self._attempt(lambda: self._stage(staged))
        self.read = self._device.record_side()
        self._batch(list(staged), Tier.FENCE, lambda task: self._to_slot(task, staged[task]))
        self.todo.clear()
        self._done = self._device.record_side()
        self._is_enqueued.set()
        return self._bytes_by_tier(remaining, Tier.FENCE)

    def _stage(self, staged: Mapping[int, torch.Tensor]) -> None:
        for task, memory in staged.items():
            self._order.at_chunk(task)
            memory.copy_(self._transfers.parts[task][0], non_blocking=True)

    def _attempt(self, enqueue: Callable[[], object], on_side: bool = True) -> None:
        """Calls `enqueue`; an exception ends the snapshot, not the training.

        The fence is still needed then: copies that are enqueued already read the live state.
        """
        if self._error is not None:
            return
        try:
            with torch.no_grad(), self._device.on_side() if on_side else contextlib.nullcontext():
                enqueue()
        except Exception as error:
            # Its frames refer to this object, and to memory of the device: nothing but Python's
            # garbage collection, which trainings turn off, would free both.
            self._error = error.with_traceback(None)
            self.todo.clear()

    def _take_error(self) -> Exception:
        """Returns the error, and forgets it: once raised, it refers to this object again."""
        error, self._error = self._error, None
        assert error is not None
        return error

    def _bytes_by_tier(self, tasks: Sequence[int], tier: Tier) -> list[int]:
        written = sum(self._transfers.written[task] for task in tasks)
        return [written if each is tier else 0 for each in Tier]

    def _batch(self, tasks: Sequence[int], tier: Tier, enqueue: Callable[[int], None]) -> None:
        """Enqueues tasks, copies before parity, and measures both by events before and after."""
        parts = len(self._transfers.parts)
        for kind in ([task for task in tasks if task < parts], [task for task in tasks if task >= parts]):
            if not kind:
                continue
            begin = self._device.record_side()
            # One attempt for all: to enter the stream costs more than to enqueue a copy.
            self._attempt(partial(_call_each, enqueue, kind))
            nbytes = sum(self._transfers.written[task] for task in kind)
            self._pending.append(_Measured(begin, self._device.record_side(), tier, nbytes, kind[0] >= parts))

    def _copy(self, task: int) -> None:
        """Enqueues a part's copy from live state to slot, or computes a parity column."""
        parts = self._transfers.parts
        if task < len(parts):
            self._order.at_chunk(task)
            self._to_slot(task, parts[task][0])
        else:
            self._order.at_parity(task - len(parts))
            compute(self._transfers, self._transfers.save_plan.columns[task - len(parts)], self._data)

    def _to_slot(self, task: int, source: torch.Tensor) -> None:
        offset = self._transfers.parts[task][1]
        self._data[offset : offset + source.nbytes].copy_(source, non_blocking=True)

    def _gather(self) -> None:
        """Gathers leaves: those of the device on the compute stream, those of the host at once."""
        transfers, host_copy = self._transfers, self._host_copy
        transfers.gather_small()
        for tensor, place in transfers.gapped:
            place.copy_(tensor, non_blocking=True)
        at = transfers.host_offset
        # One call for thousands of step counters; a copy by torch takes 0.7 µs for each.
        memoryview(host_copy.numpy())[at:] = b"".join(transfers.host)
        transfers.gathered[at:].copy_(host_copy[at:], non_blocking=True)
        for tensor, offset in transfers.large:
            self._data[offset : offset + tensor.nbytes].copy_(tensor)

    def _enqueue_samples(self, wanted: Sequence[DigestSample]) -> None:
        """Enqueues the sums of each sample's bytes: only the sums come to the host."""
        sizes = [sums_bytes(run.nbytes) for sample in wanted for run in sample.runs]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=self._on_cuda)
        parts = iter(memory.split(sizes))
        for sample in wanted:
            sums = [next(parts) for _ in sample.runs]
            for (leaf, begin, nbytes, _), part in zip(sample.runs, sums, strict=True):
                copy_sums(self._transfers.sources[leaf][begin : begin + nbytes], part, non_blocking=True)
            self._samples.append((sample, sums))

    def events(self, slot: SlotMap) -> Generator[CopyEvent, None, None]:
        transfers = self._transfers
        self._is_enqueued.wait()
        self._device.host_waits(self._done)
        if self._error is not None:
            raise self._take_error()
        memory, data = self._host_copy.numpy(), slot.data
        for begin, size, offset in transfers.late:
            np.copyto(data[offset : offset + size], memory[begin : begin + size])
        for offset, size in transfers.save_plan.zeros if slot.is_new_layout else ():
            data[offset : offset + size] = 0
        leaves = [(transfers.save_plan.leaves[i], transfers.places[i]) for i in transfers.save_plan.inline_leaves]
        inline = {leaf.name: memory[at : at + leaf.nbytes].tobytes() for leaf, at in leaves}
        sums = [(sample, [each.numpy() for each in parts]) for sample, parts in self._samples]
        yield copied_event(self._order, inline, sums)
        yield DigestedEvent(np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], np.uint64))

    def drop(self) -> None:
        """Does nothing: copies are enqueued at the mark, so there was a slot."""


def _call_each(enqueue: Callable[[int], None], tasks: Sequence[int]) -> None:
    for task in tasks:
        enqueue(task)
