"""Pipeline stages: which of the models is which stage, and how the ranks agree on what the leaves of stages are called.

schedule=, or stages as model= ─► prefix model.stage<i> ─► one rank a stage tells its names ─► core.stages: the naming
                                                       └─► possible ties: their bytes too ┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from reft.client.link.rank_group import RankGroup
from reft.client.snapshot.replica_check import value_digests
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects, stage_prefix
from reft.core.layout.stage_naming import StageNames, candidates, naming
from reft.errors import ConfigError


def modules_of(models: Sequence[Any], schedule: Any) -> dict[str, Any]:
    """The modules by prefix: "model.stage<i>" for stages, "model.<i>" for what is none.

    Args:
        models: modules, or stages of torch.distributed.pipelining.
        schedule: of torch.distributed.pipelining, of `reft.schedules`, or None.

    Raises:
        ConfigError: the schedule's stages are not among the models.
    """
    stages = [value for value in models if is_stage(value)] or _stages_of(schedule)
    plain = [value.submod if is_stage(value) else value for value in models]
    if stages:
        numbers = {id(_unwrapped(stage.submod)): stage.stage_index for stage in stages}
        missing = set(numbers) - {id(_unwrapped(module)) for module in plain}
        if missing:
            raise ConfigError(
                f"the schedule runs stages {sorted(numbers.values())}, and {len(missing)} of them are not what was passed "
                "as model: what a stage does not train can't be told from what it trains.",
                "model=[stage.submod for each stage of this process]",
            )
    else:
        numbers = {
            id(_unwrapped(module)): at for module, at in zip(plain, _described(schedule, len(plain)), strict=False)
        }
    found = {}
    for i, module in enumerate(plain):
        number = numbers.get(id(_unwrapped(module)))
        found[f"model.{i}" if number is None else stage_prefix(number)] = module
    return found


def named(rank_group: RankGroup, make: Callable[[], TrackedObjects]) -> TrackedObjects:
    """The subjects, with names that mean the same in all processes of the job; all ranks call it together.

    Args:
        make: finds what the user passed.

    Raises:
        ReftError: `make` raised on some rank.
        ConfigError: some ranks have stages and others have none, or a stage has no rank.
    """
    made: list[TrackedObjects] = []
    own: dict[int, StageNames] = {}
    tensor_index = TensorIndex()

    def introduce() -> dict[str, Any]:
        nonlocal tensor_index
        made.append(make())
        if made[0].stages():
            tensor_index = made[0].bind()
            own.update(_stages(made[0], tensor_index))
        return {"stages": sorted(own)}

    said = [frozenset(each["stages"]) for each in rank_group.gather_or_raise(introduce)]
    speaker: dict[int, int] = {}
    for rank, numbers in enumerate(said):
        for number in sorted(numbers):
            speaker.setdefault(number, rank)
    if not speaker:
        return made[0]
    _check(said, sorted(speaker))
    mine = {number: own[number] for number, rank in speaker.items() if rank == rank_group.rank}
    told = rank_group.gather_or_raise(lambda: {str(number): _to_plain(stage) for number, stage in mine.items()})
    stages = {int(number): _from_plain(stage) for each in told for number, stage in each.items()}
    possible = candidates(stages, said)
    values: dict[int, Mapping[str, str]] = {}
    if possible:
        digests = rank_group.gather_or_raise(
            lambda: {str(number): _digests(tensor_index, number, possible) for number in mine}
        )
        values = {int(number): found for each in digests for number, found in each.items() if found}
    return replace(made[0], naming=naming(stages, possible, values))


def _check(said: Sequence[frozenset[int]], numbers: Sequence[int]) -> None:
    without = [rank for rank, stages in enumerate(said) if not stages]
    if without:
        raise ConfigError(
            f"rank {without[0]} has no pipeline stage and other ranks have: the same names would mean different tensors.",
            "pass schedule= on every rank, or on none",
        )
    if list(numbers) != list(range(len(numbers))):
        raise ConfigError(f"the ranks have stages {list(numbers)}: a stage below {max(numbers)} is on none of them.")


def _stages(tracked: TrackedObjects, tensor_index: TensorIndex) -> Iterator[tuple[int, StageNames]]:
    """What this rank says of each of its stages. A tensor that two of them share counts for the first."""
    leaves = tensor_index.leaves()
    for number in tracked.stages():
        prefix = f"{stage_prefix(number)}."
        parameters, buffers = {}, set()
        for leaf in leaves:
            if leaf.name.startswith(prefix):
                name = leaf.name.removeprefix(prefix)
                if leaf.staged:
                    buffers.add(name)
                else:
                    parameters[name] = f"{leaf.describe()} {list(leaf.global_offset)} {list(leaf.global_shape)}"
        yield number, StageNames(parameters, frozenset(buffers))


def _digests(tensor_index: TensorIndex, number: int, names: frozenset[str]) -> dict[str, str]:
    prefix = f"{stage_prefix(number)}."
    found = value_digests(tensor_index, {prefix + name for name in names})
    return {piece.partition("\n")[0].removeprefix(prefix): digest for piece, digest in found.items()}


def _to_plain(stage: StageNames) -> dict[str, Any]:
    return {"parameters": dict(stage.parameters), "buffers": sorted(stage.buffers)}


def _from_plain(said: Mapping[str, Any]) -> StageNames:
    return StageNames(said["parameters"], frozenset(said["buffers"]))


def is_stage(value: Any) -> bool:
    """Whether it is a stage of torch.distributed.pipelining."""
    return not isinstance(value, nn.Module) and hasattr(value, "submod") and hasattr(value, "stage_index")


def _stages_of(schedule: Any) -> list[Any]:
    """The stages of this process in a schedule of torch.distributed.pipelining, which names them in private only."""
    found = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    return [stage for stage in found if is_stage(stage)]


def _described(schedule: Any, models: int) -> list[int]:
    """The stages of this process by a description of `reft.schedules`; none if it says none.

    Raises:
        ConfigError: there are more or fewer models.
    """
    if not hasattr(schedule, "stage") or not hasattr(schedule, "stages"):
        return []
    count, at = schedule.stages, schedule.stage
    if schedule.is_v_shaped:
        found = [at, 2 * count - 1 - at]
    else:
        found = [at + count * turn for turn in range(getattr(schedule, "virtual_stages", 1))]
    if len(found) != models:
        raise ConfigError(
            f"{type(schedule).__name__} has {len(found)} parts of the model a process; {models} were passed as model.",
            "model=[one module for each part, in the order of the pipeline]",
        )
    return found


def _unwrapped(module: Any) -> Any:
    """The module itself, without DDP and what torch.compile puts around it."""
    while type(module).__name__ in ("DistributedDataParallel", "OptimizedModule"):
        module = module.module if hasattr(module, "module") else module._orig_mod
    return module
