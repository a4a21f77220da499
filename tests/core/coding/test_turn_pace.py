"""The pace of a turn: a tenth of the link, spread over 30 s, never where a second is enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.core.coding.turn_pace import (
    NO_LIMIT,
    SPREAD_LEAST,
    SPREAD_S,
    TurnPace,
    automatic_limit,
    fixed_limit,
    pace_words,
    turn_pace,
)

GB = 10**9
CARD = automatic_limit("eth0", 50 * GB)  # 400 Gbit/s
UNKNOWN = automatic_limit("eth0", None)


@pytest.mark.parametrize(
    ("limit", "sent_bytes", "bytes_per_s", "reason"),
    [
        (NO_LIMIT, 10**15, 0, "--protect-bandwidth is off"),
        (fixed_limit(200), 199, 0, "a turn fits into one second of the limit"),
        (fixed_limit(200), 200, 200, "--protect-bandwidth"),
        (fixed_limit(200), 10**15, 200, "--protect-bandwidth"),
        (CARD, 5 * GB - 1, 0, "a turn fits into one second of the limit"),
        (CARD, 5 * GB, 166_666_667, "a turn is spread over 30 s"),
        (CARD, 105 * GB, 3_500_000_000, "a turn is spread over 30 s"),
        (CARD, 150 * GB, 5 * GB, "a tenth of eth0's speed"),
        (CARD, 900 * GB, 5 * GB, "a tenth of eth0's speed"),
        (UNKNOWN, 125_000_000 - 1, 0, "a turn fits into one second of the limit"),
        (UNKNOWN, 125_000_000, SPREAD_LEAST, "a turn is spread over 15 s"),
        (UNKNOWN, 900 * GB, 30 * GB, "a turn is spread over 30 s"),
    ],
)
def test_the_pace_of_a_turn(limit, sent_bytes, bytes_per_s, reason):
    assert turn_pace(limit, sent_bytes) == TurnPace(bytes_per_s, reason)


@given(st.none() | st.integers(10, 10**12), st.integers(0, 10**15))
def test_auto_keeps_a_tenth_of_the_link_and_never_stretches_a_turn_further_than_that_or_30_s(link, sent_bytes):
    limit = automatic_limit("eth0", link)
    pace = turn_pace(limit, sent_bytes).bytes_per_s
    if not pace:  # all that is sent in a second is within the limit
        assert sent_bytes < (limit.bytes_per_s or 125_000_000)
        return
    assert link is None or 10 * pace <= link
    assert pace >= limit.bytes_per_s > 0 or sent_bytes <= pace * SPREAD_S


def test_words_say_the_pace_and_why():
    assert pace_words(turn_pace(fixed_limit(200 << 20), GB)) == "at most 200.0 MiB a second: --protect-bandwidth"
    assert pace_words(turn_pace(UNKNOWN, 5)) == "not paced: a turn fits into one second of the limit"
    assert automatic_limit("", None).origin == "the speed of the link is unknown"
