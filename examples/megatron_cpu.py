"""Megatron-core 0.16 without a GPU: import this module before anything of megatron.

Megatron-core makes its buffers on "cuda" in any case. It asks tensors for their `.type()`, and
keeps random states of CUDA generators. Here all of these calls use the CPU. Not covered: CUDA
graphs, overlap of communication, fused kernels.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Calls of torch, with "cuda" replaced by the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(args[0]).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = CPU
        return function(*args, **kwargs)


class _Nothing:
    """A stream or an event that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Generators:
    """One generator for all devices."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


def _install() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = _Nothing
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda call, **_: call()
    cuda.default_generators = _Generators()
    # There is only one generator, and dropout draws from it. The tracker of random states would
    # complain.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    _OnCpu().__enter__()


if not torch.cuda.is_available():
    _install()
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # a router needs it; 0.16.1 has it only with Transformer Engine
