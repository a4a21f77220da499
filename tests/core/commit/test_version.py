"""Versions: ordered by (epoch counter, step); equal only if the ids of the epochs are equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reft.core.commit.version import Epoch, Version

VERSIONS = st.builds(
    Version,
    st.builds(Epoch, st.integers(0, 3), st.sampled_from([b"a" * 16, b"b" * 16])),
    st.integers(0, 3),
)


@given(VERSIONS, VERSIONS)
def test_order(one, other):
    pair = (one.epoch.counter, one.step), (other.epoch.counter, other.step)
    assert one.is_older_than(other) == (pair[0] < pair[1])
    assert not (one.is_older_than(other) and other.is_older_than(one))


def test_versions_with_one_counter_and_two_ids_are_unequal_and_unordered():
    one, other = Version(Epoch(2, b"a" * 16), 5), Version(Epoch(2, b"b" * 16), 5)
    assert one != other
    assert not one.is_older_than(other) and not other.is_older_than(one)


def test_a_later_epoch_beats_a_greater_step():
    assert Version(Epoch(1, b"a" * 16), 900).is_older_than(Version(Epoch(2, b"b" * 16), 3))


def test_text():
    assert str(Version(Epoch(7, bytes(16)), 1200)) == "step 1200 (epoch 7)"
