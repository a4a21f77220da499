"""DeepSpeed's engine: ZeRO-1, 2 and 3, BF16_Optimizer, low precision, fp32, and PipelineEngine.

    engine._take_model_step ─► optimizer.step: moments and fp32 masters of this rank
          hooked here          ─► low-precision weights, gathered
                               (hooks of the inner optimizer are too early: old weights)

    DeepSpeed's optimizer    the model's weights     masters and moments
    ZeRO-1, ZeRO-2, BF16     replicas                flat: a padded slice of all parameters
                                                     of a group on each rank
    ZeRO-3                   a slice on each rank    flat, one for each sub group and rank
                                                     (extract/zero3.py)
    FP16_UnfusedOptimizer    replicas                replicas, one for each parameter
    none (fp32)              replicas                the weights themselves

A flat master is saved as the slices of parameters that it consists of. For example
"optimizer.0.master.layers.1.weight" has the region of the slice in the flattened parameter. Moments
are saved likewise. So leaves mean the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed

from reft.client.state.extract import zero3
from reft.client.state.extract.dtensor import Region
from reft.client.state.extract.optimizers import OptimizerExtractor, track_group
from reft.client.state.extract.registry import Removable
from reft.client.state.extract.wrapping import WrappedMethod
from reft.client.state.parameters import FlatSlice, NamedParameter, ParameterNames
from reft.client.state.serialization import from_plain, to_plain
from reft.client.state.tensors import TensorIndex, without_wrappers
from reft.errors import UnsupportedState

TESTED = "0.19.8"
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer"
# Optimizers with partitioned flat masters: the attributes with masters, and with their parameters.
PARTITIONED = {
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": ("single_partition_of_fp32_groups", "bit16_groups"),
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": ("fp32_groups_flat_partition", "bf16_groups"),
}
ATTRIBUTES_READ = {
    zero3.STAGE3: zero3.ATTRIBUTES_READ,
    UNFUSED: ("fp32_groups", "fp16_groups", "loss_scale_config", "optimizer"),
    **{kind: (*names, "real_dp_process_group", "optimizer") for kind, names in PARTITIONED.items()},
}


class DeepSpeedExtractor(OptimizerExtractor):
    """Extracts the state of deepspeed.runtime.engine.DeepSpeedEngine.

    The engine is passed as the optimizer, and the engine's `.module` as the model.
    """

    def owner(self, value: Any) -> torch.optim.Optimizer:
        """Returns the inner torch optimizer, with the masters in its groups."""
        if isinstance(value, torch.optim.Optimizer):
            return value
        kind = _kind(value.optimizer)
        if kind == zero3.STAGE3:
            return zero3.with_masters(value.optimizer)
        core: torch.optim.Optimizer = value.optimizer.optimizer if kind else value.optimizer
        return core

    def check(self, prefix: str, value: Any) -> None:
        """Refuses features that were never tried, by name."""
        missing = [name for name in ("_take_model_step", "optimizer", *COUNTERS) if not hasattr(value, name)]
        optimizer = value.optimizer
        kind = _kind(optimizer)
        if kind:
            missing += [name for name in ATTRIBUTES_READ[kind] if not hasattr(optimizer, name)]
            missing += [] if hasattr(value, "param_names") else ["param_names"]
        elif not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedState(
                f"{prefix} runs DeepSpeed's {type(optimizer).__name__}; supported are ZeRO-1, 2 and 3, BF16_Optimizer, "
                "FP16_UnfusedOptimizer, and fp32 without ZeRO."
            )
        if missing:
            raise UnsupportedState(
                f"{prefix}: this deepspeed has no {missing[0]!r}; reft was tested with {TESTED}.",
                f"pip install deepspeed=={TESTED}",
            )
        scalers = (
            getattr(value, "torch_autocast_z0_gradscaler", None),
            getattr(optimizer, "torch_autocast_gradscaler", None),
        )
        unsupported = {
            "experts": getattr(value, "has_moe_layers", False),
            "offloaded optimizer state": getattr(optimizer, "cpu_offload", False),
            "tensor parallelism": _is_tensor_parallel(value),
            "torch_autocast's gradient scaler": any(each is not None for each in scalers),
            **(zero3.unsupported(optimizer) if kind == zero3.STAGE3 else {}),
        }
        for feature, is_used in unsupported.items():
            if is_used:
                raise UnsupportedState(f"{prefix} runs DeepSpeed with {feature}, which this version does not support.")

    def parameters(self, prefix: str, value: Any, known: ParameterNames) -> Iterator[NamedParameter]:
        """Yields the masters; in plain fp32, the model's own parameters."""
        optimizer, kind = value.optimizer, _kind(value.optimizer)
        stage = f".stage{value.stage_id}" if hasattr(value, "stage_id") else ""
        masters_prefix = f"{prefix}{stage}.master"
        if not kind:
            yield from super().parameters(prefix, optimizer, known)
        elif kind == UNFUSED:
            for masters_of_group, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
                for master, weight in zip(masters_of_group, weights, strict=True):
                    yield NamedParameter(
                        f"{masters_prefix}.{without_wrappers(value.param_names[weight])}", master, master.detach(), None
                    )
        else:
            flats = zero3.masters(optimizer) if kind == zero3.STAGE3 else _partitions(optimizer, *PARTITIONED[kind])
            for g, (master, group, slices) in enumerate(flats):
                rank, world = distributed.get_rank(group), distributed.get_world_size(group)
                box = Region((master.numel() * world,), (master.numel() * rank,))
                flat_slices = (
                    FlatSlice(f"{masters_prefix}.{without_wrappers(value.param_names[p])}", *place)
                    for p, *place in slices
                )
                yield NamedParameter(
                    f"{prefix}{stage}.group{g}.master", master, master.detach(), box, tuple(flat_slices)
                )

    def bind(self, index: TensorIndex, prefix: str, value: Any, names: ParameterNames) -> None:
        """Adds the masters and their moments."""
        if _kind(value.optimizer):
            core = value.optimizer.optimizer
            index.track_entry(vars(value.optimizer), "optimizer", core)
            index.track_entry(vars(core), "state", core.state)
            for group in core.param_groups:  # ZeRO-3's are not those of `owner`
                track_group(index, group)
        super().bind(index, prefix, self.owner(value), names)

    def capture(self, prefix: str, value: Any, names: ParameterNames) -> dict[str, Any]:
        """Returns groups, the engine's and the pipeline's counters, and the loss scale."""
        return {
            "core": super().capture(prefix, self.owner(value), names),
            "counters": {name: getattr(value, name) for name in COUNTERS},
            "forwards": getattr(getattr(value, "module", None), "micro_offset", None),
            "scaler": _scale_of(value.optimizer),
        }

    def restore(self, prefix: str, value: Any, names: ParameterNames, saved: Mapping[str, Any]) -> None:
        """Reverses `capture`."""
        core = self.owner(value)
        super().restore(prefix, core, names, saved["core"])
        for name, count in saved["counters"].items():
            setattr(value, name, count)
        # PipelineModule counts its forward passes: with seed_layers=True they seed each layer.
        if saved.get("forwards") is not None:  # capsules of earlier builds have none
            value.module.micro_offset = saved["forwards"]
        if saved["scaler"]:
            vars(_scaler(value.optimizer)).update(from_plain(saved["scaler"]))
        if _kind(value.optimizer) == zero3.STAGE3:
            zero3.copy_back(value.optimizer, core)

    def hook(self, value: Any, before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
        """Hooks the method in which engine.step and PipelineEngine.train_batch step.

        The method runs once for all micro-batches of a step. A step skipped for an overflow has
        changed the loss scale, so it counts. engine.step counts the micro-batch behind that method,
        so the step ends with engine.step.
        """
        steps = _EngineSteps(before, after)
        return [
            WrappedMethod(value, "_take_model_step", steps.around_model_step),
            WrappedMethod(value, "step", steps.around_step),
        ]


class _EngineSteps:
    """Calls `before` and `after` of `Extractor.hook` for the steps of an engine."""

    def __init__(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._before, self._after = before, after
        self._is_in_step = False  # engine.step is under way; PipelineEngine.train_batch does not call it
        self._has_stepped = False  # the model has stepped in it

    def around_model_step(self, engine: Any, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls `_take_model_step`."""
        self._before()
        result = call(*arguments, **keywords)
        if self._is_in_step:
            self._has_stepped = True
        else:
            self._after(engine)
        return result

    def around_step(self, engine: Any, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls `step`, which steps the model at the end of an accumulation only."""
        self._is_in_step, self._has_stepped = True, False
        try:
            result = call(*arguments, **keywords)
        finally:
            self._is_in_step = False
        if self._has_stepped:
            self._after(engine)
        return result


def _kind(optimizer: Any) -> str:
    """Returns the full class name of a supported DeepSpeed optimizer, else "".

    Derived classes do not count.
    """
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return kind if kind in ATTRIBUTES_READ else ""


def _partitions(zero: Any, masters: str, parameters: str) -> Iterator[tuple[torch.Tensor, Any, list[Any]]]:
    """Yields the flat master of each group, its ranks, and its slices.

    Yields:
        The master, the process group, and for each slice: parameter, region, first element in the
        master, number of elements.
    """
    shared = zip(getattr(zero, masters), zero.real_dp_process_group, getattr(zero, parameters), strict=True)
    for master, group, weights in shared:
        slices = []
        for weight in weights:
            if weight._hp_mapping is not None:
                low, high = weight._hp_mapping.lp_fragment_address, weight._hp_mapping.hp_fragment_address
                slices.append((weight, Region((weight.numel(),), (low.start,)), high.start, high.numel))
        yield master, group, slices


def _is_tensor_parallel(engine: Any) -> bool:
    mpu = getattr(engine, "mpu", None)
    if mpu is None:
        return False
    names = ["get_tensor_model_parallel_world_size"]
    if not hasattr(engine, "stage_id"):  # PipelineEngine's grid calls pipeline stages × slices "model parallel"
        names.append("get_model_parallel_world_size")
    sizes = (getattr(mpu, name, None) for name in names)
    return any(size() > 1 for size in sizes if size is not None)


def _scaler(optimizer: Any) -> Any:
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _scale_of(optimizer: Any) -> dict[str, Any]:
    scaler = _scaler(optimizer)
    plain = (bool, int, float, type(None))
    return {} if scaler is None else {key: to_plain(v) for key, v in vars(scaler).items() if isinstance(v, plain)}
