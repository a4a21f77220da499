"""Small host state: random generators, parameter groups and the user's objects, as one tree.

The tree is captured at the mark and stored in the capsule. A restore loads the tensors first, then
this tree, and the random generators last: restoring the rest may draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from reft.client.memory.cuda import HostCopy, begin_host_copy
from reft.client.state import random_state, serialization, structure
from reft.client.state.extra_state import ExtraState, cost_at_mark
from reft.client.state.parameters import ParameterNames
from reft.client.state.serialization import finished, from_plain, to_plain
from reft.client.state.tensors import device_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.client.state.values import Values, common
from reft.core.commit.cost_spacing import ExtraStateCost
from reft.errors import ConfigError, LayoutChanged, UnsupportedState
from reft.wire.capsule_format import NameTable
from reft.wire.slot_format import CAPSULE_MAX


class MarkedGenerators(NamedTuple):
    """The states of the generators at a mark, as `random_state.take` returns them."""

    step: int
    generators: Mapping[str, Any]


class HostState:
    """The small state of one rank that lies on the host.

    Args:
        tracked: the tracked objects; this class stores their parameter groups.
        objects: name → an object with state_dict and load_state_dict, or a torch.Generator.
        begin_copy: begins the copy of a tensor from its device to the host.
        names: of all parameters, if a tensor index has them already.

    Attributes:
        marked: the generators at the newest mark that was taken; None before the first one.
        moves: kinds of generators that a usual step moves before its first forward; None if that
            was not learned.

    Raises:
        ConfigError: an object has no state_dict or no load_state_dict.
    """

    def __init__(
        self,
        tracked: TrackedObjects,
        objects: Mapping[str, Any],
        begin_copy: Callable[[torch.Tensor], HostCopy] = begin_host_copy,
        names: ParameterNames | None = None,
    ) -> None:
        self._tracked = tracked
        self._begin_copy = begin_copy
        self._objects = objects
        self._extra_states = [value for value in objects.values() if isinstance(value, ExtraState)]
        self._names = tracked.names() if names is None else names
        self.marked: MarkedGenerators | None = None
        self.moves: Sequence[str] | None = None
        for name, value in objects.items():
            if not isinstance(value, torch.Generator) and not (
                hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
            ):
                raise ConfigError(
                    f"state[{name!r}] is a {type(value).__name__} without state_dict and load_state_dict.",
                    _remedy(name, value),
                )

    def capture(self, step: int) -> dict[str, Any]:
        """Returns the tree of the current state. The tree holds copies, no live values."""
        return storable(self.take(step, self._tracked.names()))

    def take(self, step: int, names: ParameterNames) -> dict[str, Any]:
        """Returns the tree of the mark, without a wait for the device.

        Random states and tensors of a device are put into the capsule's form later, beside training
        (`storable`).

        Args:
            step: the step of the mark.
            names: the names of all parameters, from a current tensor index.
        """
        self._names = names
        self.marked = MarkedGenerators(step, random_state.take())
        return {
            "step": step,
            "subjects": self._tracked.capture(names),
            "trainable": structure.trainable(names),
            "scalers": {name: _capture_scaler(scaler) for name, scaler in self._tracked.scalers.items()},
            "state": self.take_objects(),
            "random": self.marked.generators,
            "moves": None if self.moves is None else list(self.moves),
        }

    def live_settings(self) -> dict[str, Any]:
        """Returns the live groups and generators; asks none of the user's objects."""
        return {"subjects": self._tracked.capture(self._names), "random": random_state.capture()}

    def take_objects(self) -> dict[str, Any]:
        """Returns the state of the user's objects, by name, for `finished`."""
        return {name: to_plain(_state_of(value), self._begin_copy) for name, value in self._objects.items()}

    def extra_state_cost(self) -> ExtraStateCost | None:
        """Returns what the modules' extra state cost since the last call; None if not asked."""
        return cost_at_mark(self._extra_states)

    def check_size(self, names: NameTable) -> None:
        """Encodes the tree once, before training and after the restore, to check its size.

        Args:
            names: this rank's names in the manifest.

        Raises:
            UnsupportedState: a value has a type that cannot be stored, or the tree exceeds the
                capsule's limit.
        """
        size = len(serialization.encode(storable(self.take(0, self._names)), names))
        if size > CAPSULE_MAX:
            raise UnsupportedState(
                f"the small host state has {size} bytes, for {len(self._names)} parameters; the limit is {CAPSULE_MAX}.",
                "keep large values as tensors in a module, and pass that in state=",
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
        self.moves = tree.get("moves")  # capsules of earlier builds have none
        for name, value in self._objects.items():
            if isinstance(value, Values):
                self._restore_values(value, lists.get(name) or [tree["state"][name]])
                continue
            if name in lists:
                value.load_state_dicts([from_plain(each) for each in lists[name]])
                continue
            saved = from_plain(tree["state"][name])
            value.set_state(saved) if isinstance(value, torch.Generator) else value.load_state_dict(saved)

    def _restore_values(self, values: Values, states: Sequence[Any]) -> None:
        """Restores the loop's values from the states of one rank, or of all old ranks."""
        saved = {**states[0], "values": common([state["values"] for state in states])}
        values.reft_held.restore(saved, device_of(named.local for named in self._names.values()))


def storable(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a result of `HostState.take` in the form of a capsule. Any thread may call it."""
    return {**tree, "random": random_state.storable(tree["random"]), "state": finished(tree["state"])}


def _remedy(name: str, value: Any) -> str:
    """Returns what to do about an object without state_dict and load_state_dict."""
    if value is None or isinstance(value, (int, float, str, bytes, list, tuple, dict, np.ndarray, torch.Tensor)):
        return f'loop = reft.Values({name}=...), state={{"loop": loop}}, and use loop.{name} in the loop'
    return "pass an object with both; for a data loader, reft.ResumableLoader(loader), and iterate that"


def _state_of(value: Any) -> Any:
    if isinstance(value, Values):
        return value.reft_held.held()
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
