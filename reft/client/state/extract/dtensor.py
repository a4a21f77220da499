"""DTensor: the piece of a tensor that this rank holds, and where it lies in the whole.

    mesh (dp 2 × tp 2), w of shape (8, 6)        rank 0 1 2 3      box = (global shape, offset) of the local tensor
    [Replicate, Replicate]   the same box, (0, 0), on all ranks: replicas of one another
    [Replicate, Shard(0)]    (0, 0) on 0 and 2, (4, 0) on 1 and 3: HSDP, TP under data parallelism
    [Shard(0), Shard(1)]     four boxes, each with one holder
    [_StridedShard(0), …]    FSDP over TP: boxes too, in another order of ranks

Invariants
  1. Two ranks have equal boxes (and shapes) only if they hold the same elements. A piece that is no box, as strided shards
     of uneven size are, is named by its indices instead.
  2. Nothing here communicates; a box follows from shape, placements and this rank's coordinate alone.
  3. Partial tensors are refused: their bytes are a summand, and what they stand for exists nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from reft.errors import UnsupportedState


class Region(NamedTuple):
    """Where a local tensor lies in the tensor that all ranks hold together.

    Attributes:
        shape: of the whole tensor.
        offset: of the local tensor's first element, one number a dimension.
        tag: what is added to the name if the local tensor is no box of the whole one; empty if it is.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tag: str = ""


def local_piece(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Region | None]:
    """The local tensor, without a copy or a trace in autograd, and its box; a tensor of one process is itself, None.

    Raises:
        UnsupportedState: a pending sum, or local memory that is not what the placements say.
    """
    if not isinstance(tensor, DTensor):
        return tensor, None
    local, mesh, placements = tensor._local_tensor, tensor.device_mesh, tensor.placements
    shape = tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # a mesh that this rank has no part in: no elements
        return local, Region(tuple(local.shape), (0,) * local.dim())
    for placement in placements:
        if not isinstance(placement, (Shard, Replicate)) and not is_strided(placement):
            raise UnsupportedState(
                f"{name} is placed {placements} on its mesh: {placement} is a pending sum, or unknown.",
                "redistribute it to Shard or Replicate before attach",
            )
    expected, box = region_of(shape, tuple(mesh.shape), coordinate, placements)
    if tuple(local.shape) != expected:
        raise UnsupportedState(
            f"{name} has local shape {list(local.shape)}; placements {placements} of {list(shape)} mean {list(expected)}."
        )
    return local, box


def is_strided(placement: Any) -> bool:
    """Whether it is FSDP's shard of what TP has sharded already; torch has moved the class, and its base, more than once."""
    return type(placement).__name__ == "_StridedShard"


def region_of(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], Region]:
    """The shape and the box of the piece at a coordinate of a mesh.

    Ours, because torch's `compute_local_shape_and_global_offset` gives the first index of a strided piece and hides that it is
    no box; where it is one, the two agree (tests/client/state/test_dtensor.py).

    Args:
        shape: of the whole tensor.
        mesh_shape: size of each mesh dimension.
        coordinate: on the mesh.
        placements: Shard, strided shard or Replicate, one for each mesh dimension; applied from left to right.
    """
    begin, size = [0] * len(shape), list(shape)
    if not any(is_strided(placement) for placement in placements):
        for placement, count, at in zip(placements, mesh_shape, coordinate, strict=True):
            if isinstance(placement, Shard):
                dim = placement.dim
                each = -(-size[dim] // count)
                first = min(at * each, size[dim])
                begin[dim] += first
                size[dim] = min(each, size[dim] - first)
        return tuple(size), Region(tuple(shape), tuple(begin))
    held = [np.arange(length) for length in shape]
    for placement, count, at in zip(placements, mesh_shape, coordinate, strict=True):
        if is_strided(placement):
            parts = _chunks(held[placement.dim], placement.split_factor)
            held[placement.dim] = np.concatenate([_chunks(part, count)[at] for part in parts])
        elif isinstance(placement, Shard):
            held[placement.dim] = _chunks(held[placement.dim], count)[at]
    local = tuple(len(indices) for indices in held)
    runs = [_runs(indices) for indices in held]
    if all(len(each) <= 1 for each in runs):
        firsts = tuple(each[0][0] if each else length for each, length in zip(runs, shape, strict=True))
        return local, Region(tuple(shape), firsts)
    text = ",".join("+".join(f"{first}:{stop}" for first, stop in each) for each in runs)
    return local, Region(local, (0,) * len(shape), f"[{text} of {'x'.join(map(str, shape))}]")


def _chunks(indices: np.ndarray, count: int) -> list[np.ndarray]:
    """As torch.chunk, but always `count` parts: the last ones may be short or empty."""
    each = -(-len(indices) // count)
    return [indices[i * each : (i + 1) * each] for i in range(count)]


def _runs(indices: np.ndarray) -> list[tuple[int, int]]:
    """Ascending indices as (first, stop) of runs without gaps."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(indices, breaks) if len(run)]


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` in the place of the tensor's own piece: a DTensor of the same mesh, placements and shape, or itself.

    Args:
        tensor: a DTensor, of any dtype, or a plain tensor.
        local: of the shape of its local piece.
    """
    if not isinstance(tensor, DTensor):
        return local
    with torch.no_grad():
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
