"""The idle times of a pipeline's stages: where they lie and how long they are, as closed forms.

    1F1B, stage p of P, at least P microbatches, t_f and t_b for one forward and one backward

    │ p·t_f │ F F … F │ (P-1-p)·t_b │ B F B F … B F │ B t_f B t_f … B │ p·t_b │
      lead    P-p       middle        no idle time    P-1-p gaps         trail

Each stage is idle for (P-1)(t_f+t_b), wherever it stands; only the places differ. All stages take equal times and links none:
what a real run does is measured (core/profile.py). Every closed form equals the simulation of core/actions.py for all
P ≤ 8 and M ≤ 3P (tests/core/test_bubbles.py).

Invariants of a list of gaps: in order of time, none empty, none overlaps another or an action.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reft.core.actions import Action, Kind, Span, Times


class Gap(NamedTuple):
    """An idle time of a stage.

    Attributes:
        place: how many actions of the step the stage has done when it begins; 0 is the gap before the first.
        after: the action that it follows; None at the start of a step, or where only times are known.
        start: when it begins, from the start of the step, in the unit of the times it was made of.
        length: in the same unit; above 0.
    """

    place: int
    after: Action | None
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length


def gpipe(stage: int, stages: int, microbatches: int, times: Times) -> tuple[Gap, ...]:
    """Idle before the first forward, between the last forward and the first backward, and after the last backward."""
    p, behind, m = stage, stages - 1 - stage, microbatches
    both = times.forward + times.backward
    forwards = Action(Kind.FORWARD, m - 1)
    return _real(
        Gap(0, None, 0, p * times.forward),
        Gap(m, forwards, (p + m) * times.forward, behind * both),
        Gap(2 * m, Action(Kind.BACKWARD, m - 1), (stages - 1 + m) * both - p * times.backward, p * times.backward),
    )


def one_f_one_b(stage: int, stages: int, microbatches: int, times: Times) -> tuple[Gap, ...]:
    """See the drawing; with fewer microbatches than stages behind, the middle grows and the cool-down has fewer gaps."""
    p, behind, m = stage, stages - 1 - stage, microbatches
    t_f, t_b = times.forward, times.backward
    first = min(m, behind + 1)  # forwards before the first backward
    middle = (behind + 1 - first) * t_f + behind * t_b
    gaps = [Gap(0, None, 0, p * t_f), Gap(first, Action(Kind.FORWARD, first - 1), (p + first) * t_f, middle)]
    for j in range(m - first + 1, m):  # the backwards that no forward precedes
        gaps.append(Gap(m + j, Action(Kind.BACKWARD, j - 1), (stages - 1 + j) * t_f + (behind + j) * t_b, t_f))
    gaps.append(Gap(2 * m, Action(Kind.BACKWARD, m - 1), (stages - 1 + m) * t_f + (behind + m) * t_b, p * t_b))
    return _real(*gaps)


def between(spans: Sequence[Span], end: float) -> tuple[Gap, ...]:
    """The idle times of one stage whose actions ran like this, up to `end`."""
    gaps, at, after = [], 0.0, None
    for index, span in enumerate(spans):
        gaps.append(Gap(index, after, at, span.start - at))
        at, after = span.end, span.action
    return _real(*gaps, Gap(len(spans), after, at, end - at))


def total(gaps: Iterable[Gap]) -> float:
    """The length of all gaps together."""
    return sum(gap.length for gap in gaps)


def steady(gaps: Sequence[Gap], actions: int) -> tuple[Gap, ...]:
    """The gaps of a step among others, where nothing holds the stages together between steps: the idle time at the end of
    the step before lies after its optimizer, so it joins the one at the start.

    Args:
        actions: how many the stage does in a step.
    """
    lead = next((gap.length for gap in gaps if gap.place == 0), 0.0)
    trail = next((gap.length for gap in gaps if gap.place == actions), 0.0)
    inner = [gap._replace(start=gap.start + trail) for gap in gaps if 0 < gap.place < actions]
    return _real(Gap(0, None, 0, lead + trail), *inner)


def _real(*gaps: Gap) -> tuple[Gap, ...]:
    return tuple(gap for gap in gaps if gap.length > 0)
