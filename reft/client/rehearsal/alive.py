"""Finds living objects with state that a restart would make anew.

    gc's objects ─► of a kind with state? ─► tracked, in state=, or a part of these? ─► their names
                                             no

A wrapper of a tracked model or optimizer has no state of its own. The scan knows a wrapper by the
memory of its tensors. Any other module counts if its tensors change from the first mark to the
second, or if its name says that the module is an average.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, Sampler

from reft.client.rehearsal.digests import tensor_digest
from reft.client.rehearsal.user_code import frames, is_users, main_module
from reft.client.state.inner_tensors import inner_tensors
from reft.client.state.tracked_objects import TrackedObjects
from reft.errors import UnsupportedState

REACHED_MAX: Final = 10_000
ENTRIES_MAX: Final = 1000  # of one container
AVERAGED: Final = re.compile(r"(?:^|_|[a-z])(?:EMA|Ema)|(?:^|_)(?:ema|EMA)(?:_|$|\d)|[Aa]verag")
STATEFUL: Final = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, DataLoader)
# What is reached, and not looked into.
OPAQUE: Final = (
    *(nn.Module, torch.Tensor, torch.optim.Optimizer, DataLoader, Dataset, torch.Generator),
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str, bytes, int, float),
)


class AliveObjects:
    """The scan of one attach; see the module.

    Args:
        tracked: the tracked objects.
        state: what the user passed in state=.
    """

    def __init__(self, tracked: TrackedObjects, state: Mapping[str, Any]) -> None:
        self._tracked = tracked
        self._state = state
        self._before: list[tuple[nn.Module, str]] = []  # modules, and digests at the first mark

    def note_modules(self) -> None:
        """Notes the bytes of all modules that are not tracked; called at the first mark."""
        held = self._held_memory()
        modules = self._foreign_modules(reachable_objects(), held)
        self._before = [(module, foreign_digest(module, held)) for module in modules]

    def find(self) -> list[dict[str, str]]:
        """Returns kind, type and name of each object; called at the second mark."""
        objects, names = reachable_objects(), names_of_objects()
        covered, held = reached(self._state.values()), self._held_memory()
        kinds = [
            *(("scheduler", each) for each in self._schedulers(objects, covered)),
            *self._modules(self._foreign_modules(objects, held), held, names),
            *self._optimizers(objects, held),
            *self._others(objects, names),
        ]
        if not self._has_position(covered):
            kinds += [("loader", each) for each in of_kind(objects, DataLoader)]
        parts = {id(part) for each in of_kind(covered.values(), nn.Module) for part in each.modules()}
        return [
            {"kind": kind, "type": type(each).__name__, "name": names.get(id(each), "")}
            for kind, each in kinds
            if id(each) not in covered and id(each) not in parts
        ]

    def _schedulers(self, objects: Iterable[Any], covered: Mapping[int, Any]) -> list[LRScheduler]:
        """Returns the schedulers of tracked optimizers; no parts of other schedulers."""
        groups = {id(group) for each in self._tracked.optimizers for group in getattr(each, "param_groups", ())}
        own = [
            each
            for each in of_kind(objects, LRScheduler)
            if id(each) not in covered and not groups.isdisjoint(map(id, _groups(each)))
        ]
        parts = {part for each in own for part in reached([each]) if part != id(each)}
        return [each for each in own if id(each) not in parts]

    def _foreign_modules(self, objects: Iterable[Any], held: set[int]) -> list[nn.Module]:
        """Returns the outermost modules with tensors that are not tracked."""
        inner = {id(part) for module in self._tracked.modules.values() for part in module.modules()}
        foreign = [
            module
            for module in of_kind(objects, nn.Module)
            if id(module) not in inner and any(memory_of(tensor) not in held for tensor in tensors_of(module))
        ]
        parts = {id(part) for module in foreign for part in module.modules() if part is not module}
        return [module for module in foreign if id(module) not in parts]

    def _held_memory(self) -> set[int]:
        return {0, *map(memory_of, self._tracked.bind().tensors.values())}

    def _modules(
        self, foreign: Iterable[nn.Module], held: set[int], names: Mapping[int, str]
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields averages, and modules whose tensors have changed since the first mark."""
        before, self._before = {id(module): digest for module, digest in self._before}, []
        for module in foreign:
            if isinstance(module, AveragedModel) or is_average(module, names):
                yield "ema", module
            elif before.get(id(module), digest := foreign_digest(module, held)) != digest:
                yield "module", module

    def _optimizers(self, objects: Iterable[Any], held: set[int]) -> Iterator[tuple[str, Any]]:
        own = {id(each) for each in self._tracked.optimizers}
        for optimizer in of_kind(objects, torch.optim.Optimizer):
            if id(optimizer) not in own and any(memory_of(each) not in held for each in moments_of(optimizer)):
                yield "optimizer", optimizer

    def _others(self, objects: Iterable[Any], names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
        """Yields scalers, averages that are no modules, and objects of the script's own classes."""
        scalers = {id(each) for each in self._tracked.scalers.values()}
        for scaler in of_kind(objects, torch.amp.GradScaler):
            if id(scaler) not in scalers and scaler.is_enabled():
                yield "scaler", scaler
        tracked = {id(each) for each in (*self._tracked.optimizers, *self._tracked.modules.values())}
        for each in objects:
            if not has_own_state(type(each)):
                continue
            if is_average(each, names):
                yield "ema", each
            elif is_users(file_of(type(each))) and tracked.isdisjoint(reached([each])):
                yield "object", each

    def _has_position(self, covered: Mapping[int, Any]) -> bool:
        """Returns whether a value in state= may hold the position in the data."""
        return any(issubclass(type(each), (DataLoader, Dataset, Sampler)) for each in covered.values()) or any(
            hasattr(type(each), "__iter__") or hasattr(type(each), "__next__")
            for each in self._state.values()
            if not isinstance(each, nn.Module)
        )


def reachable_objects() -> list[Any]:
    """Returns all objects that may have state of their own, without garbage.

    A process with torch has a million objects of some thousand types, so the types are judged.
    """
    gc.collect()
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, STATEFUL) or has_state_methods(kind)}
    return [each for each in objects if type(each) in kinds]


def of_kind(objects: Iterable[Any], kind: type) -> list[Any]:
    """Returns the objects of a class. Proxies would run code if `isinstance` asked them."""
    return [each for each in objects if issubclass(type(each), kind)]


def reached(roots: Iterable[Any]) -> dict[int, Any]:
    """Returns, by id, what these hold through attributes and containers, near ones first.

    Models, optimizers, tensors, loaders and data are reached, and not looked into.
    """
    seen: dict[int, Any] = {}
    waiting = deque(roots)
    while waiting and len(seen) < REACHED_MAX:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if issubclass(type(value), OPAQUE):
            continue
        if issubclass(type(value), Mapping):
            waiting += islice(value.values(), ENTRIES_MAX)
        elif type(value) in (list, tuple, set, frozenset):
            waiting += islice(value, ENTRIES_MAX)
        else:
            waiting += islice(attributes(value).values(), ENTRIES_MAX)
    return seen


def attributes(value: Any) -> Mapping[str, Any]:
    """Returns the attributes of an instance, and runs no code of its class."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def names_of_objects() -> dict[int, str]:
    """Returns the names of the script's variables, by the id of their values.

    These are the globals of the script, and variables of the user's functions that run now.
    """
    names: dict[int, str] = {}
    spaces = [vars(main_module() or object), *(f.f_locals for f in frames() if is_users(f.f_code.co_filename))]
    for space in spaces:
        for name, value in [*space.items()]:
            if not name.startswith("_"):
                names.setdefault(id(value), name)
    return names


def is_average(value: Any, names: Mapping[int, str]) -> bool:
    """Returns whether the variable or the class is named like an average."""
    return bool(AVERAGED.search(type(value).__name__) or AVERAGED.search(names.get(id(value), "")))


def has_own_state(kind: type) -> bool:
    """Returns whether a class has state_dict and load_state_dict, and is of no other kind."""
    is_other = issubclass(kind, STATEFUL) or kind.__module__.partition(".")[0] in ("torch", "reft")
    return not is_other and has_state_methods(kind)


def has_state_methods(kind: type) -> bool:
    """Returns whether a class has state_dict and load_state_dict; asks no metaclass."""
    spaces = [vars(each) for each in kind.__mro__]
    return all(any(name in space for space in spaces) for name in ("state_dict", "load_state_dict"))


def file_of(kind: type) -> str:
    """Returns the file of the module that defines a class; empty if there is none."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the plain local memory of a module's parameters and buffers."""
    for tensor in (*module.parameters(), *module.buffers()):
        yield from plain_memory(tensor)


def moments_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in the state of an optimizer."""
    for entry in [*optimizer.state.values()]:
        values = entry.values() if isinstance(entry, Mapping) else ()
        for each in (each for each in values if isinstance(each, torch.Tensor)):
            yield from (part for part in plain_memory(each) if part.numel())


def plain_memory(tensor: Any) -> Iterator[torch.Tensor]:
    """Yields the plain tensors in a tensor: of a DTensor or a subclass, the inner ones.

    Tensors on `meta`, lazy, sparse and quantized ones have none. Of some of these torch raises an
    error, and of quantized ones it reads wrong memory.
    """
    if is_lazy(tensor):
        return
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    with contextlib.suppress(UnsupportedState):  # a subclass that hides its inner tensors
        for _, _, inner in inner_tensors("tensor", local):
            is_plain = inner.layout is torch.strided and not (inner.is_quantized or inner.is_nested)
            if is_plain and inner.device.type in ("cpu", "cuda"):
                yield inner.detach()


def memory_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's memory; 0 if there is none."""
    return tensor.untyped_storage().data_ptr()


def foreign_digest(module: nn.Module, held: set[int]) -> str:
    """Returns one digest of all tensors of a module that are not tracked."""
    digests = [tensor_digest(tensor) for tensor in tensors_of(module) if memory_of(tensor) not in held]
    return xxhash.xxh3_64_hexdigest("".join(digests).encode())


def _groups(scheduler: LRScheduler) -> Iterable[Any]:
    return getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
