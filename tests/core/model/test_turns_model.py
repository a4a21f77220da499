"""Turns and pins: the rules hold in small states and on random paths; each mistake is caught."""

from __future__ import annotations

import random

import pytest

from tests.core.model.commit_model import Violation
from tests.core.model.turns_model import Model, Rules, Size

# size, number of states up to rotation of the ring; the number changes only if the model changes
SIZES = {
    "four slots": (Size(slots=4, steps=2), 1_654),
    "two slots, no voids": (Size(slots=2, steps=3, voids=False), 9_155),
    "an attach": (Size(slots=2, steps=2, attaches=1, voids=False), 1_871),
    "a loss of parity, or a restart of the coordinator": (Size(slots=3, steps=2, losses=1, voids=False), 4_370),
    "another turn of a step": (Size(slots=2, steps=1, losses=1, retries=2, voids=False), 980),
}
LARGE_SIZES = {
    "another turn of a step": (Size(slots=2, steps=2, losses=1, retries=1, voids=False), 30_942),
    "three slots": (Size(slots=3, steps=3, voids=False), 15_176),
    "an attach": (Size(slots=2, steps=3, attaches=1, voids=False), 28_980),
}
# size, and the number of random paths
PATHS = {
    "four slots": (Size(slots=4, steps=6), 60),
    "two attaches": (Size(slots=3, steps=5, attaches=2, voids=False), 60),
    "two attaches in other shapes": (Size(slots=4, steps=5, attaches=2, losses=1, reshapes=True, voids=False), 250),
    "two losses": (Size(slots=3, steps=6, losses=2, voids=False), 60),
    "losses, and more turns of a step": (Size(slots=4, steps=5, losses=3, retries=4, voids=False), 120),
    "more turns, and an attach": (Size(slots=3, steps=4, attaches=1, losses=2, retries=3, voids=False), 60),
    "three nodes": (Size(slots=4, steps=6, nodes=3, attaches=1, losses=1, voids=False), 60),
}
LENGTH = 150


@pytest.mark.parametrize("name", SIZES)
def test_the_rules_hold(name):
    size, states = SIZES[name]
    assert Model(size, Rules()).explore() == states


@pytest.mark.soak
@pytest.mark.parametrize("name", LARGE_SIZES)
def test_the_rules_hold_in_more_states(name):
    size, states = LARGE_SIZES[name]
    assert Model(size, Rules()).explore() == states


def walk(size: Size, rules: Rules, paths: int, seed: int = 1) -> Model:
    model, chance = Model(size, rules), random.Random(seed)
    for _ in range(paths):
        model.walk(chance, LENGTH)
    return model


LONGEST = ("two attaches in other shapes", "losses, and more turns of a step", "three nodes")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONGEST)) for name in PATHS])
def test_the_rules_hold_on_long_paths(name):
    size, paths = PATHS[name]
    model = walk(size, Rules(), paths)
    assert model.protected and (model.guarded or not size.attaches) and (model.weakened or not size.retries)


@pytest.mark.soak
@pytest.mark.parametrize("name", PATHS)
def test_the_rules_hold_on_many_long_paths(name):
    size, paths = PATHS[name]
    walk(size, Rules(), 50 * paths, seed=2)


STEADY = Size(slots=4, steps=6, voids=False)
RESTART = Size(slots=3, steps=6, losses=2, voids=False)
ATTACH = Size(slots=3, steps=5, attaches=2, voids=False)
RETRY = Size(slots=4, steps=5, losses=3, retries=4, voids=False)
RESHAPE = Size(slots=3, steps=5, attaches=1, reshapes=True, voids=False)
MUTANTS = {
    "the protected version is not pinned": (Rules(pins_protected=False), STEADY),
    "the turn's version is not pinned": (Rules(pins_turn=False), RESTART),
    "the guard is not pinned": (Rules(pins_guard=False), ATTACH),
    "a turn takes an older step": (Rules(takes_newest=False), STEADY),
    "whole travels apart from the pins": (Rules(one_value=False), STEADY),
    "a restarted daemon passes on whole without pins": (Rules(ignores_since=False), STEADY),
    "one buffer for parity": (Rules(two_buffers=False), STEADY),
    "a holder begins older parity": (Rules(buffers_ascend=False), STEADY),
    "the coordinator forgets its pins in a restart": (Rules(records=False), RESTART),
    "holders drop capsules of pinned versions": (Rules(keeps_capsules=False), STEADY),
    "an attach forgets the guard": (Rules(carries_guard=False), ATTACH),
    "retired slots are freed by whole alone": (Rules(keeps_retired=False), RESHAPE),
    "one node's parity is enough": (Rules(waits_for_all=False), STEADY),
    "reports name the step, not the turn": (Rules(names_attempts=False), RETRY),
    "what is left of a protected step is not pinned": (Rules(pins_kept=False), RETRY),
    "turns write what is left of its parity": (Rules(keeps_parity=False), RETRY),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_broken_rule_is_caught(name):
    rules, size = MUTANTS[name]
    with pytest.raises(Violation, match="is protected, recovery finds"):
        walk(size, rules, 600)


def test_a_turn_may_not_begin_while_the_pins_leave_one_slot(monkeypatch):
    """With a turn beside the protected version, a rank with three slots waits for the turn."""
    monkeypatch.setattr("tests.core.model.turns_model.SLOTS", 3)
    monkeypatch.setattr("reft.core.commit.pins._leaves_two_slots", lambda pins, facts: True)
    with pytest.raises(Violation, match="no slot to go on with"):
        walk(Size(slots=3, steps=6, voids=False), Rules(), 600)
