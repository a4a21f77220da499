"""The choice of the parity slot that a turn writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reft.core.commit.parity_slots import choose_buffer
from reft.core.commit.version import Epoch, Version

ONE, TWO, OTHER = Epoch(1, b"1" * 16), Epoch(2, b"2" * 16), Epoch(1, b"x" * 16)
VERSIONS = st.builds(Version, st.sampled_from([ONE, TWO, OTHER]), st.integers(0, 4))
HELD = st.lists(st.one_of(st.none(), VERSIONS), min_size=2, max_size=2)


def at(step: int, epoch: Epoch = ONE) -> Version:
    return Version(epoch, step)


def test_an_empty_slot_is_written_first():
    assert choose_buffer([at(3), None], None, at(5)) == 1
    assert choose_buffer([None, None], None, at(5)) == 0


def test_the_protected_version_stays():
    assert choose_buffer([at(3), at(4)], at(3), at(5)) == 1
    assert choose_buffer([at(3), at(4)], at(4), at(5)) == 0


def test_the_guard_of_an_older_epoch_stays():
    assert choose_buffer([at(9), at(2)], at(9), at(0, TWO)) == 1


def test_a_turn_that_was_begun_goes_on_in_its_slot():
    assert choose_buffer([None, at(5)], None, at(5)) == 1


def test_a_late_turn_writes_nothing():
    assert choose_buffer([at(3), at(6)], at(3), at(5)) is None
    assert choose_buffer([at(0, TWO), None], None, at(9)) is None


def test_an_equal_order_of_another_history_is_not_overwritten():
    assert choose_buffer([at(5, OTHER), None], None, at(5)) is None


def test_the_protected_version_is_not_made_again():
    assert choose_buffer([at(3), at(5)], at(5), at(5)) == 0


@given(HELD, st.one_of(st.none(), VERSIONS), VERSIONS)
def test_no_choice_loses_the_protected_or_a_newer_version(held, protected, turn):
    index = choose_buffer(held, protected, turn)
    if index is None:
        assert any(version is not None and not version.is_older_than(turn) for version in held) or protected in held
    else:
        assert held[index] is None or held[index] != protected
        assert all(version is None or version == turn or version.is_older_than(turn) for version in held)
