"""What a stage's idle times really are: running estimates from measured ones, and how far the closed form was off.

    each step   (place, start, end) of each idle time ─► an estimate for each place ─► gaps, for pacing
                (kind, seconds) of each action        ─► times ─► closed form       ─► comparison

An estimate begins as the median of its first values, since the first steps of a process are unlike all others. After that
it follows slowly, and a single wild value moves it no further than a few deviations; if the values stay there, the deviation
grows, and it follows. Who measures (events of a device, or a clock) is the caller's matter: nothing here knows the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reft.core.pipeline.actions import Action, ActionKind, ActionTimes
from reft.core.pipeline.bubbles import Gap

FIRST = 5  # values whose median an estimate begins with
WEIGHT = 1 / 16  # of each further value
WILD = 4.0  # deviations by which one value may pull
LEAST_DEVIATION = 0.01  # of the mean: values that never differ must not make the next one wild
LEAST_S = 1e-5  # the same where the mean is 0: a gap that was never there must be found when it comes


@dataclass
class Estimate:
    """A running mean and mean absolute deviation of one quantity: seconds, or anything much greater, such as bytes per second.

    Attributes:
        count: how many values were observed.
    """

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0
    _first: list[float] = field(default_factory=list)

    def observe(self, value: float) -> None:
        """Takes one value."""
        self.count += 1
        if self.count <= FIRST:
            self._first.append(value)
            self.mean = statistics.median(self._first)
            self.deviation = statistics.fmean(abs(each - self.mean) for each in self._first)
            if self.count == FIRST:  # one wild value among the first must not make all others look tame
                self.deviation = statistics.median(abs(each - self.mean) for each in self._first)
            return
        error = value - self.mean
        most = WILD * max(self.deviation, LEAST_DEVIATION * abs(self.mean), LEAST_S)
        if abs(error) > most:
            error = most if error > 0 else -most
        self.mean += WEIGHT * error
        self.deviation += WEIGHT * (abs(error) - self.deviation)


class GapDifference(NamedTuple):
    """One idle time as foreseen and as measured, in seconds; 0 where there was none."""

    place: int
    foreseen: float
    measured: float


class GapComparison(NamedTuple):
    """How far foreseen gaps were off.

    Attributes:
        differences: by place, of every gap that was foreseen or measured.
        worst: the largest |measured - foreseen| / foreseen of all that were foreseen; 0 if none was.
        total: the same of all idle time together, with what nobody foresaw.
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
        """Takes one idle time; see `Gap` for what its place is.

        Args:
            start: seconds from the start of the step.
            end: not before `start`; equal if the stage did not have to wait here.
        """
        self._starts.setdefault(place, Estimate()).observe(start)
        self._lengths.setdefault(place, Estimate()).observe(end - start)

    def observe_action(self, kind: ActionKind, seconds: float) -> None:
        """Takes the time of one action."""
        self._actions.setdefault(kind, Estimate()).observe(seconds)

    def length(self, place: int) -> Estimate:
        """The estimate of one idle time, seconds; one that counts nothing if it was never measured."""
        return self._lengths.get(place, Estimate())

    def gaps(self, order: Sequence[Action] = (), least: float = 0.0) -> tuple[Gap, ...]:
        """The measured idle times that are longer than `least` seconds, in order.

        Args:
            order: what the stage does in a step, to name the action before each gap; empty if it is not known.
        """
        found = []
        for place, length in sorted(self._lengths.items()):
            after = order[place - 1] if 0 < place <= len(order) else None
            if length.mean > least:
                found.append(Gap(place, after, self._starts[place].mean, length.mean))
        return tuple(found)

    def times(self) -> ActionTimes | None:
        """What the actions take, for a closed form; None until forwards and backwards were measured."""
        means = {kind: each.mean for kind, each in self._actions.items()}
        if ActionKind.FORWARD not in means:
            return None
        if ActionKind.INPUT in means and ActionKind.WEIGHT in means:
            weight = means[ActionKind.WEIGHT]
            return ActionTimes(means[ActionKind.FORWARD], means[ActionKind.INPUT] + weight, weight)
        return (
            ActionTimes(means[ActionKind.FORWARD], means[ActionKind.BACKWARD]) if ActionKind.BACKWARD in means else None
        )


def compare(foreseen: Iterable[Gap], measured: Iterable[Gap]) -> GapComparison:
    """Holds a closed form against what was measured, place by place."""
    a, b = ({gap.place: gap.length for gap in gaps} for gaps in (foreseen, measured))
    differences = tuple(GapDifference(place, a.get(place, 0.0), b.get(place, 0.0)) for place in sorted({*a, *b}))
    worst = max(
        (abs(each.measured - each.foreseen) / each.foreseen for each in differences if each.foreseen), default=0.0
    )
    idle = sum(a.values())
    return GapComparison(differences, worst, abs(sum(b.values()) - idle) / idle if idle else 0.0)
