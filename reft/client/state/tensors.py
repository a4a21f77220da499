"""Leaves for all tensors of models and optimizers, and an index of the tensors.

A leaf's name is the same in any process that builds the same model: "model.0.layers.1.weight",
"optimizer.0.exp_avg.model.0.layers.1.weight". Names of wrappers are removed. Tied tensors are one
leaf, under the name found first. A rank's piece of a sharded tensor is a leaf with the tensor's
name and a region of the whole tensor (`reft.client.state.extract`). `TensorIndex` remembers where
each tensor was found, so the next step can check quickly that nothing has changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from reft.client.memory import locations
from reft.client.memory.entries import END, are_same, source_of
from reft.client.memory.locations import UINT64, extent_of
from reft.client.state.containers import has_tensors
from reft.client.state.extract.dtensor import Region, local_piece
from reft.client.state.inner_tensors import PLAIN_TYPES, InnerTensor, inner_region, inner_tensors
from reft.client.state.parameters import ParameterNames
from reft.client.torch_internals import WRAPPERS, local_tensor
from reft.core.layout.layout import Layout, Leaf, pack, plain_strides, strides_of
from reft.errors import UnsupportedState


def without_wrappers(name: str) -> str:
    """Returns a parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def check_supported(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedState if the tensor is not plain memory of this process."""
    if type(tensor) not in PLAIN_TYPES:
        raise UnsupportedState(
            f"{name} is a {type(tensor).__name__}, whose data no __tensor_flatten__ names; supported are plain tensors, "
            "DTensors, and classes with __tensor_flatten__ whose inner tensors are plain."
        )
    if type(tensor) is nn.UninitializedParameter:
        raise UnsupportedState(f"{name} of a lazy module has no shape yet.", "run a forward pass before attach")
    if tensor.device.type not in ("cpu", "cuda"):
        remedies = {"meta": "give the model memory and initial values before attach: model.to_empty(device=...)"}
        raise UnsupportedState(
            f"{name} lies on device {tensor.device}; supported are cpu and cuda.",
            remedies.get(tensor.device.type, "move the model to one of them"),
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise UnsupportedState(
            f"{name} has layout {tensor.layout}, or is quantized or a lazy view; only dense tensors are supported."
        )
    if tensor.is_contiguous():
        return
    shared = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    span = 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    if tensor.numel() and (shared or tensor.numel() > span):
        raise UnsupportedState(
            f"{name} has shape {list(tensor.shape)} and strides {list(tensor.stride())}: its elements share memory, as in "
            "an expanded tensor, so a restore cannot write into it.",
            "clone() it",
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill one contiguous range of memory, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a dense tensor: uint8, shape [nbytes], sharing the tensor's memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Returns the device that the tensors lie on, or the CPU.

    Tensors on the host beside a device count as that device's.

    Raises:
        UnsupportedState: the tensors lie on several devices.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise UnsupportedState(
            f"the state lies on {', '.join(sorted(map(str, devices)))}; one device for each process is supported.",
            "start a process for each device",
        )
    return next(iter(devices), torch.device("cpu"))


# Address, bytes of an element, shape, strides: tensors of one identity are one leaf.
_Identity = tuple[int, int, tuple[int, ...], tuple[int, ...]]
SHAPE = attrgetter("shape")
DTYPE = attrgetter("dtype")
STRIDE = torch.Tensor.stride
ADDRESS = torch.Tensor.data_ptr


class TensorPlaces:
    """The containers and entries in which tensors were found, with the objects found there."""

    def __init__(self) -> None:
        self._tracked: list[tuple[Mapping[Any, Any], Any, object]] = []
        # Those of `_tracked` whose container is not in `_views`.
        self._single_entries: list[tuple[Mapping[Any, Any], Any, object]] = []
        self._sizes: list[tuple[Any, int]] = []
        # Containers that also have entries without tensors: keys with tensors, the other entries.
        self._mixed: list[tuple[Mapping[Any, Any], frozenset[Any], Mapping[Any, Any]]] = []
        # What `are_same` reads of each container; their entries, with END behind those of each.
        self._sources: list[Iterable[Any]] = []
        self._entries: list[Any] = []
        # Ids of the containers of which all entries are tracked.
        self._listed: set[int] = set()
        self._containers: list[MutableMapping[Any, Any]] = []

    def track_entry(self, place: Mapping[Any, Any], key: object, value: object) -> None:
        """Tracks that `place[key]` is `value` itself."""
        self._tracked.append((place, key, value))
        if id(place) not in self._listed:
            self._single_entries.append((place, key, value))

    def track_size(self, container: Any) -> None:
        """Tracks the number of entries of a container."""
        self._sizes.append((container, len(container)))

    def track_others(self, container: Mapping[Any, Any]) -> None:
        """Tracks that no other entry of a container has a tensor later.

        `track_entry` tracks those that have tensors now. What the others are may change.
        """
        others = {key: each for key, each in container.items() if not has_tensors(each)}
        self._mixed.append((container, frozenset(key for key in container if key not in others), others))

    def track_entries(self, container: Mapping[Any, Any] | Sequence[Any]) -> None:
        """Tracks the very objects in a container, so that a replaced entry is noticed."""
        if id(container) in self._listed:
            return
        self._listed.add(id(container))
        if isinstance(container, MutableMapping):
            self._containers.append(container)
        self._sources.append(source_of(container))
        self._entries.extend(container.values() if isinstance(container, Mapping) else container)
        self._entries.append(END)

    def rollback_to(self, before: TensorPlaces) -> None:
        """Removes every tensor found since `before`, and puts back replaced values."""
        mixed = {(id(place), key): each for place, _, others in before._mixed for key, each in others.items()}
        earlier = {**mixed, **{(id(place), key): value for place, key, value in before._tracked}}
        emptied = set()
        for place, key, value in self._tracked:
            if not isinstance(value, torch.Tensor) or not isinstance(place, MutableMapping):
                continue
            if (id(place), key) not in earlier:
                place.pop(key, None)
                emptied.add(id(place))
            elif earlier[id(place), key] is not value:
                place[key] = earlier[id(place), key]
        for container in reversed(self._containers):  # a dict in a dict comes after it
            for key in [key for key, value in container.items() if id(value) in emptied and not value]:
                del container[key]
                emptied.add(id(container))

    def is_current(self) -> bool:
        """Returns whether every container still has the very same entries.

        Runs at every mark, so the code is terse.
        """
        return (
            all(len(container) == size for container, size in self._sizes)
            and are_same(self._sources, self._entries, END)
            and all(place.get(key) is value for place, key, value in self._single_entries)
            and not any(
                key not in held and has_tensors(each)
                for container, held, _ in self._mixed
                for key, each in container.items()
            )
        )


class TensorLocations:
    """The addresses, extents and write counts of tensors.

    The extent is shape and strides: the bytes at an address mean something else with others.

    A fixed tensor changes only in an optimizer's step. Forward may change any other tensor. torch
    does not count the writes of tensors made in inference mode, so these are not fixed: for example
    a mask that an evaluation puts into a buffer.
    """

    def __init__(self) -> None:
        # Of each fixed tensor: the leaf's name, its local memory, the tensor on which torch counts
        # writes, and the address and extent of the local memory.
        self._names: list[str] = []
        self._fixed: list[torch.Tensor] = []
        self._counted: list[torch.Tensor] = []
        self._addresses = array(UINT64)
        self._extents = array(UINT64)
        # Of each other tensor.
        self._others: list[torch.Tensor] = []
        self._other_addresses: list[int] = []
        self._shapes: list[torch.Size] = []
        self._strides: list[tuple[int, ...]] = []
        self._dtypes: list[torch.dtype] = []
        self._wrappers: list[torch.Tensor] = []
        self._locals: list[torch.Tensor] = []

    def track_address(self, tensor: torch.Tensor) -> None:
        """Tracks the memory address, the dtype, the shape and the strides of a plain tensor."""
        self._others.append(tensor)
        self._other_addresses.append(tensor.data_ptr())
        self._shapes.append(tensor.shape)
        self._strides.append(tensor.stride())
        self._dtypes.append(tensor.dtype)

    def track_local(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """Tracks which local tensor a DTensor has; a plain tensor is its own."""
        if local is not tensor:
            self._wrappers.append(tensor)
            self._locals.append(local)

    def track(self, name: str, tensor: torch.Tensor, local: torch.Tensor, counted: torch.Tensor, staged: bool) -> None:
        """Tracks the address, the extent and the write count of a tensor's local memory.

        Args:
            name: the name of the leaf.
            tensor: a plain tensor or a DTensor.
            local: the plain tensor itself, or the DTensor's local tensor.
            counted: the tensor on which torch counts writes.
            staged: whether forward may change the tensor.
        """
        self.track_local(tensor, local)
        if staged or counted.is_inference():
            self.track_address(local)
            return
        self._names.append(name)
        self._fixed.append(local)
        self._counted.append(counted)
        self._addresses.append(local.data_ptr())
        self._extents.extend(extent_of(local))

    def current_versions(self) -> Sequence[int] | None:
        """Returns the fixed tensors' write counts; None if any address or extent has changed.

        Runs at every mark.
        """
        if not (
            all(map(is_, map(local_tensor, self._wrappers), self._locals))
            and list(map(ADDRESS, self._others)) == self._other_addresses
            and list(map(SHAPE, self._others)) == self._shapes
            and list(map(STRIDE, self._others)) == self._strides
            and list(map(DTYPE, self._others)) == self._dtypes
        ):
            return None
        is_in_place, versions = self._read()
        return versions if is_in_place else None

    def versions(self) -> Sequence[int]:
        """Returns how often each fixed tensor was written in place."""
        return self._read()[1]

    def names(self) -> Sequence[str]:
        """Returns the names of the fixed tensors, in the order of `versions`."""
        return self._names

    def _read(self) -> tuple[bool, Sequence[int]]:
        """Returns whether the fixed tensors lie as they did; their write counts."""
        versions = array(UINT64, bytes(8 * len(self._fixed)))
        return locations.read(self._fixed, self._counted, self._addresses, self._extents, versions), versions


@dataclass
class TensorIndex:
    """An index of all leaves and of the places where their tensors were found.

    Attributes:
        tensors: name → live local tensor, plain memory of this process, in the order of discovery.
        staged: names of the leaves that forward may change.
        boxes: name → region of the whole tensor, for local tensors that are not the whole tensor.
        forms: name → how a restore makes the tensor again; see `Leaf.form`.
        rename: maps an extractor's name to the name in the whole job.
        names: name and place of each parameter.
        places: the containers in which the tensors were found.
        locations: addresses and extents of the tensors.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    staged: set[str] = field(default_factory=set)
    boxes: dict[str, Region] = field(default_factory=dict)
    forms: dict[str, str] = field(default_factory=dict)
    rename: Callable[[str], str] = str
    names: ParameterNames = field(default_factory=ParameterNames)
    places: TensorPlaces = field(default_factory=TensorPlaces)
    locations: TensorLocations = field(default_factory=TensorLocations)
    _seen: dict[_Identity, str] = field(default_factory=dict)
    _leaves: list[Leaf] = field(default_factory=list)  # made once all tensors are known

    def add(
        self,
        name: str,
        place: Mapping[Any, Any],
        key: object,
        tensor: torch.Tensor,
        staged: bool = False,
        box: Region | None = None,
    ) -> list[tuple[str, InnerTensor]]:
        """Adds a tensor, unless the same memory is already known under an earlier name.

        Returns:
            Name and memory of each leaf; no name if the memory is known. A tensor subclass has
            several leaves.

        Args:
            name: the leaf's name; indices are appended if the piece is not one region of the whole
                tensor.
            place: the container: `place[key]` is the tensor.
            key: the tensor's key in the container.
            tensor: a plain tensor, a DTensor, or a subclass of which these are the data.
            staged: whether forward may change the tensor.
            box: the region that a plain tensor covers; None: it is the whole tensor. A DTensor has
                its own.

        Raises:
            UnsupportedState: the tensor cannot be saved, or its name is taken.
        """
        name = self.rename(name)
        local, region = local_piece(name, tensor)
        region = box if region is None else region
        self.track_entry(place, key, tensor)
        parts = [*inner_tensors(name, local)]
        if owners := {id(owner): owner for part in parts for owner in part.owners}:
            # Their attributes are tracked, so that a replaced inner tensor is noticed.
            self.locations.track_local(tensor, local)
            for owner in owners.values():
                self.track_entries(vars(owner))
        added = []
        for part in parts:
            part_name = "/".join((name, *part.path))
            check_supported(part_name, part.tensor)
            self.locations.track(part_name, part.tensor if owners else tensor, part.tensor, tensor, staged)
            leaf_name = self._add_plain(part_name, part.tensor, inner_region(local, region, part.tensor))
            added.append((leaf_name, part))
            if leaf_name and staged:
                self.staged.add(leaf_name)
        return added

    def _add_plain(self, name: str, local: torch.Tensor, region: Region | None) -> str:
        """Adds plain memory; returns the name of the leaf, or "" if the memory is known.

        Args:
            name: the name without the indices of a piece.
            local: the memory.
            region: the region that the memory covers.

        Raises:
            UnsupportedState: the name is taken.
        """
        identity = identity_of(local)
        if local.numel() and identity in self._seen:
            return ""
        if region is not None:
            name += region.tag
        if name in self.tensors:
            raise UnsupportedState(
                f"two tensors are called {name} after the names of wrappers ({', '.join(WRAPPERS)}) are removed.",
                "rename one of the submodules",
            )
        if region is not None:
            self.boxes[name] = region
        self._seen[identity] = name
        self.tensors[name] = local
        return name

    def name_of(self, local: torch.Tensor) -> str:
        """Returns the name of the leaf with this memory."""
        return self._seen[identity_of(local)]

    def track_entry(self, place: Mapping[Any, Any], key: object, value: object) -> None:
        """Tracks that `place[key]` is `value` itself."""
        self.places.track_entry(place, key, value)

    def track_address(self, tensor: torch.Tensor) -> None:
        """Tracks the memory address of a plain tensor."""
        self.locations.track_address(tensor)

    def track_size(self, container: Any) -> None:
        """Tracks the number of entries of a container."""
        self.places.track_size(container)

    def track_others(self, container: Mapping[Any, Any]) -> None:
        """Tracks that no other entry of a container has a tensor later."""
        self.places.track_others(container)

    def track_entries(self, container: Mapping[Any, Any] | Sequence[Any]) -> None:
        """Tracks the very objects in a container, so that a replaced entry is noticed."""
        self.places.track_entries(container)

    def rollback_to(self, before: TensorIndex) -> None:
        """Removes every tensor created since `before` was built, and puts back replaced values."""
        self.places.rollback_to(before.places)

    def is_current(self) -> bool:
        """Returns whether every tensor is where it was, and none was added or removed."""
        return self.current_versions() is not None

    def current_versions(self) -> Sequence[int] | None:
        """Returns what `versions` returns; None if a tensor is elsewhere, was added or removed."""
        return self.locations.current_versions() if self.places.is_current() else None

    def versions(self) -> Sequence[int]:
        """Returns how often each fixed tensor was written in place.

        For a DTensor, torch counts on the DTensor, not on its local tensor.
        """
        return self.locations.versions()

    def leaves(self) -> list[Leaf]:
        """Returns all leaves, in the order of discovery, as they were at the first call."""
        if len(self._leaves) != len(self.tensors):
            self._leaves = [
                leaf_of(name, each, name in self.staged, self.boxes.get(name), self.forms.get(name, ""))
                for name, each in self.tensors.items()
            ]
        return self._leaves

    def layout(self) -> Layout:
        """Returns the layout of all leaves."""
        return pack(self.leaves())


def identity_of(local: torch.Tensor) -> _Identity:
    """Returns where a plain tensor's memory lies, and in which order its elements lie there."""
    return local.data_ptr(), local.element_size(), tuple(local.shape), local.stride()


def leaf_of(name: str, tensor: torch.Tensor, staged: bool, box: Region | None = None, form: str = "") -> Leaf:
    """Returns the leaf that describes a plain tensor.

    Args:
        name: the leaf's name.
        tensor: local memory, or a tensor on `meta`.
        staged: whether forward may change the tensor.
        box: the region of the whole tensor; None: the tensor is the whole.
        form: see `Leaf.form`.
    """
    shape = tuple(tensor.shape)
    stride = plain_strides(shape, tensor.stride()) if is_dense(tensor) else strides_of(shape)
    nbytes = tensor.numel() * tensor.element_size()
    dtype = str(tensor.dtype).removeprefix("torch.")
    whole, offset = (shape, (0,) * len(shape)) if box is None else (box.shape, box.offset)
    return Leaf(name, dtype, shape, stride, nbytes, staged, whole, offset, form)
