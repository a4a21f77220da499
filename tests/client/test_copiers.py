"""The contract of a copying engine, held by the CPU engine, with one thread and with two, and by the CUDA engine.

Without a GPU the CUDA engine runs on a device that does at once what a stream would do later; with one, on CUDA as well.
"""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch

from reft.client.copier import CopyJob, CpuCopier
from reft.client.cuda_copier import CudaCopier, Device
from reft.client.state import Bindings
from reft.core.slots import SlotState
from reft.core.version import Epoch, Version
from reft.errors import ReftError
from reft.wire.messages import table_to
from reft.wire.slot_format import Geometry, SlotMap

VERSION = Version(Epoch(1, bytes(range(16))), 7)


class Inline(Device):
    """A device whose streams do everything when it is enqueued, and that notes the order of what it is told."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def record_compute(self):
        self.order.append("record compute")
        return "compute"

    def record_side(self):
        self.order.append("record side")
        return "side"

    def side_waits(self, event):
        self.order.append(f"side waits for {event}")

    def compute_waits(self, event):
        self.order.append(f"compute waits for {event}")

    def on_side(self):
        return contextlib.nullcontext()

    def host_waits(self, event):
        self.order.append(f"host waits for {event}")


ENGINES = {
    "cpu": lambda: (CpuCopier([]), "cpu"),
    "cpu, two threads": lambda: (CpuCopier([0, 0]), "cpu"),
    "cuda, inline": lambda: (CudaCopier(Inline()), "cpu"),
    "cuda": lambda: (CudaCopier(), "cuda"),
}


@pytest.fixture(params=ENGINES)
def engine(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: the engine runs on the inline device above")
    copier, device = ENGINES[request.param]()
    yield copier, device
    copier.close()


class Taken:
    """One snapshot taken by an engine, and what it reported."""

    def __init__(self, tensors: dict[str, torch.Tensor], staged: set[str], chunk_bytes: int = 4096) -> None:
        bindings = Bindings(tensors, staged)
        self.layout = bindings.layout()
        geometry = Geometry(1 << 16, self.layout.data_bytes, chunk_bytes)
        self.pages = np.zeros(geometry.file_bytes, np.uint8)
        self.slot = SlotMap.create(self.pages, geometry, "job", 0)
        self.slot.begin(VERSION, self.layout.digest, table_to(self.layout), self.layout.data_bytes)
        self.slot.put_capsule(b"capsule")
        self.states: list[SlotState] = []
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.job = CopyJob(
            lambda may_wait: self.slot,
            lambda: None,
            chunk_bytes,
            bindings.layout(),
            tensors,
            self.at_chunk,
            self.intact,
            self.landed,
            self.sealed,
            self.failed,
        )

    def at_chunk(self, index: int) -> None:
        self.states.append(self.slot.header.state)

    def intact(self) -> None:
        self.states.append(self.slot.header.state)

    def landed(self) -> None:
        self.slot.landed()
        self.states.append(self.slot.header.state)

    def sealed(self, digests: np.ndarray) -> None:
        self.slot.sealed(digests)
        self.states.append(self.slot.header.state)
        self.ended.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    def bytes_of(self, name: str) -> bytes:
        leaves = zip(self.layout.leaves, self.layout.offsets, strict=True)
        leaf, offset = next((leaf, offset) for leaf, offset in leaves if leaf.name == name)
        return self.slot.data[offset : offset + leaf.nbytes].tobytes()


def tensors_on(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "large": torch.randn(64, 1024, device=device), "turned": torch.randn(700, 50, device=device).t(),
        "small": torch.randn(3, dtype=torch.bfloat16, device=device), "empty": torch.empty(0, 4, device=device),
        "buffer": torch.arange(10, device=device), "on host": torch.tensor(4.0),
        "gapped": torch.randn(9, 9, device=device)[::2, ::3],
    }  # fmt: skip


def test_every_byte_lands_and_the_states_come_in_order(engine):
    copier, device = engine
    taken = Taken(tensors_on(device), {"buffer"})
    copier.begin(taken.job)
    copier.fence()
    assert taken.ended.wait(20) and taken.error is None
    for name, tensor in tensors_on(device).items():
        expected = tensor.t() if name == "turned" else tensor
        assert taken.bytes_of(name) == expected.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name
    assert taken.states[-2:] == [SlotState.LANDED, SlotState.SEALED]
    assert set(taken.states[:-2]) == {SlotState.WRITING}
    assert taken.slot.bad_chunks() == [] and taken.slot.capsule() == b"capsule"
    assert copier.copied_bytes == taken.layout.data_bytes


def test_staged_leaves_are_taken_at_the_mark(engine):
    copier, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, {"buffer"})
    before = tensors["buffer"].cpu().numpy().tobytes()
    copier.begin(taken.job)
    tensors["buffer"].add_(1)  # as forward does
    copier.fence()
    assert taken.ended.wait(20)
    assert taken.bytes_of("buffer") == before


def test_nothing_is_read_after_the_fence(engine):
    copier, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, set())
    before = tensors["large"].cpu().numpy().tobytes()
    copier.begin(taken.job)
    copier.fence()
    tensors["large"].zero_()
    assert taken.ended.wait(20) and taken.error is None
    assert taken.bytes_of("large") == before


def test_a_failure_is_reported_and_the_fence_opens(engine):
    copier, device = engine
    taken = Taken(tensors_on(device), set())

    def torn() -> None:
        raise ReftError("torn")

    taken.job.intact = torn
    copier.begin(taken.job)
    copier.fence()
    assert taken.ended.wait(20) and "torn" in str(taken.error)
    assert taken.slot.reread().state is SlotState.WRITING, "a torn snapshot must not look landed"
    again = Taken(tensors_on(device), set())
    copier.begin(again.job)
    copier.fence()
    assert again.ended.wait(20) and again.error is None


def test_idle_bytes_are_those_copied_in_idle_times(engine):
    copier, device = engine
    copier.idle(True)
    first = Taken(tensors_on(device), set())
    copier.begin(first.job)
    copier.fence()
    assert first.ended.wait(20)
    copier.idle(False)
    second = Taken(tensors_on(device), set())
    copier.begin(second.job)
    copier.fence()
    assert second.ended.wait(20)
    assert copier.idle_bytes == first.layout.data_bytes and copier.copied_bytes == 2 * copier.idle_bytes


def test_on_cuda_the_fence_is_a_wait_of_the_stream_enqueued_after_the_last_copy():
    device = Inline()
    copier = CudaCopier(device)
    taken = Taken(tensors_on("cpu"), set())
    copier.begin(taken.job)
    copier.fence()
    assert taken.ended.wait(20)
    copier.close()
    order = [entry for entry in device.order if not entry.startswith("host")]
    assert order == ["record compute", "side waits for compute", "record side", "compute waits for side"]
