"""Pipeline stages: the stage number of each model, and names of leaves that all ranks agree on.

schedule=, or stages as model=
    ─► prefix model.stage<i>
    ─► for each stage, one rank sends the names         ─┬─► stage_naming.py: the naming
       a restore: names of the base's leaves                │
       a fresh start: digests of tensors that may be tied  ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from reft.client.link.exchange import gather, share
from reft.client.link.rank_group import RankGroup
from reft.client.snapshot.replica_check import value_digests
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects, stage_prefix
from reft.client.torch_internals import compiled_module, stages_of
from reft.core.layout.stage_naming import StageNames, equal_names, name_stages, tie_candidates
from reft.errors import ConfigError


@dataclass(frozen=True)
class _OwnStages:
    """The objects of this rank, and the names of its stages by stage number."""

    tracked: TrackedObjects
    tensor_index: TensorIndex
    names: Mapping[int, StageNames]


@dataclass(frozen=True)
class _StageNumbers:
    """The numbers of the stages that a rank has."""

    numbers: frozenset[int]


@dataclass(frozen=True)
class _PublishedNames:
    """Stage number → the names of that stage, for the stages that a rank speaks for."""

    names: dict[int, StageNames]


@dataclass(frozen=True)
class _PublishedDigests:
    """Stage number → digests by name of tensors that may be tied."""

    digests: dict[int, dict[str, str]]


def modules_of(models: Sequence[Any], schedule: Any) -> dict[str, Any]:
    """Returns the modules by prefix: "model.stage<i>" for stages, "model.<i>" for other models.

    Args:
        models: modules, or stages of torch.distributed.pipelining.
        schedule: a schedule of torch.distributed.pipelining or of `reft.schedules`, or None.

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
                f"the schedule runs stages {sorted(numbers.values())}, and {len(missing)} of them were not passed as model: "
                "reft can't tell what these stages train.",
                "model=[stage.submod for each stage of this process]",
            )
    else:
        numbers = {
            id(_unwrapped(module)): at for module, at in zip(plain, _described(schedule, len(plain)), strict=False)
        }
    modules = {}
    for i, module in enumerate(plain):
        number = numbers.get(id(_unwrapped(module)))
        modules[f"model.{i}" if number is None else stage_prefix(number)] = module
    return modules


@dataclass(frozen=True)
class StageFacts:
    """What all ranks know of the stages before the base is known.

    Attributes:
        objects: the objects of this rank, without agreed names.
        tensor_index: where each tensor of this rank was found.
        mine: the stages that this rank speaks for.
        stages: the names of all stages, by stage number; empty without pipeline stages.
        candidates: names that may be ties.
    """

    objects: TrackedObjects
    tensor_index: TensorIndex
    mine: frozenset[int]
    stages: Mapping[int, StageNames]
    candidates: frozenset[str]

    def tracked(self, ties: frozenset[str]) -> TrackedObjects:
        """Returns the tracked objects, with these ties."""
        return replace(self.objects, naming=name_stages(self.stages, ties)) if self.stages else self.objects

    def ties_now(self, rank_group: RankGroup) -> frozenset[str]:
        """Returns the candidates whose bytes are equal now. All ranks call it together."""
        if not self.candidates:
            return frozenset()

        def publish() -> _PublishedDigests:
            return _PublishedDigests({n: _digests(self.tensor_index, n, self.candidates) for n in self.mine})

        gathered = gather(rank_group, publish, _PublishedDigests)
        values = {number: values for each in gathered for number, values in each.digests.items() if values}
        return equal_names(self.candidates, values)

    def ties_of_base(self, names: Collection[str]) -> frozenset[str]:
        """Returns the candidates that are one leaf in the base, without a stage.

        Args:
            names: names of all leaves of the base.
        """
        prefixes = [stage_prefix(number) for number in self.stages]
        return frozenset(
            name
            for name in self.candidates
            if f"model.0.{name}" in names and not any(f"{prefix}.{name}" in names for prefix in prefixes)
        )


def introduce_stages(rank_group: RankGroup, make: Callable[[], TrackedObjects]) -> StageFacts:
    """Returns the stages of all ranks. All ranks call it together.

    Args:
        rank_group: all ranks of the job.
        make: returns the objects that the user passed.

    Raises:
        ReftError: `make` raised on some rank.
        ConfigError: some ranks have stages and others have none, or a stage has no rank.
    """

    def introduce() -> tuple[_OwnStages, _StageNumbers]:
        tracked = make()
        tensor_index = tracked.bind() if tracked.stages() else TensorIndex()
        names = dict(_stages(tracked, tensor_index)) if tracked.stages() else {}
        return _OwnStages(tracked, tensor_index, names), _StageNumbers(frozenset(names))

    own, numbers_by_rank = share(rank_group, introduce, _StageNumbers)
    stages_by_rank = [each.numbers for each in numbers_by_rank]
    speaker: dict[int, int] = {}  # stage → the first rank that has it, which sends the stage's names
    for rank, numbers in enumerate(stages_by_rank):
        for number in sorted(numbers):
            speaker.setdefault(number, rank)
    if not speaker:
        return StageFacts(own.tracked, own.tensor_index, frozenset(), {}, frozenset())
    _check(stages_by_rank, sorted(speaker))
    mine = {number: own.names[number] for number, rank in speaker.items() if rank == rank_group.rank}
    published = gather(rank_group, lambda: _PublishedNames(mine), _PublishedNames)
    stages = {number: stage for each in published for number, stage in each.names.items()}
    candidates = tie_candidates(stages, stages_by_rank)
    return StageFacts(own.tracked, own.tensor_index, frozenset(mine), stages, candidates)


def _check(stages_by_rank: Sequence[frozenset[int]], numbers: Sequence[int]) -> None:
    without = [rank for rank, stages in enumerate(stages_by_rank) if not stages]
    if without:
        raise ConfigError(
            f"rank {without[0]} has no pipeline stage, but other ranks have one: equal names would mean different tensors.",
            "pass schedule= on every rank, or on none",
        )
    if list(numbers) != list(range(len(numbers))):
        raise ConfigError(f"the ranks have stages {list(numbers)}: some stage below {max(numbers)} is on no rank.")


def _stages(tracked: TrackedObjects, tensor_index: TensorIndex) -> Iterator[tuple[int, StageNames]]:
    """Yields the number and the names of each stage of this rank.

    A tensor that two stages share belongs to the first.
    """
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
    digests = value_digests(tensor_index, {prefix + name for name in names})
    return {piece.partition("\n")[0].removeprefix(prefix): digest for piece, digest in digests.items()}


def is_stage(value: Any) -> bool:
    """Decides whether a value is a stage of torch.distributed.pipelining."""
    return not isinstance(value, nn.Module) and hasattr(value, "submod") and hasattr(value, "stage_index")


def _stages_of(schedule: Any) -> list[Any]:
    """Returns this process's stages in a schedule of torch.distributed.pipelining.

    Only private attributes of the schedule have them.
    """
    return [stage for stage in stages_of(schedule) if is_stage(stage)]


def _described(schedule: Any, models: int) -> list[int]:
    """Returns this process's stage numbers by a description of `reft.schedules`.

    Empty for any other schedule.

    Args:
        schedule: a schedule, or None.
        models: number of models that were passed.

    Raises:
        ConfigError: the number of models differs from the number of stages.
    """
    if not hasattr(schedule, "stage") or not hasattr(schedule, "stages"):
        return []
    count, at = schedule.stages, schedule.stage
    if schedule.is_v_shaped:
        numbers = [at, 2 * count - 1 - at]
    else:
        numbers = [at + count * turn for turn in range(getattr(schedule, "virtual_stages", 1))]
    if len(numbers) != models:
        raise ConfigError(
            f"{type(schedule).__name__} has {len(numbers)} parts of the model a process; {models} were passed as model.",
            "model=[one module for each part, in the order of the pipeline]",
        )
    return numbers


def _unwrapped(module: Any) -> Any:
    """Returns the module without the wrappers of DDP and torch.compile."""
    while type(module).__name__ in ("DistributedDataParallel", "OptimizedModule"):
        module = module.module if hasattr(module, "module") else compiled_module(module)
    return module
