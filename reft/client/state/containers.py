"""Lists and dicts of tensors in an optimizer's state, such as the history of LBFGS.

    state[parameter]["old_dirs"] = [tensor, tensor]     leaves NAME/0, NAME/1
                                                        capsule [HELD_AS_LEAF, HELD_AS_LEAF]

The capsule has the container with its numbers, and HELD_AS_LEAF in the place of each tensor. A
restore makes the container from the capsule, with the tensors of the leaves.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch

from reft.errors import LayoutChanged, UnsupportedState
from reft.wire.capsule_format import TensorBytes

HELD_AS_LEAF = TensorBytes("leaf", (), b"")  # no dtype of torch has this name
DICTS = (dict, OrderedDict)
CONTAINERS = (list, tuple, *DICTS)
HELD_VALUES = (torch.Tensor, bool, int, float, str, bytes, bytearray, np.ndarray, np.generic, Counter, type(None))


def without_tensors(value: Any) -> Any:
    """Returns a container of the state with HELD_AS_LEAF in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return HELD_AS_LEAF
    if type(value) in (list, tuple):
        return type(value)(map(without_tensors, value))
    if type(value) in DICTS:
        return type(value)({key: without_tensors(each) for key, each in value.items()})
    return value


def with_tensors(saved: Any, live: Any) -> Any:
    """Reverses `without_tensors`, with the tensors of `live`.

    Args:
        saved: the result of `without_tensors`.
        live: the container as it is, or as `assemble` made it.

    Raises:
        LayoutChanged: `live` lacks a tensor.
    """
    if isinstance(saved, TensorBytes) and saved == HELD_AS_LEAF:
        if not isinstance(live, torch.Tensor):
            raise LayoutChanged("the snapshot's optimizer state has a tensor in a list or dict that no leaf is for.")
        return live
    if type(saved) in (list, tuple):
        return type(saved)(with_tensors(each, _child(live, i)) for i, each in enumerate(saved))
    if type(saved) in DICTS:
        return type(saved)({key: with_tensors(each, _child(live, key)) for key, each in saved.items()})
    return saved


def _child(live: Any, key: Any) -> Any:
    if isinstance(live, (list, tuple)):
        return live[key] if key < len(live) else None
    if isinstance(live, dict):
        return live.get(key, live.get(str(key)))
    return None


def entries(value: Any) -> list[tuple[Any, Any]]:
    """Returns (key, entry) of a list, tuple or dict; nothing of any other value."""
    if type(value) not in CONTAINERS:
        return []
    return [*(value.items() if type(value) in DICTS else enumerate(value))]


def check_value(name: str, value: Any) -> None:
    """Refuses a value of an optimizer's state that neither leaves nor a capsule can hold.

    Raises:
        UnsupportedState: the value, or one in a list or dict, is of another kind.
    """
    if type(value) in CONTAINERS:
        for key, each in entries(value):
            check_value(f"{name}[{key!r}]", each)
    elif not isinstance(value, HELD_VALUES):
        raise UnsupportedState(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}; held are tensors, numbers, text, bytes and "
            "numpy arrays, and lists, tuples and dicts of these.",
            "keep the tensors of that object in a list or dict of the state, or register_extractor for the optimizer",
        )


def has_tensors(value: Any) -> bool:
    """Returns whether the value is a tensor, or a container with one."""
    if type(value) not in CONTAINERS:  # each mark asks this of each number of the state
        return isinstance(value, torch.Tensor)
    return any(has_tensors(each) for _, each in entries(value))
