"""Small host state: random generators, parameter groups and the user's objects, as one tree.

The tree is captured at the mark and stored in the capsule. A restore loads the tensors first, then
this tree, and the random generators last: restoring the rest may draw random numbers.
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
    """The small state of one rank that lies on the host.

    Args:
        tracked: the tracked objects; this class stores their parameter groups.
        objects: name → an object with state_dict and load_state_dict, or a torch.Generator.

    Raises:
        ConfigError: an object has no state_dict or no load_state_dict.
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
        """Returns the tree of the current state. The tree holds copies, no live values."""
        return self.complete(self.take(step, self._tracked.names()))

    def take(self, step: int, names: ParameterNames) -> dict[str, Any]:
        """Reads all values that must be exactly of the mark. `complete` finishes the tree.

        Args:
            step: the step of the mark.
            names: the names of all parameters, from a current tensor index.
        """
        self._names = names
        return {
            "step": step,
            "subjects": self._tracked.capture(names),
            "scalers": {name: _capture_scaler(scaler) for name, scaler in self._tracked.scalers.items()},
            "state": {name: to_plain(_state_of(value)) for name, value in self._objects.items()},
            "random": _take_random(),
        }

    def complete(self, capture: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the finished tree of a result of `take`. It may run later and in any thread."""
        return {**capture, "random": _storable_random(capture["random"])}

    def check_size(self) -> None:
        """Encodes the tree once, before training, to check its size.

        Raises:
            UnsupportedState: a value has a type that cannot be stored, or the tree exceeds the
                capsule's limit.
        """
        size = len(serialization.encode(self.capture(0)))
        if size > CAPSULE_MAX:
            raise UnsupportedState(
                f"the small host state has {size} bytes, with the names of {len(self._names)} parameters; the limit "
                f"is {CAPSULE_MAX}.",
                "keep large values as tensors in a module, and pass that in state=; merge small parameters, or shorten names",
            )

    def holds(self, parameter: int) -> bool:
        """Returns whether a tracked object has the parameter with this id."""
        return parameter in self._names

    @property
    def objects(self) -> Mapping[str, Any]:
        """The user's objects, by name."""
        return self._objects

    def restore(self, tree: Mapping[str, Any], lists: Mapping[str, Sequence[Any]] = MappingProxyType({})) -> None:
        """Restores the state that `capture` returned, except tensors that are leaves.

        Args:
            tree: the tree that `capture` returned.
            lists: name → the states of several ranks, for objects that have `load_state_dicts`.

        Raises:
            LayoutChanged: the tree has other optimizers, groups or objects than this run.
        """
        saved_prefixes, live_prefixes = set(tree["subjects"]), {prefix for prefix, _, _ in self._tracked.items()}
        if saved_prefixes != live_prefixes:
            raise LayoutChanged(
                f"the snapshot has the objects {sorted(saved_prefixes)}; attach was given {sorted(live_prefixes)}."
            )
        self._tracked.restore(tree["subjects"], self._names)
        for name, scaler in self._tracked.scalers.items():
            _restore_scaler(scaler, tree["scalers"].get(name))
        unmatched = set(self._objects) ^ set(tree["state"])
        if unmatched:
            raise LayoutChanged(
                f"the snapshot has state= {sorted(tree['state'])}; attach was given {sorted(self._objects)}."
            )
        for name, value in self._objects.items():
            if name in lists:
                value.load_state_dicts([from_plain(each) for each in lists[name]])
                continue
            saved = from_plain(tree["state"][name])
            value.set_state(saved) if isinstance(value, torch.Generator) else value.load_state_dict(saved)


def _state_of(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def _capture_scaler(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Returns the scaler's settings.

    Scale and growth tracker are leaves instead: `state_dict()` would wait for the device.
    """
    if not scaler.is_enabled():
        return {"enabled": False}  # a disabled scaler has no other settings
    return {
        "growth": scaler.get_growth_factor(),
        "backoff": scaler.get_backoff_factor(),
        "interval": scaler.get_growth_interval(),
        "enabled": scaler.is_enabled(),
    }


def _restore_scaler(scaler: torch.amp.GradScaler, saved: Mapping[str, Any] | None) -> None:
    if saved is None or saved["enabled"] != scaler.is_enabled():
        raise LayoutChanged("a GradScaler is enabled only in the snapshot, or only in this run.")
    if not saved["enabled"]:
        return
    scaler.set_growth_factor(saved["growth"])
    scaler.set_backoff_factor(saved["backoff"])
    scaler.set_growth_interval(saved["interval"])


def capture_random() -> dict[str, Any]:
    """Returns the state of the default random generators of Python, numpy and torch."""
    return _storable_random(_take_random())


def _take_random() -> dict[str, Any]:
    """Returns the states in the generators' own types. All of them are copies."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": [generator.get_state() for generator in _cuda_generators()],
    }


def _storable_random(states: Mapping[str, Any]) -> dict[str, Any]:
    kind, keys, gauss = states["python"]
    return {
        "python": [kind, np.frombuffer(array("I", keys), np.uint32), gauss],  # np.array takes three times as long
        "numpy": list(states["numpy"]),
        "cpu": _bytes_of(states["cpu"]),
        "cuda": [_bytes_of(state) for state in states["cuda"]],
    }


def _bytes_of(state: torch.Tensor) -> TensorBytes:
    """Returns the same as `to_plain`, in a third of the time.

    Only valid for a copy of a generator's state: a uint8 tensor on the host.
    """
    return TensorBytes("uint8", tuple(state.shape), state.numpy().tobytes())


def restore_random(saved: Mapping[str, Any]) -> None:
    """Restores the state of every default random generator.

    Raises:
        RestoreError: the saved state is of another number of CUDA devices.
    """
    kind, keys, gauss = saved["python"]
    random.setstate((kind, tuple(int(key) for key in keys), gauss))
    np.random.set_state(tuple(saved["numpy"]))
    torch.set_rng_state(from_plain(saved["cpu"]))
    generators = _cuda_generators()
    if saved["cuda"] and len(generators) != len(saved["cuda"]):
        raise RestoreError(
            f"the snapshot has {len(saved['cuda'])} CUDA generators, this process has {len(generators)} devices."
        )
    for generator, state in zip(generators, saved["cuda"], strict=False):
        generator.set_state(from_plain(state))


def _cuda_generators() -> Sequence[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()
