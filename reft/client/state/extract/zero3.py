"""DeepSpeed's ZeRO-3: each rank holds a slice of every parameter, `ds_tensor`.

The parameter itself is empty, or gathered.

    w.flatten()        | 0 1 2 3 | 4 5 6 7 | 8 9 . . |   ds_tensor of three ranks;
                                                         the last one ends in padding
    forward, backward  w.data = all of it ─► w.data = empty; small parameters stay
                       gathered until the next optimizer step
    sub group          | slice of w | slice of b | …     masters and moments: flat, one for
                                                         each sub group and rank; the core
                                                         optimizer's groups are empty
                                                         outside of a step

Invariants
  1. `ds_tensor` stays in place between two optimizer steps, and the next forward gathers it.
  2. Padding is not state. So leaves end before the padding, and mean the same with any number of
     ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from reft.client.state.extract.dtensor import Region
from reft.client.state.extract.fsdp1 import Parts, ShardedFlatParameter
from reft.client.state.parameters import NamedParameter
from reft.client.torch_internals import parameters_of

STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
ATTRIBUTES_READ = (
    "fp16_groups",
    "fp32_partitioned_groups_flat",
    "sub_group_to_group_id",
    "sub_group_process_groups",
    "persistent_parameters",
    "loss_scaler",
    "optimizer",
)


def partitioned_parameters(parts: Parts) -> Iterator[ShardedFlatParameter]:
    """Yields this rank's slice of each parameter that ZeRO-3 has partitioned."""
    for path, part in parts:
        for name, parameter in parameters_of(part).items():
            shard = getattr(parameter, "ds_tensor", None)
            if parameter is None or shard is None:
                continue
            box, size = _slice_of(parameter)
            full, shape = f"{path}.{name}" if path else name, tuple(parameter.ds_shape)
            piece = NamedParameter(full, parameter, shard.detach()[:size], box, shape=shape)
            yield ShardedFlatParameter(vars(parameter), "ds_tensor", shard, [piece], {(id(parameters_of(part)), name)})


def _slice_of(parameter: Any) -> tuple[Region, int]:
    """Returns this rank's region of the flattened parameter, and its length without padding."""
    begin = min(parameter.ds_zero_partition_rank * parameter.ds_tensor.ds_numel, parameter.ds_numel)
    return Region((parameter.ds_numel,), (begin,)), min(parameter.ds_tensor.ds_numel, parameter.ds_numel - begin)


def masters(zero: Any) -> Iterator[tuple[torch.Tensor, Any, list[Any]]]:
    """Yields the flat master of each sub group, its ranks, and its slices.

    Yields:
        The master, the process group, and for each slice: parameter, region, first element in the
        master, number of elements.
    """
    for s, master in enumerate(zero.fp32_partitioned_groups_flat):
        slices, at = [], 0
        for parameter in zero.fp16_groups[s]:
            box, size = _slice_of(parameter)
            slices.append((parameter, box, at, size))
            at += parameter.ds_tensor.ds_numel
        yield master, zero.sub_group_process_groups[s], slices


def with_masters(zero: Any) -> torch.optim.Optimizer:
    """Returns a copy of the core optimizer as it is within a step.

    The copy has the masters in its groups, and shares the state.
    """
    core = zero.optimizer
    twin: torch.optim.Optimizer = object.__new__(type(core))
    vars(twin).update(vars(core))
    masters_of: list[list[torch.Tensor]] = [[] for _ in core.param_groups]
    for s, master in enumerate(zero.fp32_partitioned_groups_flat):
        masters_of[zero.sub_group_to_group_id[s]].append(master)
    twin.param_groups = [
        {**group, "params": group_masters} for group, group_masters in zip(core.param_groups, masters_of, strict=True)
    ]
    return twin


def copy_back(zero: Any, twin: torch.optim.Optimizer) -> None:
    """Copies the restored values of the copy's groups into the core optimizer.

    Also releases gathered parameters, so that the next forward gathers the restored shards.
    """
    for group, restored in zip(zero.optimizer.param_groups, twin.param_groups, strict=True):
        group.update({key: value for key, value in restored.items() if key != "params"})
    gathered = zero.persistent_parameters
    if gathered:
        gathered[0].partition(gathered)


def unsupported(zero: Any) -> dict[str, bool]:
    """Returns features of ZeRO-3 that were never tried, and whether they are used."""
    return {
        "offloaded parameters or optimizer state": zero.offload_optimizer or zero.offload_param,
        "weights partitioned within nodes (zero_hpz_partition_size)": zero.zero_hpz_partition_size > 1,
        "quantized weights": zero.zero_quantized_nontrainable_weights,
        "Muon": zero.use_muon,
        "ZenFlow": bool(zero.zenflow),
    }
