"""A refusal has the value, the tightest limit and the remedy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.core.budget import MemoryLimit, format_bytes, peak_bytes, refusal, slots_to_make

GIB = 1 << 30
MACHINE = MemoryLimit("the machine's free memory", 8 * GIB, "free memory")
FLAG = MemoryLimit("--memory", 2 * GIB, "start reft-daemon with a larger --memory")


def test_the_tightest_limit_is_named():
    text = refusal(3 * GIB, [MACHINE, FLAG])
    assert text == "the slots need 3.0 GiB, but --memory leaves 2.0 GiB.\nFix: start reft-daemon with a larger --memory"


def test_what_fits_exactly_is_allowed():
    assert refusal(2 * GIB, [MACHINE, FLAG]) is None
    assert refusal(2 * GIB + 1, [MACHINE, FLAG]) is not None


def test_without_limits_nothing_is_refused():
    assert refusal(1 << 80, []) is None


def test_an_exceeded_limit_leaves_zero_bytes():
    text = refusal(1, [MemoryLimit("the machine's free memory", -5 * GIB, "free memory")])
    assert "leaves 0 B" in text
    assert refusal(0, [MemoryLimit("the machine's free memory", -1, "free memory")]) is not None


@given(st.integers(0, 1 << 70), st.lists(st.integers(-(1 << 40), 1 << 70), max_size=4))
def test_refused_exactly_if_some_limit_is_exceeded(need, free):
    limits = [MemoryLimit(f"limit {i}", value, "less") for i, value in enumerate(free)]
    text = refusal(need, limits)
    assert (text is not None) == any(need > value for value in free)
    assert text is None or "Fix: less" in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 10, "1.5 MiB"), (GIB, "1.0 GiB"),
        (1 << 40, "1.0 TiB"), (1 << 63, "8388608.0 TiB"),
    ],
)  # fmt: skip
def test_size(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("wanted", "fitting", "holds_older", "count"),
    [
        (3, 0, False, 3),
        (3, 0, True, 2),
        (2, 0, True, 2),
        (16, 0, True, 2),
        (3, 1, True, 1),
        (3, 2, True, 0),
        (3, 3, True, 0),
        (3, 2, False, 1),
        (3, 3, False, 0),
    ],
)
def test_a_rank_begins_with_two_slots_while_older_ones_are_held(wanted, fitting, holds_older, count):
    assert slots_to_make(wanted, fitting, holds_older) == count


@pytest.mark.parametrize(("wanted", "slots"), [(2, 3), (3, 3), (5, 5)])
def test_the_peak_is_the_base_and_two_slots_or_all_wanted_slots(wanted, slots):
    assert peak_bytes(100, wanted) == 100 * slots
