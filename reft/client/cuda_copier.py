"""The copying engine on CUDA: everything is enqueued at the mark, on a side stream; the host never waits in a step.

    compute stream   … optimizer t │ gather staged + small leaves │ forward, backward t+1 │ wait(done) │ optimizer t+1
    side stream                    └► wait(gathered) ► gathered bytes ► large leaves, chunk by chunk ► done
    worker thread                                                       done ► intact? ► LANDED ► digests ► SEALED

The fence is a wait of the compute stream, so every copy and the event behind the last one are enqueued before the
optimizer's pre-hook returns: an event that is not recorded yet would be no fence. Whether the state was written in between
is decided by whoever comes first, the fence or the worker; after the fence the optimizer itself changes the counters that
tell. LANDED is written by the host once the event has passed: in the order of a tag in the stream, and never before it.

What talks to CUDA is behind `Device`, so that the contract test can run this engine where there is none. On a GPU this
version has not been run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reft.client.copier import CopyJob, Worker
from reft.client.state import flat_bytes, is_dense
from reft.core.layout import SMALL_BYTES
from reft.errors import UnsupportedState
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
    """What to copy for one set of tensors: `host` leaves at once, `small` ones gathered, `large` ones as they are."""

    tensors: Mapping[str, torch.Tensor]
    host: list[tuple[torch.Tensor, int]]
    small: list[tuple[torch.Tensor, torch.Tensor]]  # source, its place in the gathered bytes
    gathered: torch.Tensor
    gathered_offset: int
    large: list[tuple[torch.Tensor, int]]


class CudaCopier:
    """Copies state that lies on one CUDA device. At most one snapshot is under way.

    Args:
        device: CUDA, or what stands for it in the contract test.
    """

    def __init__(self, device: Device | None = None) -> None:
        self.copied_bytes = 0
        self.idle_bytes = 0
        self._device = device or Device()
        self._transfers: Transfers | None = None
        self._worker = Worker("reft-copier", None)
        self._lock = threading.Lock()
        self._verdict: Future[None] | None = None
        self._job: CopyJob | None = None
        self._done: Any = None
        self._is_idle = False

    def begin(self, job: CopyJob) -> None:
        slot = job.open(False)
        transfers = self._planned(job)
        data = torch.from_numpy(slot.data)
        with torch.no_grad():
            for tensor, offset in transfers.host:
                data[offset : offset + tensor.nbytes].copy_(flat_bytes(tensor.contiguous()))
            for source, place in transfers.small:
                place.copy_(source, non_blocking=True)
            self._device.side_waits(self._device.record_compute())
            with self._device.on_side():
                self._enqueue(job, transfers, data)
            self._done = self._device.record_side()
        self._job, self._verdict = job, Future()
        done, verdict = self._done, self._verdict
        self._worker.submit(lambda: self._finish(job, slot, done, verdict))

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

    def _enqueue(self, job: CopyJob, transfers: Transfers, data: torch.Tensor) -> None:
        size = transfers.gathered.nbytes
        start = transfers.gathered_offset
        data[start : start + size].copy_(transfers.gathered, non_blocking=True)
        for source, offset in transfers.large:
            for at in range(0, source.nbytes, TRANSFER_BYTES):
                job.at_chunk(at // TRANSFER_BYTES)
                part = source[at : at + TRANSFER_BYTES]
                data[offset + at : offset + at + part.nbytes].copy_(part, non_blocking=True)
        self.copied_bytes += job.layout.data_bytes
        self.idle_bytes += job.layout.data_bytes if self._is_idle else 0

    def _finish(self, job: CopyJob, slot: SlotMap, done: Any, verdict: Future[None]) -> None:
        """In the worker: what follows the last byte."""
        try:
            self._device.host_waits(done)
            self._decide(job, verdict)
            verdict.result()
            job.landed()
            digests = np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], np.uint64)
        except Exception as error:
            job.failed(error)
            return
        job.sealed(digests)

    def _planned(self, job: CopyJob) -> Transfers:
        if self._transfers is None or self._transfers.tensors is not job.tensors:
            self._transfers = plan_transfers(job)
        return self._transfers


def plan_transfers(job: CopyJob) -> Transfers:
    """Sorts the leaves of a snapshot by how they travel.

    Raises:
        UnsupportedState: they lie on more than one device, or a large one has gaps between its elements.
    """
    leaves = list(zip(job.layout.leaves, job.layout.offsets, strict=True))
    devices = {tensor.device for tensor in job.tensors.values() if tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise UnsupportedState(f"the state lies on {len(devices)} devices; one a process is held.")
    device = next(iter(devices), torch.device("cpu"))
    host, small, large = [], [], []
    for leaf, offset in leaves:
        tensor = job.tensors[leaf.name].detach()
        if not leaf.nbytes:
            continue
        if tensor.device != device or (device.type == "cpu" and leaf.staged):
            host.append((tensor, offset))
        elif leaf.staged or leaf.nbytes < SMALL_BYTES:
            small.append((leaf, tensor, offset))
        elif is_dense(tensor):
            large.append((flat_bytes(tensor), offset))
        else:
            raise UnsupportedState(f"{leaf.name} has gaps between its elements and is too large to gather.")
    # Staged and small leaves come first in a layout, but leaves of the host may lie between: the run covers them all.
    first = min((offset for _, _, offset in small), default=0)
    end = max((offset + leaf.nbytes for leaf, _, offset in small), default=0)
    gathered = torch.zeros(end - first, dtype=torch.uint8, device=device)
    places = []
    for leaf, tensor, offset in small:
        place = gathered[offset - first : offset - first + leaf.nbytes].view(tensor.dtype)
        places.append((tensor, place.as_strided(tensor.shape, leaf.stride)))
    return Transfers(job.tensors, host, places, gathered, first, large)
