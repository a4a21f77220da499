"""Finds the state: every tensor of models and optimizers as a leaf, for plain and DDP models.

A leaf's name says what it is in any process that builds the same model: "model.0.layers.1.weight",
"optimizer.0.exp_avg.model.0.layers.1.weight". Wrappers are cut from names; tied tensors are one leaf, under their first
name. `Bindings` remembers where each tensor was found, so that the next step sees at a glance whether all is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from reft.core.layout import Layout, Leaf, pack
from reft.errors import UnsupportedState

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def clean(name: str) -> str:
    """A parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def check(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedState if the tensor is not plain memory of this process."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer, nn.UninitializedParameter):
        raise UnsupportedState(
            f"{name} is a {type(tensor).__name__}; this version holds plain tensors (single device, DDP)."
        )
    if isinstance(tensor, nn.UninitializedParameter) or tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedState(
            f"{name} has no memory yet (device {tensor.device}).", "run a forward pass before attach"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise UnsupportedState(
            f"{name} has layout {tensor.layout}, or is quantized or a lazy view; dense tensors are held."
        )


def check_owners(modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuses what looks plain but keeps its state elsewhere, or moves it inside the window.

    Raises:
        UnsupportedState: FSDP1, which frees and refills its parameters in forward; or an optimizer around another one
            (ZeroRedundancyOptimizer, Accelerate's), whose own state is empty.
    """
    for module in modules:
        for path, part in module.named_modules():
            if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(part).__mro__):
                raise UnsupportedState(f"{path or 'the model'} is FSDP, which this version does not hold.")
    for optimizer in optimizers:
        inner = [
            name for name in ("optim", "optimizer") if isinstance(vars(optimizer).get(name), torch.optim.Optimizer)
        ]
        if inner:
            raise UnsupportedState(
                f"{type(optimizer).__name__} keeps its state in another optimizer, its .{inner[0]}.",
                "pass that one if it holds whole parameters; sharded optimizers are not in this version",
            )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill one run of memory, in whatever order."""
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


@dataclass
class Bindings:
    """Where the leaves were found.

    Attributes:
        tensors: name → live tensor, in the order of discovery.
        staged: names of the leaves that forward may mutate.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    staged: set[str] = field(default_factory=set)
    _places: list[tuple[Mapping[Any, Any], Any, object]] = field(default_factory=list)
    _pointers: list[Callable[[], int]] = field(default_factory=list)
    _addresses: list[int] = field(default_factory=list)
    _sizes: list[tuple[Any, int]] = field(default_factory=list)
    _seen: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], str] = field(default_factory=dict)

    def add(self, name: str, place: Mapping[Any, Any], key: object, tensor: torch.Tensor, staged: bool = False) -> None:
        """Notes a tensor, unless the same memory is known under an earlier name."""
        check(name, tensor)
        self._places.append((place, key, tensor))
        self._pointers.append(tensor.data_ptr)
        self._addresses.append(tensor.data_ptr())
        identity = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and identity in self._seen:
            return
        self._seen[identity] = name
        self.tensors[name] = tensor
        if staged:
            self.staged.add(name)

    def expect(self, place: Mapping[Any, Any], key: object, value: object) -> None:
        """Notes that `place[key]` is `value` itself, which is no leaf."""
        self._places.append((place, key, value))

    def count(self, container: Any) -> None:
        """Notes how many entries a container has."""
        self._sizes.append((container, len(container)))

    def hold(self) -> bool:
        """Whether every tensor is still where it was, and nothing came or went. Runs at every mark, so it is terse."""
        return (
            all(len(container) == size for container, size in self._sizes)
            and all(place.get(key) is value for place, key, value in self._places)
            and [pointer() for pointer in self._pointers] == self._addresses
        )

    def layout(self) -> Layout:
        """The layout of all leaves."""
        return pack(leaf_of(name, tensor, name in self.staged) for name, tensor in self.tensors.items())


def leaf_of(name: str, tensor: torch.Tensor, staged: bool) -> Leaf:
    """The leaf that describes a tensor of one process that shares it with nobody, or a replica."""
    shape = tuple(tensor.shape)
    stride = tensor.stride() if is_dense(tensor) else _row_major(shape)
    nbytes = tensor.numel() * tensor.element_size()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Leaf(name, dtype, shape, tuple(stride), nbytes, staged, shape, (0,) * len(shape))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Subjects:
    """What the user passed to attach: models, optimizers, and modules among `state`, by prefix."""

    modules: Mapping[str, nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    scalers: Mapping[str, torch.amp.GradScaler]

    def bind(self) -> Bindings:
        """Finds all leaves as they are now.

        Raises:
            UnsupportedState: one can't be held; its name is in the message.
        """
        found = Bindings()
        for prefix, module in self.modules.items():
            _bind_module(found, prefix, module)
        names = {id(tensor): name for name, tensor in self.parameter_names()}
        for i, optimizer in enumerate(self.optimizers):
            _bind_optimizer(found, f"optimizer.{i}", optimizer, names)
        for name, scaler in self.scalers.items():
            for key in ("_scale", "_growth_tracker"):
                value = vars(scaler).get(key)
                if value is None:
                    found.expect(vars(scaler), key, value)
                else:
                    found.add(f"state.{name}.{key}", vars(scaler), key, value, staged=True)
        return found

    def parameter_names(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, parameter) of all modules, then of what only an optimizer holds."""
        seen: set[int] = set()
        for prefix, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{prefix}.{clean(name)}", parameter
        for i, optimizer in enumerate(self.optimizers):
            for g, group in enumerate(optimizer.param_groups):
                for k, parameter in enumerate(group["params"]):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield f"optimizer.{i}.group{g}.param{k}", parameter


def _bind_module(found: Bindings, prefix: str, module: nn.Module) -> None:
    for path, part in module.named_modules():
        for container, staged in ((part._parameters, False), (part._buffers, True)):
            found.count(container)
            for name, tensor in container.items():
                if tensor is not None:
                    full = clean(f"{path}.{name}" if path else name)
                    found.add(f"{prefix}.{full}", container, name, tensor, staged)
        found.count(part._modules)


def _bind_optimizer(found: Bindings, prefix: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    found.expect(vars(optimizer), "state", optimizer.state)
    found.expect(vars(optimizer), "param_groups", optimizer.param_groups)
    found.count(optimizer.state)
    found.count(optimizer.param_groups)
    foreign = [key for key in optimizer.state if id(key) not in names]
    if foreign:
        raise UnsupportedState(
            f"{prefix} keeps state under {foreign[0]!r:.60}, which is no parameter; it would be lost."
        )
    for g, group in enumerate(optimizer.param_groups):
        found.count(group["params"])
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                found.add(f"{prefix}.group{g}.{key}", group, key, value, staged=True)
        for parameter in group["params"]:
            name = names[id(parameter)]
            if not name.startswith(("model.", "state.")):
                found.add(name, {name: parameter}, name, parameter)
            _bind_state(found, prefix, name, optimizer.state.get(parameter))


def _bind_state(found: Bindings, prefix: str, name: str, state: MutableMapping[str, Any] | None) -> None:
    if not state:
        return
    found.count(state)
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found.add(f"{prefix}.{key}.{name}", state, key, value)
