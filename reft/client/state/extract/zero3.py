"""DeepSpeed's ZeRO-3: each rank holds one run of every parameter, `ds_tensor`; the parameter itself is empty, or gathered.

    w.flatten()    | 0 1 2 3 | 4 5 6 7 | 8 9 . . |        ds_tensor of three ranks; the last one's end is padding
    forward, backward: w.data = all of it ─► w.data = empty; small parameters stay gathered until the next optimizer step

    sub group      | run of w | run of b | …              masters and moments: flat, one for each sub group and rank;
                                                          core optimizer's groups are empty but within a step

Invariants
  1. `ds_tensor` lies still between two optimizer steps, and is what the next forward gathers.
  2. Padding is nobody's state, so leaves end before it, and mean the same with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from reft.client.state.extract.dtensor import Region
from reft.client.state.extract.fsdp1 import Parts, ShardedFlatParameter
from reft.client.state.parameters import NamedParameter

STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
READ = (
    "fp16_groups",
    "fp32_partitioned_groups_flat",
    "sub_group_to_group_id",
    "sub_group_process_groups",
    "persistent_parameters",
    "loss_scaler",
    "optimizer",
)


def partitioned_parameters(parts: Parts) -> Iterator[ShardedFlatParameter]:
    """What this rank holds of each parameter that ZeRO-3 has partitioned."""
    for path, part in parts:
        for name, parameter in part._parameters.items():
            shard = getattr(parameter, "ds_tensor", None)
            if parameter is None or shard is None:
                continue
            box, size = _place(parameter)
            piece = NamedParameter(f"{path}.{name}" if path else name, parameter, shard.detach()[:size], box)
            yield ShardedFlatParameter(vars(parameter), "ds_tensor", shard, [piece], {(id(part._parameters), name)})


def _place(parameter: Any) -> tuple[Region, int]:
    """Where this rank's run begins in the flattened parameter, and how long it is without padding."""
    begin = min(parameter.ds_zero_partition_rank * parameter.ds_tensor.ds_numel, parameter.ds_numel)
    return Region((parameter.ds_numel,), (begin,)), min(parameter.ds_tensor.ds_numel, parameter.ds_numel - begin)


def masters(zero: Any) -> Iterator[tuple[torch.Tensor, Any, list[Any]]]:
    """The flat master of each sub group, the ranks that share it, and what this rank's part of it consists of.

    Returns:
        for each run: parameter, box, first element in the master, number of elements.
    """
    for s, master in enumerate(zero.fp32_partitioned_groups_flat):
        runs, at = [], 0
        for parameter in zero.fp16_groups[s]:
            box, size = _place(parameter)
            runs.append((parameter, box, at, size))
            at += parameter.ds_tensor.ds_numel
        yield master, zero.sub_group_process_groups[s], runs


def complete(zero: Any) -> torch.optim.Optimizer:
    """The core optimizer as it is within a step: a twin with the masters in its groups, and the same state."""
    core = zero.optimizer
    twin: torch.optim.Optimizer = object.__new__(type(core))
    vars(twin).update(vars(core))
    held: list[list[torch.Tensor]] = [[] for _ in core.param_groups]
    for s, master in enumerate(zero.fp32_partitioned_groups_flat):
        held[zero.sub_group_to_group_id[s]].append(master)
    twin.param_groups = [{**group, "params": own} for group, own in zip(core.param_groups, held, strict=True)]
    return twin


def take_over(zero: Any, twin: torch.optim.Optimizer) -> None:
    """What was restored into the twin and into shards, for the optimizer itself: groups' values; what was gathered is let go."""
    for group, restored in zip(zero.optimizer.param_groups, twin.param_groups, strict=True):
        group.update({key: value for key, value in restored.items() if key != "params"})
    gathered = zero.persistent_parameters
    if gathered:
        gathered[0].partition(gathered)


def refused(zero: Any) -> dict[str, bool]:
    """What of ZeRO-3 was not tried, and whether it is there."""
    return {
        "offloaded parameters or optimizer state": zero.offload_optimizer or zero.offload_param,
        "weights partitioned within nodes (zero_hpz_partition_size)": zero.zero_hpz_partition_size > 1,
        "quantized weights": zero.zero_quantized_nontrainable_weights,
        "Muon": zero.use_muon,
        "ZenFlow": bool(zero.zenflow),
    }
