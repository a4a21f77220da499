"""What copying and decoding need of CUDA, so that their contract tests can run where there is none."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """For calls of CUDA that a thread makes while another one may capture a graph, in the default mode.

    Waiting for an event, or pinning memory, would fail then and make the capture invalid, and with it the training step. In
    this mode a thread heeds its own captures only. By the driver and not the runtime, which would make a context on device 0.
    """
    exchange = _exchange()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange() -> Any:
    """Sets the capture mode of the calling thread, and gives the one that it had in its place; None without NVIDIA's driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


class Device:
    """A compute stream, which is whatever stream is current, and a side stream for copies. Events carry times.

    Args:
        device: whose streams; None: the current device's. It need not be current in the threads that use this.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self.side = torch.cuda.Stream(device, priority=0)  # 0 is the lowest priority: compute goes first
        self._anchor: tuple[Any, float] | None = None  # an event that was passed, and when

    def is_capturing(self) -> bool:
        """Whether the compute stream is being captured into a graph: it runs nothing, and must not wait for other streams."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def record_compute(self) -> Any:
        """An event behind all that is enqueued for computing."""
        return _recorded(torch.cuda.current_stream(self._device))

    def record_side(self) -> Any:
        """An event behind all that is enqueued for copying."""
        return _recorded(self.side)

    def side_waits(self, event: Any) -> None:
        self.side.wait_event(event)

    def compute_waits(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.side)

    def host_waits(self, event: Any) -> None:
        with beside_captures():
            event.synchronize()

    def times(self, events: Sequence[Any]) -> list[float] | None:
        """When the device passed these events, in seconds of `time.perf_counter`; None if it has not passed them all.

        CUDA gives differences in single precision, so each call counts from the first event of the call before.
        """
        if not all(event.query() for event in events):
            return None
        if self._anchor is None:
            event = self.record_compute()
            event.synchronize()
            self._anchor = event, time.perf_counter()
        first, at_s = self._anchor
        found = [at_s + first.elapsed_time(event) / 1000 for event in events]
        self._anchor = events[0], found[0]
        return found


def _recorded(stream: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
