"""Compares many tensors with their addresses and extents, and reads how often each was written.

A mark does this for every tensor of the state. torch has no call for a list of tensors, and three
Python calls for each tensor take longer than the memory of all tensors. `_locations.c` makes one
call for address, dtype, shape and strides (DLPack's C exchange API) and one for the write count.
Where `_locations.c` could not be compiled, or torch speaks another DLPack, Python's calls serve.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch

from reft.client.torch_internals import WRITE_COUNT, write_count

UINT64 = "Q"
BLOCK = 1024  # tensors of which all facts are read before the next ones: so many fit into a core's cache
Tensors = list[torch.Tensor]
Read = Callable[[Tensors, Tensors, "array[int]", "array[int]", "array[int]"], bool]


def extent_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the dtype's id, the number of dimensions, shape and strides of a tensor."""
    return (id(tensor.dtype), tensor.dim(), *tensor.shape, *tensor.stride())


def _read(
    tensors: Tensors, counted: Tensors, addresses: array[int], extents: array[int], counts: array[int], /
) -> bool:
    is_same, found = len(tensors) == len(addresses), array(UINT64)
    for at in range(0, len(tensors), BLOCK):
        block = slice(at, at + BLOCK)
        counts[block] = array(UINT64, map(write_count, counted[block]))
        is_same &= array(UINT64, map(torch.Tensor.data_ptr, tensors[block])) == addresses[block]
        found.extend(chain.from_iterable(map(extent_of, tensors[block])))
    return is_same and found == extents


# read(tensors, counted, addresses, extents, counts): whether all tensors have these addresses, and
# the extents that `extent_of` gave, end to end. Stores in `counts` how often each of `counted` was
# written in place.
read: Read = _read
with contextlib.suppress(ImportError, AttributeError, BufferError):
    from reft.client.memory import _locations

    _read_in_c = partial(_locations.read_extents, torch.Tensor.__dlpack_c_exchange_api__, WRITE_COUNT)
    # BufferError: another DLPack. It may also give other strides for dimensions of size 1.
    _one = [torch.empty_strided((1, 2), (3, 1))]
    if _read_in_c(
        _one, _one, array(UINT64, [_one[0].data_ptr()]), array(UINT64, extent_of(_one[0])), array(UINT64, [0])
    ):
        read = _read_in_c
