"""The steps that one rank has reported, until the round decides them.

    answer(sealed) ─► undecided ─► in each report ─► the outcome decides the step ─► forgotten

Each report covers all undecided steps (round.py, StepReport), so the next report repairs what a
daemon has lost. A late or repeated outcome changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reft.core.commit.lag_backoff import OutcomeDelays
from reft.core.commit.round import Outcome, StepAnswer, StepReport


@dataclass
class UndecidedSteps:
    """One rank's answers that the round has not decided yet.

    Attributes:
        newest: the newest reported step; -1 if there is none.
        sealed: undecided sealed step → cell → digest of this rank's bytes in the cell.
        delays: how long outcomes took.
    """

    newest: int = -1
    sealed: dict[int, Mapping[int, int]] = field(default_factory=dict)
    delays: OutcomeDelays = field(default_factory=OutcomeDelays)

    def answer(self, step: int, answer: StepAnswer, digests: Mapping[int, int]) -> None:
        """Takes the answer for a step.

        The answer for an earlier step than the newest one changes nothing.
        """
        if answer is StepAnswer.SEALED and step > self.newest:
            self.sealed[step] = digests
        self.newest = max(self.newest, step)

    def settle(self, outcome: Outcome) -> None:
        """Forgets the steps that the outcome decides."""
        for step in [step for step in self.sealed if outcome.decides(step)]:
            self.delays.note_decided(step, self.newest, outcome.voids(step))
            del self.sealed[step]

    def report(self, whole: int) -> StepReport:
        """Returns the report of all undecided steps.

        Args:
            whole: the newest step known to be whole; -1 if there is none.
        """
        return StepReport(whole, self.newest, frozenset(self.sealed))

    def longest_delay(self, step: int) -> int:
        """Returns the longest delay of an outcome in steps, a missing one included.

        Args:
            step: the newest step.
        """
        return self.delays.longest(step, min(self.sealed, default=None))
