"""FSDP1 (FullyShardedDataParallel): flat parameters, of which each rank holds a slice.

    flat parameter   | w                | b    | pad |
    ranks                0     |     1     |    2
    use_orig_params=False    one leaf, "layer._flat_param": the rank's slice, padding included
    use_orig_params=True     one leaf for each parameter and rank, a slice of w.flatten():
                             rank 1 has the end of w.flatten() and the beginning of b.flatten()

Invariants
  1. reft saves `_local_shard`, whose memory stays in place. During forward and backward the
     parameters of modules and optimizers may point to gathered memory instead.
  2. A parameter without elements on this rank is yielded with an empty slice. It never gets a
     gradient, so most optimizers make no state for it.
  3. NO_SHARD keeps whole parameters in the modules. ModuleExtractor saves them as usual, so this
     code ignores NO_SHARD.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from reft.client.state.extract.dtensor import Region
from reft.client.state.parameters import NamedParameter
from reft.client.torch_internals import (
    FLAT_NAME,
    LOCAL_SHARD,
    flattened_entries,
    fsdp1_handle,
    original_parameters,
    parameters_of,
)

# A module's submodules, each once, with its path. Kept, because walking takes milliseconds.
Parts = Sequence[tuple[str, nn.Module]]


class ShardedFlatParameter(NamedTuple):
    """One flat parameter.

    Attributes:
        place, key: `place[key]` is the local memory; None before the first forward.
        shard: FSDP's shard: this rank's slice, 1-D. Not a shard of reft's code.
        pieces: the pieces of parameters in that slice. Their names start with the wrapper's path,
            without the model's prefix ("model.0").
        slots: the entries that it replaces, as (id of a module's container of parameters, key). Not
            a snapshot slot.
    """

    place: Mapping[str, Any]
    key: str
    shard: torch.Tensor
    pieces: list[NamedParameter]
    slots: set[tuple[int, str]]


def flat_parameters(parts: Parts) -> Iterator[ShardedFlatParameter]:
    """Yields the sharded flat parameters of FSDP1 wrappers, outer wrappers first."""
    for path, part in parts:
        if not any(kind.__name__ == "FullyShardedDataParallel" for kind in type(part).__mro__):
            continue
        handle = fsdp1_handle(part)
        if handle is None:
            continue
        flat = handle.flat_param
        shard = vars(flat).get(LOCAL_SHARD)
        # The first forward sets LOCAL_SHARD to flat.data. Before that, flat.data is the slice.
        memory = flat.data if shard is None else shard
        # The path inside the model. ModuleExtractor later puts the model's prefix before the name.
        prefix = f"{path}." if path else ""
        originals = original_parameters(flat)
        if originals is None:
            pieces = [_whole(f"{prefix}{FLAT_NAME}", handle, memory)]
            slots = {(id(parameters_of(part)), FLAT_NAME)}
        else:
            pieces = [*_pieces(prefix, originals, memory)]
            slots = flattened_entries(flat)
        yield ShardedFlatParameter(vars(flat), LOCAL_SHARD, memory, pieces, slots)


def _whole(name: str, handle: Any, shard: torch.Tensor) -> NamedParameter:
    """Returns the whole slice as one parameter. With padding all slices are equally long."""
    size = shard.numel()
    return NamedParameter(name, handle.flat_param, shard, Region((size * handle.world_size,), (size * handle.rank,)))


def _pieces(prefix: str, originals: Sequence[Any], shard: torch.Tensor) -> Iterator[NamedParameter]:
    """Yields the slice of each original parameter in the shard; the slice may be empty."""
    for parameter, name, shape, info in originals:
        whole = shape.numel()
        # Not in the shard: an empty region at the end of the parameter.
        first = info.intra_param_start_idx if info.in_shard else whole
        begin, size = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
        box = Region((whole,), (first,))
        yield NamedParameter(f"{prefix}{name}", parameter, shard[begin : begin + size], box, shape=tuple(shape))
