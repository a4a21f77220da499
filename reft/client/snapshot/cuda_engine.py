"""The copying engine on CUDA: everything is enqueued on a side stream; the host never waits in a step.

    compute stream   … optimizer t │ gather riders + small leaves │ F0 │ gap │ F1 │ … │ wait(read) │ optimizer t+1
    side stream                    └► wait(gathered) ► riders          └► wait(gap begins) ► parts ► … ► read ► done
    worker thread                                                       done ► zeros ► intact? ► LANDED ► digests ► SEALED

Without a course all is enqueued at the mark. With one, the plan (core/pipeline/pacing.py) says for each stretch what it
holds; that
is enqueued when training enqueues the stretch, behind an event of the compute stream: the device is there when its work is,
not when Python is. What no stretch holds is enqueued at the fence, first of all into scratch memory of the device where it
was granted: the optimizer then waits for that copy only, and the slot gets the bytes beside what follows.

The fence is a wait of the compute stream, so every copy and the event behind the last one are enqueued before the
optimizer's pre-hook returns: an event that is not recorded yet would be no fence. Whether the state was written in between
is decided by the first of the two, the fence or the worker; after the fence the optimizer itself changes the counters that
tell. LANDED is written by the host once the event has passed: in the order of a tag in the stream, and never before it.

While training is captured into a CUDA graph nothing is enqueued: the side stream would become part of the graph, or the capture
fail. A captured optimizer calls no hook when it is replayed, so the session asks for the fence right after each mark then.

What talks to CUDA is behind `Device`, so that the contract test can run this engine where there is none.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from reft.client.memory.cuda import Device
from reft.client.memory.threads import TaskThread
from reft.client.snapshot.cuda_plan import TRANSFER_BYTES, CudaCopyPlan, compute, plan_transfers
from reft.client.snapshot.engine import CopyJob
from reft.client.snapshot.replica_check import DigestSample, digest_of
from reft.client.snapshot.save_plan import ParityTiling
from reft.client.snapshot.stats import CopyStats
from reft.client.snapshot.timeline import COPYING, TimelineEvent
from reft.client.state.tensors import flat_bytes, is_dense
from reft.core.pipeline import pacing
from reft.core.pipeline.course import PacingPlan
from reft.core.pipeline.pacing import Tier
from reft.errors import ReftError
from reft.wire.slot_format import chunk_digest

log = logging.getLogger("reft")
PLAN_EVERY = 16  # snapshots until a plan is made again from newer measurements; it costs the host up to a millisecond
PENDING_MAX = 256  # measurements that the device has not made yet


class CudaCopyEngine:
    """Copies state that lies on one CUDA device. At most one snapshot is under way.

    Args:
        device: CUDA, or what stands for it in the contract test.
        parity_scratch_bytes: the most memory of the device for computing parity.
        overrun_scratch_bytes: memory of the device for what is not copied when the fence comes; 0 lets the optimizer wait.
    """

    def __init__(
        self, device: Device | None = None, parity_scratch_bytes: int = 64 << 20, overrun_scratch_bytes: int = 0
    ) -> None:
        self.copy_stats = CopyStats()
        # A launch costs more than a small column, so columns are as wide as the scratch allows.
        self.cut = ParityTiling(TRANSFER_BYTES, parity_scratch_bytes // 2, parity_scratch_bytes)
        self.compares_all = False  # all bytes of a cell over PCIe would undo what sharding saves
        self.keeps_host_time = False
        self._device = device or Device()
        self._overrun_bytes = overrun_scratch_bytes
        self._overrun: torch.Tensor | None = None
        self._transfers: CudaCopyPlan | None = None
        self._without_room = 0  # snapshots in a row for which the device had no memory
        self._planned: tuple[CudaCopyPlan, tuple[Tier, ...], pacing.TaskPlan] | None = None
        self._plan_age = 0
        self._worker = TaskThread("reft-copier", None)
        self._flight: _Flight | None = None
        self._tier = Tier.COMPUTE
        self._pending: deque[_Measured] = deque(maxlen=PENDING_MAX)

    def begin(self, job: CopyJob) -> None:
        if self._transfers is None or self._transfers.save_plan is not job.save_plan:
            self._transfers = self._planned_transfers(job)
        self._settle()
        plan = self._plan(self._transfers, job.pacing_plan) if job.pacing_plan else None
        flight = _Flight(job, self._transfers, plan, self._device, self._pending)
        flight.start()
        self._flight = flight
        at_once = job.save_plan.written_bytes - sum(self._transfers.written)  # what lies on the host
        self.copy_stats.wrote([at_once if tier is self._tier else 0 for tier in Tier])
        self._launch(list(flight.todo) if plan is None else [*plan.tasks(pacing.AT_MARK), *plan.tasks(0)], self._tier)

    def is_capturing(self) -> bool:
        return self._device.is_capturing()

    def enter(self, index: int, tier: Tier) -> Any:
        event = self._device.record_compute()
        self._tier = tier
        if index and self._flight is not None and self._flight.todo:
            self._flight.side_waits(event)
            self._launch(self._flight.tasks(index, tier), tier)
        return event

    def stamp(self) -> Any:
        return self._device.record_compute()

    def times(self, stamps: Sequence[Any]) -> list[float] | None:
        return self._device.times(stamps)

    def hurry(self) -> None:
        if self._flight is not None:
            self._launch(list(self._flight.todo), self._tier)

    def fence(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if flight.todo:
            self.copy_stats.wrote(flight.overrun(self._scratch()))
            self._worker.submit(flight.finish)
        flight.decide()
        before = self._device.record_compute()
        self._device.compute_waits(flight.read)
        self._pending.append(_Measured(before, self._device.record_compute(), Tier.FENCE, 0))

    def submit(self, task: Callable[[], None]) -> None:
        self._worker.submit(task)

    def close(self) -> None:
        self._worker.close()

    def _launch(self, tasks: Sequence[int], tier: Tier) -> None:
        """Enqueues tasks of the snapshot under way; behind the last one the worker goes on."""
        flight = self._flight
        if flight is None or flight.read is not None:
            return
        if len(tasks):
            self.copy_stats.wrote(flight.launch(tasks, tier))
        if not flight.todo:
            flight.land()
            self._worker.submit(flight.finish)

    def _planned_transfers(self, job: CopyJob) -> CudaCopyPlan:
        """The transfers of another share; the device needs room for them.

        Where it has none, only the 1st, 2nd, 4th, 8th, … snapshot tries again: torch gives back all that it keeps before it
        says so, and then training has to ask the driver for it anew.

        Raises:
            ReftError: the device has no room.
        """
        if not self._without_room & (self._without_room - 1):
            with contextlib.suppress(torch.OutOfMemoryError):
                found = plan_transfers(job.save_plan, job.chunk_bytes)
                self._without_room = 0
                return found
        self._without_room += 1
        raise ReftError(
            f"the device has no room for small leaves and parity, "
            f"at most {job.save_plan.tiling.scratch} bytes of scratch memory.",
            "lower REFT_PARITY_SCRATCH_BYTES",
        )

    def _scratch(self) -> torch.Tensor:
        """Memory for an overrun: allocated when it is needed first, then kept; none if the device has none left.

        Of the side stream: what torch gives to the compute stream may be used there until the device has come so far.
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
                    "what is not copied at the fence. Lower REFT_OVERRUN_SCRATCH_BYTES.",
                    self._overrun_bytes,
                )
                self._overrun = torch.empty(0, dtype=torch.uint8, device=device)
        return self._overrun

    def _plan(self, transfers: CudaCopyPlan, pacing_plan: PacingPlan) -> pacing.TaskPlan:
        """Where each part and column goes; made again now and then, and when windows or the share are others."""
        tiers = tuple(stretch.tier for stretch in pacing_plan.phases)
        self._plan_age += 1
        known = self._planned
        if known is not None and known[0] is transfers and known[1] == tiers and self._plan_age % PLAN_EVERY:
            return known[2]
        ends = list(accumulate((stretch.seconds for stretch in pacing_plan.phases), initial=0.0))
        windows = [pacing.CopyWindow(tier, *span) for tier, span in zip(tiers, pairwise(ends), strict=True)]
        beside = pacing_plan.beside_bytes_per_s
        rates = pacing.CopyRates(
            pacing_plan.bytes_per_s, beside, beside, self.copy_stats.parity_rate() or pacing_plan.bytes_per_s / 2
        )
        sizes = [source.nbytes for source, _ in transfers.parts]
        parity = transfers.written[len(sizes) :]
        plan = pacing.plan(sizes, parity, windows, rates, pacing_plan.guard_s, pacing_plan.seconds)
        self._planned = transfers, tiers, plan
        return plan

    def _settle(self) -> None:
        """Takes the measurements that the device has made since into account."""
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
    """Two events, and what was enqueued between them; 0 bytes at the fence: nothing, the compute stream waited."""

    begin: Any
    end: Any
    tier: Tier
    nbytes: int
    is_parity: bool = False


class _Flight:
    """One snapshot under way; see the module. The trainer's thread enqueues, the worker finishes."""

    def __init__(
        self,
        job: CopyJob,
        transfers: CudaCopyPlan,
        plan: pacing.TaskPlan | None,
        device: Device,
        pending: deque[_Measured],
    ) -> None:
        self._job, self._transfers, self._plan = job, transfers, plan
        self._device, self._pending = device, pending
        # Fresh for each snapshot: the worker reads it when the next one may have begun. torch reuses pinned memory.
        self._on_cuda = transfers.gathered.device.type != "cpu"
        self._aside = torch.empty(transfers.gathered.nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._on_cuda)
        self._slot = job.open(False)  # behind what there may be no memory for: a slot is given back by `failed` alone
        self._data = torch.from_numpy(self._slot.data)
        self._lock = threading.Lock()
        self._verdict: Future[None] = Future()
        self._compared: list[tuple[DigestSample, list[torch.Tensor]]] = []
        self._done: Any = None
        self.read: Any = None  # behind the last byte that is read from the live state
        self.todo = dict.fromkeys(range(len(transfers.parts) + len(transfers.save_plan.columns)))  # in order

    def side_waits(self, event: Any) -> None:
        """What is enqueued from here on is copied when the device has passed this event."""
        self._device.side_waits(event)

    def tasks(self, index: int, tier: Tier) -> Sequence[int]:
        """What the plan has for a stretch; everything if training has left the course."""
        windows = self._plan.windows if self._plan else ()
        if self._plan is None or index >= len(windows) or windows[index].tier is not tier:
            return list(self.todo)
        return self._plan.tasks(index).tolist()

    def start(self) -> None:
        """At the mark: what forward mutates and what is small is gathered, in the compute stream."""
        self._attempt(self._start, on_side=False)

    def _start(self) -> None:
        self._gather()
        self._device.side_waits(self._device.record_compute())
        inline_leaves = self._transfers.riders_bytes
        with self._device.on_side():
            self._aside[:inline_leaves].copy_(self._transfers.gathered[:inline_leaves], non_blocking=True)
            self._compared = [(sample, self._sampled(sample)) for sample in self._job.samples()]

    def launch(self, tasks: Iterable[int], tier: Tier) -> list[int]:
        """Enqueues those of the tasks that are left; bytes written, by tier."""
        left = [task for task in tasks if task in self.todo]
        self._batch(left, tier, self._copy)
        for task in left:
            self.todo.pop(task, None)
        return self._counted(left, tier)

    def land(self) -> None:
        """Everything is enqueued."""
        self._done = self.read = self._device.record_side()

    def overrun(self, scratch: torch.Tensor) -> list[int]:
        """At the fence: what was not enqueued yet, as much of it as possible by way of the scratch memory."""
        left = list(self.todo)
        rooms: dict[int, torch.Tensor] = {}
        used = 0
        for task in left:
            nbytes = self._transfers.parts[task][0].nbytes if task < len(self._transfers.parts) else 0
            if nbytes and used + nbytes <= scratch.nbytes:
                rooms[task] = scratch[used : used + nbytes]
                used += nbytes
        self._batch([task for task in left if task not in rooms], Tier.FENCE, self._copy)
        self._attempt(lambda: self._stage(rooms))
        self.read = self._device.record_side()
        self._batch(list(rooms), Tier.FENCE, lambda task: self._to_slot(task, rooms[task]))
        self.todo.clear()
        self._done = self._device.record_side()
        return self._counted(left, Tier.FENCE)

    def _stage(self, rooms: Mapping[int, torch.Tensor]) -> None:
        for task, room in rooms.items():
            self._job.at_chunk(task)
            room.copy_(self._transfers.parts[task][0], non_blocking=True)

    def decide(self) -> None:
        """Whether the state was left alone so far; the first answer holds."""
        with self._lock:
            if self._verdict.done():
                return
            try:
                self._job.intact()
                self._verdict.set_result(None)
            except Exception as error:
                self._verdict.set_exception(error)

    def _attempt(self, enqueue: Callable[[], object], on_side: bool = True) -> None:
        """A failure ends the snapshot, not the training; what is enqueued still reads the state, so there is a fence."""
        if self._verdict.done():
            return
        try:
            with torch.no_grad(), self._device.on_side() if on_side else contextlib.nullcontext():
                enqueue()
        except Exception as error:
            self._verdict.set_exception(error)
            self.todo.clear()

    def _counted(self, tasks: Sequence[int], tier: Tier) -> list[int]:
        written = sum(self._transfers.written[task] for task in tasks)
        return [written if each is tier else 0 for each in Tier]

    def _batch(self, tasks: Sequence[int], tier: Tier, enqueue: Callable[[int], None]) -> None:
        """Enqueues tasks, copies before parity, each kind between two events that tell how long it took."""
        parts = len(self._transfers.parts)
        for kind in ([task for task in tasks if task < parts], [task for task in tasks if task >= parts]):
            if not kind:
                continue
            begin = self._device.record_side()
            for task in kind:
                self._attempt(partial(enqueue, task))
            nbytes = sum(self._transfers.written[task] for task in kind)
            self._pending.append(_Measured(begin, self._device.record_side(), tier, nbytes, kind[0] >= parts))

    def _copy(self, task: int) -> None:
        """From the live state into the slot; of parity, the computation too."""
        parts = self._transfers.parts
        if task < len(parts):
            self._job.at_chunk(task)
            self._to_slot(task, parts[task][0])
        else:
            self._job.at_parity(task - len(parts))
            compute(self._transfers, self._transfers.save_plan.columns[task - len(parts)], self._data)

    def _to_slot(self, task: int, source: torch.Tensor) -> None:
        offset = self._transfers.parts[task][1]
        self._data[offset : offset + source.nbytes].copy_(source, non_blocking=True)

    def _gather(self) -> None:
        """In the compute stream; what lies on the host, at once."""
        transfers, aside = self._transfers, self._aside
        for tensor, place in transfers.small:
            place.copy_(tensor, non_blocking=True)
        for tensor, at in transfers.host:
            run = flat_bytes(tensor.contiguous() if not is_dense(tensor) else tensor)
            aside[at : at + run.nbytes].copy_(run)
        at = transfers.host_offset
        transfers.gathered[at:].copy_(aside[at:], non_blocking=True)
        for tensor, offset in transfers.large:
            self._data[offset : offset + tensor.nbytes].copy_(tensor)

    def _sampled(self, sample: DigestSample) -> list[torch.Tensor]:
        """Copies of what is compared with other ranks, a small window of each cell, in host memory of their own."""
        parts = []
        for leaf, begin, nbytes, _ in sample.runs:
            part = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._on_cuda)
            part.copy_(self._transfers.sources[leaf][begin : begin + nbytes], non_blocking=True)
            parts.append(part)
        return parts

    def finish(self) -> None:
        """In the worker: what follows the last byte."""
        job, slot, transfers = self._job, self._slot, self._transfers
        try:
            self._device.host_waits(self._done)
            self.decide()
            self._verdict.result()
            memory, data = self._aside.numpy(), slot.data
            for begin, size, offset in transfers.late:
                np.copyto(data[offset : offset + size], memory[begin : begin + size])
            for offset, size in job.save_plan.zeros if slot.is_new_layout else ():
                data[offset : offset + size] = 0
            job.compared(
                {sample.cell: digest_of(sample, [part.numpy() for part in parts]) for sample, parts in self._compared}
            )
            leaves = [(job.save_plan.leaves[i], transfers.places[i]) for i in job.save_plan.inline_leaves]
            job.landed({leaf.name: memory[at : at + leaf.nbytes].tobytes() for leaf, at in leaves})
            job.sealed(np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], np.uint64))
        except Exception as error:
            job.failed(error)
