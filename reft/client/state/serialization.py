"""Small values of a capsule: trees without live values, there and back, and the bytes of such a tree.

An optimizer that counts in Python numbers (`state[p]["step"] += 1`) has no numbers until its first step, and as many as it has
parameters from then on. Written by the names of parameters they would make a capsule too large whose names fit at attach.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from reft.errors import RestoreError, UnsupportedState
from reft.wire import capsule_format
from reft.wire.capsule_format import TensorBytes

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


GROUPED = {"class", "groups", "scalars"}  # what the tree of a torch optimizer consists of
NUMBERS = (bool, int, float, str, type(None))  # whose repr says all of them


def encode(tree: Mapping[str, Any]) -> bytes:
    """The capsule's bytes.

    Raises:
        UnsupportedState: a value is of a type that is not stored.
    """
    return capsule_format.encode(
        {**tree, "subjects": {prefix: _short(held) for prefix, held in tree["subjects"].items()}}
    )


def decode(data: bytes) -> dict[str, Any]:
    """The tree that `encode` was given.

    Raises:
        FormatError: these are no capsule's bytes.
    """
    tree = capsule_format.decode(data)
    return {**tree, "subjects": {prefix: _long(held) for prefix, held in tree["subjects"].items()}}


def _short(held: Mapping[str, Any]) -> Mapping[str, Any]:
    """A subject with `alike`, what most parameters of its groups have, and `unlike`, what others have, for `scalars`."""
    scalars = held.get("scalars")
    if not scalars or not held.keys() >= GROUPED:
        return held
    own = [name for group in held["groups"] for name in group.get("params", ())]  # Megatron's groups have no names
    kinds = Counter(kind for name in own if (kind := _kind(scalars.get(name, {}))))
    kind, count = max(kinds.items(), key=lambda each: each[1], default=("{}", 0))
    if kind == "{}" or 2 * count < len(own):
        return held
    alike = next(scalars[name] for name in own if _kind(scalars.get(name, {})) == kind)
    mismatched = {name: scalars.get(name, {}) for name in own if _kind(scalars.get(name, {})) != kind}
    mismatched |= {name: scalars[name] for name in scalars.keys() - set(own)}
    rest = {key: value for key, value in held.items() if key != "scalars"}
    return {**rest, "alike": alike, "unlike": mismatched}


def _long(held: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reverse of `_short`."""
    if not held.keys() >= (GROUPED - {"scalars"}) | {"alike", "unlike"}:
        return held
    own = [name for group in held["groups"] for name in group["params"]]
    scalars = {**dict.fromkeys(own, held["alike"]), **held["unlike"]}
    rest = {key: value for key, value in held.items() if key not in ("alike", "unlike")}
    return {**rest, "scalars": {name: values for name, values in scalars.items() if values}}


def _kind(values: Mapping[str, Any]) -> str:
    """Equal for values that are alike to the bit; empty if that takes more than a look."""
    return repr(values) if all(type(each) in NUMBERS for each in values.values()) else ""
