"""Measures a stage's idle times: running estimates, and how far the closed form was off.

    each step   (place, start, end) of each gap ─► an estimate for each place ─► gaps, for pacing
                (kind, seconds) of each action  ─► times ─► closed form       ─► comparison

An estimate begins as the median of its first values, since the first steps of a process are
unusual. After that it follows slowly. A single wild value moves the estimate by a few deviations at
most. If the values stay there, the deviation grows, and the estimate follows. The caller measures
the times, with events of a device or a clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reft.core.pipeline.actions import Action, ActionKind, Times
from reft.core.pipeline.bubbles import Gap

FIRST_VALUES = 5  # an estimate begins with the median of so many values
WEIGHT = 1 / 16  # weight of each further value
DEVIATIONS_MAX = 4.0  # one value pulls by so many deviations at most
LEAST_DEVIATION = 0.01  # fraction of the mean; without it, equal values would make the next one wild
LEAST_S = 1e-5  # least deviation where the mean is 0, so that a new gap is found


@dataclass
class Estimate:
    """A running mean and mean absolute deviation of one quantity.

    The unit is seconds, or one with much greater values, such as bytes per second.

    Attributes:
        mean: the estimate.
        deviation: mean absolute deviation.
        count: number of observed values.
    """

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0
    _first: list[float] = field(default_factory=list)

    def observe(self, value: float) -> None:
        """Takes one value into account."""
        self.count += 1
        if self.count <= FIRST_VALUES:
            self._first.append(value)
            self.mean = statistics.median(self._first)
            self.deviation = statistics.fmean(abs(each - self.mean) for each in self._first)
            if self.count == FIRST_VALUES:  # one wild value among the first must not inflate the deviation
                self.deviation = statistics.median(abs(each - self.mean) for each in self._first)
            return
        error = value - self.mean
        most = DEVIATIONS_MAX * max(self.deviation, LEAST_DEVIATION * abs(self.mean), LEAST_S)
        if abs(error) > most:
            error = most if error > 0 else -most
        self.mean += WEIGHT * error
        self.deviation += WEIGHT * (abs(error) - self.deviation)


class GapDifference(NamedTuple):
    """The expected and the measured length of one idle time, in seconds.

    A length is 0 where there was none.
    """

    place: int
    foreseen: float
    measured: float


class GapComparison(NamedTuple):
    """The difference between expected and measured gaps.

    Attributes:
        differences: by place, of every gap that was expected or measured.
        worst: the largest |measured - foreseen| / foreseen of all expected gaps; 0 if there were
            none.
        total: the same for the sum of all idle time, gaps that were not expected included.
    """

    differences: tuple[GapDifference, ...]
    worst: float
    total: float


@dataclass
class StageProfile:
    """The measured step of one stage."""

    _starts: dict[int, Estimate] = field(default_factory=dict)
    _lengths: dict[int, Estimate] = field(default_factory=dict)
    _actions: dict[ActionKind, Estimate] = field(default_factory=dict)

    def observe(self, place: int, start: float, end: float) -> None:
        """Takes one idle time into account; `Gap` explains its place.

        Args:
            place: see `Gap`.
            start: seconds from the start of the step.
            end: not before `start`; equal if the stage did not have to wait here.
        """
        self._starts.setdefault(place, Estimate()).observe(start)
        self._lengths.setdefault(place, Estimate()).observe(end - start)

    def observe_action(self, kind: ActionKind, seconds: float) -> None:
        """Takes the duration of one action into account."""
        self._actions.setdefault(kind, Estimate()).observe(seconds)

    def length(self, place: int) -> Estimate:
        """Returns the estimate of one idle time in seconds.

        Its count is 0 if it was never measured.
        """
        return self._lengths.get(place, Estimate())

    def gaps(self, order: Sequence[Action] = (), least: float = 0.0) -> tuple[Gap, ...]:
        """Returns the measured idle times that are longer than `least` seconds, in order.

        Args:
            order: the stage's actions in a step, to name the action before each gap; empty if not
                known.
            least: seconds.
        """
        gaps = []
        for place, length in sorted(self._lengths.items()):
            after = order[place - 1] if 0 < place <= len(order) else None
            if length.mean > least:
                gaps.append(Gap(place, after, self._starts[place].mean, length.mean))
        return tuple(gaps)

    def times(self) -> Times | None:
        """Returns the durations of actions; None until forwards and backwards were measured."""
        means = {kind: each.mean for kind, each in self._actions.items()}
        if ActionKind.FORWARD not in means:
            return None
        if ActionKind.INPUT in means and ActionKind.WEIGHT in means:
            weight = means[ActionKind.WEIGHT]
            return Times(means[ActionKind.FORWARD], means[ActionKind.INPUT] + weight, weight)
        return Times(means[ActionKind.FORWARD], means[ActionKind.BACKWARD]) if ActionKind.BACKWARD in means else None


def compare(foreseen: Iterable[Gap], measured: Iterable[Gap]) -> GapComparison:
    """Compares the gaps of a closed form with the measured gaps, place by place."""
    a, b = ({gap.place: gap.length for gap in gaps} for gaps in (foreseen, measured))
    differences = tuple(GapDifference(place, a.get(place, 0.0), b.get(place, 0.0)) for place in sorted({*a, *b}))
    worst = max(
        (abs(each.measured - each.foreseen) / each.foreseen for each in differences if each.foreseen), default=0.0
    )
    idle = sum(a.values())
    return GapComparison(differences, worst, abs(sum(b.values()) - idle) / idle if idle else 0.0)
