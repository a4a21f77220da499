"""The reuse rule, and the choice of the next slot to write."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reft.core.commit.slots import Slot, SlotState, choose_slot, may_reuse
from reft.core.commit.version import Epoch, Version

ONE, TWO = Epoch(1, b"1" * 16), Epoch(2, b"2" * 16)


def at(step: int, epoch: Epoch = ONE) -> Version:
    return Version(epoch, step)


def slot(version: Version | None, state: SlotState = SlotState.SEALED, index: int = 0) -> Slot:
    return Slot(index, SlotState.EMPTY if version is None else state, version)


VERSIONS = st.builds(at, st.integers(0, 6), st.sampled_from([ONE, TWO]))
STATES = st.sampled_from([SlotState.WRITING, SlotState.LANDED, SlotState.SEALED])
SLOTS = st.lists(st.one_of(st.just(slot(None)), st.builds(slot, VERSIONS, STATES)), max_size=5).map(
    lambda slots: [Slot(i, slot.state, slot.version) for i, slot in enumerate(slots)]
)


def test_an_empty_slot_is_free():
    assert may_reuse(slot(None), None, ())


def test_without_a_known_whole_version_no_used_slot_is_free():
    assert not any(may_reuse(slot(at(3), state), None, ()) for state in list(SlotState)[1:])


def test_only_versions_older_than_the_whole_one_are_free():
    assert may_reuse(slot(at(3)), at(4), ())
    assert not may_reuse(slot(at(4)), at(4), ())
    assert not may_reuse(slot(at(5)), at(4), ())


def test_the_whole_version_of_an_older_epoch_protects_itself_and_frees_what_came_before():
    assert not may_reuse(slot(at(3)), at(3), ())
    assert may_reuse(slot(at(2)), at(3), ())
    assert may_reuse(slot(at(9)), at(0, TWO), ())


def test_a_void_of_exactly_this_version_frees_it():
    assert may_reuse(slot(at(5)), at(3), {at(5)})
    assert not may_reuse(slot(at(5)), at(3), {at(6)})
    assert not may_reuse(slot(at(5)), at(3), {at(5, TWO)})


def test_a_pinned_version_is_not_free_though_a_newer_one_is_whole():
    assert not may_reuse(slot(at(3)), at(5), (), {at(3), at(4)})
    assert may_reuse(slot(at(2)), at(5), (), {at(3), at(4)})
    assert may_reuse(slot(at(3)), at(5), (), {at(3, TWO)})


def test_an_equal_order_with_another_id_is_not_older():
    assert not may_reuse(slot(at(4, Epoch(1, b"x" * 16))), at(4), ())


@given(SLOTS, st.one_of(st.none(), VERSIONS), st.frozensets(VERSIONS, max_size=4), st.frozensets(VERSIONS, max_size=2))
def test_the_choice_equals_a_naive_implementation(slots, whole, voids, pinned):
    """The naive form: sorts all slots by age, and takes the first that the rule allows."""
    allowed = []
    for each in slots:
        is_empty = each.version is None
        is_superseded = not is_empty and whole is not None and each.version.order < whole.order
        is_void = any(each.version == void for void in voids)
        if is_empty or ((is_superseded or is_void) and each.version not in pinned):
            allowed.append(each)
    allowed.sort(key=lambda each: (0, 0, 0) if each.version is None else (1, *each.version.order))
    assert choose_slot(slots, whole, voids, pinned) == (allowed[0] if allowed else None)


@given(SLOTS, VERSIONS)
def test_the_newest_whole_version_is_never_chosen(slots, whole):
    chosen = choose_slot(slots, whole, ())
    assert chosen is None or chosen.version != whole


def test_the_numbers_of_the_states_are_those_of_the_format():
    assert [(state.name, state.value) for state in SlotState] == [
        ("EMPTY", 0), ("WRITING", 1), ("LANDED", 2), ("SEALED", 3),
    ]  # fmt: skip
