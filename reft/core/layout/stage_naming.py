"""What the leaves of pipeline stages are called, so that the same name means the same tensor in every process of the job.

    stage 0   embed.weight  layers.0.weight  layers.1.weight                 names of the whole model: kept as they are,
    stage 1                                  layers.2.weight  head.weight    a model of one stage has them too

    stage 0   embed.weight  layers.0.weight  layers.1.weight                 numbered anew in each stage: names get the stage
    stage 1   embed.weight  layers.0.weight  head.weight                     but for embed, if it is shown to be tied

Two stages that both have a "layers.0.weight" of one shape hold two tensors, even if their bytes are equal now: both may have
been made from one seed, or be zeros. So a name that two stages share is taken for one tensor, a *tie*, only if
  1. it is in the first and the last stage and in no other, with one dtype, shape and place in the whole;
  2. no part of it is a number: elements of lists are what is numbered anew;
  3. both stages have parameters of their own beside those that they share, and no rank has both stages;
  4. their bytes are equal, and not one value repeated.
That is a proposal like any identity: the digests of each snapshot go on comparing ties.

Invariants
  1. No two tensors of different stages get one name, unless they are a tie.
  2. If all parameters that stages share are ties, all other names are those of the modules: they say nothing of stages.
  3. The order of the stages does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

CONSTANT = "constant "  # before a digest of bytes that repeat one value


@dataclass(frozen=True)
class StageNames:
    """The names of one stage, as its module has them.

    Attributes:
        parameters: name → what it is: dtype, shapes, and place in the whole.
        buffers: names of what forward mutates.
    """

    parameters: Mapping[str, str]
    buffers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StageNaming:
    """How the stages' leaves are named.

    Attributes:
        is_global: whether the modules' own names name the parameters of the whole model.
        ties: names of parameters that the first and the last stage have in common.
        repeated: names of buffers that several stages have, each its own.
    """

    is_global: bool = True
    ties: frozenset[str] = frozenset()
    repeated: frozenset[str] = frozenset()

    def has_stage(self, name: str) -> bool:
        """Whether the stage belongs to the identity of this leaf."""
        return name in self.repeated or not (self.is_global or name in self.ties)


def candidates(stages: Mapping[int, StageNames], together: Collection[frozenset[int]] = ()) -> frozenset[str]:
    """Names that may be ties, if their bytes are equal.

    Args:
        stages: all stages of the job, by their index.
        together: for each rank, the stages that it has.
    """
    if len(stages) < 2:
        return frozenset()
    first, last = min(stages), max(stages)
    shared = _shared(stages)
    of_two = [stages[first].parameters, stages[last].parameters]
    if any({first, last} <= ranks for ranks in together) or any(shared.keys() >= names.keys() for names in of_two):
        return frozenset()
    return frozenset(
        name
        for name, holders in shared.items()
        if holders == {first, last} and of_two[0].get(name) == of_two[1].get(name) and not _is_numbered(name)
    )


def naming(
    stages: Mapping[int, StageNames], possible: Collection[str], values: Mapping[int, Mapping[str, str]]
) -> StageNaming:
    """How to name the leaves of these stages.

    Args:
        stages: all stages of the job, by their index.
        possible: from `candidates`.
        values: stage → name → digest of its bytes, after CONSTANT if they repeat one value; of the possible ties.
    """
    seen: dict[str, set[str]] = {name: set() for name in possible}
    for digests in values.values():
        for name, digest in digests.items():
            seen.setdefault(name, set()).add(digest)
    ties = frozenset(
        name for name in possible if len(seen[name]) == 1 and not next(iter(seen[name])).startswith(CONSTANT)
    )
    count: dict[str, int] = {}
    for stage in stages.values():
        for name in stage.buffers:
            count[name] = count.get(name, 0) + 1
    repeated = frozenset(name for name, number in count.items() if number > 1)
    return StageNaming(_shared(stages).keys() <= ties, ties, repeated)


def _shared(stages: Mapping[int, StageNames]) -> dict[str, set[int]]:
    """Names that several stages have and that are a parameter in one of them → these stages."""
    holders: dict[str, set[int]] = {}
    for index, stage in stages.items():
        for name in (*stage.parameters, *stage.buffers):
            holders.setdefault(name, set()).add(index)
    parameters = {name for stage in stages.values() for name in stage.parameters}
    return {name: found for name, found in holders.items() if len(found) > 1 and name in parameters}


def _is_numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))
