"""Follows DistributedDataParallel to the end of its backward pass, where it waits in C++ for its buckets.

    forward ─► output │ backward begins there ─► … ─► all gradients │ begun: gap │ DDP waits for its buckets │ ended: compute
                        queues `begun`                                queues `ended`

The seam: callbacks of the autograd engine run in their order once a backward pass has done everything else. DDP queues its
own when its last bucket is full; so what is queued when the pass begins runs before it, and what that one queues behind it.
Nothing of DDP or of the model is replaced, and gradients are those that they were.

A backward pass that does not go through the first tensor of the output is not seen; nor are collectives of a second DDP in
the same pass, beyond the first one's wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reft.client.schedule.iteration_profile import OTHER, WAIT, IterationProfiler
from reft.core.pipeline.pacing import Tier


def follow(models: Iterable[Any], profiler: IterationProfiler) -> Callable[[], None]:
    """Hooks every DDP among the models and in them; what it returns takes the hooks off.

    Args:
        profiler: of an engine whose time is the host's: on a device the stream waits, not Python.
    """
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

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

    found = [
        module
        for model in models
        if isinstance(model, nn.Module)
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    ]
    handles = [module.register_forward_hook(forward) for module in found]

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop


def _first(output: Any) -> torch.Tensor | None:
    """The first tensor of a module's output through which a backward pass can come."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    parts: Iterable[Any] = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, (list, tuple)):
        parts = output
    return next((tensor for tensor in map(_first, parts) if tensor is not None), None)
