"""Compares two runs, mark by mark, and finds the first difference.

The order within a step is the order in which a difference spreads: generators, inputs, parameter
groups, entries of state=, tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from reft.core.rehearsal.records import AttachRecord, MarkRecord, RehearsedAttempt

RankMarks = Mapping[int, Mapping[int, MarkRecord]]  # rank → step → mark


class DifferenceKind(Enum):
    """What differs; within a step the first of these is named."""

    ATTACH_GENERATORS = "a generator after attach"
    BATCH_GENERATORS = "a generator at the first batch"
    FORWARD_GENERATORS = "a generator at the first forward"
    INPUTS = "an input of the model"
    GROUPS = "a parameter group"
    STATE = "an entry of state="
    LEAVES = "a tensor of model or optimizer"
    MARK_GENERATORS = "a generator at the mark"


@dataclass(frozen=True)
class MarkDifference:
    """The first difference of two runs.

    Attributes:
        kind: the first kind that differs in this step.
        names: what differs, by name, on this rank.
        kinds: all kinds that differ in this step, on any rank.
    """

    step: int
    rank: int
    kind: DifferenceKind
    names: Sequence[str]
    kinds: frozenset[DifferenceKind]


def differing(expected: Mapping[str, object], actual: Mapping[str, object]) -> list[str]:
    """Returns the names whose values differ, or that only one side has."""
    absent = object()
    return [name for name in {**expected, **actual} if expected.get(name, absent) != actual.get(name, absent)]


def _input_names(expected: MarkRecord, actual: MarkRecord) -> list[str]:
    if len(expected.inputs) != len(actual.inputs):
        return [f"{len(expected.inputs)} and {len(actual.inputs)} tensors"]
    pairs = zip(expected.inputs, actual.inputs, strict=True)
    return [f"tensor {index}" for index, (one, other) in enumerate(pairs) if one != other]


def _group_names(expected: MarkRecord, actual: MarkRecord) -> list[str]:
    groups = differing(expected.groups, actual.groups)
    return [
        f"{group}.{setting}"
        for group in groups
        for setting in differing(expected.groups.get(group, {}), actual.groups.get(group, {}))
    ]


def _seen_names(expected: Mapping[str, str] | None, actual: Mapping[str, str] | None) -> list[str]:
    """Returns the names that differ between two moments, if both runs have recorded them."""
    return [] if expected is None or actual is None else differing(expected, actual)


def _batch_names(expected: MarkRecord, actual: MarkRecord) -> list[str]:
    """Returns the generators that differ at the first batch, and whose difference had an effect.

    A script may seed its generators between the batch and the forward. Then only a batch that
    differs has seen the state before.
    """
    names = _seen_names(expected.at_batch, actual.at_batch)
    at_forward = _seen_names(expected.at_forward, actual.at_forward)
    return names if _input_names(expected, actual) else [name for name in names if name in at_forward]


_NAMES_BY_KIND: Final[Mapping[DifferenceKind, Callable[[MarkRecord, MarkRecord], list[str]]]] = {
    DifferenceKind.BATCH_GENERATORS: _batch_names,
    DifferenceKind.FORWARD_GENERATORS: lambda expected, actual: _seen_names(expected.at_forward, actual.at_forward),
    DifferenceKind.INPUTS: _input_names,
    DifferenceKind.GROUPS: _group_names,
    DifferenceKind.STATE: lambda expected, actual: differing(expected.state, actual.state),
    DifferenceKind.LEAVES: lambda expected, actual: differing(expected.leaves, actual.leaves),
    DifferenceKind.MARK_GENERATORS: lambda expected, actual: differing(expected.generators, actual.generators),
}
AFTER_ATTACH: Final = (DifferenceKind.BATCH_GENERATORS, DifferenceKind.FORWARD_GENERATORS)
STATE_PREFIX: Final = "state="
# kind → what stands before a name in the names that are not compared
_SET_ASIDE: Final[Mapping[DifferenceKind, str]] = {
    DifferenceKind.BATCH_GENERATORS: "",
    DifferenceKind.FORWARD_GENERATORS: "",
    DifferenceKind.STATE: STATE_PREFIX,
    DifferenceKind.MARK_GENERATORS: "",
}


def unseeded_generators(expected: Mapping[int, AttachRecord], actual: Mapping[int, AttachRecord]) -> frozenset[str]:
    """Returns the generators that differ between two fresh starts, on any rank.

    No comparison can say anything about them.
    """
    ranks = expected.keys() & actual.keys()
    return frozenset(name for rank in ranks for name in differing(expected[rank].generators, actual[rank].generators))


def drifting_state(expected: RankMarks, actual: RankMarks, unseeded: Iterable[str]) -> frozenset[str]:
    """Returns entries of state= that differ in two fresh starts, equal in all else.

    Such an entry holds a time, or the state of a generator that each run seeds anew.
    """
    ignored = set(unseeded)
    while (difference := first_difference(expected, actual, ignored)) is not None:
        if difference.kinds != {DifferenceKind.STATE}:
            return frozenset()
        ignored |= {STATE_PREFIX + name for name in difference.names}
    return frozenset(ignored - set(unseeded))


def first_difference(expected: RankMarks, actual: RankMarks, unseeded: Iterable[str] = ()) -> MarkDifference | None:
    """Returns the first difference in steps of both runs; None if there is none.

    Args:
        expected: the marks of the undisturbed run.
        actual: the marks of the other run.
        unseeded: generators, and entries of state=, that are not compared.
    """
    ignored = set(unseeded)
    for step in sorted({step for marks in actual.values() for step in marks}):
        names: dict[tuple[DifferenceKind, int], list[str]] = {}
        for rank in sorted(expected.keys() & actual.keys()):
            if step in expected[rank] and step in actual[rank]:
                for kind, compared in _NAMES_BY_KIND.items():
                    found = compared(expected[rank][step], actual[rank][step])
                    if kind in _SET_ASIDE:
                        found = [name for name in found if _SET_ASIDE[kind] + name not in ignored]
                    if found:
                        names[kind, rank] = found
        if names:
            kinds = frozenset(kind for kind, _ in names)
            first = next(kind for kind in DifferenceKind if kind in kinds)
            rank = min(rank for kind, rank in names if kind is first)
            return MarkDifference(step, rank, first, names[first, rank], kinds)
    return None


def restored_difference(
    expected: RankMarks, restarted: Mapping[int, RehearsedAttempt], unseeded: Iterable[str] = ()
) -> MarkDifference | None:
    """Returns the first difference after a restart; None if there is none.

    A generator that attach brought back wrongly is the first difference only if the first batch or
    the first forward saw another state too: the generator may be put back after attach.
    """
    marks = {rank: attempt.marks for rank, attempt in restarted.items()}
    difference = first_difference(expected, marks, unseeded)
    if difference is None or difference.kind not in AFTER_ATTACH:
        return difference
    attempt = restarted[difference.rank]
    base = expected[difference.rank].get(attempt.attach.step)
    if base is None or difference.step != min(attempt.marks):
        return difference
    wrong = [name for name in difference.names if base.generators.get(name) != attempt.attach.generators.get(name)]
    if not wrong:
        return difference
    kinds = difference.kinds | {DifferenceKind.ATTACH_GENERATORS}
    return MarkDifference(difference.step, difference.rank, DifferenceKind.ATTACH_GENERATORS, wrong, kinds)


def steps_of(marks_by_rank: RankMarks) -> tuple[int, int]:
    """Returns the first and the last step of all ranks, else (0, 0)."""
    common = set.intersection(*(set(marks) for marks in marks_by_rank.values())) if marks_by_rank else set()
    return (min(common), max(common)) if common else (0, 0)
