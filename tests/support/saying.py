"""Makes step reports from a few answers."""

from __future__ import annotations

from collections.abc import Mapping

from reft.core.commit.round import Outcome, StepAnswer, StepReport

SEALED, VOID = StepAnswer.SEALED, StepAnswer.VOID


def report_of(answers: Mapping[int, StepAnswer], since: int = -1) -> StepReport:
    """Returns the report of a rank with these answers.

    All other steps before the newest were skipped.
    """
    sealed = frozenset(step for step, answer in answers.items() if answer is SEALED)
    return StepReport(since, max(answers, default=since), sealed)


def voids(outcome: Outcome, steps: range = range(100)) -> set[int]:
    """Returns the void steps among `steps`."""
    return {step for step in steps if outcome.voids(step)}
