"""The private names of torch that the trainer's side reads, and the versions tried.

    attach ─► require ─► a name that the job needs is missing: attach refuses, and names it
           └► notices ─► a name that reft can do without is missing: one line; the feature is off

Private names of other trainers (DeepSpeed, Megatron-core, …) are read by the adapters for these
trainers, which check them.

The names are asked for once, at attach. So the functions below ask nothing: some run at each mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from reft.errors import UnsupportedState
from reft.private_names import PrivateName, has_name, refusal, short_version, versions

TRIED = ("2.13",)


def _names(owner: str, names: str, use: str) -> tuple[PrivateName, ...]:
    return tuple(PrivateName(owner, name, use, TRIED) for name in names.split())


# Classes of objects that are passed to attach, and of their parts.
OF_CLASSES = (
    *_names("Module", "_parameters _buffers _modules _non_persistent_buffers_set", "every model"),
    *_names("Tensor", "_version", "every tensor"),
    *_names("DTensor", "_local_tensor", "DTensors"),
    *_names("FullyShardedDataParallel", "_handle _flat_param _fsdp_wrapped_module", "FSDP1"),
    *_names("FSDPModule", "_get_fsdp_state", "FSDP2"),
    *_names("OptimizedModule", "_orig_mod", "torch.compile"),
    *_names("CheckpointWrapper", "_checkpoint_wrapped_module", "activation checkpointing"),
    *_names("ZeroRedundancyOptimizer", "_overlap_with_ddp", "ZeroRedundancyOptimizer"),
    *_names("PipelineScheduleSingle", "_stage", "pipeline schedules"),
    *_names("PipelineScheduleMulti", "_stages", "pipeline schedules"),
)
# Names of objects that only the names above lead to, and of a scaler that is enabled.
STRIDED_SHARD = "_StridedShard"
PLACEMENTS = _names("placement_types", STRIDED_SHARD, "DTensors")
FLAT_PARAMETER = _names(
    "flat_param", "_params _fqns _shapes _shard_param_infos _param_infos _shared_param_infos", "FSDP1"
)
# A flat parameter gets its shard in the first forward; torch's class declares it.
LOCAL_SHARD = "_local_shard"
SHARD = _names("FlatParameter", LOCAL_SHARD, "FSDP1")
FSDP2_STATE = _names("FSDPState", "_fsdp_param_groups", "FSDP2")
FSDP2_PARAMETER = _names("FSDPParam", "_module_info", "FSDP2")
SCALER = _names("GradScaler", "_scale _growth_tracker", "GradScaler")
REQUIRED = (*OF_CLASSES, *PLACEMENTS, *FLAT_PARAMETER, *SHARD, *FSDP2_STATE, *FSDP2_PARAMETER, *SCALER)

# Names that reft can do without; `use` says what reft can't do then.
MICROBATCHES, LOSS, QUEUE, HOOK_STATES, LR_MARK, COPY_LISTS = OPTIONAL = (
    *_names("pipeline schedule", "_n_microbatches", "reft measures the schedule's gaps, and does not compute them"),
    *_names("pipeline schedule", "_compute_loss", "the time of the loss counts as a gap"),
    *_names("Variable", "_execution_engine.queue_callback", "copies do not use the time in which DDP waits"),
    *_names("DistributedDataParallel", "_comm_hooks", "attach can't name the state of DDP's communication hooks"),
    *_names("Optimizer.step", "_wrapped_by_lr_sched", "attach can't tell whether state= lacks an LR scheduler"),
    *_names("torch", "_foreach_copy_", "small leaves on a CUDA device are copied one by one, at each mark"),
)

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
FLAT_NAME = "_flat_param"  # of the flat parameter in a module, without use_orig_params
SCALER_TENSORS = ("_scale", "_growth_tracker")
# Of a DataLoader's iterator. Without it a rehearsal does not see passes end, and says so.
BATCHES_GIVEN = "_num_yielded"

# The memory of a DTensor on this rank, without a copy or an autograd trace. Runs at every mark.
local_tensor: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
# How often a tensor was written in place. Runs at every mark.
WRITE_COUNT = "_version"
write_count: Callable[[torch.Tensor], int] = attrgetter(WRITE_COUNT)


def strided_shard(dim: int, split_factor: int) -> Any:
    """Returns the placement of FSDP's shard of a tensor that TP already sharded."""
    return getattr(torch.distributed.tensor.placement_types, STRIDED_SHARD)(dim, split_factor=split_factor)


def batches_given(iterator: Any) -> int | None:
    """Returns how many batches a DataLoader's iterator has given; None if unknown."""
    return getattr(iterator, BATCHES_GIVEN, None)


def _kinds(value: object) -> set[str]:
    return {kind.__name__ for kind in type(value).__mro__}


def _with_parts(value: Any) -> Iterator[Any]:
    """Yields an object, its submodules and its parameters; for a pipeline stage its module's."""
    yield value
    module = value if isinstance(value, nn.Module) else getattr(value, "submod", None)
    if isinstance(module, nn.Module):
        for part in module.modules():
            yield part
            yield from part.parameters(recurse=False)
    elif isinstance(value, torch.optim.Optimizer):
        yield from (each for group in value.param_groups for each in group["params"])


def needed(values: Iterable[Any]) -> Iterator[tuple[PrivateName, object]]:
    """Yields each private name that these objects need, and the object that must have it.

    Check each name before asking for the next one: some names lead to the next object.

    Args:
        values: models, optimizers, scalers and the schedule. Other objects need nothing.
    """
    for value in (part for each in values for part in _with_parts(each)):
        kinds = _kinds(value)
        yield from ((name, value) for name in OF_CLASSES if name.owner in kinds)
        if "DTensor" in kinds:
            yield from ((name, torch.distributed.tensor.placement_types) for name in PLACEMENTS)
        if "FSDPModule" in kinds:
            yield from ((name, value._get_fsdp_state()) for name in FSDP2_STATE)
            yield from ((name, each) for each in fsdp2_parameters(value) for name in FSDP2_PARAMETER)
        if "FullyShardedDataParallel" in kinds and (handle := fsdp1_handle(value)) is not None:
            yield from ((name, handle.flat_param) for name in FLAT_PARAMETER)
            yield from ((name, torch.distributed.fsdp.FlatParameter) for name in SHARD)
        if "GradScaler" in kinds and value.is_enabled():
            yield from ((name, value) for name in SCALER)


def require(values: Iterable[Any], state: Iterable[Any] = (), torch_version: str = str(torch.__version__)) -> None:
    """Checks that torch has every private name that these objects need.

    Args:
        values: models, optimizers and the schedule.
        state: objects of any kind; only modules and scalers among them are looked at.
        torch_version: for the message.

    Raises:
        UnsupportedState: a name is missing.
    """
    held = [each for each in state if isinstance(each, (nn.Module, torch.amp.GradScaler))]
    for name, holder in needed([*values, *held]):
        if not has_name(holder, name.name):
            raise UnsupportedState(*refusal(name, torch_version))


def notices(
    models: Iterable[Any], optimizers: Iterable[Any], schedule: Any, torch_version: str = str(torch.__version__)
) -> list[str]:
    """Returns lines about a torch that was not tried, and about features that are off.

    Args:
        models: modules.
        optimizers: of any kind.
        schedule: a schedule, or None.
        torch_version: of this process.
    """
    parts = [part for model in models for part in _with_parts(model)]
    ddp = [part for part in parts if "DistributedDataParallel" in _kinds(part)]
    steps = any(isinstance(each, torch.optim.Optimizer) for each in optimizers)
    is_absent = {
        MICROBATCHES: is_schedule(schedule) and not has_name(schedule, MICROBATCHES.name),
        LOSS: is_schedule(schedule) and not has_name(schedule, LOSS.name),
        QUEUE: bool(ddp) and schedule is not None and backward_queue() is None,
        HOOK_STATES: not all(has_name(part, HOOK_STATES.name) for part in ddp),
        LR_MARK: steps and not has_lr_mark(),
        COPY_LISTS: not has_name(torch, COPY_LISTS.name),
    }
    tried = versions((*REQUIRED, *OPTIONAL))
    lines = []
    if short_version(torch_version) not in tried:
        lines.append(f"torch {torch_version} was not tried with this reft; tried: torch {', '.join(tried)}.")
    return [*lines, *(f"this torch has no {name}: {name.use}." for name in OPTIONAL if is_absent[name])]


# Tensors


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to the target of the same number, type and shape.

    Never waits for a device. On CUDA some tens of copies are one kernel, whose launch costs as much
    as that of one copy.
    """
    if not targets:
        return  # torch refuses empty lists
    if has_name(torch, COPY_LISTS.name):
        torch._foreach_copy_(targets, sources, non_blocking=True)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


# Modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the container of a module's own parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the container of a module's own buffers."""
    return module._buffers


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the container of a module's own submodules."""
    return module._modules


def is_persistent(module: nn.Module, key: str) -> bool:
    """Returns whether checkpoints contain this buffer of the module."""
    return key not in module._non_persistent_buffers_set


def compiled_module(module: Any) -> nn.Module:
    """Returns the module inside a result of torch.compile."""
    return module._orig_mod


# FSDP1


def fsdp1_handle(wrapper: Any) -> Any:
    """Returns the handle of a wrapper's sharded flat parameter; None if there is none."""
    handle = wrapper._handle
    return handle if handle is not None and handle.uses_sharded_strategy else None


def original_parameters(flat: Any) -> Sequence[tuple[nn.Parameter, str, torch.Size, Any]] | None:
    """Returns parameter, name, shape and range in the shard; None without use_orig_params."""
    if flat._params is None:
        return None
    return [*zip(flat._params, flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)]


def flattened_entries(flat: Any) -> set[tuple[int, str]]:
    """Returns the modules' entries that a flat parameter replaces: (id of the container, key)."""
    infos = (*flat._param_infos, *flat._shared_param_infos)
    return {(id(parameters_of(info.module)), info.param_name) for info in infos}


# FSDP2


def fsdp2_parameters(module: Any) -> list[Any]:
    """Returns FSDP2's records of the parameters that this module shards."""
    return [each for group in module._get_fsdp_state()._fsdp_param_groups for each in group.fsdp_params]


def owners_of(fsdp_parameter: Any) -> list[tuple[nn.Module, str]]:
    """Returns the modules that have this parameter, with the parameter's name in each."""
    info = fsdp_parameter._module_info
    return [
        *zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names], strict=True),
    ]


# Optimizers


def overlaps_with_ddp(optimizer: Any) -> bool:
    """Returns whether DDP's hooks run this ZeroRedundancyOptimizer's step, during backward."""
    return bool(optimizer._overlap_with_ddp)


def has_lr_scheduler(optimizer: Any) -> bool:
    """Returns whether an LR scheduler has wrapped the optimizer's step."""
    return hasattr(optimizer.step, LR_MARK.name)


def has_lr_mark() -> bool:
    """Returns whether this torch's LR schedulers mark the step that they wrap."""
    optimizer = torch.optim.SGD([torch.zeros(1)])
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return has_lr_scheduler(optimizer)


# Schedules and DDP


def is_schedule(value: object) -> bool:
    """Returns whether this is a schedule of torch.distributed.pipelining; does not import that."""
    return not _kinds(value).isdisjoint(("PipelineScheduleSingle", "PipelineScheduleMulti"))


def stages_of(schedule: Any) -> list[Any]:
    """Returns the stages that a schedule has in this process; none for any other object."""
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    return [stage for stage in stages if stage is not None]


def microbatches_of(schedule: Any) -> int | None:
    """Returns the number of microbatches of a schedule; None if this torch does not tell."""
    return getattr(schedule, MICROBATCHES.name, None)


def backward_queue() -> Callable[[Callable[[], None]], None] | None:
    """Returns a function that runs a callback at the end of this backward pass.

    None if this torch has no such function.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    return getattr(engine, "queue_callback", None)


def hook_states(module: Any) -> list[Any]:
    """Returns the states of DDP's communication hooks."""
    return [state for _, state in getattr(module, HOOK_STATES.name, ())]


def storage_info(path: str, nbytes: int) -> Any:
    """Returns where DCP's reader finds an item: a whole file. Only `dcp_skeleton` needs it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, 0, nbytes)
