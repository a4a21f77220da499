"""Compares closed forms of idle times with a simulation of orders and dependencies."""

from collections.abc import Callable, Iterable

import pytest

from reft.core.pipeline import actions, bubbles
from reft.core.pipeline.actions import Action, ActionKind, Times
from reft.core.pipeline.bubbles import Gap
from reft.errors import ConfigError
from reft.schedules import Custom, GPipe, Interleaved, OneFOneB, ZeroBubbleH1, ZeroBubbleV

MOST_STAGES = 8
# Whole numbers: their sums and differences are exact, so closed forms must be exactly equal.
WHOLE = [Times(1, 2), Times(1, 1), Times(5, 9), Times(2, 1)]
CUT = [
    Times(1, 2, 1),
    Times(5, 9, 4),
    Times(1, 5, 2),
    Times(3, 4, 2),
    Times(2, 5, 3),
]  # times with the backward in two parts
SHAPES = [(P, M) for P in range(1, MOST_STAGES + 1) for M in range(1, 3 * P + 1)]
Order = Callable[[int, int, int], tuple[Action, ...]]


def total(gaps: Iterable[Gap]) -> float:
    """Returns the total length of all gaps."""
    return sum(gap.length for gap in gaps)


def simulated(order: Order, P: int, M: int, times: Times, is_v_shaped: bool = False):
    """Returns for each stage its gaps in the simulation."""
    spans = actions.simulate([order(stage, P, M) for stage in range(P)], times, is_v_shaped)
    end = max(each[-1].end for each in spans)
    return [bubbles.between(each, end) for each in spans]


def equal(order: Order, closed: Callable[..., tuple[Gap, ...] | None], times: Times, is_v_shaped: bool = False):
    """Returns the shapes that have a closed form; checks each against the simulation."""
    shapes = set()
    for P, M in SHAPES:
        gaps = [closed(p, P, M, times) for p in range(P)]
        if None in gaps:
            assert set(gaps) == {None}, "either all stages have a closed form, or none"
            continue
        for p, run in enumerate(simulated(order, P, M, times, is_v_shaped)):
            assert gaps[p] == run, f"stage {p} of {P}, {M} microbatches"
        shapes.add((P, M))
    return shapes


@pytest.mark.parametrize("times", WHOLE, ids=str)
@pytest.mark.parametrize(
    ("order", "closed"),
    [(actions.gpipe, bubbles.gpipe), (actions.one_f_one_b, bubbles.one_f_one_b)],
    ids=["gpipe", "1f1b"],
)
def test_closed_forms_equal_the_simulation(order, closed, times):
    assert equal(order, closed, times) == set(SHAPES)
    for P, M in SHAPES:
        assert {total(closed(p, P, M, times)) for p in range(P)} == {(P - 1) * (times.forward + times.backward)}


@pytest.mark.parametrize("times", WHOLE, ids=str)
@pytest.mark.parametrize("parts", [2, 3])
def test_the_closed_form_of_interleaved_equals_the_simulation(parts, times):
    def order(p, P, M):
        # Microbatches that can't be split into rounds have no order, and no closed form.
        return () if M % max(1, M // P) else actions.interleaved(p, P, M, parts)

    shapes = equal(order, lambda p, P, M, t: bubbles.interleaved(p, P, M, parts, t), times)
    regular = {(P, M) for P, M in SHAPES if M % P == 0}
    assert shapes == (regular if times.backward >= times.forward else set())
    for P, M in shapes:
        idle = (P - 1) * (times.forward + times.backward)  # each action is 1/parts of a stage's work
        assert {total(bubbles.interleaved(p, P, M, parts, times)) for p in range(P)} == {idle}


@pytest.mark.parametrize("times", CUT, ids=str)
def test_the_form_of_zb_h1_equals_the_simulation(times):
    assert equal(actions.zb_h1, bubbles.zb_h1, times) == {(P, M) for P, M in SHAPES if M >= P}
    if times.weight <= times.forward:
        idle = 7 * (times.forward + times.input - times.weight)
        assert {total(bubbles.zb_h1(p, 8, 16, times)) for p in range(8)} == {idle}


def test_zb_h1_has_no_closed_form_where_weight_gradients_delay_other_stages():
    times = Times(2, 4, 3)
    assert bubbles.zb_h1(0, 4, 8, times) is None
    assert ZeroBubbleH1(0, 4, 8).gaps(times) == simulated(actions.zb_h1, 4, 8, times)[0]


@pytest.mark.parametrize("times", [Times(1, 2, 1), Times(3, 6, 3), Times(2, 5, 2)], ids=str)
def test_the_form_of_zbv_equals_the_simulation(times):
    is_uniform = times.forward == times.input == times.weight
    expected = {(P, M) for P, M in SHAPES if M >= 2 * P - 1 and is_uniform}
    assert equal(actions.zbv, bubbles.zbv, times, is_v_shaped=True) == expected


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        (OneFOneB(2, 4, 3), actions.one_f_one_b),
        (GPipe(2, 4, 3), actions.gpipe),
        (Interleaved(2, 4, 3), lambda p, P, M: actions.interleaved(p, P, M, 2)),
        (Interleaved(1, 4, 8, 3), lambda p, P, M: actions.interleaved(p, P, M, 3)),
        (ZeroBubbleH1(1, 4, 3), actions.zb_h1),
        (ZeroBubbleV(1, 4, 3), actions.zbv),
    ],
    ids=lambda value: str(value) if not callable(value) else "",
)
def test_a_schedule_has_gaps_with_and_without_a_closed_form(schedule, order):
    times = Times(2, 5, 2)
    P, M = schedule.stages, schedule.microbatches
    assert schedule.gaps(times) == simulated(order, P, M, times, schedule.is_v_shaped)[schedule.stage]
    assert schedule.order() == order(schedule.stage, P, M)


def test_an_impossible_schedule_is_refused():
    for wrong in (
        lambda: OneFOneB(4, 4, 8), lambda: GPipe(0, 2, 0), lambda: Interleaved(0, 4, 9), lambda: Interleaved(0, 4, 8, 1),
        lambda: Custom([(0.0, 1.0), (0.5, 1.0)]), lambda: Custom([(0.0, 0.0)]),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            wrong()
    assert Custom([(0.5, 1.0), (2.0, 0.5)]).gaps() == (Gap(0, None, 0.5, 1.0), Gap(1, None, 2.0, 0.5))


def test_a_gap_names_the_action_that_it_follows():
    gaps = bubbles.one_f_one_b(1, 3, 4, Times(1, 2))
    assert gaps == (
        Gap(0, None, 0, 1),
        Gap(2, Action(ActionKind.FORWARD, 1), 3, 2),
        Gap(7, Action(ActionKind.BACKWARD, 2), 13, 1),
        Gap(8, Action(ActionKind.BACKWARD, 3), 16, 2),
    )
    order = actions.one_f_one_b(1, 3, 4)
    assert [gap.after for gap in gaps[1:]] == [order[gap.place - 1] for gap in gaps[1:]]


def test_the_gap_at_the_end_of_a_step_joins_the_next_start():
    gaps = bubbles.one_f_one_b(1, 3, 4, Times(1, 2))
    joined = bubbles.steady(gaps, actions=8)
    assert [gap.length for gap in joined] == [3, 2, 1]
    assert total(joined) == total(gaps)
    assert joined[1].start == gaps[1].start + 2


def test_orders_that_wait_for_one_another_are_refused():
    orders = [(Action(ActionKind.BACKWARD, 0), Action(ActionKind.FORWARD, 0)), actions.gpipe(1, 2, 1)]
    with pytest.raises(ConfigError, match="stage 0 never gets to B0"):
        actions.simulate(orders, Times(1, 2))
