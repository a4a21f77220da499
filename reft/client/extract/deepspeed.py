"""DeepSpeed's engine: plain fp32 training, ZeRO-1 and ZeRO-2, and PipelineEngine over them.

    engine._take_model_step ─► optimizer.step: moments and fp32 master of this rank's partition ─► low-precision weights, gathered
          hooked here                          inner hooks are too early: the weights are still old

The model's weights are replicas. A group's fp32 master is one flat tensor, padded, of which each data-parallel rank has an
equal part: a leaf "optimizer.0.group0.master" with its place in the whole, and its moments likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed

from reft.client.extract.dtensor import Box
from reft.client.extract.optimizers import OptimizerExtractor
from reft.client.extract.registry import Named, Names, Removable
from reft.client.extract.wrapping import Wrapped
from reft.client.plain import from_plain, to_plain
from reft.client.state import Bindings
from reft.errors import UnsupportedState

TESTED = "0.19.8"
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
ZERO = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
READ = ("single_partition_of_fp32_groups", "real_dp_process_group", "partition_size", "loss_scaler", "optimizer")


class DeepSpeedExtractor(OptimizerExtractor):
    """For deepspeed.runtime.engine.DeepSpeedEngine, passed as the optimizer, beside its `.module` as the model."""

    def owner(self, value: Any) -> torch.optim.Optimizer:
        """torch's optimizer at the core; its groups hold the masters."""
        if isinstance(value, torch.optim.Optimizer):
            return value
        core: torch.optim.Optimizer = value.optimizer.optimizer if _is_zero(value.optimizer) else value.optimizer
        return core

    def check(self, prefix: str, value: Any) -> None:
        """Refuses by name what was not tried."""
        missing = [name for name in ("_take_model_step", "optimizer", *COUNTERS) if not hasattr(value, name)]
        optimizer = value.optimizer
        if _is_zero(optimizer):
            missing += [name for name in READ if not hasattr(optimizer, name)]
        elif not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedState(
                f"{prefix} runs DeepSpeed's {type(optimizer).__name__}; ZeRO-1, ZeRO-2, and fp32 without ZeRO are held."
            )
        if missing:
            raise UnsupportedState(
                f"{prefix}: this deepspeed has no {missing[0]!r}; reft was tested with {TESTED}.",
                f"pip install deepspeed=={TESTED}",
            )
        refused = {
            "experts": getattr(value, "has_moe_layers", False),
            "offloaded optimizer state": getattr(optimizer, "cpu_offload", False),
            "tensor parallelism": _is_tensor_parallel(value),
        }
        for what, is_there in refused.items():
            if is_there:
                raise UnsupportedState(f"{prefix} runs DeepSpeed with {what}, which this version does not hold.")

    def parameters(self, prefix: str, value: Any, known: Names) -> Iterator[Named]:
        """The masters, or without ZeRO the model's own parameters."""
        optimizer = value.optimizer
        if not _is_zero(optimizer):
            yield from super().parameters(prefix, optimizer, known)
            return
        stage = f".stage{value.stage_id}" if hasattr(value, "stage_id") else ""
        for g, master in enumerate(optimizer.single_partition_of_fp32_groups):
            group = optimizer.real_dp_process_group[g]
            rank, world = distributed.get_rank(group), distributed.get_world_size(group)
            box = Box((master.numel() * world,), (master.numel() * rank,))
            yield Named(f"{prefix}{stage}.group{g}.master", master, master, box)

    def bind(self, found: Bindings, prefix: str, value: Any, names: Names) -> None:
        """The masters and their moments."""
        if _is_zero(value.optimizer):
            for named in self.parameters(prefix, value, names):
                found.add(named.name, {named.name: named.tensor}, named.name, named.tensor, box=named.box)
        super().bind(found, prefix, self.owner(value), names)

    def capture(self, prefix: str, value: Any, names: Names) -> dict[str, Any]:
        """Groups, the engine's counters and the loss scale."""
        return {
            "core": super().capture(prefix, self.owner(value), names),
            "counters": {name: getattr(value, name) for name in COUNTERS},
            "scaler": _scale_of(value.optimizer),
        }

    def restore(self, prefix: str, value: Any, names: Names, saved: Mapping[str, Any]) -> None:
        """The reverse of `capture`."""
        super().restore(prefix, self.owner(value), names, saved["core"])
        for name, count in saved["counters"].items():
            setattr(value, name, count)
        if saved["scaler"]:
            vars(value.optimizer.loss_scaler).update(from_plain(saved["scaler"]))

    def hook(self, value: Any, before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
        """Where both engine.step and PipelineEngine.train_batch step; once for all micro batches of a step.

        A step that is skipped for an overflow has changed the loss scale, and counts.
        """
        return [Wrapped(value, "_take_model_step", before, after)]


def _is_zero(optimizer: Any) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" == ZERO for kind in type(optimizer).__mro__)


def _is_tensor_parallel(engine: Any) -> bool:
    mpu = getattr(engine, "mpu", None)
    if mpu is None:
        return False
    sizes = (
        getattr(mpu, name, None) for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
    )
    # PipelineEngine's grid calls pipeline times slices "model parallel".
    return not hasattr(engine, "stage_id") and any(size() > 1 for size in sizes if size is not None)


def _scale_of(optimizer: Any) -> dict[str, Any]:
    scaler = getattr(optimizer, "loss_scaler", None)
    plain = (bool, int, float)
    return {} if scaler is None else {key: to_plain(v) for key, v in vars(scaler).items() if isinstance(v, plain)}
