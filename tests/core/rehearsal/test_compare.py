"""The first difference of two runs, and what is not compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reft.core.rehearsal.compare import (
    DifferenceKind,
    differing,
    drifting_state,
    first_difference,
    restored_difference,
    steps_of,
    unseeded_generators,
)
from reft.core.rehearsal.records import AliveObject, AliveRecord, MoveRecord, UntracedRecord, attempts_of
from tests.support.rehearsal_records import attach, attempt, mark, marks


def test_equal_runs_have_no_difference():
    assert first_difference({0: marks(1, 9)}, {0: marks(1, 9)}) is None


@pytest.mark.parametrize(
    ("change", "kind", "names"),
    [
        ({"at_forward": {"torch": "x", "python": "p"}}, DifferenceKind.FORWARD_GENERATORS, ["torch"]),
        ({"inputs": ["i5", "x"]}, DifferenceKind.INPUTS, ["tensor 1"]),
        ({"inputs": ["x"]}, DifferenceKind.INPUTS, ["2 and 1 tensors"]),
        ({"groups": {"optimizer.0.0": {"lr": 0.2}}}, DifferenceKind.GROUPS, ["optimizer.0.0.lr"]),
        ({"groups": {}}, DifferenceKind.GROUPS, ["optimizer.0.0.lr"]),
        ({"state": {"data": "x"}}, DifferenceKind.STATE, ["data"]),
        ({"leaves": {"w": "w5", "b": "x"}}, DifferenceKind.LEAVES, ["b"]),
        ({"leaves": {"w": "w5"}}, DifferenceKind.LEAVES, ["b"]),
        ({"generators": {"torch": "g5", "python": "x"}}, DifferenceKind.MARK_GENERATORS, ["python"]),
    ],
)
def test_each_kind_is_found_in_its_step(change, kind, names):
    expected = {0: marks(1, 9), 1: marks(1, 9)}
    actual = {0: marks(1, 9), 1: {**marks(1, 9), 5: replace(mark(5), **change)}}
    difference = first_difference(expected, actual)
    assert (difference.step, difference.rank, difference.kind, list(difference.names)) == (5, 1, kind, names)
    assert difference.kinds == {kind}


SEEDED = {"torch": "x", "python": "p"}


@pytest.mark.parametrize(
    ("change", "kind", "kinds"),
    [
        ({"at_forward": SEEDED}, "BATCH", {"BATCH", "FORWARD"}),
        ({"inputs": ["x", "j5"]}, "BATCH", {"BATCH", "INPUTS"}),
        ({}, None, set()),  # put back, or seeded anew, between the batch and the forward
        ({"at_forward": {"torch": "g4", "python": "x"}}, "FORWARD", {"FORWARD"}),
        ({"leaves": {}}, "LEAVES", {"LEAVES"}),
    ],
)
def test_a_generator_at_the_first_batch_counts_if_it_had_an_effect(change, kind, kinds):
    actual = {0: {**marks(1, 9), 5: mark(5, at_batch=SEEDED, **change)}}
    difference = first_difference({0: marks(1, 9)}, actual)
    name = {each: each.name.removesuffix("_GENERATORS") for each in DifferenceKind}
    assert (difference and name[difference.kind]) == kind
    assert {name[each] for each in (difference.kinds if difference else ())} == kinds
    assert first_difference({0: marks(1, 9)}, actual, ["torch"]) is None or kind != "BATCH" or change.get("inputs")


def test_a_first_batch_that_one_run_has_not_recorded_is_not_compared():
    unseen = {0: {5: mark(5, at_batch=None)}}
    assert first_difference(unseen, {0: {5: mark(5, at_batch=SEEDED)}}) is None
    other = {0: {5: mark(5, at_batch=SEEDED, at_forward=SEEDED)}}
    assert first_difference(unseen, other).kinds == {DifferenceKind.FORWARD_GENERATORS}


def test_the_first_step_counts_then_the_first_kind():
    late = {0: {**marks(1, 9), 4: mark(4, leaves={"w": "x", "b": "b4"}), 3: mark(3, state={"data": "x"}, leaves={})}}
    difference = first_difference({0: marks(1, 9)}, late)
    assert (difference.step, difference.kind) == (3, DifferenceKind.STATE)
    assert difference.kinds == {DifferenceKind.STATE, DifferenceKind.LEAVES}


def test_only_steps_of_both_runs_are_compared():
    assert first_difference({0: marks(1, 5)}, {0: marks(4, 9)}) is None


def test_a_step_without_forward_has_no_forward_generators():
    assert first_difference({0: {5: mark(5, at_forward=None)}}, {0: {5: mark(5)}}) is None


def test_unseeded_generators_are_not_compared():
    expected = {0: attach(0, generators={"torch": "g", "python": "p"})}
    actual = {0: attach(0, generators={"torch": "g", "python": "q"})}
    assert unseeded_generators(expected, actual) == {"python"}
    other = {0: {5: mark(5, at_forward={"torch": "g4", "python": "x"}, generators={"torch": "g5", "python": "x"})}}
    assert first_difference({0: marks(1, 9)}, other, ["python"]) is None
    assert first_difference({0: marks(1, 9)}, other).names == ["python"]


def test_a_generator_that_attach_did_not_bring_back_is_named_as_that():
    moved = {"torch": "x", "python": "p"}
    for at_batch in (moved, None):
        wrong = {"torch": "wrong", "python": "p"}
        restarted = {0: attempt(4, 9, at_batch={5: at_batch}, at_forward={5: moved}, generators=wrong)}
        difference = restored_difference({0: marks(1, 9)}, restarted)
        assert (difference.step, difference.kind) == (5, DifferenceKind.ATTACH_GENERATORS)
    restarted = {0: attempt(4, 9, at_forward={5: moved}, generators={"torch": "g4", "python": "p"})}
    assert restored_difference({0: marks(1, 9)}, restarted).kind is DifferenceKind.FORWARD_GENERATORS


def test_generators_may_be_put_back_after_attach():
    restarted = {0: attempt(4, 9, generators={"torch": "wrong", "python": "p"})}
    assert restored_difference({0: marks(1, 9)}, restarted) is None


def test_an_entry_of_state_that_each_run_makes_anew_is_no_difference():
    expected = {0: {step: mark(step, state={"data": "d", "log": f"a{step}"}) for step in range(1, 6)}}
    actual = {0: {step: mark(step, state={"data": "d", "log": f"b{step}"}) for step in range(1, 6)}}
    assert drifting_state(expected, actual, ()) == {"state=log"}
    assert first_difference(expected, actual, {"state=log"}) is None
    assert first_difference(expected, actual, {"log"}).names == ["log"]
    actual[0][4] = replace(actual[0][4], leaves={})
    assert drifting_state(expected, actual, ()) == frozenset()


def test_names_that_one_side_lacks_differ():
    assert differing({"a": 1, "b": None}, {"a": 1, "c": None}) == ["b", "c"]


def test_steps_that_all_ranks_have():
    assert steps_of({0: marks(2, 7), 1: marks(3, 9)}) == (3, 7)
    assert steps_of({0: marks(2, 3), 1: marks(5, 6)}) == steps_of({}) == (0, 0)


def test_records_are_divided_at_each_attach():
    move = MoveRecord("torch", "train.py", 4, "iter(loader)")
    alive = AliveObject("ema", "AveragedModel", "ema")
    untraced = UntracedRecord("a debugger")
    found = attempts_of([mark(1), attach(0), mark(1), AliveRecord([alive]), attach(1), untraced, move, mark(2)])
    assert [(list(each.marks), each.moves, each.alive) for each in found] == [([1], [], [alive]), ([2], [move], [])]
    assert [each.untraced for each in found] == ["", "a debugger"]
