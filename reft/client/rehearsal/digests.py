"""Digests of what a rehearsal compares: tensors, generators, small state. Each is hex text.

bytes on the host      xxh3_64 of the bytes in place
bytes on a device      xxh3_64 of sums that the device computes (snapshot/replica_sums.py)
small state            xxh3_64 of its encoding in a capsule; the order of keys does not count
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from reft.client.snapshot.replica_sums import PIECE_BYTES, pieces_of, tensor_sums
from reft.client.state import random_state
from reft.wire import capsule_format

ON_HOST, ON_DEVICE = "xxh3_64", "xxh3_64 of sums"


def tensor_digest(tensor: torch.Tensor) -> str:
    """Returns the digest of a plain tensor's bytes; waits for its device."""
    if tensor.device.type != "cpu":
        return xxhash.xxh3_64_hexdigest(tensor_sums(tensor).tobytes())
    digest = xxhash.xxh3_64()
    for piece in pieces_of(tensor, PIECE_BYTES):
        digest.update(piece.numpy())
    return digest.hexdigest()


def generator_digests() -> dict[str, str]:
    """Returns the digests of all default generators: python, numpy, torch, cuda:0, ..."""
    states = random_state.storable(random_state.take())
    named = {"python": states["python"], "numpy": states["numpy"], "torch": states["cpu"]}
    named |= {f"cuda:{index}": state for index, state in enumerate(states["cuda"])}
    return {name: plain_digest(state) for name, state in named.items()}


def plain_digest(value: object) -> str:
    """Returns the digest of a value that a capsule can hold, in the capsule's form.

    Raises:
        UnsupportedState: a capsule can't hold the value.
    """
    return xxhash.xxh3_64_hexdigest(capsule_format.encode(_sorted(value)))


def _sorted(value: Any) -> Any:
    """Returns the value with the keys of plain dicts in one order.

    A restored object may get its attributes in another order.
    """
    if type(value) is dict:
        return {key: _sorted(value[key]) for key in sorted(value, key=repr)}
    return type(value)(map(_sorted, value)) if type(value) in (list, tuple) else value


def group_values(group: Mapping[str, Any]) -> dict[str, object]:
    """Returns the settings in a parameter group, in JSON types.

    Parameters are left out, and values that are no settings, such as functions.
    """
    settings = {key: _setting(value) for key, value in group.items() if key != "params"}
    return {key: value for key, value in settings.items() if value is not None}


def _setting(value: Any) -> object:
    """Returns a setting in JSON types, a tensor as its digest; None for other values."""
    if isinstance(value, torch.Tensor):
        return _setting(value.item()) if value.numel() == 1 else tensor_digest(value)
    if isinstance(value, np.generic):
        return _setting(value.item())
    if isinstance(value, (list, tuple)):
        return [_setting(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    return value if isinstance(value, (bool, int, float, str)) else None
