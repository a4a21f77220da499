"""Forms: how a restore makes tensors that the optimizer has not made yet.

    state[parameter][key]            leaves             the wrappers of each, outermost first
    tensor                           NAME               none: plain, or placed like its parameter
    DTensor placed otherwise         NAME               DTensor
    subclass (8-bit, float8, …)      NAME/codes, …      subclass
    list or dict (LBFGS, Shampoo)    NAME/0, NAME/1     entry
    DTensor of a subclass            NAME/codes[of …]   DTensor, subclass

A form travels with its leaf, in the manifest and in the slot's table. So a restore needs neither a
prediction nor a step of the optimizer. A form never contains bytes of the state, and nothing of it
is executed: a class is only taken if this process has imported it already.

`assemble` makes a dict of the tensors in a list or dict. The capsule has the container itself, see
`state/containers.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from reft.client.state.extract.dtensor import is_strided
from reft.client.state.inner_tensors import InnerTensor, flattened
from reft.client.state.parameters import NamedParameter
from reft.client.torch_internals import strided_shard
from reft.core.layout.layout import Leaf
from reft.errors import FormatError, LayoutChanged, UnsupportedState


class EntryWrapper(NamedTuple):
    """The leaf lies in a list or a dict, under this index or key."""

    key: str


class DTensorWrapper(NamedTuple):
    """The leaf is the local tensor of a DTensor, on the mesh of its parameter.

    No placements: the leaf is not in a DTensor, although it has the shape of its parameter's piece.
    """

    placements: tuple[str, ...]
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


class SubclassWrapper(NamedTuple):
    """The leaf is an inner tensor of a tensor subclass.

    Attributes:
        kind: the class, as "module.Class".
        attribute: the name of the inner tensor.
        context: the class's settings, as `_settings_to` writes them.
        shape, stride: of the outer tensor.
    """

    kind: str
    attribute: str
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]


Wrapper = EntryWrapper | DTensorWrapper | SubclassWrapper
_KINDS: Mapping[str, type[EntryWrapper] | type[DTensorWrapper] | type[SubclassWrapper]] = {
    "entry": EntryWrapper,
    "placed": DTensorWrapper,
    "class": SubclassWrapper,
}
_TAGS = {kind: tag for tag, kind in _KINDS.items()}


@dataclass(frozen=True)
class StateForm:
    """The form of one leaf of an optimizer's state.

    Attributes:
        wrappers: what the leaf lies in, outermost first.
        tag: the end of the leaf's name that says to which piece the leaf belongs.
        on_host: whether the leaf lies on the host; None: as `OptimizerExtractor` expects.
    """

    wrappers: tuple[Wrapper, ...] = ()
    tag: str = ""
    on_host: bool | None = None

    def text(self) -> str:
        """Returns the text of `Leaf.form`; empty for the usual form."""
        if self == StateForm():
            return ""
        wrappers = [[_TAGS[type(each)], *each] for each in self.wrappers]
        return json.dumps([wrappers, self.tag, self.on_host], separators=(",", ":"))

    @classmethod
    def of(cls, leaf: Leaf) -> StateForm:
        """Returns the form of a leaf.

        Raises:
            FormatError: the text is no form.
        """
        if not leaf.form:
            return cls()
        try:
            wrappers, tag, on_host = json.loads(leaf.form)
            return cls(tuple(_KINDS[kind](*map(_hashable, values)) for kind, *values in wrappers), str(tag), on_host)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FormatError(f"the form of leaf {leaf.name!r} can't be read: {error}.") from error

    @property
    def path(self) -> str:
        """The part of the leaf's name that the wrappers add."""
        names = (
            each.key if isinstance(each, EntryWrapper) else each.attribute
            for each in self.wrappers
            if not isinstance(each, DTensorWrapper)
        )
        return "".join(f"/{name}" for name in names)

    def name(self, leaf: Leaf) -> str:
        """Returns the leaf's name without the tag and the path."""
        return leaf.name.removesuffix(self.tag).removesuffix(self.path)


def wrappers_of(
    name: str, parameter: NamedParameter, keys: Sequence[str], value: torch.Tensor, inner: InnerTensor
) -> tuple[Wrapper, ...]:
    """Returns the wrappers of a leaf.

    Args:
        name: name of the leaf, for errors.
        parameter: the parameter whose state has the value.
        keys: the keys of the lists and dicts that the value lies in.
        value: the tensor in the state.
        inner: the leaf's memory, and the way from the value to it.

    Raises:
        UnsupportedState: a restore could not make the tensor again.
    """
    wrappers: list[Wrapper] = [EntryWrapper(key) for key in keys]
    outer = parameter.tensor
    if isinstance(value, DTensor):
        if not isinstance(outer, DTensor) or value.device_mesh != outer.device_mesh:
            raise UnsupportedState(
                f"{name} lies on another device mesh than its parameter, so a restore could not place it."
            )
        if inner.path or value.placements != outer.placements or value.shape != outer.shape:
            wrappers.append(
                DTensorWrapper(tuple(map(_placement_to, value.placements)), tuple(value.shape), value.stride())
            )
    elif isinstance(outer, DTensor) and not inner.path and value.shape == parameter.local.shape:
        wrappers.append(DTensorWrapper(()))
    for owner, attribute in zip(inner.owners, inner.path, strict=True):
        kind, (_, context) = type(owner), flattened(owner)
        wrappers.append(
            SubclassWrapper(
                f"{kind.__module__}.{kind.__qualname__}",
                attribute,
                _settings_to(name, context),
                tuple(owner.shape),
                owner.stride(),
            )
        )
    return tuple(wrappers)


def assemble(parts: Sequence[tuple[tuple[Wrapper, ...], torch.Tensor]], parameter: NamedParameter) -> Any:
    """Returns a value of a parameter's state.

    A list or dict comes as a dict with text keys.

    Args:
        parts: the plain tensors of the value, each with its wrappers.
        parameter: the parameter.

    Raises:
        LayoutChanged: this process lacks a class of the value, or the class refuses the tensors.
    """
    wrappers, tensor = parts[0]
    if not wrappers:
        return tensor
    first = wrappers[0]
    groups: dict[str, list[tuple[tuple[Wrapper, ...], torch.Tensor]]] = {}
    for (outermost, *others), each in parts:
        key = outermost.key if isinstance(outermost, EntryWrapper) else getattr(outermost, "attribute", "")
        groups.setdefault(key, []).append((tuple(others), each))
    values = {key: assemble(group, parameter) for key, group in groups.items()}
    if isinstance(first, EntryWrapper):
        return values
    if isinstance(first, SubclassWrapper):
        return _unflattened(first, values)
    return _placed(first, values[""], parameter)


def _placed(wrapper: DTensorWrapper, local: torch.Tensor, parameter: NamedParameter) -> torch.Tensor:
    if not wrapper.placements:
        return local
    if not isinstance(parameter.tensor, DTensor):
        raise LayoutChanged(
            f"the state of {parameter.name} was sharded as a DTensor, and {parameter.name} is none in this job."
        )
    placements = [_placement_from(text) for text in wrapper.placements]
    return DTensor.from_local(
        local,
        parameter.tensor.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(wrapper.shape),
        stride=wrapper.stride,
    )


def _unflattened(wrapper: SubclassWrapper, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns a tensor of a class that this process has imported."""
    module, _, name = wrapper.kind.rpartition(".")
    kind: Any = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise LayoutChanged(
            f"the snapshot has a {wrapper.kind}, which this process has not imported.", f"import {module} before attach"
        )
    try:
        value = kind.__tensor_unflatten__(
            dict(inner), _settings_from(wrapper.context), torch.Size(wrapper.shape), wrapper.stride
        )
    except Exception as error:
        raise LayoutChanged(f"{wrapper.kind} can't be made from its inner tensors: {error}.") from error
    made: torch.Tensor = value
    return made


def _placement_to(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    assert isinstance(placement, Shard) or is_strided(placement), f"local_piece refuses {placement}"
    split = f".{placement.split_factor}" if is_strided(placement) else ""
    return f"S{placement.dim}{split}"


def _placement_from(text: str) -> Placement:
    if text == "R":
        return Replicate()
    dim, _, split = text.removeprefix("S").partition(".")
    return strided_shard(int(dim), int(split)) if split else Shard(int(dim))


def _settings_to(name: str, value: Any) -> Any:
    """Returns the settings of a tensor subclass in JSON types.

    Raises:
        UnsupportedState: a value is neither a number, text, a dtype, a device nor a list of such.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple, torch.Size):
        return [type(value).__name__, *(_settings_to(name, each) for each in value)]
    if type(value) is dict and all(type(key) is str for key in value):
        return ["dict", *([key, _settings_to(name, each)] for key, each in value.items())]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    raise UnsupportedState(
        f"{name} is part of a tensor subclass with a setting of type {type(value).__name__}, which a restore could not make "
        "again."
    )


def _settings_from(value: Any) -> Any:
    """Reverses `_settings_to`."""
    if not isinstance(value, (list, tuple)):
        return value
    kind, *items = value
    if kind == "dict":
        return {key: _settings_from(each) for key, each in items}
    if kind == "dtype":
        return getattr(torch, items[0])
    if kind == "device":
        return torch.device(items[0])
    return {"list": list, "tuple": tuple, "Size": torch.Size}[kind](map(_settings_from, items))


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
