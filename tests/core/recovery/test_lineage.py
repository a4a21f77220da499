"""Tests which of several decisions is in force, and when only a person can choose."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from reft.core.commit.decision import KNOWN_MAX, Decision
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.lineage import histories, known_to, next_epoch, written_by
from reft.core.recovery.recovery import HeldCapsule, HeldSlot

ONE, TWO, THREE = (Epoch(n, bytes([n]) * 16) for n in (1, 2, 3))
TWIN = Epoch(2, b"x" * 16)  # the same counter, a greater id
FRESH = Decision(ONE, None)


def at(step: int, epoch: Epoch = ONE) -> Version:
    return Version(epoch, step)


def after(epoch: Epoch, step: int, *known: Epoch, of: Epoch = ONE) -> Decision:
    """Returns the decision of an attach that went back to a step of epoch `of`."""
    return Decision(epoch, at(step, of), (*known, of))


def test_a_decision_ends_the_decisions_that_it_knew():
    second = after(TWO, 3)
    assert histories({"a": FRESH, "b": second}, {ONE: "ab", TWO: "b"}, [ONE]) == [second]
    assert histories({"a": FRESH, "b": second}, {}, [ONE, TWO]) == [second]
    assert histories({"a": after(TWIN, 9), "b": after(THREE, 3, TWIN)}, {}, [ONE, TWIN]) == [after(THREE, 3, TWIN)]
    assert histories({}, {}, []) == []


def test_a_decision_that_its_own_nodes_lack_does_not_count():
    torn, carried = after(TWIN, 4), after(TWO, 3)
    members = {ONE: "abc", TWO: "bc", TWIN: "abc", THREE: "abc"}
    assert histories({"a": torn, "b": carried, "c": carried}, members, [ONE]) == [carried]
    assert histories({"a": torn, "b": FRESH}, members, [ONE]) == [FRESH]
    thrice = after(THREE, 4)
    assert histories({"a": thrice, "b": carried, "c": carried}, members, [ONE]) == [carried]
    assert histories({"a": thrice}, members, [ONE]) == [thrice]
    assert histories({"a": carried, "b": thrice, "c": thrice}, {TWO: "a", THREE: "bc"}, [ONE]) == [thrice]


def test_without_other_answers_the_written_versions_decide():
    """B alone received the decision; A and C continued, and A is lost."""
    members = {TWO: "ac", TWIN: "ab", THREE: "ab"}
    for told in (after(TWIN, 3), after(THREE, 3)):
        for base in (3, 2):
            went_on = after(TWO, base)
            assert histories({"b": told, "c": went_on}, members, [ONE, TWO]) == [went_on]


def test_without_written_versions_the_newest_base_counts():
    """A decision with an older base might drop the base of the other one."""
    for first, second in ((TWO, TWIN), (TWIN, TWO)):
        remembered = {"a": after(first, 5), "b": after(second, 3)}
        assert histories(remembered, {TWO: "ab", TWIN: "ab"}, [ONE]) == [after(first, 5)]
        assert histories(remembered, {TWO: "ac", TWIN: "bd"}, [ONE]) == [after(first, 5)]
    begun = after(TWO, 3), Decision(TWIN, None)
    assert histories(dict(zip("ab", begun, strict=True)), {}, [ONE]) == [begun[0]]


def test_two_histories_with_versions_that_do_not_know_each_other_are_both_returned():
    for second in (TWIN, THREE):
        in_force = histories({"a": after(TWO, 3), "b": after(second, 3)}, {}, [ONE, TWO, second])
        assert in_force == [after(second, 3), after(TWO, 3)]
    late = after(THREE, 9, ONE, of=TWIN)  # wrote nothing, but goes back to a history unknown to the other
    assert histories({"a": after(TWO, 3), "b": late}, {}, [ONE, TWO, TWIN]) == [late, after(TWO, 3)]
    assert histories({"a": after(TWO, 3), "b": after(TWIN, 3), "c": late}, {}, [ONE, TWO, TWIN])[1:] == [after(TWO, 3)]


def test_a_decision_that_knows_both_histories_leaves_one():
    chosen = Decision(THREE, at(9, TWO), known_to([after(TWO, 3), after(TWIN, 3)]))
    assert chosen.known == (TWIN, TWO, ONE)
    assert histories({"a": chosen, "b": after(TWIN, 3)}, {}, [ONE, TWO, TWIN]) == [chosen]


def test_a_decision_names_known_max_epochs_and_ends_older_ones_by_counter():
    decisions, known = [], ()
    for n in range(1, KNOWN_MAX + 10):
        decisions.append(Decision(Epoch(n, bytes([n]) * 16), None, known))
        known = known_to(decisions[-1:])
    last = decisions[-1]
    assert len(last.known) == KNOWN_MAX
    assert all(last.supersedes(each.epoch) for each in decisions[:-1]) and not last.supersedes(last.epoch)
    assert not last.supersedes(Epoch(last.epoch.counter - 1, b"another of it"))
    assert histories({"a": decisions[0], "b": last}, {}, [decisions[0].epoch]) == [last]


def test_a_new_epoch_is_above_all_seen_epochs():
    assert next_epoch([], [], b"i" * 16) == Epoch(1, b"i" * 16)
    held = [
        HeldSlot("a", 0, "s", SlotState.SEALED, at(3, THREE)),
        HeldSlot("a", 0, "t", SlotState.EMPTY, None),
    ]
    assert next_epoch([FRESH], held, b"i" * 16).counter == 4
    assert next_epoch([Decision(THREE, None)], held[1:], b"i" * 16).counter == 4
    assert written_by(held, [HeldCapsule("b", 0, at(1, TWO), 0)]) == {TWO, THREE}


@st.composite
def decided(draw):
    """Draws attaches that each saw some earlier ones, with counters above all that they saw."""
    decisions: list[Decision] = []
    for i in range(draw(st.integers(1, 6))):
        seen = draw(st.lists(st.sampled_from(decisions), unique=True)) if decisions else []
        counter = 1 + max((each.epoch.counter for each in seen), default=0)
        base = draw(st.sampled_from([None, *seen]))
        version = base and at(draw(st.integers(0, 3)), base.epoch)
        decisions.append(Decision(Epoch(counter, bytes([i]) * 16), version, known_to(seen)))
    return decisions


@given(decided(), st.data())
def test_the_order_does_not_matter_and_no_unknown_history_is_outranked(decisions, data):
    nodes = data.draw(st.lists(st.sampled_from(decisions), min_size=1, max_size=5))
    written = data.draw(st.sets(st.sampled_from([each.epoch for each in decisions])))
    remembered = {f"n{i}": each for i, each in enumerate(nodes)}
    in_force = histories(remembered, {}, written)
    shuffled = random.Random(data.draw(st.integers(0, 9))).sample(sorted(remembered), len(remembered))
    assert histories({node: remembered[node] for node in shuffled}, {}, written) == in_force
    chosen = in_force[0]
    if len(in_force) == 1:
        for other in nodes:
            if other.epoch in written and other.epoch != chosen.epoch:
                # A remembered decision has ended it. The chosen decision is that one, or outranks
                # it.
                assert any(each.supersedes(other.epoch) for each in nodes)
    else:
        assert not any(each.supersedes(other.epoch) for each in nodes for other in in_force)
