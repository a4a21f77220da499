"""Optimizers that are not torch's own, with the kinds of state that such optimizers keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

BLOCK = 8


class BlockTensor(torch.Tensor):
    """A tensor in 8 bits: int8 codes, and the largest magnitude of each block of elements."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, shape: Any) -> BlockTensor:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, shape: Any) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.dtype, self.shape]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> BlockTensor:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def of(cls, value: torch.Tensor) -> BlockTensor:
        flat = nn.functional.pad(value.reshape(-1), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
        scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-12)
        return cls((flat / scale * 127).round().to(torch.int8), scale[:, 0].clone(), value.dtype, value.shape)

    def dequantized(self) -> torch.Tensor:
        flat = self.codes.to(self.dtype) * (self.scale[:, None] / 127)
        return flat.reshape(-1)[: self.shape.numel()].view(self.shape)

    def write(self, value: torch.Tensor) -> None:
        """Writes a value in place, as torchao's states do."""
        new = BlockTensor.of(value)
        self.codes.copy_(new.codes)
        self.scale.copy_(new.scale)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):  # DTensor views it in its own shape
            return cls(args[0].codes, args[0].scale, args[0].dtype, args[0].shape)
        plain = [each.dequantized() if isinstance(each, cls) else each for each in args]
        return func(*plain, **(kwargs or {}))


class Foreign(torch.optim.Optimizer):
    """Steps one parameter after the other; a derived class says how."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group["lr"])

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class Lion(Foreign):
    """Momentum whose sign is taken; the first step creates the state."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], lr: float) -> None:
        moment = state.setdefault("exp_avg", torch.zeros_like(parameter))
        parameter.add_(torch.sign(moment * 0.9 + gradient * 0.1), alpha=-lr)
        moment.lerp_(gradient, 0.01)


class Adafactor(Foreign):
    """Means of squared rows and columns, as transformers' Adafactor keeps them, and a count."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], lr: float) -> None:
        state["step"] = state.get("step", 0) + 1
        square = gradient.square() + 1e-30
        if gradient.dim() < 2:
            mean = state.setdefault("exp_avg_sq", torch.zeros_like(square)).lerp_(square, 0.1)
        else:
            row, column = square.sum(-1), square.sum(-2)
            if isinstance(column, DTensor):
                column = column.redistribute(placements=[Replicate()] * column.device_mesh.ndim)
            row = state.setdefault("exp_avg_sq_row", torch.zeros_like(row)).lerp_(row, 0.1)
            column = state.setdefault("exp_avg_sq_col", torch.zeros_like(column)).lerp_(column, 0.1)
            mean = row.unsqueeze(-1) * column.unsqueeze(-2)
        parameter.add_(gradient * mean.rsqrt().clamp(max=1), alpha=-lr)


class Shampoo(Foreign):
    """A list of preconditioners, and a dict with a momentum and a number, for each parameter."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["preconditioners"] = [torch.eye(size) for size in gradient.shape]
            state["momentum"] = {"buffer": torch.zeros_like(parameter), "count": 0, 7: (torch.zeros(2), None)}
            state["recent"] = []
        for dim, matrix in enumerate(state["preconditioners"]):
            flat = gradient.movedim(dim, 0).reshape(gradient.shape[dim], -1)
            matrix.add_(flat @ flat.t())
        state["momentum"]["count"] += 1
        state["recent"] = [*state["recent"], gradient.norm()][-3:]
        state["momentum"]["buffer"].mul_(0.9).add_(gradient).div_(1 + sum(state["recent"]))
        parameter.add_(state["momentum"]["buffer"], alpha=-lr / state["preconditioners"][0].diagonal().sum().item())


class Lion8(Foreign):
    """Lion whose moment lies in 8 bits; under FSDP2 in a DTensor, as in torchao."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], lr: float) -> None:
        if not state:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            block: Any = BlockTensor.of(torch.zeros_like(local))
            if isinstance(parameter, DTensor):
                block = DTensor.from_local(
                    block, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                    stride=parameter.stride(),
                )  # fmt: skip
            state["exp_avg"] = block
        moment = state["exp_avg"]
        if isinstance(parameter, DTensor):
            parameter, gradient, moment = parameter.to_local(), gradient.to_local(), moment._local_tensor
        value = moment.dequantized()
        parameter.add_(torch.sign(value * 0.9 + gradient * 0.1), alpha=-lr)
        moment.write(value.lerp(gradient, 0.01))
