"""What ranks say of steps, from a few answers."""

from __future__ import annotations

from collections.abc import Mapping

from reft.core.commit.round import Outcome, StepAnswer, StepReport

SEALED, VOID = StepAnswer.SEALED, StepAnswer.VOID


def says(answers: Mapping[int, StepAnswer], since: int = -1) -> StepReport:
    """What a rank says that has given these answers and has skipped all other steps before the newest."""
    sealed = frozenset(step for step, answer in answers.items() if answer is SEALED)
    return StepReport(since, max(answers, default=since), sealed)


def voids(outcome: Outcome, steps: range = range(100)) -> set[int]:
    """Those of the steps that are void."""
    return {step for step in steps if outcome.voids(step)}
