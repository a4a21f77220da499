"""All reachable states of the commit model keep the invariants; each broken rule violates one."""

from __future__ import annotations

import pytest

from tests.core.model.commit_model import Model, Rules, Size, Violation

# size, number of states up to the order of ranks; the number changes only if the model changes
SIZES = {
    "two slots, a crash": (Size(ranks=2, slots=2, steps=3, crashes=1), 29_876),
    "two slots, two crashes": (Size(ranks=2, slots=2, steps=2, crashes=2), 4_444),
    "three slots, a crash": (Size(ranks=2, slots=3, steps=2, crashes=1), 2_308),
    "three ranks, two crashes": (Size(ranks=3, slots=2, steps=1, crashes=2), 478),
    "three ranks, no crash": (Size(ranks=3, slots=2, steps=2, crashes=0), 1_771),
    "two slots, many steps": (Size(ranks=2, slots=2, steps=4, crashes=0), 7_953),
    "three slots, many steps": (Size(ranks=2, slots=3, steps=3, crashes=0), 3_655),
}


@pytest.mark.soak
def test_the_rules_hold_for_three_ranks_and_a_crash():
    assert Model(Size(ranks=3, slots=2, steps=2, crashes=1), Rules()).explore() == 45_681


@pytest.mark.parametrize("name", SIZES)
def test_the_rules_hold(name):
    size, states = SIZES[name]
    assert Model(size, Rules()).explore() == states


MUTANTS = {
    "no reuse rule": (Rules(reuse=False), "was announced"),
    "at least s instead of exactly s": (Rules(exact=False), "was announced"),
    "a void counts as an answer": (Rules(voids_count=True), "was announced"),
    "void because a rank is late": (Rules(early_voids=True), "was announced"),
    "recovery trusts announcements": (Rules(trust_round=True), "was announced"),
    "versions keyed by step only": (Rules(keyed_by_epoch=False), "different versions|dead history"),
    "slots of the older history not dropped": (Rules(drops=False), "no slot to go on with"),
    "base not pinned after a restart": (Rules(pins_base=False), "or is the base"),
    "older histories count": (Rules(reads_decision=False), "dead history"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_broken_rule_is_caught(name):
    rules, invariant = MUTANTS[name]
    with pytest.raises(Violation, match=invariant):
        Model(Size(ranks=2, slots=2, steps=3, crashes=1), rules).explore()


def test_step_keys_mix_two_histories():
    """Recovery would mix an orphan's step 1 with a new step 1.

    The orphan is of epoch 1, the new step of epoch 2.
    """

    class Mixing(Model):
        def check(self, state):
            if not self.recovered(state)[1]:
                raise Violation(f"ranks load different versions: {state}")

    size = Size(ranks=2, slots=2, steps=2, crashes=1)
    with pytest.raises(Violation, match="different versions"):
        Mixing(size, Rules(keyed_by_epoch=False)).explore()
    assert Mixing(size, Rules()).explore() == 2_308


def test_a_leak_of_slots_is_a_violation_with_three_slots_too():
    with pytest.raises(Violation, match="no slot to go on with"):
        Model(Size(ranks=2, slots=3, steps=4, crashes=1), Rules(drops=False)).explore()
