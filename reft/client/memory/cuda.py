"""What copying and decoding need of CUDA, so that their contract tests can run where there is none."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from reft.client.memory.threads import TaskThread

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of this process
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """For calls of CUDA that a thread makes while another one may capture a graph, in the default mode.

    Waiting for an event, or pinning memory, would fail then and make the capture invalid, and with it the training step. In
    this mode a thread heeds its own captures only. By the driver and not the runtime, which would make a context on device 0.
    """
    exchange_mode = _mode_exchange()
    if exchange_mode is None:
        yield
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchange_mode(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange_mode(ctypes.byref(mode))


@functools.cache
def _mode_exchange() -> Any:
    """Sets the capture mode of the calling thread, and gives the one that it had in its place; None without NVIDIA's driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def pin(address: int, nbytes: int, device: torch.device) -> int:
    """Pins memory, so that a copy between it and a device runs beside the host; CUDA's error, 0 if there is none."""
    return _apart(device, lambda runtime: runtime.cudaHostRegister(address, nbytes, _PORTABLE))


def unpin(address: int, device: torch.device) -> int:
    """The reverse; ahead of the memory's unmapping, or what is mapped there next would be taken for pinned."""
    return _apart(device, lambda runtime: runtime.cudaHostUnregister(address))


def _apart(device: torch.device, call: Callable[[Any], Any]) -> int:
    """What a call of CUDA's runtime returns that is made in a thread of its own.

    The runtime keeps the last error of each thread, and torch raises it at the next kernel that this thread launches: a slot
    that can't be pinned would end the training step.
    """
    found: list[int] = []

    def run() -> None:
        with torch.cuda.device(device), beside_captures():
            found.append(int(call(torch.cuda.cudart())))

    worker = TaskThread("reft-pin", None)
    try:
        worker.submit(run).result()
    finally:
        worker.close()
    return found[0]


class Device:
    """A compute stream, which is whatever stream is current, and a side stream for copies. Events carry times.

    CUDA's runtime makes a context of hundreds of MiB on whichever device is current in the thread that calls it, and in a new
    thread that is device 0. So what torch does not guard by itself is called with this device current.

    Args:
        device: whose streams; None: the current device's. It need not be current in the threads that use this.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.side = torch.cuda.Stream(device, priority=0)  # 0 is the lowest priority: compute goes first
        self._device = self.side.device
        event = self.record_side()
        self.host_waits(event)  # nothing lies before it: later, a step would wait for the device here
        self._anchor: tuple[Any, float] = event, time.perf_counter()  # an event that was passed, and when

    def is_capturing(self) -> bool:
        """Whether the compute stream is being captured into a graph: it runs nothing, and must not wait for other streams."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def record_compute(self) -> Any:
        """An event behind all that is enqueued for computing."""
        return _recorded(torch.cuda.current_stream(self._device))

    def record_side(self) -> Any:
        """An event behind all that is enqueued for copying. Who waits for it sleeps, and keeps no core busy for a window."""
        return _recorded(self.side, blocking=True)

    def side_waits(self, event: Any) -> None:
        self.side.wait_event(event)

    def compute_waits(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    @contextlib.contextmanager
    def on_side(self) -> Iterator[None]:
        # Without the first, torch would make the device that was current before so again by force.
        with torch.cuda.device(self._device), torch.cuda.stream(self.side):
            yield

    def host_waits(self, event: Any) -> None:
        with torch.cuda.device(self._device), beside_captures():
            event.synchronize()

    def times(self, events: Sequence[Any]) -> list[float] | None:
        """When the device passed these events, in seconds of `time.perf_counter`; None if it has not passed them all.

        CUDA gives differences in single precision, so each call counts from the first event of the call before.
        """
        if not all(event.query() for event in events):
            return None
        first, at_s = self._anchor
        found = [at_s + _between(first, event) / 1000 for event in events]
        self._anchor = events[0], found[0]
        return found


def _between(first: Any, event: Any) -> float:
    """Milliseconds, negative if the event was passed before the first: CUDA does not say that its own difference ever is."""
    after: float = first.elapsed_time(event)
    return after if after > 0 else -event.elapsed_time(first)


def _recorded(stream: Any, blocking: bool = False) -> Any:
    event = torch.cuda.Event(enable_timing=True, blocking=blocking)
    event.record(stream)
    return event
