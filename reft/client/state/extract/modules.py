"""Models: plain and DDP modules, FSDP2's, and whatever has DTensors for parameters (TP, SP, EP).

module._parameters, _buffers ─► leaves        FSDP2: FSDPParam.sharded_param stands for what lies in _parameters,
                                              because forward puts the gathered parameter there and may leave it
                                              FSDP1, DeepSpeed's ZeRO-3: shards that lie still, elsewhere
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
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.tensors import TensorIndex, clean
from reft.core.layout.layout import Leaf


class ModuleTensor(NamedTuple):
    """A tensor of a module: `place[key]`, under its name in the whole job."""

    name: str
    place: Mapping[str, Any]
    key: str
    tensor: torch.Tensor


def is_a(value: object, kind: str) -> bool:
    """Whether a class of this name is among those of the value; so that no trainer is imported to ask."""
    return any(each.__name__ == kind for each in type(value).__mro__)


class ModuleExtractor:
    """For every nn.Module."""

    roles = frozenset({"model"})

    def check(self, prefix: str, value: nn.Module) -> None:
        """Refuses nothing: what can't be held is found tensor by tensor."""

    def parameters(self, prefix: str, value: nn.Module, known: ParameterNames) -> Iterator[NamedParameter]:
        """Sharded parameters where FSDP has them, whatever lies in the module now."""
        parts = [*value.named_modules()]
        elsewhere = _sharded_elsewhere(parts)
        for flat in elsewhere:
            for named in flat.pieces:
                yield named._replace(name=f"{prefix}.{clean(named.name)}")
        for slot in self._parameters(prefix, parts, elsewhere):
            yield NamedParameter(slot.name, slot.tensor, *local_piece(slot.name, slot.tensor))

    def bind(self, found: TensorIndex, prefix: str, value: nn.Module, names: ParameterNames) -> None:
        """Parameters, and buffers as staged leaves."""
        parts = [*value.named_modules()]
        note_structure(found, parts)
        elsewhere = _sharded_elsewhere(parts)
        for flat in elsewhere:
            found.track_entry(flat.place, flat.key, flat.place.get(flat.key))
            for named in flat.pieces:
                name = f"{prefix}.{clean(named.name)}"
                found.add(name, {name: named.local}, name, named.local, box=named.box)
        for slot in self._parameters(prefix, parts, elsewhere):
            found.add(slot.name, slot.place, slot.key, slot.tensor)
        for slot in _slots(prefix, parts, "_buffers"):
            found.add(slot.name, slot.place, slot.key, slot.tensor, staged=True)

    def slots(self, prefix: str, module: nn.Module, attribute: str) -> Iterator[ModuleTensor]:
        """What the module and those in it have, but for FSDP1's parameters and those of ZeRO-3.

        Args:
            attribute: "_parameters" or "_buffers".
        """
        parts = [*module.named_modules()]
        if attribute == "_buffers":
            return _slots(prefix, parts, attribute)
        return self._parameters(prefix, parts, _sharded_elsewhere(parts))

    def _parameters(
        self, prefix: str, parts: Parts, elsewhere: Sequence[ShardedFlatParameter]
    ) -> Iterator[ModuleTensor]:
        """What lies in the modules, or stands for it where FSDP2 has sharded it."""
        sharded = _sharded_by_fsdp2(parts)
        flat = {slot for each in elsewhere for slot in each.slots}
        for slot in _slots(prefix, parts, "_parameters"):
            at = (id(slot.place), slot.key)
            if at not in flat:
                yield sharded[at]._replace(name=slot.name) if at in sharded else slot

    def predict(self, prefix: str, value: nn.Module, names: ParameterNames) -> Iterable[Leaf]:
        """None: a model has all its tensors."""
        return ()

    def make(
        self, prefix: str, value: nn.Module, leaves: Sequence[Leaf], names: ParameterNames, room: HugePageBuffer
    ) -> None:
        """Buffers that have no value yet, or that no checkpoint has and training has resized.

        Whatever else a model lacks makes it another model.
        """
        held = {leaf.name: leaf for leaf in leaves if leaf.shape == leaf.global_shape}
        for path, part in value.named_modules():
            for key, tensor in part._buffers.items():
                leaf = held.get(f"{prefix}.{clean(f'{path}.{key}' if path else key)}")
                if leaf is not None and (tensor is None or key in part._non_persistent_buffers_set):
                    like = tensor if tensor is not None else next(chain(part.parameters(), value.parameters()), None)
                    device = None if like is None else like.device
                    dtype = getattr(torch, leaf.dtype)
                    part._buffers[key] = torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device=device)

    def capture(self, prefix: str, value: nn.Module, names: ParameterNames) -> dict[str, Any]:
        """Nothing beside the leaves."""
        return {}

    def restore(self, prefix: str, value: nn.Module, names: ParameterNames, saved: Mapping[str, Any]) -> None:
        """Nothing beside the leaves."""

    def hook(self, value: Any, before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
        """A module is no optimizer."""
        return []


def note_structure(found: TensorIndex, parts: Parts) -> None:
    """Notes which modules there are, which tensors they have, and what they have room for: a buffer may come later."""
    moving = {at for at, _ in _sharded_by_fsdp2(parts)}
    moving.update(at for flat in _sharded_elsewhere(parts) for at, _ in flat.slots)
    for _, part in parts:
        found.track_entries(part._modules)
        for container in (part._parameters, part._buffers):
            note = found.track_size if id(container) in moving else found.track_entries
            note(container)
            for key, tensor in container.items():
                if tensor is None:
                    found.track_entry(container, key, None)


def _slots(prefix: str, parts: Parts, attribute: str) -> Iterator[ModuleTensor]:
    """What the modules themselves have."""
    for path, part in parts:
        container = getattr(part, attribute)
        for name, tensor in container.items():
            if tensor is not None:
                yield ModuleTensor(f"{prefix}.{clean(f'{path}.{name}' if path else name)}", container, name, tensor)


def _sharded_elsewhere(parts: Parts) -> list[ShardedFlatParameter]:
    """What stands for parameters whose memory moves in forward."""
    return [*flat_parameters(parts), *partitioned_parameters(parts)]


def _sharded_by_fsdp2(parts: Parts) -> dict[tuple[int, str], ModuleTensor]:
    """(id of a module's _parameters, name in it) → where FSDP2 keeps the sharded parameter, its nn.Parameter for good."""
    found = {}
    for _, part in parts:
        if not is_a(part, "FSDPModule"):
            continue
        state = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12 had one group at most
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for each in (each for group in groups for each in group.fsdp_params):
            info = each._module_info
            slot = ModuleTensor("", vars(each), "sharded_param", each.sharded_param)
            owners = zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names], strict=True)
            found.update({(id(owner._parameters), name): slot for owner, name in owners})
    return found
