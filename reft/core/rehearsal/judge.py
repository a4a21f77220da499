"""Judges a rehearsal from the attempts of both runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from reft.core.rehearsal.causes import (
    SUSPECT,
    LikelyCause,
    RestartEvidence,
    causes_after,
    causes_before,
    forgotten_objects,
    nothing_restored,
)
from reft.core.rehearsal.compare import (
    AFTER_ATTACH,
    STATE_PREFIX,
    MarkDifference,
    RankMarks,
    drifting_state,
    first_difference,
    restored_difference,
    steps_of,
    unseeded_generators,
)
from reft.core.rehearsal.reached import Reached, reached
from reft.core.rehearsal.records import AliveObject, MarkRecord, RehearsedAttempt
from reft.core.text import counted

Attempts = Mapping[int, Sequence[RehearsedAttempt]]  # rank → its attempts, oldest first


class RehearsalOutcome(Enum):
    """How a rehearsal ended."""

    EQUAL = "equal"
    DIFFERENT = "different"  # after the restart
    FORGOTTEN = "forgotten"  # what was recorded is equal, but state that lives is not in state=
    NOT_DETERMINISTIC = "not deterministic"  # the runs differ before the kill


@dataclass(frozen=True)
class RehearsalResult:
    """The judgement of a rehearsal.

    Attributes:
        base: the step that was restored, and its source; None if nothing was restored.
        through: the last step that was compared.
        compared: how many steps after the restart were compared.
        recovery_s: seconds from the kill to the end of the next step on all ranks.
        difference: the first one; None without one.
        causes: the most telling one first; empty if none is known.
        unseeded: what is other in each run, and was not compared: generators, and `state=NAME`.
        suspects: objects that are alive and not in state=, and may need to be.
        unseen: what the recorder could not see, and why.
        reached_before, reached_after: what of the script was reached, on each side of the kill.
    """

    outcome: RehearsalOutcome
    ranks: int
    base: int
    source: str | None
    through: int
    compared: int
    recovery_s: float
    difference: MarkDifference | None
    causes: Sequence[LikelyCause]
    unseeded: Sequence[str]
    suspects: Sequence[AliveObject]
    unseen: Sequence[str]
    reached_before: Reached
    reached_after: Reached


def first_marks(attempts: Attempts) -> dict[int, Mapping[int, MarkRecord]]:
    """Returns the marks of each rank's first attempt."""
    return {rank: each[0].marks for rank, each in attempts.items()}


def _until(marks: RankMarks, last: int) -> dict[int, Mapping[int, MarkRecord]]:
    return {rank: {step: mark for step, mark in each.items() if step <= last} for rank, each in marks.items()}


def _cut(attempt: RehearsedAttempt, last: int) -> RehearsedAttempt:
    marks = {step: mark for step, mark in attempt.marks.items() if step <= last}
    return replace(attempt, marks=marks)


def _is_drawn(attempt: RehearsedAttempt, generator: str) -> bool:
    """Returns whether a generator moves after attach."""
    at_attach = attempt.attach.generators.get(generator)
    return any(mark.generators.get(generator) != at_attach for mark in attempt.marks.values())


def _unseen(expected: RankMarks, difference: MarkDifference | None, attempt: RehearsedAttempt) -> list[str]:
    """Returns what the recorder could not see, for a report.

    Args:
        expected: the marks of the undisturbed run.
        difference: the first one; without one only the inputs matter.
        attempt: the restarted one of the rank that differs.
    """
    blind = [rank for rank, marks in expected.items() if not any(mark.inputs for mark in marks.values())]
    of_model = f"inputs of the model, on {counted(len(blind), 'rank')}: no call of its forward was seen there"
    moves = f"lines of the script that move a generator: {attempt.untraced}"
    is_untraced = difference is not None and attempt.untraced
    mark = attempt.marks.get(difference.step) if difference and difference.kind in AFTER_ATTACH else None
    batch = "the first batch: no loader of torch or reft handed one out between attach and the first forward"
    is_without_batch = (
        mark is not None and mark.at_batch is None and difference and difference.step == min(attempt.marks)
    )
    return [*([of_model] if blind else []), *([moves] if is_untraced else []), *([batch] if is_without_batch else [])]


def judge(undisturbed: Attempts, killed: Attempts, *, killed_s: float, last_step: int) -> RehearsalResult:
    """Returns the judgement.

    Args:
        undisturbed: one attempt of each rank.
        killed: at least two attempts of each rank; the last one ended the run.
        killed_s: when the kill happened.
        last_step: later steps are not compared.
    """
    expected = first_marks(undisturbed)
    begun = {rank: each[0] for rank, each in killed.items()}
    restarted = {rank: _cut(each[-1], last_step) for rank, each in killed.items()}
    unseeded = unseeded_generators(
        {rank: each[0].attach for rank, each in undisturbed.items()},
        {rank: each.attach for rank, each in begun.items()},
    )
    alive = _distinct(
        [each for runs in (undisturbed, killed) for rank in runs.values() for one in rank for each in one.alive]
    )
    begun_marks = _until(first_marks(killed), last_step)
    unseeded |= drifting_state(expected, begun_marks, unseeded)
    before = first_difference(expected, begun_marks, unseeded)
    difference = before or restored_difference(expected, restarted, unseeded)
    if before:
        outcome = RehearsalOutcome.NOT_DETERMINISTIC
        samples = {run[before.rank][0].attach.hash_sample for run in (undisturbed, killed)}
        generators = sorted(name for name in unseeded if not name.startswith(STATE_PREFIX))
        drawn = {name: _is_drawn(undisturbed[before.rank][0], name) for name in generators}
        causes = causes_before(before, drawn, other_hash=len(samples) > 1)
    elif lost := nothing_restored(restarted):
        outcome, causes = RehearsalOutcome.DIFFERENT, [lost]
    elif difference:
        outcome = RehearsalOutcome.DIFFERENT
        usual = [move for move in undisturbed[difference.rank][0].moves if move.is_usual]
        causes = causes_after(RestartEvidence(difference, expected, restarted, alive, usual))
    else:
        causes = forgotten_objects(alive)
        outcome = RehearsalOutcome.FORGOTTEN if causes else RehearsalOutcome.EQUAL
    first, last = steps_of({rank: attempt.marks for rank, attempt in restarted.items()})
    base = restarted[0].attach
    return RehearsalResult(
        outcome,
        len(restarted),
        base.step,
        base.restored_from,
        through=last,
        compared=last - first + 1,
        recovery_s=max(min(mark.time_s for mark in each.marks.values()) for each in restarted.values()) - killed_s,
        difference=difference,
        causes=causes,
        unseeded=sorted(unseeded),
        suspects=[each for each in alive if each.kind in SUSPECT],
        unseen=_unseen(expected, difference, restarted[difference.rank if difference else 0]),
        reached_before=reached(begun_marks),
        reached_after=reached({rank: attempt.marks for rank, attempt in restarted.items()}),
    )


def _distinct(objects: Sequence[AliveObject]) -> list[AliveObject]:
    return list(dict.fromkeys(objects))
