"""Serialization of small state: trees without live values, and the bytes of such a tree.

An optimizer may count in Python numbers (`state[p]["step"] += 1`). Such numbers appear at the first
step, one for each parameter. Stored for each parameter, they could make a capsule too large that
was small enough at attach. So `encode` stores the most common value once. Names of parameters are
written as numbers of the manifest's names (`reft.wire.capsule_format`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from reft.client.memory.cuda import HostCopy
from reft.errors import RestoreError, UnsupportedState
from reft.wire import capsule_format
from reft.wire.capsule_format import NO_NAMES, NameTable, TensorBytes

_DICTS = (dict, Counter, OrderedDict)


def to_plain(value: Any, begin_copy: Callable[[torch.Tensor], HostCopy] | None = None) -> Any:
    """Returns the tree with every tensor as bytes; independent of the original values.

    Args:
        value: the tree.
        begin_copy: begins the copy of a tensor from its device, which is then a `HostCopy` in the
            tree until `finished`. None waits for the device.

    Raises:
        UnsupportedState: a tensor is sharded or of another subclass, which its bytes do not
            describe.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            raise UnsupportedState(
                f"a value in the small state is a {type(value).__name__} of shape {list(value.shape)}.",
                "keep tensors in a module or an optimizer, and pass that",
            )
        if begin_copy is not None and value.device.type != "cpu":
            return begin_copy(value.detach())
        return _tensor_bytes(value.detach().cpu())
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, begin_copy) for item in value)
    if type(value) in _DICTS:
        return type(value)({key: to_plain(item, begin_copy) for key, item in value.items()})
    if isinstance(value, np.ndarray):
        return value.copy()
    return bytes(value) if type(value) is bytearray else value


def finished(value: Any) -> Any:
    """Returns the tree of `to_plain` with each `HostCopy` as bytes. Waits for the device."""
    if isinstance(value, HostCopy):
        return _tensor_bytes(value.wait())
    if type(value) in (list, tuple):
        return type(value)(finished(item) for item in value)
    if type(value) in _DICTS:
        return type(value)({key: finished(item) for key, item in value.items()})
    return value


def _tensor_bytes(tensor: torch.Tensor) -> TensorBytes:
    """Returns the bytes of a tensor on the host."""
    flat = tensor.resolve_conj().resolve_neg().contiguous()  # a lazy view's own bytes are other ones
    data = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return TensorBytes(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def from_plain(value: Any) -> Any:
    """Reverses `to_plain`; tensors are created on the CPU."""
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


OPTIMIZER_KEYS = {"class", "groups", "scalars"}  # of the tree of a torch optimizer
REPR_IS_EXACT = (bool, int, float, str, type(None))  # types whose repr is exact


def encode(tree: Mapping[str, Any], names: NameTable = NO_NAMES) -> bytes:
    """Returns the tree as the capsule's bytes.

    Args:
        tree: the host state of one rank.
        names: the rank's names in the manifest.

    Raises:
        UnsupportedState: a value has a type that cannot be stored.
    """
    return capsule_format.encode(
        {**tree, "subjects": {prefix: _compact(saved) for prefix, saved in tree["subjects"].items()}}, names
    )


def decode(data: bytes, names: NameTable = NO_NAMES) -> dict[str, Any]:
    """Returns the tree that was given to `encode`.

    Raises:
        FormatError: the bytes are not those of a capsule, or other names were given to `encode`.
    """
    tree = capsule_format.decode(data, names)
    return {**tree, "subjects": {prefix: _expand(saved) for prefix, saved in tree["subjects"].items()}}


def _compact(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an optimizer's tree with the most common entry of `scalars` stored once.

    `alike` is the entry of most parameters. `unlike` has the entries of all other parameters.
    """
    scalars = saved.get("scalars")
    if not scalars or not saved.keys() >= OPTIMIZER_KEYS:
        return saved
    parameters = [
        name for group in saved["groups"] for name in group.get("params", ())
    ]  # Megatron's groups have no names
    kinds = Counter(kind for name in parameters if (kind := _kind(scalars.get(name, {}))))
    kind, count = max(kinds.items(), key=lambda each: each[1], default=("{}", 0))
    if kind == "{}" or 2 * count < len(parameters):
        return saved
    common = next(scalars[name] for name in parameters if _kind(scalars.get(name, {})) == kind)
    mismatched = {name: scalars.get(name, {}) for name in parameters if _kind(scalars.get(name, {})) != kind}
    mismatched |= {name: scalars[name] for name in scalars.keys() - set(parameters)}
    rest = {key: value for key, value in saved.items() if key != "scalars"}
    return {**rest, "alike": common, "unlike": mismatched}


def _expand(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reverses `_compact`."""
    if not saved.keys() >= (OPTIMIZER_KEYS - {"scalars"}) | {"alike", "unlike"}:
        return saved
    parameters = [name for group in saved["groups"] for name in group["params"]]
    scalars = {**dict.fromkeys(parameters, saved["alike"]), **saved["unlike"]}
    rest = {key: value for key, value in saved.items() if key not in ("alike", "unlike")}
    return {**rest, "scalars": {name: values for name, values in scalars.items() if values}}


def _kind(values: Mapping[str, Any]) -> str:
    """Returns equal text for bitwise equal values; empty text if repr cannot decide."""
    return repr(values) if all(type(each) in REPR_IS_EXACT for each in values.values()) else ""
