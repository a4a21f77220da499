"""Jobs of any shape in one process: a mesh, tensors sharded over it, and each rank's leaves."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from reft.client.state.tensors import leaf_of
from reft.core.coding.placement import Placement, place
from reft.core.layout.cells import INLINE_BYTES_MAX, divide
from reft.core.layout.layout import Layout, Leaf, pack
from tests.support.shards import Tensors

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool, torch.complex128)
# For each dimension of the mesh: the tensor's dimension that it shards; None is replicated.
Cut = tuple[int | None, ...]


def box(mesh: Sequence[int], rank: int, cut: Cut, shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns offset and shape of a rank's piece; as with torch.chunk, the last are smaller."""
    offset, size = [0] * len(shape), list(shape)
    strides = [math.prod(mesh[i + 1 :]) for i in range(len(mesh))]
    for length, stride, dim in zip(mesh, strides, cut, strict=True):
        if dim is not None:
            step = -(-size[dim] // length)
            begin = min(rank // stride % length * step, size[dim])
            offset[dim] += begin
            size[dim] = min(step, size[dim] - begin)
    return offset, size


@dataclass(frozen=True)
class Shape:
    """A job: how its mesh shards each tensor, and which ranks have the tensor.

    Attributes:
        mesh: the number of ranks along each dimension.
        cuts: name → cut.
        stages: name → index along the first dimension of the mesh. Only ranks with this index have
            the tensor.
        orders: name → the order in which a piece's dimensions lie in memory; without an entry it is
            row-major.
    """

    mesh: tuple[int, ...]
    cuts: dict[str, Cut]
    stages: dict[str, int]
    orders: dict[str, tuple[int, ...]]

    @property
    def world(self) -> int:
        return math.prod(self.mesh)

    def state(self, whole: Tensors, rank: int) -> tuple[list[Leaf], Tensors]:
        """Returns a rank's leaves and tensors."""
        leaves, tensors = [], {}
        for name, tensor in whole.items():
            stage = self.stages.get(name)
            if stage is not None and rank // math.prod(self.mesh[1:]) != stage:
                continue
            offset, size = box(self.mesh, rank, self.cuts[name], tensor.shape)
            local = tensor[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].clone()
            order = self.orders.get(name, tuple(range(tensor.dim())))
            back = [order.index(d) for d in range(len(order))]
            local = local.permute(order).contiguous().permute(back) if order else local
            leaf = leaf_of(name, local, False)
            leaves.append(replace(leaf, global_shape=tuple(tensor.shape), global_offset=tuple(offset)))
            tensors[name] = local
        return leaves, tensors

    def states(self, whole: Tensors) -> tuple[list[list[Leaf]], list[Tensors]]:
        """Returns the leaves and the tensors of all ranks."""
        states = [self.state(whole, rank) for rank in range(self.world)]
        return [leaves for leaves, _ in states], [tensors for _, tensors in states]


def placement_for(
    leaves: Sequence[Sequence[Leaf]], domains: Sequence[int], scheme: Any, tolerate: int | None, chunk_bytes: int,
    own: Sequence[str] = (), slots: int = 0, inline_bytes_max: int = INLINE_BYTES_MAX,
) -> Placement:  # fmt: skip
    """Returns the placement of a job whose ranks have these leaves.

    Args:
        leaves: the leaves of each rank.
        own: names of mismatched leaves, which stay unreplicated.
        slots: of each rank; from four on, unreplicated leaves are exchanged.
        inline_bytes_max: the most bytes of a rank's leaves that travel in its capsule.
    """
    layouts: dict[bytes, Layout] = {}
    index = []
    for each in leaves:
        layout = pack(each)
        layouts[layout.digest] = layout
        index.append(layout.digest)
    division = divide(layouts, index, own, inline_bytes_max if len(set(domains)) > 1 else 0)
    return place(division, domains, scheme, tolerate, chunk_bytes, slots)


def whole_state(rng: random.Random, count: int, elements: int) -> Tensors:
    """Returns tensors of random shapes and dtypes, with random bytes."""
    tensors: Tensors = {}
    for i in range(count):
        dims = rng.choice((0, 1, 1, 2, 2, 2, 3))
        shape = [
            max(1, min(int(rng.expovariate(1 / (elements ** (1 / max(dims, 1))))), 4 * elements)) for _ in range(dims)
        ]
        dtype = rng.choice(DTYPES)
        item = torch.empty((), dtype=dtype).element_size()
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        top = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, top, (math.prod(shape) * item,), generator=generator, dtype=torch.uint8)
        tensors[f"t{i}"] = raw.view(dtype).reshape(shape)
    return tensors


def random_shape(rng: random.Random, whole: Tensors, ranks_max: int = 16) -> Shape:
    """Returns a random mesh of up to three dimensions. Each tensor has a random cut."""
    while True:
        mesh = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in range(rng.randint(1, 3)))
        if math.prod(mesh) <= ranks_max:
            break
    cuts: dict[str, Cut] = {}
    orders = {}
    has_stages = rng.random() < 0.3
    stages = {}
    for name, tensor in whole.items():
        dims = tensor.dim()
        cuts[name] = tuple(rng.randrange(dims) if dims and rng.random() < 0.5 else None for _ in mesh)
        if has_stages:
            cuts[name] = (None, *cuts[name][1:])
            stages[name] = rng.randrange(mesh[0])
        if dims > 1 and rng.random() < 0.3:
            orders[name] = tuple(rng.sample(range(dims), dims))
    return Shape(mesh, cuts, stages, orders)
