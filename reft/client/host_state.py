"""Small host state: random generators, parameter groups, and the user's own objects, as one tree for the capsule.

Taken at the mark, brought back after all tensors; the generators last, because bringing back the rest may draw from them.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reft.client.state import Subjects
from reft.errors import ConfigError, LayoutChanged, RestoreError
from reft.wire.capsule import TensorBytes

_DICTS = (dict, Counter, OrderedDict)


def to_plain(value: Any) -> Any:
    """The tree with every tensor as bytes, for the capsule's codec; nothing in it changes when the original does."""
    if isinstance(value, torch.Tensor):
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
            else torch.empty(0, dtype=torch.uint8)
        )
        return flat.view(dtype).reshape(value.shape)
    if type(value) in (list, tuple):
        return type(value)(from_plain(item) for item in value)
    if type(value) in _DICTS:
        return type(value)({key: from_plain(item) for key, item in value.items()})
    return value


class HostState:
    """What is small and lies on the host.

    Args:
        subjects: whose parameter groups are kept.
        objects: name → object with state_dict and load_state_dict, or a torch.Generator.

    Raises:
        ConfigError: an object can't give its state.
    """

    def __init__(self, subjects: Subjects, objects: Mapping[str, Any]) -> None:
        self._subjects = subjects
        self._objects = objects
        self._names = {id(parameter): name for name, parameter in subjects.parameter_names()}
        for name, value in objects.items():
            if not isinstance(value, torch.Generator) and not (
                hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
            ):
                raise ConfigError(
                    f"state[{name!r}] is a {type(value).__name__} without state_dict and load_state_dict."
                )

    def capture(self, step: int) -> dict[str, Any]:
        """The tree as it is now; it holds copies, no live values."""
        return {
            "step": step,
            "optimizers": [self._capture_optimizer(optimizer) for optimizer in self._subjects.optimizers],
            "scalers": {name: _capture_scaler(scaler) for name, scaler in self._subjects.scalers.items()},
            "state": {name: to_plain(_state_of(value)) for name, value in self._objects.items()},
            "random": capture_random(),
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Brings back what `capture` took, but for tensors that are leaves.

        Raises:
            LayoutChanged: other optimizers, groups or objects than were held.
        """
        held = tree["optimizers"]
        if len(held) != len(self._subjects.optimizers):
            raise LayoutChanged(f"{len(held)} optimizers are held, {len(self._subjects.optimizers)} were passed.")
        for optimizer, saved in zip(self._subjects.optimizers, held, strict=True):
            self._restore_optimizer(optimizer, saved)
        for name, scaler in self._subjects.scalers.items():
            _restore_scaler(scaler, tree["scalers"].get(name))
        missing = set(self._objects) ^ set(tree["state"])
        if missing:
            raise LayoutChanged(f"state= holds {sorted(tree['state'])}, passed were {sorted(self._objects)}.")
        for name, value in self._objects.items():
            saved = from_plain(tree["state"][name])
            value.set_state(saved) if isinstance(value, torch.Generator) else value.load_state_dict(saved)

    def _capture_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        groups = []
        for group in optimizer.param_groups:
            names = [self._names[id(parameter)] for parameter in group["params"]]
            groups.append({"params": names, "values": _plain_values(group, but="params")})
        plain = {self._names.get(id(key)): _plain_values(state) for key, state in optimizer.state.items()}
        scalars = {name: values for name, values in plain.items() if name and values}
        return {"class": _class_of(optimizer), "groups": groups, "scalars": scalars}

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        if saved["class"] != _class_of(optimizer):
            raise LayoutChanged(f"the held optimizer is a {saved['class']}, passed was a {_class_of(optimizer)}.")
        live = [[self._names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if [group["params"] for group in saved["groups"]] != live:
            raise LayoutChanged(
                f"the optimizer's {len(live)} parameter groups hold other parameters, or in another order,"
                f" than the {len(saved['groups'])} that are held."
            )
        for group, held in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update(from_plain(held["values"]))
            for parameter in group["params"]:
                name = self._names[id(parameter)]
                if name in saved["scalars"]:
                    optimizer.state[parameter].update(from_plain(saved["scalars"][name]))


def _plain_values(values: Mapping[str, Any], but: str = "") -> dict[str, Any]:
    """What is no tensor, and so no leaf."""
    return {key: to_plain(v) for key, v in values.items() if not isinstance(v, torch.Tensor) and key != but}


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _state_of(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def _capture_scaler(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """The settings; scale and growth tracker are leaves, since `state_dict()` would wait for the device."""
    return {
        "growth": scaler.get_growth_factor(),
        "backoff": scaler.get_backoff_factor(),
        "interval": scaler.get_growth_interval(),
        "enabled": scaler.is_enabled(),
    }


def _restore_scaler(scaler: torch.amp.GradScaler, saved: Mapping[str, Any] | None) -> None:
    if saved is None or saved["enabled"] != scaler.is_enabled():
        raise LayoutChanged("a GradScaler was enabled on one side of the failure only.")
    scaler.set_growth_factor(saved["growth"])
    scaler.set_backoff_factor(saved["backoff"])
    scaler.set_growth_interval(saved["interval"])


def capture_random() -> dict[str, Any]:
    """The state of every random generator that Python, numpy and torch share by default."""
    kind, keys, gauss = random.getstate()
    return {
        "python": [kind, np.array(keys, np.uint32), gauss],
        "numpy": list(np.random.get_state()),
        "cpu": to_plain(torch.get_rng_state()),
        "cuda": [to_plain(generator.get_state()) for generator in _cuda_generators()],
    }


def restore_random(saved: Mapping[str, Any]) -> None:
    """Brings every generator back.

    Raises:
        RestoreError: the held state is of another number of CUDA devices.
    """
    kind, keys, gauss = saved["python"]
    random.setstate((kind, tuple(int(key) for key in keys), gauss))
    np.random.set_state(tuple(saved["numpy"]))
    torch.set_rng_state(from_plain(saved["cpu"]))
    generators = _cuda_generators()
    if saved["cuda"] and len(generators) != len(saved["cuda"]):
        raise RestoreError(
            f"{len(saved['cuda'])} CUDA generators are held, this process has {len(generators)} devices."
        )
    for generator, state in zip(generators, saved["cuda"], strict=False):
        generator.set_state(from_plain(state))


def _cuda_generators() -> Sequence[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
