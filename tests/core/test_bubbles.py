"""Closed forms of idle times, held against a simulation that knows only orders and dependencies."""

from collections.abc import Callable

import pytest

from reft.core import actions, bubbles
from reft.core.actions import Action, Kind, Times
from reft.core.bubbles import Gap, total
from reft.errors import ConfigError

MOST_STAGES = 8
# Whole numbers: sums and differences of them are exact, so closed forms must be equal, not close.
TIMES = [Times(1, 2), Times(1, 1), Times(5, 9), Times(2, 1), Times(3, 4)]
SHAPES = [(P, M) for P in range(1, MOST_STAGES + 1) for M in range(1, 3 * P + 1)]


def simulated(order: Callable[[int], tuple[Action, ...]], stages: int, times: Times, is_v_shaped: bool = False):
    """For each stage its gaps in the simulation."""
    spans = actions.simulate([order(stage) for stage in range(stages)], times, is_v_shaped)
    end = max(each[-1].end for each in spans)
    return [bubbles.between(each, end) for each in spans]


@pytest.mark.parametrize("times", TIMES, ids=str)
@pytest.mark.parametrize(
    ("order", "closed"),
    [(actions.gpipe, bubbles.gpipe), (actions.one_f_one_b, bubbles.one_f_one_b)],
    ids=["gpipe", "1f1b"],
)
def test_closed_forms_equal_the_simulation(order, closed, times):
    for P, M in SHAPES:
        found = simulated(lambda p: order(p, P, M), P, times)  # noqa: B023 - called at once
        for p in range(P):
            gaps = closed(p, P, M, times)
            assert gaps == found[p], f"stage {p} of {P}, {M} microbatches"
            assert total(gaps) == (P - 1) * (times.forward + times.backward)


def test_a_gap_names_the_action_that_it_follows():
    gaps = bubbles.one_f_one_b(1, 3, 4, Times(1, 2))
    assert gaps == (
        Gap(0, None, 0, 1),
        Gap(2, Action(Kind.FORWARD, 1), 3, 2),
        Gap(7, Action(Kind.BACKWARD, 2), 13, 1),
        Gap(8, Action(Kind.BACKWARD, 3), 16, 2),
    )
    order = actions.one_f_one_b(1, 3, 4)
    assert [gap.after for gap in gaps[1:]] == [order[gap.place - 1] for gap in gaps[1:]]


def test_between_steps_the_end_of_one_joins_the_start_of_the_next():
    gaps = bubbles.one_f_one_b(1, 3, 4, Times(1, 2))
    joined = bubbles.steady(gaps, actions=8)
    assert [gap.length for gap in joined] == [3, 2, 1]
    assert total(joined) == total(gaps)
    assert joined[1].start == gaps[1].start + 2


def test_orders_that_wait_for_one_another_are_refused():
    orders = [(Action(Kind.BACKWARD, 0), Action(Kind.FORWARD, 0)), actions.gpipe(1, 2, 1)]
    with pytest.raises(ConfigError, match="stage 0 waits for ever before B0"):
        actions.simulate(orders, Times(1, 2))
