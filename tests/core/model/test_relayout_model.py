"""All reachable states of the model of a new layout keep its invariant; broken rules violate it."""

from __future__ import annotations

import pytest

from tests.core.model.commit_model import Violation
from tests.core.model.relayout_model import RelayoutModel, Rules


@pytest.mark.parametrize(("steps", "slots", "failures"), [(2, 2, 1), (2, 3, 0)])
def test_the_rules_hold(steps, slots, failures):
    model = RelayoutModel(steps, Rules(), failures, slots)
    assert model.explore() > 1000 and model.has_new_version


@pytest.mark.soak
def test_the_rules_hold_for_three_steps_and_a_failure():
    assert RelayoutModel(3, Rules()).explore() > 10_000


MUTANTS = {
    "ranks go on after hold": (Rules(holds=False), "writes in the old epoch"),
    "hold does not wait for the last snapshot": (Rules(ends_first=False), "writes in the old epoch"),
    "no pin, no check": (Rules(pins=False, checks=False), "was known to be whole"),
    "a restarted daemon takes any base": (Rules(checks=False), "was known to be whole"),
    "rank 0 alone names the base": (Rules(asks_all=False, checks=False), "was known to be whole"),
    "the new epoch writes over the base": (Rules(keeps_base=False), "was known to be whole"),
    "a rank begins before every daemon has the decision": (Rules(decides_first=False), "was known to be whole"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_broken_rule_is_caught(name):
    rules, invariant = MUTANTS[name]
    with pytest.raises(Violation, match=invariant):
        RelayoutModel(3, rules).explore()
