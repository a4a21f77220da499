"""For the contract tests of copy engines: the engines, some tensors, and a recorded snapshot."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import torch

from reft.client.snapshot.cpu_engine import CpuCopyEngine
from reft.client.snapshot.cuda_engine import CudaCopyEngine
from reft.client.snapshot.engine import CopiedEvent, CopyOrder, DigestedEvent
from reft.client.snapshot.save_plan import ParityTiling, plan_save
from reft.client.state.tensors import TensorIndex, flat_bytes, is_dense
from reft.core.coding.placement import Placement, place
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import divide
from reft.core.pipeline.course import PacingPlan
from reft.failpoints import Failpoints
from reft.wire.slot_format import Geometry, SlotMap
from tests.support.streams import Inline, Late

VERSION = Version(Epoch(1, bytes(range(16))), 7)


ENGINES = {
    "cpu": lambda: (CpuCopyEngine([]), "cpu"),
    "cpu, two threads": lambda: (CpuCopyEngine([0, 0]), "cpu"),
    "cuda, inline": lambda: (CudaCopyEngine(Inline()), "cpu"),
    "cuda, late": lambda: (CudaCopyEngine(Late()), "cpu"),
    "cuda": lambda: (CudaCopyEngine(), "cuda"),
}


CUT = ParityTiling(4096, 8192, 1 << 20)  # makes several columns even for small tensors


def placement_of(tensor_index: TensorIndex, D: int = 1, f: int = 0, each: int = 1, scheme: str = "aec") -> Placement:
    """Returns the placement for D domains of `each` ranks, which all hold the same leaves."""
    layout = tensor_index.layout()
    division = divide({layout.digest: layout}, [layout.digest] * (D * each))
    return place(division, [rank // each for rank in range(D * each)], scheme, f, 4096)


class Recorded(Failpoints):
    """Failpoints that call the test's methods before each chunk and parity column."""

    def __init__(self, taken: Taken) -> None:
        super().__init__()
        self.taken = taken

    def hit(self, name: str, **facts: int) -> bool:
        (self.taken.at_chunk if name == "snapshot.chunk" else self.taken.at_parity)(facts["chunk"])
        return False


class Taken:
    """One snapshot for an engine to take; a thread pulls the engine's events and records them."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], staged: set[str], placement: Placement | None = None, rank: int = 0,
        cut: ParityTiling = CUT,
    ) -> None:  # fmt: skip
        tensor_index = TensorIndex(tensors, staged)
        self.placement = placement or placement_of(tensor_index)
        self.save_plan = plan_save(self.placement, rank, tensor_index.layout().leaves, tensors, cut)
        geometry = Geometry(1 << 18, self.save_plan.data_bytes, 4096)
        self.pages = np.zeros(geometry.file_bytes, np.uint8)
        self.slot = SlotMap.create(self.pages, geometry, "job", rank)
        self.slot.data[:] = 0xA5  # bytes that an earlier user left in the slot
        self.parity: list[int] = []
        self.begin()

    def begin(self, pacing_plan: PacingPlan | None = None) -> None:
        self.slot.begin(VERSION, self.save_plan.digest, self.save_plan.table, self.save_plan.data_bytes)
        self.states: list[SlotState] = []
        self.chunks: list[int] = []
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.inline_leaves: dict[str, bytes] = {}
        self.cells: dict[int, int] = {}
        self.order = CopyOrder(self.save_plan, 4096, 1, True, pacing_plan, Recorded(self))

    def paced(self, pacing_plan: PacingPlan) -> Taken:
        """Makes the engine follow this plan."""
        self.order = replace(self.order, pacing_plan=pacing_plan)
        return self

    def start(self, copy_engine, after: threading.Event | None = None) -> None:
        """Begins the snapshot, as at a mark; a thread brings the slot to SEALED.

        Args:
            after: the thread waits for this event first.
        """
        copy = copy_engine.begin(self.order, self.slot)
        threading.Thread(target=self._pull, args=(copy, after), daemon=True).start()

    def _pull(self, copy, after: threading.Event | None) -> None:
        assert after is None or after.wait(20)
        try:
            with closing(copy.events(self.slot)) as events:
                for event in events:
                    self.landed(event) if isinstance(event, CopiedEvent) else self.sealed(event)
        except Exception as error:
            self.error = error
        self.ended.set()

    def by(self, copy_engine) -> Taken:
        """Takes the snapshot with this engine, to the end."""
        self.start(copy_engine)
        copy_engine.fence()
        assert self.ended.wait(20) and self.error is None, self.error
        return self

    def at_chunk(self, index: int) -> None:
        self.chunks.append(index)
        self.states.append(self.slot.header.state)

    def at_parity(self, index: int) -> None:
        self.parity.append(index)

    def landed(self, copied: CopiedEvent) -> None:
        self.states.append(self.slot.header.state)
        self.inline_leaves, self.cells = dict(copied.inline_leaves), dict(copied.cell_digests)
        self.slot.put_capsule(b"capsule")
        self.slot.landed()
        self.states.append(self.slot.header.state)

    def sealed(self, event: DigestedEvent) -> None:
        self.slot.sealed(event.digests)
        self.states.append(self.slot.header.state)

    def bytes_of(self, name: str) -> bytes:
        """Returns the stored bytes of an inline, unreplicated or unplanned leaf."""
        if name in self.inline_leaves:
            return self.inline_leaves[name]
        leaves = zip(self.save_plan.layout.leaves, self.save_plan.layout.offsets, strict=True)
        leaf, offset = next((leaf, offset) for leaf, offset in leaves if leaf.name == name)
        return self.slot.data[offset : offset + leaf.nbytes].tobytes()


class Away(torch.Tensor):
    """A tensor that claims to lie on a device: its bytes are no memory of the host."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def numpy(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def bytes_in(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor's bytes: in memory order, or row-major if the tensor has gaps."""
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
