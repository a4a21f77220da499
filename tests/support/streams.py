"""Devices for the CUDA engine where there is no CUDA."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reft.client.memory.cuda import Device


class Inline(Device):
    """A device whose streams do everything when it is enqueued, and that notes the order of what it is told."""

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
        assert not self.captures, "waiting for what is outside breaks the capture"
        self.order.append(f"compute waits for {event}")

    def on_side(self):
        return contextlib.nullcontext()

    def host_waits(self, event):
        self.order.append(f"host waits for {event}")

    def times(self, events):
        return [0.0 for _ in events]


class Late(Inline):
    """A device whose side stream does nothing until somebody must wait for it: as late as a real one may be.

    The compute stream does everything at once. What is written in place on the side stream is kept back, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: list = []
        self._done = 0
        self._lock = threading.Lock()

    def record_side(self):
        return len(self._queue)

    def on_side(self):
        return _Keeping(self._queue)

    def compute_waits(self, event):
        assert not self.captures, "waiting for what is outside breaks the capture"
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
    """A late device by the rule of torch's allocator: what it gives to the compute stream, that stream may still be using.

    So the side stream may write there only behind an event which the compute stream has recorded since. Memory that is
    allocated in the side stream is its own. Allocations are noted inside of `watching`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watching = _Allocating(self)
        self.is_on_side = False
        self.given: dict[int, torch.Tensor] = {}  # by address; kept, or another tensor would get the same
        self._safe: set[int] = set()
        self._recorded: set[int] = set()

    def record_compute(self):
        self._recorded = set(self.given)
        return super().record_compute()

    def side_waits(self, event):
        self._safe |= self._recorded

    @contextlib.contextmanager
    def on_side(self):
        self.is_on_side = True
        try:
            with _Careful(self._queue, self):
                yield
        finally:
            self.is_on_side = False

    def check(self, target: torch.Tensor) -> None:
        address = target.untyped_storage().data_ptr()
        assert address in self._safe or address not in self.given, "the compute stream may still use this memory"


class _Allocating(TorchDispatchMode):
    """Notes what is allocated in the compute stream."""

    def __init__(self, device: Strict) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not self._device.is_on_side and func._schema.name in ("aten::empty", "aten::zeros", "aten::empty_strided"):
            self._device.given[found.untyped_storage().data_ptr()] = found
        return found


class _Keeping(TorchDispatchMode):
    """Puts what writes into a queue; views are made at once."""

    def __init__(self, queue: list) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        self._queue.append((func, args, kwargs))
        return kwargs.get("out", args[0])


class _Careful(_Keeping):
    """Looks at each place that is written."""

    def __init__(self, queue: list, device: Strict) -> None:
        super().__init__(queue)
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            self._device.check((kwargs or {}).get("out", args[0]))
        return super().__torch_dispatch__(func, types, args, kwargs)
