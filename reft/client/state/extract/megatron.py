"""Megatron-core's optimizers: fp32 main parameters, their moments, groups and loss scale.

    MegatronOptimizer.step ─► gradients unscaled, norm over all ranks ─► inner AdamW on main
          hooked here         parameters ─► the model's parameters, gathered
                              (hooks of the inner optimizer are too early: old model parameters)

    optimizer              main parameters of this rank         leaf names (megatron_modules)
    FP32Optimizer          the model's                          the model's
    Float16Optimizer…      a copy in fp32 of each               optimizer.0.0.main.NAME,
                                                                the region of NAME
    DistributedOptimizer   a slice of the flattened elements    optimizer.0.0.main.NAME.flat,
                           of some (of fp32 parameters a        a slice of it; several
                           view: no leaf)                       instances are replicas
    ChainedOptimizer       those of its members, the dense      optimizer.0.0., optimizer.0.1.
                           and the experts'

Without a second instance, a rank is the only holder of its slices, as with ZeRO-1. Then the slices
travel in capsules if they are small. Else the daemons exchange parity of them.
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
ATTRIBUTES_READ = {
    FP32: (),
    FLOAT16: ("float16_groups", "fp32_from_float16_groups", "grad_scaler"),
    DISTRIBUTED: ("model_float16_groups", "shard_fp32_from_float16_groups", "model_fp32_groups", "shard_fp32_groups",
                  "_get_model_param_range_map", "ddp_config", "grad_scaler"),
}  # fmt: skip
# The settings that distinguish Megatron's groups.
GROUP = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
TRACKERS = ("_growth_tracker", "_hysteresis_tracker")


class _Inner(OptimizerExtractor):
    """Extracts the state of the inner optimizer (torch's, Apex' or Transformer Engine's).

    Its parameters are the main parameters.
    """

    def check(self, prefix: str, value: torch.optim.Optimizer) -> None:
        """Refuses nothing: Megatron created the optimizer."""

    def _gets_gradient(self, named: NamedParameter) -> bool:
        """Returns True: Megatron copies a gradient to each main parameter, outside autograd."""
        return True

    def capture(self, prefix: str, value: torch.optim.Optimizer, names: ParameterNames) -> dict[str, Any]:
        """Returns groups without the names of parameters.

        Names differ by rank, but all ranks have the same groups.
        """
        saved = super().capture(prefix, value, names)
        return {**saved, "groups": [group["values"] for group in saved["groups"]]}

    def restore(
        self, prefix: str, value: torch.optim.Optimizer, names: ParameterNames, saved: Mapping[str, Any]
    ) -> None:
        """Reverses `capture`."""
        saved_groups = [[group.get(key) for key in GROUP] for group in saved["groups"]]
        live_groups = [[group.get(key) for key in GROUP] for group in value.param_groups]
        if saved_groups != live_groups:
            raise LayoutChanged(
                f"{prefix}: the snapshot has the groups {saved_groups} of ({', '.join(GROUP)}), this job has {live_groups}."
            )
        own_names = [[names[id(parameter)].name for parameter in group["params"]] for group in value.param_groups]
        groups = [
            {"params": params, "values": values} for params, values in zip(own_names, saved["groups"], strict=True)
        ]
        super().restore(prefix, value, names, {**saved, "groups": groups})


class MegatronExtractor:
    """Extracts the state of a MegatronOptimizer, as `get_megatron_optimizer` returns it."""

    roles = frozenset({"optimizer"})

    def check(self, prefix: str, value: Any) -> None:
        """Refuses features that were never tried, by name."""
        for each in members(value):
            kind = _kind(each)
            if kind not in ATTRIBUTES_READ:
                raise UnsupportedState(
                    f"{prefix} has a {type(each).__name__}; supported are "
                    f"{', '.join(name.rpartition('.')[2] for name in ATTRIBUTES_READ)}."
                )
            for feature, is_used in _unsupported(each).items():
                if is_used:
                    raise UnsupportedState(
                        f"{prefix} is a {type(each).__name__} with {feature}, which this version does not support."
                    )
            if getattr(each, "is_stub_optimizer", False):
                continue
            missing = [name for name in ("optimizer", "config", *ATTRIBUTES_READ[kind]) if not hasattr(each, name)]
            if missing:
                raise UnsupportedState(
                    f"{prefix}: this megatron-core's {type(each).__name__} has no {missing[0]!r}; reft was tested with "
                    f"{TESTED}.",
                    f"pip install megatron-core=={TESTED}",
                )

    def parameters(self, prefix: str, value: Any, known: ParameterNames) -> Iterator[NamedParameter]:
        """Yields main parameters that are not the model's own."""
        for member_prefix, each in _prefixed_members(prefix, value):
            yield from _main_parameters(member_prefix, each, known)

    def bind(self, index: TensorIndex, prefix: str, value: Any, names: ParameterNames) -> None:
        """Adds main parameters, moments and loss scales."""
        for member_prefix, each in _prefixed_members(prefix, value):
            for named in _main_parameters(member_prefix, each, names):
                if named.name.startswith(member_prefix):
                    index.add(named.name, {named.name: named.tensor}, named.name, named.tensor, box=named.box)
            _Inner().bind(index, member_prefix, each.optimizer, names)
            if _has_dynamic_scale(each):
                scaler = each.grad_scaler
                index.add(f"{member_prefix}.scale", vars(scaler), "_scale", scaler._scale, staged=True)

    def predict(self, prefix: str, value: Any, names: ParameterNames) -> Iterable[Leaf]:
        """Returns the moments, which the first step creates."""
        return [
            leaf
            for member_prefix, each in _prefixed_members(prefix, value)
            for leaf in _Inner().predict(member_prefix, each.optimizer, names)
        ]

    def make(
        self, prefix: str, value: Any, leaves: Sequence[Leaf], names: ParameterNames, buffer: HugePageBuffer
    ) -> None:
        """Creates the moments; each member recognises its own by their names."""
        for member_prefix, each in _prefixed_members(prefix, value):
            _Inner().make(member_prefix, each.optimizer, leaves, names, buffer)

    def capture(self, prefix: str, value: Any, names: ParameterNames) -> dict[str, Any]:
        """Returns each member's groups, and the counters of its loss scale."""
        members_state = {}
        for member_prefix, each in _prefixed_members(prefix, value):
            scaler = {name: getattr(each.grad_scaler, name) for name in TRACKERS} if _has_dynamic_scale(each) else {}
            members_state[member_prefix] = {
                "core": _Inner().capture(member_prefix, each.optimizer, names),
                "scaler": to_plain(scaler),
            }
        return members_state

    def restore(self, prefix: str, value: Any, names: ParameterNames, saved: Mapping[str, Any]) -> None:
        """Reverses `capture`."""
        members_by_prefix = dict(_prefixed_members(prefix, value))
        if members_by_prefix.keys() != saved.keys():
            raise LayoutChanged(
                f"the snapshot has the optimizers {sorted(saved)}, this job has {sorted(members_by_prefix)}."
            )
        for member_prefix, each in members_by_prefix.items():
            _Inner().restore(member_prefix, each.optimizer, names, saved[member_prefix]["core"])
            if bool(saved[member_prefix]["scaler"]) != _has_dynamic_scale(each):
                raise LayoutChanged(
                    f"{member_prefix} has a dynamic loss scale only in the snapshot, or only in this job."
                )
            if saved[member_prefix]["scaler"]:
                vars(each.grad_scaler).update(from_plain(saved[member_prefix]["scaler"]))

    def hook(self, value: Any, before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
        """Hooks the outermost step.

        A step skipped for an overflow has changed the loss scale, so it counts.
        """
        return [WrappedMethod(value, "step", between(before, after))]


def members(value: Any) -> list[Any]:
    """Returns the optimizers of a chain, or the optimizer itself."""
    return list(value.chained_optimizers) if _kind(value) == CHAINED else [value]


def _prefixed_members(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (prefix, Megatron's optimizer) of each member that trains anything on this rank.

    A member's number is the same on all ranks: Megatron aligns the groups of its members.
    """
    for i, each in enumerate(members(value)):
        if not getattr(each, "is_stub_optimizer", False):
            yield f"{prefix}.{i}", each


def _main_parameters(member_prefix: str, value: Any, known: ParameterNames) -> Iterator[NamedParameter]:
    """Yields a member's main parameters that are not parameters of the model.

    Views of model parameters are named after them.
    """
    kind = _kind(value)
    if kind == FLOAT16:
        for model, main in _pairs(value.float16_groups, value.fp32_from_float16_groups):
            source = known[id(model)]
            yield NamedParameter(f"{member_prefix}.main.{source.name}", main, main, source.box)
    elif kind == DISTRIBUTED:
        for model, main in _pairs(value.model_float16_groups, value.shard_fp32_from_float16_groups):
            yield _shard(f"{member_prefix}.main.{known[id(model)].name}.flat", value, model, main, known)
        for model, view in _pairs(value.model_fp32_groups, value.shard_fp32_groups):
            yield _shard(f"{known[id(model)].name}.flat", value, model, view, known)


def _pairs(models: Sequence[Sequence[Any]], mains: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, Any]]:
    for group, mains_of_group in zip(models, mains, strict=True):
        yield from zip(group, mains_of_group, strict=True)


def _shard(name: str, value: Any, model: torch.Tensor, main: torch.Tensor, known: ParameterNames) -> NamedParameter:
    """Returns a distributed optimizer's slice of one parameter."""
    source, element_range = known[id(model)], value._get_model_param_range_map(model)["param"]
    if element_range.end - element_range.start != main.numel():
        raise UnsupportedState(
            f"{name} has {main.numel()} elements, but Megatron says that it is {element_range.start} to "
            f"{element_range.end} of its parameter."
        )
    shape = tuple(source.local.shape)
    box = source.box or Region(shape, (0,) * len(shape))
    run = flat_range(shape, box.shape, box.offset, element_range.start)
    return NamedParameter(name, main, main, Region((run.whole,), (run.first,), box.tag + run.tag))


def _kind(value: Any) -> str:
    """Returns the full class name; derived classes may keep their state elsewhere."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _unsupported(value: Any) -> dict[str, bool]:
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
