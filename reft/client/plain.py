"""Trees of small values for the capsule: copies without live values, and back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import nn

from reft.errors import RestoreError, UnsupportedState
from reft.wire.capsule import TensorBytes

_DICTS = (dict, Counter, OrderedDict)


def to_plain(value: Any) -> Any:
    """The tree with every tensor as bytes, for the capsule's codec; nothing in it changes when the original does.

    Raises:
        UnsupportedState: a tensor is sharded, or another subclass: its bytes alone do not say what it is.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            raise UnsupportedState(
                f"a value among the small state is a {type(value).__name__} of shape {list(value.shape)}.",
                "keep tensors in a module or an optimizer, and pass that",
            )
        flat = value.detach().cpu().contiguous()
        data = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return TensorBytes(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
    if type(value) in (list, tuple):
        return type(value)(to_plain(item) for item in value)
    if type(value) in _DICTS:
        return type(value)({key: to_plain(item) for key, item in value.items()})
    if isinstance(value, np.ndarray):
        return value.copy()
    return bytes(value) if type(value) is bytearray else value


def from_plain(value: Any) -> Any:
    """The reverse of `to_plain`; tensors come back on the CPU."""
    if isinstance(value, TensorBytes):
        dtype = getattr(torch, value.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise RestoreError(f"this torch has no dtype {value.dtype!r}.")
        flat = (
            torch.frombuffer(bytearray(value.data), dtype=torch.uint8)
            if value.data
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return flat.view(dtype).reshape(value.shape)
    if type(value) in (list, tuple):
        return type(value)(from_plain(item) for item in value)
    if type(value) in _DICTS:
        return type(value)({key: from_plain(item) for key, item in value.items()})
    return value
