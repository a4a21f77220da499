"""The plain tensors inside a tensor subclass, by the path of their attributes.

    tensor                                        leaves
    Int8Tensor with qdata and scale               NAME/qdata, NAME/scale
    a subclass whose attribute is a subclass      NAME/inner/codes, NAME/inner/scale
    a plain tensor                                NAME

A class names its inner tensors by `__tensor_flatten__`. That is torch's protocol for classes whose
data are other tensors: torchao's quantised weights and optimizer states, float8, jagged tensors.
The bytes of such a tensor are those of its inner tensors. Its other attributes are settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from reft.client.state.extract.dtensor import Region
from reft.errors import UnsupportedState

PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer, nn.UninitializedParameter)
# Its inner tensor may still be on its way from other ranks.
PENDING = "AsyncCollectiveTensor"


class InnerTensor(NamedTuple):
    """A plain tensor inside a tensor subclass.

    Attributes:
        owners: the subclass instances from the outermost to the innermost.
        path: the attribute of each owner; empty for a plain tensor.
        tensor: the plain tensor.
    """

    owners: tuple[torch.Tensor, ...]
    path: tuple[str, ...]
    tensor: torch.Tensor


def has_inner_tensors(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's data are other tensors, as its class says."""
    kind = type(tensor)
    return kind not in PLAIN_TYPES and hasattr(kind, "__tensor_flatten__") and kind.__name__ != PENDING


def inner_tensors(name: str, tensor: torch.Tensor) -> Iterator[InnerTensor]:
    """Yields the plain tensors inside a tensor; of a plain tensor the tensor itself.

    Raises:
        UnsupportedState: an inner tensor is no attribute of the instance. Then reft can't notice
            that another tensor has taken its place.
    """
    if not has_inner_tensors(tensor):
        yield InnerTensor((), (), tensor)
        return
    attributes, _ = flattened(tensor)
    for attribute in attributes:
        inner = vars(tensor).get(attribute)
        if not isinstance(inner, torch.Tensor):
            raise UnsupportedState(
                f"{name} is a {type(tensor).__name__}, which does not keep its inner tensor {attribute!r} as an attribute."
            )
        for each in inner_tensors(f"{name}/{attribute}", inner):
            yield InnerTensor((tensor, *each.owners), (attribute, *each.path), each.tensor)


def flattened(tensor: Any) -> tuple[list[str], Any]:
    """Returns the names of the inner tensors, and the class's settings."""
    attributes, context = tensor.__tensor_flatten__()
    return list(attributes), context


def inner_region(outer: torch.Tensor, region: Region | None, inner: torch.Tensor) -> Region | None:
    """Returns the region of an inner tensor of a rank's piece.

    An inner tensor with the piece's shape and dtype has the same elements. Any other one, such as
    the scales of blocks, belongs to this piece only, and its name says to which piece.

    Args:
        outer: the rank's piece.
        region: the region of the piece; None if the piece is the whole tensor.
        inner: the inner tensor.
    """
    if region is None or inner is outer or (inner.shape == outer.shape and inner.dtype == outer.dtype):
        return region
    return piece_region(tuple(outer.shape), region, tuple(inner.shape))


def piece_region(local: tuple[int, ...], region: Region, shape: tuple[int, ...]) -> Region | None:
    """Returns the region of a tensor that belongs to one piece.

    None if the piece is the whole.

    Args:
        local: shape of the piece.
        region: region of the piece.
        shape: shape of the tensor.
    """
    if local == region.shape and not region.tag:
        return None
    cut = ",".join(f"{first}:{first + size}" for first, size in zip(region.offset, local, strict=True))
    return Region(shape, (0,) * len(shape), region.tag or f"[of {cut}]")
