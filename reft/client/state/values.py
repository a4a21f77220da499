"""`reft.Values`: the loop's own values, used by attribute and held with each snapshot.

    value, at the mark                              lies in
    number, text, bytes, None, numpy array ───────► the capsule
    tensor of up to LARGE bytes ──────────────────► the capsule
    larger tensor ────► its copy ─────────────────► a leaf, state.NAME.VALUE

A loop rebinds its values at each step, and a leaf must stay where it is. So each large tensor has a
copy, which each mark writes. A mark then finds all leaves in their places, and needs no new tensor
index. Price: the memory once more, and the time of the copy in the training thread. For a tensor of
another shape or dtype there is another copy, and so another save plan.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from reft.client.state.containers import DICTS
from reft.client.state.serialization import from_plain, to_plain
from reft.core.layout.layout import Leaf
from reft.core.text import counted
from reft.errors import LayoutChanged, UnsupportedState
from reft.wire import capsule_format
from reft.wire.capsule_format import TensorBytes

LARGE = 64 << 10  # bytes: a larger tensor is a leaf
PLAIN_MAX = 256 << 10  # bytes of all other values together; a capsule holds 1 MiB
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
LEAF = "leaf"  # no dtype of torch has this name


class Values:
    """Values of a loop that belong to its state: a best loss, a prefetched batch.

        loop = reft.Values(best=1e9, batch=None)
        session = reft.attach(model, optimizer, state={"loop": loop})
        if session.restored_from is None:
            loop.batch = next(batches)
        for step in session.steps(total):
            loss = train(loop.batch)
            loop.best = min(loop.best, float(loss))
            loop.batch = next(batches)

    After a restore each value is as it was at the mark of the restored step. A value is a number,
    text, bytes, None, a numpy array, a tensor, or a list, tuple or dict of these. Any other value
    is refused by its name, at attach or at the first mark. Later ones cost snapshots, and the log
    names them. Tensors come back without gradients, on their kind of device. Two names for one
    tensor come back as two tensors.

    Tensors of up to 64 KiB and all other values travel with each snapshot: at most 256 KiB of them.
    A larger tensor takes its memory once more, and is copied at each mark. One that is new, or has
    another shape than before, costs some snapshots: the slots are made larger, and with several
    ranks a new layout is agreed on, more and more rarely if shapes keep changing. So give a large
    value its shape before attach: `batch=torch.zeros(32, 1024)`. Each rank has its own large
    tensors, so they exist once, like a shard of FSDP. With another number of ranks only values come
    back that were the same on all ranks; a large tensor is refused.

    Attributes:
        reft_held: what reft holds of the values; for reft itself.
    """

    reft_held: HeldValues

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_values", {})
        object.__setattr__(self, "reft_held", HeldValues(self._values))
        self.load_state_dict(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_values")[name]
        except KeyError:
            raise AttributeError(f"these reft.Values have no value {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if not NAME.fullmatch(name) or hasattr(Values, name) or name in vars(self):
            raise AttributeError(f"{name!r} can't be the name of a value: choose another one")
        self._values[name] = value

    def __delattr__(self, name: str) -> None:
        if self._values.pop(name, self) is self:
            raise AttributeError(f"these reft.Values have no value {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        return f"reft.Values({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def state_dict(self) -> dict[str, Any]:
        """Returns the values by name, not copied."""
        return dict(self._values)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replaces all values."""
        self._values.clear()
        for name, value in saved.items():
            setattr(self, name, value)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replaces all values by those of ranks that had the same ones.

        Raises:
            LayoutChanged: a value differs among the ranks.
        """
        self.load_state_dict(common(states))


class HeldValues(nn.Module):
    """What reft holds of `Values`. A module, as everything in `state=` that has leaves.

    Args:
        values: name → value; the dict itself.

    Attributes:
        tensors: key → copy of a large tensor. The key of a value is its name. The tensors in a
            list, tuple or dict are NAME/0, NAME/1, … in their order.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self._values = values
        self.tensors: dict[str, torch.Tensor] = {}

    def check(self) -> None:
        """Refuses values that can't be held.

        Raises:
            UnsupportedState: names the value.
        """
        sizes = {}
        for name, value in self.held()["values"].items():
            try:
                sizes[name] = len(capsule_format.encode({name: to_plain(value)}))
            except UnsupportedState as error:
                raise _refused(name, error.message) from error
        if sum(sizes.values()) > PLAIN_MAX:
            name = max(sizes, key=lambda each: sizes[each])
            raise UnsupportedState(
                f"the values without large tensors have {sum(sizes.values())} bytes; the limit is {PLAIN_MAX}. The largest is "
                f"{name!r} with {sizes[name]}.",
                f"make numbers one tensor: above {LARGE} bytes a tensor does not count here",
            )

    def refresh(self) -> None:
        """Copies each large tensor into its copy; makes and drops copies."""
        large: dict[str, torch.Tensor] = {}
        for name, value in self._values.items():
            _mapped(name, value, torch.Tensor, lambda key, tensor: _is_large(tensor) and large.update({key: tensor}))
        for key in self.tensors.keys() - large.keys():
            del self.tensors[key]
        with torch.no_grad():
            for key, tensor in large.items():
                copy = self.tensors.get(key)
                if copy is None or _form(copy) != _form(tensor):
                    self.tensors[key] = copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                copy.copy_(tensor)

    def fit(self, leaves: Iterable[Leaf], prefix: str) -> None:
        """Makes exactly the copies into which these leaves are restored.

        Args:
            leaves: the leaves of a snapshot.
            prefix: of the names of this object's leaves.
        """
        keys = {leaf.name.removeprefix(prefix): leaf for leaf in leaves if leaf.name.startswith(prefix)}
        for key in self.tensors.keys() - keys.keys():
            del self.tensors[key]
        for key, leaf in keys.items():
            copy, dtype = self.tensors.get(key), getattr(torch, leaf.dtype)
            if copy is None or (copy.dtype, tuple(copy.shape)) != (dtype, leaf.shape):
                self.tensors[key] = torch.empty(leaf.shape, dtype=dtype, device="cpu")

    def held(self) -> dict[str, Any]:
        """Returns the values with a mark in the place of each large tensor.

        Raises:
            UnsupportedState: a tensor has no plain memory.
        """
        devices: dict[str, str] = {}

        def replace(key: str, tensor: torch.Tensor) -> Any:
            _check_tensor(key, tensor)
            devices[key] = tensor.device.type
            return TensorBytes(LEAF, (), key.encode()) if _is_large(tensor) else tensor

        values = {name: _mapped(name, value, torch.Tensor, replace) for name, value in self._values.items()}
        return {"values": values, "devices": {key: kind for key, kind in devices.items() if kind != "cpu"}}

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Replaces the values by those that `held` returned; the copies are restored.

        Args:
            saved: the result of `held` in plain form.
            device: for tensors that lay on a device of this kind.
        """

        def replace(key: str, data: TensorBytes) -> torch.Tensor:
            tensor = self.tensors[data.data.decode()].clone() if data.dtype == LEAF else from_plain(data)
            return tensor.to(device if saved["devices"].get(key, "cpu") == device.type else "cpu")

        self._values.clear()
        for name, value in saved["values"].items():
            self._values[name] = _mapped(name, value, TensorBytes, replace)


def common(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the values that all ranks had.

    Args:
        states: for each rank its values by name, as plain values or tensors.

    Raises:
        LayoutChanged: a value differs.
    """
    for name in dict.fromkeys(name for state in states for name in state):
        if len({capsule_format.encode([to_plain(state[name])] if name in state else []) for state in states}) > 1:
            raise LayoutChanged(
                f"value {name!r} of reft.Values differs among {counted(len(states), 'rank')} of the snapshot, and this job has "
                "another number of ranks: no rule says which rank gets which value.",
                f"start {counted(len(states), 'rank')}, or hold values that are the same on all ranks",
            )
    return dict(states[0])


def _mapped(name: str, value: Any, kind: type, change: Callable[[str, Any], Any]) -> Any:
    """Returns a value with each object of a kind replaced by `change(key, object)`."""
    if isinstance(value, kind):
        return change(name, value)
    return _walk(name, value, kind, change, itertools.count())


def _walk(name: str, each: Any, kind: type, change: Callable[[str, Any], Any], numbers: Iterator[int]) -> Any:
    """Returns one entry of a value; `numbers` counts the objects of the kind.

    A function inside `_mapped` would be a cycle, which keeps old batches until Python collects.
    """
    if isinstance(each, kind):
        return change(f"{name}/{next(numbers)}", each)
    if type(each) in (list, tuple):
        return type(each)([_walk(name, item, kind, change, numbers) for item in each])
    if type(each) in DICTS:
        return type(each)({key: _walk(name, item, kind, change, numbers) for key, item in each.items()})
    return each


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() > LARGE


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _check_tensor(key: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise _refused(key, f"it is a {type(tensor).__module__}.{type(tensor).__qualname__}.")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type not in ("cpu", "cuda"):
        raise _refused(key, f"it is a tensor of layout {tensor.layout} on {tensor.device}, or quantized.")


def _refused(name: str, reason: str) -> UnsupportedState:
    return UnsupportedState(
        f"value {name!r} of reft.Values can't be held: {reason}",
        "keep numbers, text, numpy arrays or plain tensors of it; or pass the object itself in state= if it has state_dict and "
        "load_state_dict",
    )
