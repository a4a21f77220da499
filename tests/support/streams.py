"""Fake devices for the CUDA engine where there is no CUDA."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reft.client.memory.cuda import Device


class Inline(Device):
    """A device whose streams do all work at once; records the order of the calls."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.captures = False

    def is_capturing(self):
        return self.captures

    def record_compute(self):
        assert not self.captures, "an event of the compute stream becomes part of the graph"
        self.order.append("record compute")
        return "compute"

    def record_side(self):
        self.order.append("record side")
        return f"side {self.order.count('record side')}"

    def side_waits(self, event):
        self.order.append(f"side waits for {event}")

    def compute_waits(self, event):
        assert not self.captures, "waiting for an event outside of the graph breaks the capture"
        self.order.append(f"compute waits for {event}")

    def note_writer(self):
        self.order.append("note writer")

    @contextlib.contextmanager
    def behind_writer(self):
        assert not self.captures, "waiting for a stream outside of the graph breaks the capture"
        self.order.append("compute waits for writer")
        yield
        self.order.append("writer waits for compute")

    def on_side(self):
        return contextlib.nullcontext()

    def as_graph(self, enqueue):
        self.order.append("capture")

        def replay():
            self.order.append("replay")
            enqueue()

        return replay

    def host_waits(self, event):
        self.order.append(f"host waits for {event}")

    def times(self, events):
        return [0.0 for _ in events]


class Late(Inline):
    """A device whose side stream works only when something waits for it.

    The compute stream does all work at once. Writes on the side stream are put into a queue, in
    order.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: list = []
        self._done = 0
        self._lock = threading.Lock()

    def record_side(self):
        return len(self._queue)

    def on_side(self):
        return _QueueWrites(self._queue)

    def compute_waits(self, event):
        assert not self.captures, "waiting for an event outside of the graph breaks the capture"
        self._run(event)

    def host_waits(self, event):
        if event != "compute":
            self._run(event)

    def _run(self, until: int) -> None:
        with self._lock:
            while self._done < until:
                call, args, kwargs = self._queue[self._done]
                call(*args, **kwargs)
                self._done += 1


class Strict(Late):
    """A late device that checks a rule of torch's allocator.

    The rule is for memory of the compute stream. Such memory may still be in use there when it is
    allocated. So the side stream may write it only behind an event that the compute stream recorded
    after the allocation. Memory allocated on the side stream is free to use. Allocations inside of
    `watching` are checked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watching = _RecordAllocations(self)
        self.is_on_side = False
        # By address. The tensors are kept, or another tensor would get the same address.
        self.allocated: dict[int, torch.Tensor] = {}
        self._safe: set[int] = set()
        self._recorded: set[int] = set()

    def record_compute(self):
        self._recorded = set(self.allocated)
        return super().record_compute()

    def side_waits(self, event):
        self._safe |= self._recorded

    @contextlib.contextmanager
    def on_side(self):
        self.is_on_side = True
        try:
            with _CheckWrites(self._queue, self):
                yield
        finally:
            self.is_on_side = False

    def check(self, target: torch.Tensor) -> None:
        address = target.untyped_storage().data_ptr()
        assert address in self._safe or address not in self.allocated, "the compute stream may still use this memory"


class _RecordAllocations(TorchDispatchMode):
    """Records the tensors that are allocated on the compute stream."""

    def __init__(self, device: Strict) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not self._device.is_on_side and func._schema.name in ("aten::empty", "aten::zeros", "aten::empty_strided"):
            self._device.allocated[result.untyped_storage().data_ptr()] = result
        return result


class _QueueWrites(TorchDispatchMode):
    """Puts operators that write into a queue; makes views at once."""

    def __init__(self, queue: list) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        self._queue.append((func, args, kwargs))
        return kwargs.get("out", args[0])


class _CheckWrites(_QueueWrites):
    """Checks each address that is written."""

    def __init__(self, queue: list, device: Strict) -> None:
        super().__init__(queue)
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            self._device.check((kwargs or {}).get("out", args[0]))
        return super().__torch_dispatch__(func, types, args, kwargs)
