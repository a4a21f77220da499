"""Decides what to restore if restores end again and again before the next step.

    restores of step S, or of a        the next attach restores
    step before S, that ended
    before a step after S
    fewer than 3                       the newest version
    3 to 5                             the newest version before S; none is held: it stops
    6                                  nothing: it stops, with the reason

A job that fails at once after each restore would use up all its restarts, and a person would find
it in the morning where it was at night. The cause may be the version itself (a state that was
already broken) or the step after it (a batch, a machine). An older version helps in the first case.
In the second case attach stops.

Invariants
  1. Each daemon counts in its record, when a decision comes. The greatest count of all daemons that
     remember the decision in force is the count of the job.
  2. The count starts again only if a version after S became whole, if a rank reported a step after
     S, or if the job ended as it should: all sessions were closed. So a job that goes back, and
     fails at S again, does not start to count anew.
  3. An attach that is refused is not counted: its decision is undone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from reft.core.commit.version import Version

NEWEST_MAX = 3  # restores of the newest version
RESTORES_MAX = 2 * NEWEST_MAX  # restores in all


@dataclass(frozen=True)
class RestoreCount:
    """How often a job was restored without getting past a step.

    Attributes:
        step: the newest step that was restored.
        count: how often this step, or an older one, was restored.
    """

    step: int
    count: int

    @property
    def goes_back(self) -> bool:
        """Whether the next attach restores a version before `step`."""
        return self.count >= NEWEST_MAX

    @property
    def stops(self) -> bool:
        """Whether the next attach restores nothing."""
        return self.count >= RESTORES_MAX


def next_count(before: RestoreCount | None, base: Version | None, reached: int) -> RestoreCount | None:
    """Returns the count after a decision; None for a fresh start.

    Args:
        before: the count until now; None if nothing was restored.
        base: the version that the decision restores.
        reached: the newest step that a rank has reported since the last decision; -1 if none.
    """
    if base is None:
        return None
    if before is None or base.step > before.step or reached > before.step:
        return RestoreCount(base.step, 1)
    return RestoreCount(before.step, before.count + 1)


def count_now(counts: Iterable[RestoreCount], reached: Collection[int]) -> RestoreCount | None:
    """Returns the job's count; None if the last restore got past its step.

    Args:
        counts: of the daemons that remember the decision in force.
        reached: the newest step that the ranks of each daemon have reported.
    """
    newest = max(counts, key=lambda each: (each.step, each.count), default=None)
    return None if newest is None or max(reached, default=-1) > newest.step else newest


def went_back(count: RestoreCount, base: Version) -> str:
    """Returns a sentence on an attach that restores an older version."""
    return (
        f"the last {count.count} restores of step {count.step}, or of a step before it, ended before step {count.step + 1}: "
        f"going back to step {base.step}."
    )


def stopped(job: str, count: RestoreCount) -> str:
    """Returns a sentence on an attach that restores nothing."""
    older = "" if count.stops else " No older version is held in memory."
    return (
        f"{count.count} restores of job {job} from step {count.step}, or from a step before it, ended before step "
        f"{count.step + 1}.{older} attach stops, so that the restarts end."
    )
