"""A fake CUDA runtime. Each thread has its device, its stream and its last error.

It follows the rules of CUDA 12 and torch.cuda:
  - A thread begins with device 0, whatever device other threads have set.
  - A call that torch does not guard makes a context on the current device. So does setting a
    device, but not the exit of torch's guard.
  - The runtime keeps a thread's last error, and torch raises it when this thread launches its next
    kernel.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class _Stream:
    device: torch.device
    name: str
    runtime: Runtime = field(repr=False, compare=False)

    def wait_event(self, event: _Event) -> None:
        assert event.stream is not None, "an event that is not recorded is no fence"

    def wait_stream(self, other: _Stream) -> None:
        self.runtime.stream_waits.append((self.name, other.name))


@dataclass
class _Event:
    runtime: Runtime
    blocking: bool
    stream: _Stream | None = None
    at_ms: float = 0.0

    def record(self, stream: _Stream) -> None:
        self.stream = stream
        self.at_ms = self.runtime.now_ms = self.runtime.now_ms + 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.runtime.call()
        assert self.stream is not None
        self.runtime.waits.append((self.stream.name, "sleeps" if self.blocking else "spins"))

    def elapsed_time(self, other: _Event) -> float:
        return max(0.0, other.at_ms - self.at_ms)


class Runtime:
    """The fake runtime; see the module.

    Attributes:
        contexts: the devices that have a context.
        waits: (stream, "sleeps" or "spins") for each time that the host waited for an event.
        stream_waits: (stream, the stream that it waits for) of each wait for a whole stream.
        calls: the calls that pin or unpin: (name, arguments …).
        error: the error number that these calls return.
    """

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self.waits: list[tuple[str, str]] = []
        self.stream_waits: list[tuple[str, str]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.error = 0
        self.now_ms = 0.0
        self._thread = threading.local()

    # State of each thread

    @property
    def device(self) -> int:
        return getattr(self._thread, "device", 0)

    def set_device(self, index: int) -> None:
        self._thread.device = index
        self.contexts.add(index)

    def call(self) -> None:
        """Does what each call does that torch does not guard: makes a context."""
        self.contexts.add(self.device)

    def launch(self) -> None:
        """Launches a kernel in this thread; raises the thread's last error."""
        error, self._thread.error = getattr(self._thread, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    # torch.cuda

    def current_stream(self, device: torch.device | None = None) -> _Stream:
        index = self.device if device is None or device.index is None else device.index
        streams = vars(self._thread).setdefault("streams", {})
        return streams.get(index) or _Stream(torch.device("cuda", index), "compute", self)

    def set_stream(self, stream: _Stream) -> None:
        if stream.device.index != self.device:
            self.set_device(stream.device.index)
        vars(self._thread).setdefault("streams", {})[stream.device.index] = stream

    @contextlib.contextmanager
    def guard(self, device: torch.device):
        before = self.device
        self.set_device(device.index)
        yield
        if before in self.contexts:
            self.set_device(before)
        self._thread.device = before

    @contextlib.contextmanager
    def on_stream(self, stream: _Stream):
        before, before_there = self.current_stream(), self.current_stream(stream.device)
        self.set_stream(stream)
        yield
        if before.device != stream.device:
            self.set_stream(before_there)
        self.set_stream(before)

    def cudart(self) -> Runtime:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return self._pins("register", address, nbytes, flags)

    def cudaHostUnregister(self, address: int) -> int:
        return self._pins("unregister", address)

    def _pins(self, *call: Any) -> int:
        self.call()
        self.calls.append(call)
        self._thread.error = self.error
        return self.error

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces the functions of torch.cuda by those of the fake."""
        real_device = torch.device("cuda", 0)

        def stream(device: torch.device | None, priority: int) -> _Stream:
            index = self.device if device is None else (device.index or 0)
            self.contexts.add(index)
            return _Stream(torch.device(real_device.type, index), "side", self)

        for name, value in {
            "Stream": stream,
            "Event": lambda enable_timing, blocking=False: _Event(self, blocking),
            "current_stream": self.current_stream,
            "device": self.guard,
            "stream": self.on_stream,
            "cudart": self.cudart,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
