"""DTensor: this rank's piece of a tensor, and the piece's region of the whole.

    mesh (dp 2 × tp 2), w of shape (8, 6)    rank 0 1 2 3    region = (global shape, offset)
    [Replicate, Replicate]   the same region, (0, 0), on all ranks: replicas
    [Replicate, Shard(0)]    (0, 0) on 0 and 2, (4, 0) on 1 and 3: HSDP, TP under data parallelism
    [Shard(0), Shard(1)]     four regions, each on one rank
    [_StridedShard(0), …]    FSDP over TP: regions too, in another order of ranks

Invariants
  1. Two ranks have equal regions (and shapes) only if they hold the same elements. A piece that is
     not one box of the whole, like strided shards of uneven size, is named by its indices instead.
  2. No code here communicates. A region follows from shape, placements and this rank's coordinate.
  3. Partial tensors are refused: their bytes are a summand, and the sum exists nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from reft.client.torch_internals import STRIDED_SHARD, local_tensor
from reft.errors import UnsupportedState


class Region(NamedTuple):
    """The region of the whole tensor that a local tensor covers.

    Attributes:
        shape: shape of the whole tensor.
        offset: offset of the local tensor's first element, one number for each dimension.
        tag: appended to the leaf's name if the local tensor is not one box of the whole; else
            empty.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tag: str = ""


def local_piece(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Region | None]:
    """Returns the local tensor and its region, without a copy or an autograd trace.

    For a tensor that is not a DTensor, returns the tensor and None.

    Raises:
        UnsupportedState: the tensor is a pending sum, or its local shape contradicts the
            placements.
    """
    if not isinstance(tensor, DTensor):
        return tensor, None
    local, mesh, placements = local_tensor(tensor), tensor.device_mesh, tensor.placements
    shape = tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # the rank is not in the mesh: no elements
        return local, Region(tuple(local.shape), (0,) * local.dim())
    for placement in placements:
        if not isinstance(placement, (Shard, Replicate)) and not is_strided(placement):
            raise UnsupportedState(
                f"{name} is placed {placements} on its mesh: {placement} is a pending sum, or unknown to reft.",
                "redistribute it to Shard or Replicate before attach",
            )
    expected, box = region_of(shape, tuple(mesh.shape), coordinate, placements)
    if tuple(local.shape) != expected:
        raise UnsupportedState(
            f"{name} has local shape {list(local.shape)}; placements {placements} of {list(shape)} mean {list(expected)}."
        )
    return local, box


def is_strided(placement: Any) -> bool:
    """Returns whether the placement is FSDP's shard of a tensor that TP already sharded.

    Compares the name: torch has moved the class and its base more than once.
    """
    return type(placement).__name__ == STRIDED_SHARD


def region_of(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], Region]:
    """Returns the shape and the region of the piece at a mesh coordinate.

    torch's `compute_local_shape_and_global_offset` cannot be used: for a strided piece it returns
    the first index and hides that the piece is not one box. For boxes, both functions agree
    (tests/client/state/test_dtensor.py).

    Args:
        shape: shape of the whole tensor.
        mesh_shape: size of each mesh dimension.
        coordinate: coordinate on the mesh.
        placements: Shard, strided shard or Replicate for each mesh dimension; applied left to
            right.
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
    indices_of = [np.arange(length) for length in shape]
    for placement, count, at in zip(placements, mesh_shape, coordinate, strict=True):
        if is_strided(placement):
            parts = _chunks(indices_of[placement.dim], placement.split_factor)
            indices_of[placement.dim] = np.concatenate([_chunks(part, count)[at] for part in parts])
        elif isinstance(placement, Shard):
            indices_of[placement.dim] = _chunks(indices_of[placement.dim], count)[at]
    local = tuple(len(indices) for indices in indices_of)
    runs = [_runs(indices) for indices in indices_of]
    if all(len(each) <= 1 for each in runs):
        firsts = tuple(each[0][0] if each else length for each, length in zip(runs, shape, strict=True))
        return local, Region(tuple(shape), firsts)
    text = ",".join("+".join(f"{first}:{stop}" for first, stop in each) for each in runs)
    return local, Region(local, (0,) * len(shape), f"[{text} of {'x'.join(map(str, shape))}]")


def _chunks(indices: np.ndarray, count: int) -> list[np.ndarray]:
    """Splits like torch.chunk, but always into `count` parts.

    The last parts may be short or empty.
    """
    each = -(-len(indices) // count)
    return [indices[i * each : (i + 1) * each] for i in range(count)]


def _runs(indices: np.ndarray) -> list[tuple[int, int]]:
    """Returns ascending indices as (first, stop) of runs without gaps."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(indices, breaks) if len(run)]


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns `local` as a DTensor like `tensor`, or unchanged if `tensor` is plain.

    The DTensor has the same mesh, placements and shape as `tensor`.

    Args:
        tensor: a DTensor of any dtype, or a plain tensor.
        local: a tensor with the shape of the tensor's local piece.
    """
    if not isinstance(tensor, DTensor):
        return local
    with torch.no_grad():
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
