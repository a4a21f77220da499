"""Names the leaves of pipeline stages: one name means one tensor in every process of the job.

    stage 0   embed.weight  layers.0.weight  layers.1.weight               names of the whole model:
    stage 1                                  layers.2.weight  head.weight  unchanged

    stage 0   embed.weight  layers.0.weight  layers.1.weight               each stage counts from 0:
    stage 1   embed.weight  layers.0.weight  head.weight                   add stage, not to ties

Names of the first kind also fit a job that has the whole model in one stage.

If two stages have a "layers.0.weight" of the same shape, they hold two tensors, even if their bytes
are equal now: both may come from the same seed, or be zeros. A name that two stages share means one
tensor, a *tie*, only if
  1. the first and the last stage have the name and no other stage does, with equal dtype, shape and
     place in the whole;
  2. no part of the name is a number, because elements of lists are numbered from 0 in each stage;
  3. both stages also have parameters that they do not share, and no rank has both stages;
  4. at a fresh start the bytes are equal, and are not one repeated value; at a restore the base has
     one leaf of this name, whatever the bytes of the new model are.
A tie is a proposal, like any identity: the digests of each snapshot compare tied tensors again.

Invariants
  1. Two tensors of different stages never get the same name, unless they are a tie.
  2. If all parameters that stages share are ties, all other names are those of the modules, without
     a stage.
  3. The order of the stages does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

CONSTANT = "constant "  # prefix of the digest of a tensor that repeats one value


@dataclass(frozen=True)
class StageNames:
    """The names of one stage, as they are in its module.

    Attributes:
        parameters: name → description of the parameter: dtype, shapes, and place in the whole.
        buffers: names of the buffers, which forward mutates.
    """

    parameters: Mapping[str, str]
    buffers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StageNaming:
    """The rule that names the stages' leaves.

    Attributes:
        is_global: whether the modules' names are unique in the whole model, except ties.
        ties: names of parameters that the first and the last stage have in common.
        repeated: names of different buffers that several stages use.
    """

    is_global: bool = True
    ties: frozenset[str] = frozenset()
    repeated: frozenset[str] = frozenset()

    def has_stage(self, name: str) -> bool:
        """Whether the stage is part of this leaf's name."""
        return name in self.repeated or not (self.is_global or name in self.ties)


def tie_candidates(stages: Mapping[int, StageNames], together: Collection[frozenset[int]] = ()) -> frozenset[str]:
    """Returns the names that are ties if their bytes are equal.

    Args:
        stages: all stages of the job, by index.
        together: for each rank, the set of its stages.
    """
    if len(stages) < 2:
        return frozenset()
    first, last = min(stages), max(stages)
    shared = _shared(stages)
    parameters = [stages[first].parameters, stages[last].parameters]
    has_both = any({first, last} <= stages_of_rank for stages_of_rank in together)
    if has_both or any(shared.keys() >= names.keys() for names in parameters):
        return frozenset()
    return frozenset(
        name
        for name, holders in shared.items()
        if holders == {first, last} and parameters[0].get(name) == parameters[1].get(name) and not _is_numbered(name)
    )


def equal_names(possible: Collection[str], values: Mapping[int, Mapping[str, str]]) -> frozenset[str]:
    """Returns the possible ties whose bytes are equal.

    Args:
        possible: the result of `tie_candidates`.
        values: stage → name → digest of the bytes, for each possible tie. CONSTANT precedes the
            digest if the bytes repeat one value.
    """
    digests_of: dict[str, set[str]] = {name: set() for name in possible}
    for digests in values.values():
        for name, digest in digests.items():
            digests_of.setdefault(name, set()).add(digest)
    return frozenset(
        name
        for name in possible
        if len(digests_of[name]) == 1 and not next(iter(digests_of[name])).startswith(CONSTANT)
    )


def name_stages(stages: Mapping[int, StageNames], ties: frozenset[str]) -> StageNaming:
    """Decides how to name the leaves of these stages.

    Args:
        stages: all stages of the job, by index.
        ties: the names that are ties, among the result of `tie_candidates`.
    """
    counts: dict[str, int] = {}
    for stage in stages.values():
        for name in stage.buffers:
            counts[name] = counts.get(name, 0) + 1
    repeated = frozenset(name for name, count in counts.items() if count > 1)
    return StageNaming(_shared(stages).keys() <= ties, ties, repeated)


def _shared(stages: Mapping[int, StageNames]) -> dict[str, set[int]]:
    """Returns name → stages, for names that several stages have.

    Only names that are a parameter in some stage.
    """
    holders: dict[str, set[int]] = {}
    for index, stage in stages.items():
        for name in (*stage.parameters, *stage.buffers):
            holders.setdefault(name, set()).add(index)
    parameters = {name for stage in stages.values() for name in stage.parameters}
    return {name: indices for name, indices in holders.items() if len(indices) > 1 and name in parameters}


def _is_numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))
