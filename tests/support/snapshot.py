"""What the contract tests of copying engines share: the engines, some tensors, and a snapshot that tells what happened."""

from __future__ import annotations

import threading

import numpy as np
import torch

from reft.client.snapshot.cpu_engine import CpuCopier
from reft.client.snapshot.cuda_engine import CudaCopier
from reft.client.snapshot.engine import CopyJob
from reft.client.snapshot.replica_check import samples
from reft.client.snapshot.save_plan import Cut, share_of
from reft.client.state.tensors import Bindings, flat_bytes, is_dense
from reft.core.coding.placement import Placement, place
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import divide
from reft.wire.slot_format import Geometry, SlotMap
from tests.support.streams import Inline, Late

VERSION = Version(Epoch(1, bytes(range(16))), 7)


ENGINES = {
    "cpu": lambda: (CpuCopier([]), "cpu"),
    "cpu, two threads": lambda: (CpuCopier([0, 0]), "cpu"),
    "cuda, inline": lambda: (CudaCopier(Inline()), "cpu"),
    "cuda, late": lambda: (CudaCopier(Late()), "cpu"),
    "cuda": lambda: (CudaCopier(), "cuda"),
}


CUT = Cut(4096, 8192, 1 << 20)  # several columns even for small tensors


def placement_of(bindings: Bindings, D: int = 1, f: int = 0, each: int = 1, scheme: str = "aec") -> Placement:
    """D domains with `each` ranks, which all hold the same leaves."""
    layout = bindings.layout()
    division = divide({layout.digest: layout}, [layout.digest] * (D * each))
    return place(division, [rank // each for rank in range(D * each)], scheme, f, 4096)


class Taken:
    """One snapshot taken by an engine, and what it reported."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], staged: set[str], placement: Placement | None = None, rank: int = 0,
        cut: Cut = CUT,
    ) -> None:  # fmt: skip
        bindings = Bindings(tensors, staged)
        self.placement = placement or placement_of(bindings)
        self.share = share_of(self.placement, rank, bindings.layout().leaves, tensors, cut)
        geometry = Geometry(1 << 16, self.share.data_bytes, 4096)
        self.pages = np.zeros(geometry.file_bytes, np.uint8)
        self.slot = SlotMap.create(self.pages, geometry, "job", rank)
        self.slot.data[:] = 0xA5  # of whoever had the slot before
        self.parity: list[int] = []
        self.begin()

    def begin(self) -> None:
        self.slot.begin(VERSION, self.share.digest, self.share.table, self.share.data_bytes)
        self.states: list[SlotState] = []
        self.chunks: list[int] = []
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.riders: dict[str, bytes] = {}
        self.cells: dict[int, int] = {}
        self.job = CopyJob(
            lambda may_wait: self.slot, lambda: None, 4096, self.share, self.at_chunk, self.parity.append, self.intact,
            self.landed, self.sealed, self.failed, lambda: samples(self.share.cells, 1, in_whole=True), self.cells.update,
        )  # fmt: skip

    def by(self, copier) -> Taken:
        """Takes it, to the end."""
        copier.begin(self.job)
        copier.fence()
        assert self.ended.wait(20) and self.error is None, self.error
        return self

    def at_chunk(self, index: int) -> None:
        self.chunks.append(index)
        self.states.append(self.slot.header.state)

    def intact(self) -> None:
        self.states.append(self.slot.header.state)

    def landed(self, riders) -> None:
        self.riders = dict(riders)
        self.slot.put_capsule(b"capsule")
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
        """Of a rider or a kept leaf."""
        if name in self.riders:
            return self.riders[name]
        leaves = zip(self.share.layout.leaves, self.share.layout.offsets, strict=True)
        leaf, offset = next((leaf, offset) for leaf, offset in leaves if leaf.name == name)
        return self.slot.data[offset : offset + leaf.nbytes].tobytes()


def bytes_in(tensor: torch.Tensor) -> np.ndarray:
    """In the order that a leaf has: that of memory, or row-major if there are gaps."""
    host = tensor.detach().cpu()
    return flat_bytes(host if is_dense(host) else host.contiguous()).numpy()


def tensors_on(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "large": torch.randn(64, 1024, device=device), "turned": torch.randn(700, 50, device=device).t(),
        "small": torch.randn(3, dtype=torch.bfloat16, device=device), "empty": torch.empty(0, 4, device=device),
        "buffer": torch.arange(10, device=device), "on host": torch.tensor(4.0),
        "gapped": torch.randn(9, 9, device=device)[::2, ::3], "medium": torch.randn(20000, device=device),
    }  # fmt: skip
