"""Jobs whose ranks load in threads of one process.

Their slots lie in the memory of this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from reft.client.restore.decode import Decoder
from reft.client.restore.load import load
from reft.client.restore.load_plan import LoadSizes
from reft.core.coding.placement import Placement
from reft.wire.slot_format import SlotMap
from tests.support.shards import Postbox, Tensors, alike, make_slot, on_all, placed

CHUNK = 4096
SMALL = LoadSizes(piece=4096, group=32 << 10, groups=2, window=16 << 10, ahead=8 << 10)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def mixed(scale: int = 1) -> Tensors:
    """Returns tensors of odd sizes and several dtypes, many small ones, and some with gaps."""
    kinds = [
        torch.bfloat16,
        torch.int8,
        torch.bool,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ]
    tensors = {f"small.{i}": random((3 * i + 1,), kinds[i % len(kinds)], i) for i in range(30)}
    tensors["large"] = random((331 * scale, 37), torch.float32, 100)
    tensors["odd"] = random((9973 * scale,), torch.int8, 101)
    tensors["fp8"] = random((2003 * scale,), torch.float8_e4m3fn, 104)
    tensors["transposed"] = random((64, 41 * scale), torch.bfloat16, 102).t()
    tensors["strided"] = random((48 * scale, 64), torch.float32, 103)[:, ::2]
    tensors["empty"] = torch.empty((0, 7))
    return tensors


def blank(tensors: Tensors) -> Tensors:
    """Returns tensors of the same names and shapes, filled with zeros."""
    made = {}
    for name, tensor in tensors.items():
        made[name] = torch.zeros_like(tensor)
        if name == "strided":
            made[name] = torch.zeros((tensor.shape[0], 2 * tensor.shape[1]))[:, ::2]
    return made


class Job:
    """A job with its slots. All ranks have the same `tensors`, or each has its own in `ranks`.

    Attributes:
        live: the tensors of each rank to load into.
        decoder: makes each rank's decoder.
    """

    def __init__(self, world: int, scheme: str, tolerate: int, tensors: Tensors | None = None, ranks: Any = None,
                 domains: Any = None) -> None:  # fmt: skip
        self.world = world
        self.ranks: list[Tensors] = ranks or [tensors or mixed()] * world
        self.placement: Placement = placed(self.ranks, domains or list(range(world)), scheme, tolerate, CHUNK)
        self.slots: list[SlotMap] = [make_slot(self.placement, rank, self.ranks[rank]) for rank in range(world)]
        self.live = [blank(tensors) for tensors in self.ranks]
        self.decoder: Callable[[], Decoder] = Decoder

    def digests(self, rank: int) -> np.ndarray:
        slot = self.slots[rank]
        return slot.digests[: slot.chunks].copy()

    def load(self, lost: Collection[int] = (), readers: Any = None, sizes: LoadSizes = SMALL, box: Postbox | None = None,
             at_chunk: Any = lambda rank, chunk: None, digests: Any = None) -> list[tuple[int, ...] | Exception]:  # fmt: skip
        """Loads on all ranks, each in a thread, without the lost slots.

        Returns each rank's result.
        """
        box = box or Postbox()
        have = frozenset(range(self.world)) - frozenset(lost)
        reader_of = {old: old for old in have} | (readers or {})

        def one(rank: int) -> tuple[int, ...]:
            mine = {old: self.slots[old] for old in have if reader_of[old] == rank}
            table = {old: self.digests(old) for old in lost} if digests is None else digests
            return load(
                box.of(rank), self.placement, rank, have, reader_of, mine, self.live[rank], (), table,
                lambda chunk: at_chunk(rank, chunk), sizes, self.decoder(),
            )  # fmt: skip

        return on_all(self.world, one)

    def cell_names(self, rank: int) -> list[str]:
        division = self.placement.division
        cells = (division.cells[index] for index in division.cells_of[division.layout_of[rank]])
        return [leaf.name for cell in cells for leaf in cell.leaves]

    def is_whole(self) -> bool:
        return all(alike(self.live[r], self.ranks[r], self.cell_names(r)) for r in range(self.world))


def few() -> Tensors:
    """Returns few tensors, one of them not dense. Tests can then try all losses of a wide group."""
    small = {f"small.{i}": random((3 * i + 1,), torch.bfloat16, i) for i in range(4)}
    return small | {"odd": random((2503,), torch.int8, 101), "strided": random((8, 64), torch.float32, 103)[:, ::2]}


def every_loss(job: Job, f: int) -> None:
    """Loads once for every combination of at most f lost ranks."""
    for count in range(f + 1):
        for lost in itertools.combinations(range(job.world), count):
            job.live = [blank(tensors) for tensors in job.ranks]
            assert job.load(lost) == [()] * job.world, f"lost {lost}"
            assert job.is_whole(), f"lost {lost}"
