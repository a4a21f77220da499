"""Hooks for DistributedDataParallel: reports the wait for DDP's buckets, which happens in C++.

    forward ─► output │ backward begins ─► … ─► gradients │ begun: gap │ DDP waits │ ended: compute
                        queues `begun`                      queues `ended`

How it works: callbacks of the autograd engine run in order, after all other work of a backward
pass. DDP queues its own callback when its last bucket is full. A callback queued at the start of
the pass runs before DDP's callback, and a callback that this first one queues runs after DDP's.
Nothing of DDP or the model is replaced, and gradients do not change.

Limits: a backward pass that does not go through the first tensor of the output is not seen. If a
second DDP runs in the same pass, only the first one's wait is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reft.client.schedule.iteration_profile import OTHER, WAIT, IterationProfiler
from reft.client.torch_internals import backward_queue
from reft.core.pipeline.pacing import Tier


def follow(models: Iterable[Any], profiler: IterationProfiler) -> Callable[[], None]:
    """Hooks every DDP module in the models, and returns a function that removes the hooks.

    Args:
        models: the models; objects other than modules are ignored.
        profiler: gets the reports. Its engine must keep host time: on a device the stream waits,
            not Python.
    """
    queue = backward_queue()
    if queue is None:
        return _nothing  # attach has printed a line (`torch_internals.notices`)

    def begun() -> None:
        if profiler.name == OTHER:
            profiler.enter(Tier.GAP, WAIT)
            queue(ended)

    def ended() -> None:
        if profiler.name == WAIT:
            profiler.enter(Tier.COMPUTE, OTHER)

    def forward(module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = _first(output)
        if tensor is not None:
            tensor.register_hook(lambda _: queue(begun))

    ddp_modules = [
        module
        for model in models
        if isinstance(model, nn.Module)
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    ]
    handles = [module.register_forward_hook(forward) for module in ddp_modules]

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop


def _nothing() -> None:
    """Removes nothing, because no hook was installed."""


def _first(output: Any) -> torch.Tensor | None:
    """Returns the first tensor of a module's output that requires a gradient, or None."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    parts: Iterable[Any] = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, (list, tuple)):
        parts = output
    return next((tensor for tensor in map(_first, parts) if tensor is not None), None)
