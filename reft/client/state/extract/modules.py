"""Models: plain and DDP modules, FSDP2's, and all with DTensor parameters (TP, SP, EP).

a module's parameters and buffers ─► leaves
FSDP2                 FSDPParam.sharded_param replaces the module's entry, because
                      forward puts the gathered parameter there and may leave it there
FSDP1, ZeRO-3         the shards lie elsewhere, in memory that stays in place
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.state.extract.dtensor import local_piece
from reft.client.state.extract.fsdp1 import Parts, ShardedFlatParameter, flat_parameters
from reft.client.state.extract.registry import Removable
from reft.client.state.extract.zero3 import partitioned_parameters
from reft.client.state.inner_tensors import InnerTensor
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.tensors import TensorIndex, without_wrappers
from reft.client.torch_internals import (
    buffers_of,
    fsdp2_parameters,
    is_persistent,
    owners_of,
    parameters_of,
    submodules_of,
)
from reft.core.layout.layout import Leaf
from reft.core.layout.model_form import ModelForm
from reft.errors import UnsupportedState

ContainerOf = Callable[[nn.Module], dict[str, Any]]


class ModuleTensor(NamedTuple):
    """A tensor of a module: `place[key]`, with its name in the whole job.

    `is_temporary`: whether the module's state dict leaves the tensor out.
    """

    name: str
    place: Mapping[str, Any]
    key: str
    tensor: torch.Tensor
    is_temporary: bool = False


def is_a(value: object, kind: str) -> bool:
    """Returns whether the value's class, or a base class, has this name.

    Compares names, so that no trainer's package is imported.
    """
    return any(each.__name__ == kind for each in type(value).__mro__)


class ModuleExtractor:
    """Extracts the state of any nn.Module."""

    roles = frozenset({"model"})

    def check(self, prefix: str, value: nn.Module) -> None:
        """Refuses scripted modules; `bind` refuses tensors that cannot be saved."""
        for path, part in value.named_modules():
            if is_a(part, "ScriptModule"):
                raise UnsupportedState(
                    f"{f'{prefix}.{path}' if path else prefix} is a {type(part).__name__} of torch.jit, whose tensors lie "
                    "outside of Python.",
                    "pass the model as it was before scripting or tracing: it has the same parameters and buffers",
                )

    def parameters(self, prefix: str, value: nn.Module, known: ParameterNames) -> Iterator[NamedParameter]:
        """Yields the parameters, as shards if FSDP has sharded them."""
        parts = [*value.named_modules()]
        elsewhere = _sharded_elsewhere(parts)
        for flat in elsewhere:
            for named in flat.pieces:
                yield named._replace(name=f"{prefix}.{without_wrappers(named.name)}")
        for module_tensor in self._parameters(prefix, parts, elsewhere):
            yield NamedParameter(
                module_tensor.name, module_tensor.tensor, *local_piece(module_tensor.name, module_tensor.tensor)
            )

    def bind(self, index: TensorIndex, prefix: str, value: nn.Module, names: ParameterNames) -> None:
        """Adds parameters, and buffers as staged leaves."""
        parts = [*value.named_modules()]
        track_structure(index, parts)
        elsewhere = _sharded_elsewhere(parts)
        for flat in elsewhere:
            index.track_entry(flat.place, flat.key, flat.place.get(flat.key))
            for named in flat.pieces:
                name = f"{prefix}.{without_wrappers(named.name)}"
                added = index.add(name, {name: named.local}, name, named.local, box=named.box)
                note_form(index, added, ModelForm(named.shape))
        for module_tensor in self._parameters(prefix, parts, elsewhere):
            index.add(module_tensor.name, module_tensor.place, module_tensor.key, module_tensor.tensor)
        for module_tensor in _slots(prefix, parts, buffers_of):
            added = index.add(
                module_tensor.name, module_tensor.place, module_tensor.key, module_tensor.tensor, staged=True
            )
            note_form(index, added, ModelForm(is_temporary=module_tensor.is_temporary), module_tensor.name)

    def slots(self, prefix: str, module: nn.Module, container_of: ContainerOf) -> Iterator[ModuleTensor]:
        """Yields the tensors of the module and its submodules.

        Parameters of FSDP1 and ZeRO-3 are left out.

        Args:
            prefix: prefix of the names.
            module: the outermost module.
            container_of: `parameters_of` or `buffers_of`.
        """
        parts = [*module.named_modules()]
        if container_of is buffers_of:
            return _slots(prefix, parts, container_of)
        return self._parameters(prefix, parts, _sharded_elsewhere(parts))

    def _parameters(
        self, prefix: str, parts: Parts, elsewhere: Sequence[ShardedFlatParameter]
    ) -> Iterator[ModuleTensor]:
        """Yields the modules' parameters; for FSDP2, the sharded parameters instead."""
        sharded = _sharded_by_fsdp2(parts)
        flat = {entry for each in elsewhere for entry in each.slots}
        for module_tensor in _slots(prefix, parts, parameters_of):
            at = (id(module_tensor.place), module_tensor.key)
            if at not in flat:
                yield sharded[at]._replace(name=module_tensor.name) if at in sharded else module_tensor

    def predict(self, prefix: str, value: nn.Module, names: ParameterNames) -> Iterable[Leaf]:
        """Returns no leaf: a model has all its tensors from the start."""
        return ()

    def make(
        self, prefix: str, value: nn.Module, leaves: Sequence[Leaf], names: ParameterNames, buffer: HugePageBuffer
    ) -> None:
        """Creates buffers that are None, and those that training made or resized.

        The latter only if no checkpoint contains them. Any other missing
        tensor means that the model is another one.
        """
        saved_leaves = {leaf.name: leaf for leaf in leaves if leaf.shape == leaf.global_shape}
        for path, part in value.named_modules():
            for key, tensor in buffers_of(part).items():
                leaf = saved_leaves.get(f"{prefix}.{without_wrappers(f'{path}.{key}' if path else key)}")
                if leaf is not None and (tensor is None or not is_persistent(part, key)):
                    neighbor = (
                        tensor if tensor is not None else next(chain(part.parameters(), value.parameters()), None)
                    )
                    device = None if neighbor is None else neighbor.device
                    dtype = getattr(torch, leaf.dtype)
                    buffers_of(part)[key] = torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device=device)
        self._register(prefix, value, saved_leaves.values())

    def _register(self, prefix: str, value: nn.Module, leaves: Iterable[Leaf]) -> None:
        """Registers buffers that a forward makes, such as a mask."""
        parts = {".".join(filter(None, (prefix, without_wrappers(path)))): part for path, part in value.named_modules()}
        for leaf in leaves:
            owner, _, key = leaf.name.rpartition(".")
            if leaf.staged and owner in parts and not hasattr(parts[owner], key) and ModelForm.of(leaf).is_temporary:
                neighbor = next(chain(parts[owner].parameters(), value.parameters()), None)
                device, dtype = None if neighbor is None else neighbor.device, getattr(torch, leaf.dtype)
                made = torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device=device)
                parts[owner].register_buffer(key, made, persistent=False)

    def capture(self, prefix: str, value: nn.Module, names: ParameterNames) -> dict[str, Any]:
        """Returns nothing: all state of a module is in leaves."""
        return {}

    def restore(self, prefix: str, value: nn.Module, names: ParameterNames, saved: Mapping[str, Any]) -> None:
        """Does nothing: all state of a module is in leaves."""

    def hook(self, value: Any, before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
        """Returns no hook: a module is not an optimizer."""
        return []


def note_form(index: TensorIndex, added: Sequence[tuple[str, InnerTensor]], form: ModelForm, name: str = "") -> None:
    """Notes the form of leaves that `TensorIndex.add` has added.

    A leaf that state dicts have under a later name only is not temporary: it gets that name.

    Args:
        index: has the leaves.
        added: what `TensorIndex.add` has returned.
        form: of these leaves.
        name: of the tensor; empty: no earlier leaf with the same memory needs one.
    """
    temporary = ModelForm(is_temporary=True).text()
    if text := form.text():
        index.forms.update((leaf, text) for leaf, _ in added if leaf)
    for known in (index.name_of(part.tensor) for leaf, part in added if not leaf and name and not form.is_temporary):
        if index.forms.get(known) == temporary:
            tag = "".join(known.partition("[")[1:])
            index.forms[known] = ModelForm(name=index.rename(name) + tag).text()


def track_structure(index: TensorIndex, parts: Parts) -> None:
    """Tracks the modules, their tensors, and entries that are None.

    An entry that is None may become a buffer later.
    """
    moving_containers = {at for at, _ in _sharded_by_fsdp2(parts)}
    moving_containers.update(at for flat in _sharded_elsewhere(parts) for at, _ in flat.slots)
    for _, part in parts:
        index.track_entries(submodules_of(part))
        for container in (parameters_of(part), buffers_of(part)):
            track = index.track_size if id(container) in moving_containers else index.track_entries
            track(container)
            for key, tensor in container.items():
                if tensor is None:
                    index.track_entry(container, key, None)


def _slots(prefix: str, parts: Parts, container_of: ContainerOf) -> Iterator[ModuleTensor]:
    """Yields the tensors in one container of each module."""
    for path, part in parts:
        container = container_of(part)
        for name, tensor in container.items():
            if tensor is not None:
                yield ModuleTensor(
                    f"{prefix}.{without_wrappers(f'{path}.{name}' if path else name)}", container, name, tensor,
                    container_of is buffers_of and not is_persistent(part, name),
                )  # fmt: skip


def _sharded_elsewhere(parts: Parts) -> list[ShardedFlatParameter]:
    """Returns the shards that replace parameters whose memory moves in forward."""
    return [*flat_parameters(parts), *partitioned_parameters(parts)]


def _sharded_by_fsdp2(parts: Parts) -> dict[tuple[int, str], ModuleTensor]:
    """Returns the sharded parameters of FSDP2.

    Maps (id of a module's container of parameters, key) → the sharded nn.Parameter, which stays.
    """
    sharded = {}
    for _, part in parts:
        for each in fsdp2_parameters(part) if is_a(part, "FSDPModule") else ():
            module_tensor = ModuleTensor("", vars(each), "sharded_param", each.sharded_param)
            sharded.update({(id(parameters_of(owner)), name): module_tensor for owner, name in owners_of(each)})
    return sharded
