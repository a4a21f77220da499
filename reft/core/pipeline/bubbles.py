"""Computes the idle times of a pipeline's stages as closed forms.

The forms say where these times lie, and how long they are.

    1F1B, stage p of P, at least P microbatches, t_f and t_b for one forward and one backward

    │ p·t_f │ F F … F │ (P-1-p)·t_b │ B F B F … B F │ B t_f B t_f … B │ p·t_b │
      lead    P-p       middle        no idle time    P-1-p gaps         trail

Each stage is idle for (P-1)(t_f+t_b), whatever its number; only the places differ. The forms assume
that all stages take equal times and that links take none. Real runs are measured
(core/pipeline/profile.py). Every closed form equals the simulation of core/pipeline/actions.py for
all P ≤ 8 and M ≤ 3P (tests/core/pipeline/test_bubbles.py).

Invariants of a list of gaps: in order of time; none is empty; none overlaps another gap or an
    action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reft.core.pipeline.actions import Action, ActionKind, ActionSpan, Times
from reft.core.pipeline.actions import interleaved as interleaved_order
from reft.core.pipeline.actions import zb_h1 as zb_h1_order
from reft.core.pipeline.actions import zbv as zbv_order


class Gap(NamedTuple):
    """An idle time of a stage.

    Attributes:
        place: how many actions of the step the stage has done when the gap begins; 0 is the gap
            before the first.
        after: the action that the gap follows; None at the start of a step, or where only times are
            known.
        start: from the start of the step, in the unit of the action times.
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
    """Returns the gaps before the first forward, before the first backward, and after the last."""
    p, behind, m = stage, stages - 1 - stage, microbatches
    both = times.forward + times.backward
    forwards = Action(ActionKind.FORWARD, m - 1)
    return _nonempty(
        Gap(0, None, 0, p * times.forward),
        Gap(m, forwards, (p + m) * times.forward, behind * both),
        Gap(
            2 * m, Action(ActionKind.BACKWARD, m - 1), (stages - 1 + m) * both - p * times.backward, p * times.backward
        ),
    )


def one_f_one_b(stage: int, stages: int, microbatches: int, times: Times) -> tuple[Gap, ...]:
    """Returns the gaps of the drawing.

    With fewer microbatches than stages behind, the middle grows and the cool-down has fewer gaps.
    """
    p, behind, m = stage, stages - 1 - stage, microbatches
    t_f, t_b = times.forward, times.backward
    first = min(m, behind + 1)  # forwards before the first backward
    middle = (behind + 1 - first) * t_f + behind * t_b
    gaps = [Gap(0, None, 0, p * t_f), Gap(first, Action(ActionKind.FORWARD, first - 1), (p + first) * t_f, middle)]
    for j in range(m - first + 1, m):  # the backwards without a forward before them
        gaps.append(Gap(m + j, Action(ActionKind.BACKWARD, j - 1), (stages - 1 + j) * t_f + (behind + j) * t_b, t_f))
    gaps.append(Gap(2 * m, Action(ActionKind.BACKWARD, m - 1), (stages - 1 + m) * t_f + (behind + m) * t_b, p * t_b))
    return _nonempty(*gaps)


def interleaved(stage: int, stages: int, microbatches: int, parts: int, times: Times) -> tuple[Gap, ...] | None:
    """Returns the gaps of 1F1B with several parts a stage.

    The result is None where no closed form is known. That is so if a backward is shorter than a
    forward, or if the stages do not divide the number of microbatches.

        lead | forwards | middle | B F … B | early | F B … F | B t_f B … t_f B | B … B | trail

    The early gap lies between two groups of actions: the first backwards, and the first forwards
    whose inputs passed all stages once. The early gap and the gaps of the cool-down make up
    2(P-1-p)·t_f. If t_f does not divide that sum, the earliest gap of the cool-down is shorter.
    """
    P, p, r, m = stages, stage, stages - 1 - stage, microbatches
    t_f, t_b = times.forward, times.backward
    if parts < 2 or t_b < t_f or m % P:
        return None
    actions = m * parts
    ahead = (parts - 1) * P + 2 * r
    ends = (actions + P - 1) * (t_f + t_b) - p * t_b  # the last backward
    last = actions - (parts - 1) * P - 1  # the last backward that the cool-down waits for
    middle, early, late = r * (t_b - t_f), max(r * t_f - (p + 1) * t_b, 0), 2 * r * t_f
    if ahead >= actions:  # all forwards come first: the stage waits once instead of several times later
        ahead, early, late = actions - 1, 0, last * t_f
        middle = r * (t_f + t_b) - late
    late -= early
    order = interleaved_order(stage, stages, microbatches, parts)
    begins = (p + ahead + 1) * t_f
    return_at = begins + middle + (2 * p + 2) * t_b + (2 * p + 1) * t_f
    gaps = [
        Gap(0, None, 0, p * t_f),
        _gap(order, ahead + 1, begins, middle),
        _gap(order, ahead + 4 * p + 4, return_at, early) if early else None,
    ]
    count = -int(-late // t_f)  # rounded up
    for back in range(count - 1, -1, -1):  # number of waits that still follow
        length = min(t_f, late - back * t_f)
        starts = ends - (actions - last) * t_b - back * (t_f + t_b)
        gaps.append(_gap(order, actions + last - back, starts - length, length))
    gaps.append(_gap(order, 2 * actions, ends, p * t_b))
    return _nonempty(*filter(None, gaps))


def zb_h1(stage: int, stages: int, microbatches: int, times: Times) -> tuple[Gap, ...] | None:
    """Returns the gaps of 1F1B with weight gradients in the cool-down and at the end.

    Returns None where no closed form is known: with fewer microbatches than stages, or if gradients
    of inputs take less time than those of weights.
    """
    p, r, m = stage, stages - 1 - stage, microbatches
    t_f, t_i, t_w = times.forward, times.input, times.weight
    if m < stages or t_i < min(t_f, t_w):
        return None
    filled = min(t_f, t_w)  # the filled part of each gap of 1F1B
    order = zb_h1_order(stage, stages, microbatches)
    gaps = [Gap(0, None, 0, p * t_f), _gap(order, r + 1, stages * t_f, r * t_i)]
    for k in range(r):  # the backwards without a forward before them
        j = m - r + k
        begins = stages * t_f + r * t_i + j * (t_f + t_i) + (m - r - p - 1) * t_w
        gaps.append(_gap(order, m + 2 * j - p, begins - t_f + filled, t_f - filled))
    ends = m * (t_f + t_i + t_w) + (stages - 1) * (t_f + t_i - filled) - p * (t_i - filled)
    return _nonempty(*gaps, _gap(order, 3 * m, ends, p * (t_i - filled)))


def zbv(stage: int, stages: int, microbatches: int, times: Times) -> tuple[Gap, ...] | None:
    """Returns the gaps at the start and at the end, the only ones.

    Returns None where no closed form is known: with fewer than 2P-1 microbatches, or actions of
        different durations.
    """
    if microbatches < 2 * stages - 1 or not times.forward == times.input == times.weight:
        return None
    r, t = stages - 1 - stage, times.forward
    order = zbv_order(stage, stages, microbatches)
    ends = (6 * microbatches + stage) * t
    return _nonempty(Gap(0, None, 0, stage * t), _gap(order, len(order), ends, r * t))


def _gap(order: Sequence[Action], place: int, start: float, length: float) -> Gap:
    return Gap(place, order[place - 1], start, length)


def between(spans: Sequence[ActionSpan], end: float) -> tuple[Gap, ...]:
    """Returns the idle times of one stage that ran these actions, up to `end`."""
    gaps, at, after = [], 0.0, None
    for index, span in enumerate(spans):
        gaps.append(Gap(index, after, at, span.start - at))
        at, after = span.end, span.action
    return _nonempty(*gaps, Gap(len(spans), after, at, end - at))


def steady(gaps: Sequence[Gap], actions: int) -> tuple[Gap, ...]:
    """Returns the gaps of a step between other steps.

    No barrier holds the stages together there. The idle time at the end of the previous step lies
    after its optimizer. So that time joins the gap at the start.

    Args:
        gaps: of a step alone.
        actions: number of the stage's actions in a step.
    """
    lead = next((gap.length for gap in gaps if gap.place == 0), 0.0)
    trail = next((gap.length for gap in gaps if gap.place == actions), 0.0)
    inner = [gap._replace(start=gap.start + trail) for gap in gaps if 0 < gap.place < actions]
    return _nonempty(Gap(0, None, 0, lead + trail), *inner)


def _nonempty(*gaps: Gap) -> tuple[Gap, ...]:
    return tuple(gap for gap in gaps if gap.length > 0)
