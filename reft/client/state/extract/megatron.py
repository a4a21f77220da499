"""Megatron-core's optimizers: fp32 main parameters, their moments, groups, the loss scale.

    MegatronOptimizer.step ─► gradients unscaled, norm over all ranks ─► inner AdamW on main parameters ─► model's, gathered
          hooked here                                                 inner hooks are too early: the model's are still old

    optimizer              main parameters of this rank                     named after the model's (extract/megatron_modules)
    FP32Optimizer          the model's                                      as there
    Float16Optimizer…      a copy in fp32 of each                           optimizer.0.0.main.NAME, the box of NAME
    DistributedOptimizer   a run of the flattened elements of some          optimizer.0.0.main.NAME.flat, a run of it;
                           (of fp32 parameters a view: no leaf)             several instances of it have replicas of each other's
    ChainedOptimizer       those of its members, the dense and the experts' optimizer.0.0., optimizer.0.1.

A rank of no instance's peers is the only holder of its runs, as with ZeRO-1: lost processes are survived, lost nodes not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.state.extract.dtensor import Region
from reft.client.state.extract.megatron_modules import TESTED
from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.client.state.extract.registry import Removable
from reft.client.state.extract.wrapping import WrappedMethod, between
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.serialization import from_plain, to_plain
from reft.client.state.tensors import TensorIndex
from reft.core.layout.flat_ranges import flat_range
from reft.core.layout.layout import Leaf
from reft.errors import LayoutChanged, UnsupportedState

PACKAGE = "megatron.core.optimizer."
CHAINED = PACKAGE + "optimizer.ChainedOptimizer"
FP32 = PACKAGE + "optimizer.FP32Optimizer"
FLOAT16 = PACKAGE + "optimizer.Float16OptimizerWithFloat16Params"
DISTRIBUTED = PACKAGE + "distrib_optimizer.DistributedOptimizer"
READ = {
    FP32: (),
    FLOAT16: ("float16_groups", "fp32_from_float16_groups", "grad_scaler"),
    DISTRIBUTED: ("model_float16_groups", "shard_fp32_from_float16_groups", "model_fp32_groups", "shard_fp32_groups",
                  "_get_model_param_range_map", "ddp_config", "grad_scaler"),
}  # fmt: skip
GROUP = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")  # what tells Megatron's groups apart
TRACKERS = ("_growth_tracker", "_hysteresis_tracker")


class _Inner(OptimizerExtractor):
    """For torch's, Apex' or Transformer Engine's optimizer at the core, and its main parameters."""

    def check(self, prefix: str, value: torch.optim.Optimizer) -> None:
        """Nothing: Megatron made it."""

    def _gets_gradient(self, named: NamedParameter) -> bool:
        """Megatron copies one to each main parameter, which autograd does not know."""
        return True

    def capture(self, prefix: str, value: torch.optim.Optimizer, names: ParameterNames) -> dict[str, Any]:
        """Without the names of parameters: each rank has others, but all ranks have the same groups."""
        held = super().capture(prefix, value, names)
        return {**held, "groups": [group["values"] for group in held["groups"]]}

    def restore(
        self, prefix: str, value: torch.optim.Optimizer, names: ParameterNames, saved: Mapping[str, Any]
    ) -> None:
        """The reverse of `capture`."""
        held = [[group.get(key) for key in GROUP] for group in saved["groups"]]
        live = [[group.get(key) for key in GROUP] for group in value.param_groups]
        if held != live:
            raise LayoutChanged(f"{prefix}: groups {held} of ({', '.join(GROUP)}) are held, {live} were passed.")
        own = [[names[id(parameter)].name for parameter in group["params"]] for group in value.param_groups]
        groups = [{"params": params, "values": values} for params, values in zip(own, saved["groups"], strict=True)]
        super().restore(prefix, value, names, {**saved, "groups": groups})


class MegatronExtractor:
    """For megatron.core.optimizer.optimizer.MegatronOptimizer, as `get_megatron_optimizer` returns it."""

    roles = frozenset({"optimizer"})

    def check(self, prefix: str, value: Any) -> None:
        """Refuses by name what was not tried."""
        for each in members(value):
            kind = _kind(each)
            if kind not in READ:
                raise UnsupportedState(
                    f"{prefix} has a {type(each).__name__}; {', '.join(name.rpartition('.')[2] for name in READ)} are held."
                )
            for what, is_there in _refused(each).items():
                if is_there:
                    raise UnsupportedState(
                        f"{prefix} is a {type(each).__name__} with {what}, which this version does not hold."
                    )
            if getattr(each, "is_stub_optimizer", False):
                continue
            missing = [name for name in ("optimizer", "config", *READ[kind]) if not hasattr(each, name)]
            if missing:
                raise UnsupportedState(
                    f"{prefix}: this megatron-core's {type(each).__name__} has no {missing[0]!r}; reft was tested with "
                    f"{TESTED}.",
                    f"pip install megatron-core=={TESTED}",
                )

    def parameters(self, prefix: str, value: Any, known: ParameterNames) -> Iterator[NamedParameter]:
        """Main parameters that are not the model's own."""
        for own, each in _inner(prefix, value):
            yield from _mains(own, each, known)

    def bind(self, found: TensorIndex, prefix: str, value: Any, names: ParameterNames) -> None:
        """Main parameters, moments and loss scales."""
        for own, each in _inner(prefix, value):
            for named in _mains(own, each, names):
                if named.name.startswith(own):
                    found.add(named.name, {named.name: named.tensor}, named.name, named.tensor, box=named.box)
            _Inner().bind(found, own, each.optimizer, names)
            if _has_dynamic_scale(each):
                scaler = each.grad_scaler
                found.add(f"{own}.scale", vars(scaler), "_scale", scaler._scale, staged=True)

    def predict(self, prefix: str, value: Any, names: ParameterNames) -> Iterable[Leaf]:
        """Moments, which the first step makes."""
        return [leaf for own, each in _inner(prefix, value) for leaf in _Inner().predict(own, each.optimizer, names)]

    def make(
        self, prefix: str, value: Any, leaves: Sequence[Leaf], names: ParameterNames, room: HugePageBuffer
    ) -> None:
        """Moments; each member knows its own by their names."""
        for own, each in _inner(prefix, value):
            _Inner().make(own, each.optimizer, leaves, names, room)

    def capture(self, prefix: str, value: Any, names: ParameterNames) -> dict[str, Any]:
        """Groups, and how long the loss scale has been what it is."""
        found = {}
        for own, each in _inner(prefix, value):
            scaler = {name: getattr(each.grad_scaler, name) for name in TRACKERS} if _has_dynamic_scale(each) else {}
            found[own] = {"core": _Inner().capture(own, each.optimizer, names), "scaler": to_plain(scaler)}
        return found

    def restore(self, prefix: str, value: Any, names: ParameterNames, saved: Mapping[str, Any]) -> None:
        """The reverse of `capture`."""
        live = dict(_inner(prefix, value))
        if live.keys() != saved.keys():
            raise LayoutChanged(f"optimizers {sorted(saved)} are held, passed were {sorted(live)}.")
        for own, each in live.items():
            _Inner().restore(own, each.optimizer, names, saved[own]["core"])
            if bool(saved[own]["scaler"]) != _has_dynamic_scale(each):
                raise LayoutChanged(f"{own} had a dynamic loss scale on one side of the failure only.")
            if saved[own]["scaler"]:
                vars(each.grad_scaler).update(from_plain(saved[own]["scaler"]))

    def hook(self, value: Any, before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
        """The outermost step. One that is skipped for an overflow has changed the loss scale, and counts."""
        return [WrappedMethod(value, "step", between(before, after))]


def members(value: Any) -> list[Any]:
    """The optimizers of a chain, or this one."""
    return list(value.chained_optimizers) if _kind(value) == CHAINED else [value]


def _inner(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(prefix, Megatron's optimizer) of each member that trains anything on this rank.

    A member's number is the same on all ranks: Megatron aligns the groups that they are made of.
    """
    for i, each in enumerate(members(value)):
        if not getattr(each, "is_stub_optimizer", False):
            yield f"{prefix}.{i}", each


def _mains(own: str, value: Any, known: ParameterNames) -> Iterator[NamedParameter]:
    """A member's main parameters that are no parameters of the model; views of such are named after them."""
    kind = _kind(value)
    if kind == FLOAT16:
        for model, main in _pairs(value.float16_groups, value.fp32_from_float16_groups):
            source = known[id(model)]
            yield NamedParameter(f"{own}.main.{source.name}", main, main, source.box)
    elif kind == DISTRIBUTED:
        for model, main in _pairs(value.model_float16_groups, value.shard_fp32_from_float16_groups):
            yield _shard(f"{own}.main.{known[id(model)].name}.flat", value, model, main, known)
        for model, view in _pairs(value.model_fp32_groups, value.shard_fp32_groups):
            yield _shard(f"{known[id(model)].name}.flat", value, model, view, known)


def _pairs(models: Sequence[Sequence[Any]], mains: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, Any]]:
    for group, own in zip(models, mains, strict=True):
        yield from zip(group, own, strict=True)


def _shard(name: str, value: Any, model: torch.Tensor, main: torch.Tensor, known: ParameterNames) -> NamedParameter:
    """What a distributed optimizer has of one parameter: a run of its elements."""
    source, held = known[id(model)], value._get_model_param_range_map(model)["param"]
    if held.end - held.start != main.numel():
        raise UnsupportedState(
            f"{name} has {main.numel()} elements, and Megatron says that it is {held.start} to {held.end} of its parameter."
        )
    shape = tuple(source.local.shape)
    box = source.box or Region(shape, (0,) * len(shape))
    run = flat_range(shape, box.shape, box.offset, held.start)
    return NamedParameter(name, main, main, Region((run.whole,), (run.first,), box.tag + run.tag))


def _kind(value: Any) -> str:
    """The class itself: what derives from it may keep its state elsewhere."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _refused(value: Any) -> dict[str, bool]:
    config, ddp = value.config, getattr(value, "ddp_config", None)
    return {
        "use_precision_aware_optimizer": getattr(config, "use_precision_aware_optimizer", False),
        "optimizer_cpu_offload": getattr(config, "optimizer_cpu_offload", False),
        "overlap_param_gather (parameters are gathered after the step has ended)": (
            getattr(ddp, "overlap_param_gather", False) or getattr(config, "overlap_param_gather", False)
        ),
        "overlap_param_gather_with_optimizer_step": getattr(config, "overlap_param_gather_with_optimizer_step", False),
        "reuse_grad_buf_for_mxfp8_param_ag": getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False),
        "Megatron-FSDP": getattr(ddp, "use_megatron_fsdp", False),
    }


def _has_dynamic_scale(value: Any) -> bool:
    return hasattr(getattr(value, "grad_scaler", None), TRACKERS[0])
