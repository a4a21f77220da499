"""Replaces what torchtitan 0.3.0 lacks on a CPU with gloo and torch 2.13.

Imported before its trainer.

torchtitan expects triton, a GPU with flex attention, a newer torch's `set_timeout`, and a sum that
gloo does not have. LOSSES collects the losses that torchtitan logs: (step, loss of all ranks).
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

LOSSES: list[tuple[int, float]] = []


class Kernels(types.ModuleType):
    """Replaces a module of triton kernels, none of which a dense model calls."""

    __all__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Cpu:
    """Replaces torch.cuda."""

    def __getattr__(self, name: str) -> Any:
        values = {"device_count": 1, "current_device": 0, "get_device_name": "cpu", "memory_stats": {},
                "get_device_properties": types.SimpleNamespace(total_memory=1 << 34)}  # fmt: skip
        return lambda *_, **__: values.get(name)


KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
sys.modules[KERNELS] = Kernels(KERNELS)

from torchtitan.tools import utils  # noqa: E402

utils.device_type, utils.device_module = "cpu", Cpu()
utils.get_local_device = lambda: torch.device("cpu")

from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils as distributed_utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402


def attend(
    self: Any, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, *, scale: float | None = None,
    enable_gqa: bool = False, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Computes causal attention, because flex attention has no backward pass on a CPU.

    The plan of tensor parallelism uses these parameter names.
    """
    heads = [each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH)]
    result = torch.nn.functional.scaled_dot_product_attention(
        *heads, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return result.transpose(1, 2)


def log(self: Any, step: int, global_avg_loss: Any, *_: Any, **__: Any) -> None:
    """Records the loss, in the place of the metrics processor's method."""
    LOSSES.append((step, float(global_avg_loss)))


divide = FSDPModule.set_gradient_divide_factor


def divide_after_summing(self: FSDPModule, factor: float) -> None:
    """Divides after the sum, because gloo can't multiply in a reduction."""
    self.set_force_sum_reduction_for_comms(True)
    divide(self, factor)


FlexAttention.forward = attend
metrics.MetricsProcessor.log = log
distributed_utils.set_pg_timeouts = lambda **_: None
FSDPModule.set_gradient_divide_factor = divide_after_summing
