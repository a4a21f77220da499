"""All calls of CUDA that copying and decoding need; contract tests replace them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reft.client.memory.threads import TaskThread

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of this process
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Allows calls of CUDA in this thread while another thread may capture a graph.

    Without it, to wait for an event or to pin memory would fail, and would make the capture invalid
    and so end the training step. In the thread-local mode only a thread's own captures forbid such
    calls. The mode is set by the driver, because the runtime would make a context on device 0.
    """
    exchange_mode = _capture_mode_setter()
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
def _capture_mode_setter() -> Any:
    """Returns the driver's function that exchanges the calling thread's capture mode.

    Returns:
        None without NVIDIA's driver.
    """
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def pin(address: int, nbytes: int, device: torch.device) -> int:
    """Pins memory. Copies between pinned memory and a device do not block the host.

    Returns:
        CUDA's error number; 0 is success.
    """
    return _call_in_thread(device, lambda runtime: runtime.cudaHostRegister(address, nbytes, _PORTABLE))


def unpin(address: int, device: torch.device) -> int:
    """Unpins memory; returns CUDA's error number, 0 is success.

    Must be called before the memory is unmapped: CUDA would take memory that is mapped there later
        for pinned.
    """
    return _call_in_thread(device, lambda runtime: runtime.cudaHostUnregister(address))


def _call_in_thread(device: torch.device, call: Callable[[Any], Any]) -> int:
    """Calls CUDA's runtime in a new thread; returns the error number.

    The runtime keeps the last error of each thread, and torch raises this error when the thread
    launches its next kernel. In the trainer's thread, a slot that can't be pinned would end the
    training step.
    """
    errors: list[int] = []

    def run() -> None:
        with torch.cuda.device(device), beside_captures():
            errors.append(int(call(torch.cuda.cudart())))

    worker = TaskThread("reft-pin", None)
    try:
        worker.submit(run).result()
    finally:
        worker.close()
    return errors[0]


@dataclass(frozen=True)
class HostCopy:
    """A tensor on its way from a device to the host.

    Attributes:
        memory: the tensor on the host, in pinned memory.
        event: the device passes this event when the bytes have arrived.
        device: the device; None in tests without one.
    """

    memory: torch.Tensor
    event: Any
    device: torch.device | None = None

    def wait(self) -> torch.Tensor:
        """Returns the tensor on the host, once the device has copied it. Any thread may call it."""
        # A wait makes a context on the current device, which in a new thread is device 0.
        with torch.cuda.device(self.device) if self.device else contextlib.nullcontext(), beside_captures():
            self.event.synchronize()
        return self.memory

    def is_nonzero(self) -> bool:
        """Returns whether any element is other than 0. Waits like `wait`."""
        return bool(self.wait().any())


def begin_host_copy(tensor: torch.Tensor) -> HostCopy:
    """Enqueues a copy of a tensor to the host, in the current stream."""
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    with torch.cuda.device(tensor.device), torch.no_grad():
        # A lazy view's own bytes are other ones. torch would change them on the host after the
        # copy, and does not wait for the copy's end.
        memory.copy_(tensor.resolve_conj().resolve_neg().contiguous(), non_blocking=True)
        return HostCopy(memory, _record_event(torch.cuda.current_stream(), blocking=True), tensor.device)


class Device:
    """The compute stream, which is the current one, and a side stream for copies.

    CUDA's runtime makes a context of hundreds of MiB on the device that is current in the calling
    thread. In a new thread that is device 0. So this class makes its own device current, except
    around calls where torch does so.

    Args:
        device: the device of the streams; None is the current device. It need not be current in the
            calling threads.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        # 0 is the lowest priority, so that compute goes first.
        self.side = torch.cuda.Stream(device, priority=0)
        self._device = self.side.device
        self._writer: Any = None  # the stream in which the state was last written
        event = self.record_side()
        # Here the side stream is empty; later this would make a step wait for the device.
        self.host_waits(event)
        # An event, and when the device passed it.
        self._anchor: tuple[Any, float] = event, time.perf_counter()

    def is_capturing(self) -> bool:
        """Tells whether the compute stream is being captured into a graph.

        Then the stream runs nothing, and must not wait for other streams.
        """
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def record_compute(self) -> Any:
        """Records an event on the compute stream, behind all work that is enqueued there."""
        return _record_event(torch.cuda.current_stream(self._device))

    def record_side(self) -> Any:
        """Records an event on the side stream, behind all copies that are enqueued there.

        A thread that waits for this event sleeps: it would otherwise keep a core busy for the whole
            window.
        """
        return _record_event(self.side, blocking=True)

    def side_waits(self, event: Any) -> None:
        self.side.wait_event(event)

    def compute_waits(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def note_writer(self) -> None:
        """Notes that the state will be written in the stream that is current."""
        self._writer = torch.cuda.current_stream(self._device)

    @contextlib.contextmanager
    def behind_writer(self) -> Iterator[None]:
        """Orders what is enqueued inside between the writes before and the work after.

        A loop may train in a stream of its own, and mark outside of it. The compute stream would
        then read the state too early, or while the next forward pass changes buffers.
        """
        compute, writer = torch.cuda.current_stream(self._device), self._writer
        if writer is None or writer == compute:
            yield
            return
        compute.wait_stream(writer)
        try:
            yield
        finally:
            writer.wait_stream(compute)

    @contextlib.contextmanager
    def on_side(self) -> Iterator[None]:
        # Without `torch.cuda.device`, torch would make the earlier device current at the end, and
        # so make a context there.
        with torch.cuda.device(self._device), torch.cuda.stream(self.side):
            yield

    def as_graph(self, enqueue: Callable[[], object]) -> Callable[[], object]:
        """Returns a call that launches the work of `enqueue` as one graph.

        It is launched in the stream that is current then. A graph of thousands of kernels costs as
        much as some launches. `enqueue` is called once, here, and its work is not done then. It may
        only launch kernels and copies, and their memory must live as long as the graph is used.

        Raises:
            RuntimeError: CUDA can't capture this work, or another thread captures now.
        """
        graph = torch.cuda.CUDAGraph()
        # A capture begins with writes into memory that training's own graphs may read: the seed and
        # the offset of their generator. So both streams wait for each other.
        self.side_waits(self.record_compute())
        with self.on_side(), torch.no_grad():
            # In this mode a capture forbids no call, so memory that Python frees meanwhile may go.
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                enqueue()
            finally:
                graph.capture_end()
        self.compute_waits(self.record_side())
        return graph.replay

    def host_waits(self, event: Any) -> None:
        with torch.cuda.device(self._device), beside_captures():
            event.synchronize()

    def times(self, events: Sequence[Any]) -> list[float] | None:
        """Returns when the device passed the events, in seconds of `time.perf_counter`.

        CUDA gives differences in single precision, so each call measures from the first event of
        the call before.

        Returns:
            None if the device has not passed all events.
        """
        if not all(event.query() for event in events):
            return None
        first, at_s = self._anchor
        times_s = [at_s + _elapsed_ms(first, event) / 1000 for event in events]
        self._anchor = events[0], times_s[0]
        return times_s


def _elapsed_ms(first: Any, event: Any) -> float:
    """Returns the milliseconds from `first` to `event`; negative if `event` came first.

    CUDA does not document negative differences, so the positive one is asked for.
    """
    after: float = first.elapsed_time(event)
    return after if after > 0 else -event.elapsed_time(first)


def _record_event(stream: Any, blocking: bool = False) -> Any:
    event = torch.cuda.Event(enable_timing=True, blocking=blocking)
    event.record(stream)
    return event
