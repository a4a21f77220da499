"""The state: every tensor of models and optimizers as a leaf.

A leaf's name says what it is in any process that builds the same model: "model.0.layers.1.weight",
"optimizer.0.exp_avg.model.0.layers.1.weight". Wrappers are cut from names; tied tensors are one leaf, under their first
name. What a rank holds of a tensor that is sharded is a leaf of that name with its place in the whole
(`reft.client.state.extract`). `TensorIndex` remembers where each tensor was found, so that the next step sees at a glance whether
all is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from reft.client.state.extract.dtensor import Region, local_piece
from reft.client.state.parameters import ParameterNames
from reft.core.layout.layout import Layout, Leaf, pack, plain_strides, strides_of
from reft.errors import UnsupportedState

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def clean(name: str) -> str:
    """A parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def check(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedState if the tensor is not plain memory of this process."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer, nn.UninitializedParameter):
        raise UnsupportedState(
            f"{name} is a {type(tensor).__name__}; plain tensors and DTensors of plain tensors are held."
        )
    if type(tensor) is nn.UninitializedParameter or tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedState(
            f"{name} has no memory yet (device {tensor.device}).", "run a forward pass before attach"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise UnsupportedState(
            f"{name} has layout {tensor.layout}, or is quantized or a lazy view; dense tensors are held."
        )
    if tensor.is_contiguous():
        return
    shared = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    span = 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    if tensor.numel() and (shared or tensor.numel() > span):
        raise UnsupportedState(
            f"{name} has shape {list(tensor.shape)} and strides {list(tensor.stride())}: elements of it share memory, as "
            "those of an expanded tensor, so nothing can be written back into it.",
            "clone() it",
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill one run of memory, in whatever order."""
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
    """The bytes of a dense tensor, uint8 of shape [nbytes], sharing its memory."""
    run = tensor.detach().as_strided((tensor.numel(),), (1,))
    return run.view(torch.uint8) if run.numel() else run.new_empty(0, dtype=torch.uint8)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where state lies: its device, and the host if it has none. What lies on the host beside a device counts as the device's.

    Raises:
        UnsupportedState: it lies on several devices.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise UnsupportedState(
            f"the state lies on {', '.join(sorted(map(str, devices)))}; one device a process is held.",
            "start a process for each device",
        )
    return next(iter(devices), torch.device("cpu"))


LOCAL, SHAPE, VERSION = attrgetter("_local_tensor"), attrgetter("shape"), attrgetter("_version")
ADDRESS, NUMEL = torch.Tensor.data_ptr, torch.Tensor.numel
END = object()  # is no entry of anything


@dataclass
class TensorIndex:
    """Where the leaves were found.

    Attributes:
        tensors: name → live local tensor, plain memory of this process, in the order of discovery.
        staged: names of the leaves that forward may mutate.
        boxes: name → where the local tensor lies in the whole one, for those that are not the whole.
        rename: from the name that an extractor gives to that in the whole job.
        names: what each parameter is.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    staged: set[str] = field(default_factory=set)
    boxes: dict[str, Region] = field(default_factory=dict)
    rename: Callable[[str], str] = str
    names: ParameterNames = field(default_factory=ParameterNames)
    _noted: list[tuple[Mapping[Any, Any], Any, object]] = field(default_factory=list)
    _places: list[tuple[Mapping[Any, Any], Any, object]] = field(
        default_factory=list
    )  # of those, what `_views` don't show
    _located: list[torch.Tensor] = field(default_factory=list)
    _addresses: list[int] = field(default_factory=list)
    _fixed: list[torch.Tensor] = field(default_factory=list)
    _numels: list[int] = field(default_factory=list)
    _resizable: list[torch.Tensor] = field(default_factory=list)
    _shapes: list[torch.Size] = field(default_factory=list)
    _wrappers: list[torch.Tensor] = field(default_factory=list)
    _locals: list[torch.Tensor] = field(default_factory=list)
    _sizes: list[tuple[Any, int]] = field(default_factory=list)
    _empty: list[Any] = field(default_factory=list)  # containers without entries, as most modules have
    _views: list[Iterable[Any]] = field(default_factory=list)
    _entries: list[Any] = field(default_factory=list)
    _whole: set[int] = field(default_factory=set)  # ids of containers all of whose entries are noted
    _containers: list[MutableMapping[Any, Any]] = field(default_factory=list)
    _counted: list[torch.Tensor] = field(default_factory=list)
    _seen: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        place: Mapping[Any, Any],
        key: object,
        tensor: torch.Tensor,
        staged: bool = False,
        box: Region | None = None,
    ) -> None:
        """Notes a tensor, unless the same memory is known under an earlier name.

        Args:
            name: of the leaf; a tensor that is no box of the whole adds its indices.
            place: where it was found: `place[key]` is the tensor.
            tensor: plain, or a DTensor.
            staged: whether forward may mutate it.
            box: where a plain tensor lies in the whole one; None: it is the whole. A DTensor knows its own.

        Raises:
            UnsupportedState: it can't be held.
        """
        name = self.rename(name)
        local, own = local_piece(name, tensor)
        if own is None:
            own = box
        else:
            self._wrappers.append(tensor)
            self._locals.append(local)
        check(name, local)
        self.track_entry(place, key, tensor)
        self.track_address(local)
        if staged:  # buffers are resized in place; numel takes a third of the time
            self._resizable.append(local)
            self._shapes.append(local.shape)
        else:
            self._fixed.append(local)
            self._numels.append(local.numel())
        identity = (local.untyped_storage().data_ptr(), local.storage_offset(), tuple(local.shape), local.stride())
        if local.numel() and identity in self._seen:
            return
        if own is not None:
            name += own.tag
        if name in self.tensors:
            raise UnsupportedState(
                f"two tensors are called {name} once the names of wrappers ({', '.join(WRAPPERS)}) are cut out.",
                "rename one of the submodules",
            )
        if own is not None:
            self.boxes[name] = own
        if local.numel() and name in self.tensors:
            raise UnsupportedState(f"two tensors of this process are called {name}; each must have a name of its own.")
        self._seen[identity] = name
        self.tensors[name] = local
        if not tensor.is_inference():
            self._counted.append(tensor)
        if staged:
            self.staged.add(name)

    def track_entry(self, place: Mapping[Any, Any], key: object, value: object) -> None:
        """Notes that `place[key]` is `value` itself."""
        self._noted.append((place, key, value))
        if id(place) not in self._whole:
            self._places.append((place, key, value))

    def track_address(self, tensor: torch.Tensor) -> None:
        """Notes where the memory of a plain tensor lies."""
        self._located.append(tensor)
        self._addresses.append(tensor.data_ptr())

    def track_size(self, container: Any) -> None:
        """Notes how many entries a container has."""
        self._sizes.append((container, len(container)))

    def track_entries(self, container: Mapping[Any, Any] | Sequence[Any]) -> None:
        """Notes which entries a container has: the very objects, so that one in another's place does not go unseen."""
        view: Iterable[Any] = container.values() if isinstance(container, Mapping) else container
        self._whole.add(id(container))
        if isinstance(container, MutableMapping):
            self._containers.append(container)
        if not container:
            self._empty.append(container)
            return
        self._views.append(view)
        self._entries.extend(view)

    def rollback_to(self, before: TensorIndex) -> None:
        """Takes out every tensor that was made since `before` was found, and puts back what was in its place."""
        known = {(id(place), key): value for place, key, value in before._noted}
        emptied = set()
        for place, key, value in self._noted:
            if not isinstance(value, torch.Tensor) or not isinstance(place, MutableMapping):
                continue
            if (id(place), key) not in known:
                place.pop(key, None)
                emptied.add(id(place))
            elif known[id(place), key] is not value:
                place[key] = known[id(place), key]
        for container in self._containers:
            for key in [key for key, value in container.items() if id(value) in emptied and not value]:
                del container[key]

    def is_current(self) -> bool:
        """Whether every tensor is still where it was, and nothing came or went. Runs at every mark, so it is terse."""
        return (
            not any(self._empty)
            and all(len(container) == size for container, size in self._sizes)
            # What ends both: if an entry came or went, all behind it lie elsewhere.
            and all(map(is_, chain(chain.from_iterable(self._views), (END,)), chain(self._entries, (END,))))
            and all(place.get(key) is value for place, key, value in self._places)
            and all(map(is_, map(LOCAL, self._wrappers), self._locals))
            and list(map(ADDRESS, self._located)) == self._addresses
            and list(map(NUMEL, self._fixed)) == self._numels
            and list(map(SHAPE, self._resizable)) == self._shapes
        )

    def versions(self) -> list[int]:
        """How often each leaf was written in place, in the order of `tensors`. A DTensor counts; its local tensor does not.

        Nor does what was made in inference mode: a mask, say, that an evaluation puts into a buffer.
        """
        return list(map(VERSION, self._counted))

    def leaves(self) -> list[Leaf]:
        """All leaves, in the order of discovery."""
        return [leaf_of(name, each, name in self.staged, self.boxes.get(name)) for name, each in self.tensors.items()]

    def layout(self) -> Layout:
        """The layout of all leaves."""
        return pack(self.leaves())


def leaf_of(name: str, tensor: torch.Tensor, staged: bool, box: Region | None = None) -> Leaf:
    """The leaf that describes a plain tensor.

    Args:
        name: of the leaf.
        tensor: local memory, or on `meta`.
        staged: whether forward may mutate it.
        box: where it lies in the whole; None: it is the whole.
    """
    shape = tuple(tensor.shape)
    stride = plain_strides(shape, tensor.stride()) if is_dense(tensor) else strides_of(shape)
    nbytes = tensor.numel() * tensor.element_size()
    dtype = str(tensor.dtype).removeprefix("torch.")
    whole, offset = (shape, (0,) * len(shape)) if box is None else (box.shape, box.offset)
    return Leaf(name, dtype, shape, stride, nbytes, staged, whole, offset)
