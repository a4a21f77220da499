"""Small host state: random generators, parameter groups, and the user's own objects, as one tree for the capsule.

Taken at the mark, brought back after all tensors; the generators last, because bringing back the rest may draw from them.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from reft.client.state import serialization
from reft.client.state.parameters import ParameterNames
from reft.client.state.serialization import from_plain, to_plain
from reft.client.state.tracked_objects import TrackedObjects
from reft.errors import ConfigError, LayoutChanged, RestoreError, UnsupportedState
from reft.wire.capsule_format import TensorBytes
from reft.wire.slot_format import CAPSULE_MAX


class HostState:
    """What is small and lies on the host.

    Args:
        tracked: whose parameter groups are kept.
        objects: name → object with state_dict and load_state_dict, or a torch.Generator.

    Raises:
        ConfigError: an object can't give its state.
    """

    def __init__(self, tracked: TrackedObjects, objects: Mapping[str, Any]) -> None:
        self._tracked = tracked
        self._objects = objects
        self._names = tracked.names()
        for name, value in objects.items():
            if not isinstance(value, torch.Generator) and not (
                hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
            ):
                raise ConfigError(
                    f"state[{name!r}] is a {type(value).__name__} without state_dict and load_state_dict."
                )

    def capture(self, step: int) -> dict[str, Any]:
        """The tree as it is now; it holds copies, no live values."""
        return self.complete(self.take(step, self._tracked.names()))

    def take(self, step: int, names: ParameterNames) -> dict[str, Any]:
        """What the mark does of it: all that must not be older or newer.

        Args:
            names: of all parameters, as the bindings have them that hold.
        """
        self._names = names
        return {
            "step": step,
            "subjects": self._tracked.capture(names),
            "scalers": {name: _capture_scaler(scaler) for name, scaler in self._tracked.scalers.items()},
            "state": {name: to_plain(_state_of(value)) for name, value in self._objects.items()},
            "random": _take_random(),
        }

    def complete(self, taken: Mapping[str, Any]) -> dict[str, Any]:
        """The tree of what was taken; any thread may do this, and later."""
        return {**taken, "random": _stored_random(taken["random"])}

    def check_size(self) -> None:
        """Encodes it once, before training.

        Raises:
            UnsupportedState: a value is of a type that is not stored, or all is larger than a capsule can be.
        """
        size = len(serialization.encode(self.capture(0)))
        if size > CAPSULE_MAX:
            raise UnsupportedState(
                f"the small state on the host has {size} bytes, names of {len(self._names)} parameters included; the limit "
                f"is {CAPSULE_MAX}.",
                "keep large values as tensors in a module, and pass that in state=; merge small parameters, or shorten names",
            )

    def holds(self, parameter: int) -> bool:
        """Whether the parameter with this id is one of the subjects'."""
        return parameter in self._names

    @property
    def objects(self) -> Mapping[str, Any]:
        """The user's objects, by name."""
        return self._objects

    def restore(self, tree: Mapping[str, Any], lists: Mapping[str, Sequence[Any]] = MappingProxyType({})) -> None:
        """Brings back what `capture` took, but for tensors that are leaves.

        Args:
            tree: as `capture` gave it.
            lists: name → states of several ranks, for objects that get them all by `load_state_dicts`.

        Raises:
            LayoutChanged: other optimizers, groups or objects than were held.
        """
        held, live = set(tree["subjects"]), {prefix for prefix, _, _ in self._tracked.items()}
        if held != live:
            raise LayoutChanged(f"{sorted(held)} are held, {sorted(live)} were passed.")
        self._tracked.restore(tree["subjects"], self._names)
        for name, scaler in self._tracked.scalers.items():
            _restore_scaler(scaler, tree["scalers"].get(name))
        missing = set(self._objects) ^ set(tree["state"])
        if missing:
            raise LayoutChanged(f"state= holds {sorted(tree['state'])}, passed were {sorted(self._objects)}.")
        for name, value in self._objects.items():
            if name in lists:
                value.load_state_dicts([from_plain(each) for each in lists[name]])
                continue
            saved = from_plain(tree["state"][name])
            value.set_state(saved) if isinstance(value, torch.Generator) else value.load_state_dict(saved)


def _state_of(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def _capture_scaler(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """The settings; scale and growth tracker are leaves, since `state_dict()` would wait for the device."""
    if not scaler.is_enabled():
        return {"enabled": False}  # it has none
    return {
        "growth": scaler.get_growth_factor(),
        "backoff": scaler.get_backoff_factor(),
        "interval": scaler.get_growth_interval(),
        "enabled": scaler.is_enabled(),
    }


def _restore_scaler(scaler: torch.amp.GradScaler, saved: Mapping[str, Any] | None) -> None:
    if saved is None or saved["enabled"] != scaler.is_enabled():
        raise LayoutChanged("a GradScaler was enabled on one side of the failure only.")
    if not saved["enabled"]:
        return
    scaler.set_growth_factor(saved["growth"])
    scaler.set_backoff_factor(saved["backoff"])
    scaler.set_growth_interval(saved["interval"])


def capture_random() -> dict[str, Any]:
    """The state of every random generator that Python, numpy and torch share by default."""
    return _stored_random(_take_random())


def _take_random() -> dict[str, Any]:
    """As the generators give it, which is as copies."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": [generator.get_state() for generator in _cuda_generators()],
    }


def _stored_random(taken: Mapping[str, Any]) -> dict[str, Any]:
    kind, keys, gauss = taken["python"]
    return {
        "python": [kind, np.frombuffer(array("I", keys), np.uint32), gauss],  # np.array takes thrice as long
        "numpy": list(taken["numpy"]),
        "cpu": _bytes_of(taken["cpu"]),
        "cuda": [_bytes_of(state) for state in taken["cuda"]],
    }


def _bytes_of(state: torch.Tensor) -> TensorBytes:
    """As `to_plain` gives it, for the copy that a generator makes of its state: on the host, uint8, in a third of the time."""
    return TensorBytes("uint8", tuple(state.shape), state.numpy().tobytes())


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
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()
