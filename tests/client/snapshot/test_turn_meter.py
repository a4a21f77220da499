"""How long turns last, by the pins that a rank hears."""

from __future__ import annotations

from reft.client.snapshot.turn_meter import TurnMeter
from reft.core.commit.pins import Pins


def test_a_turn_lasts_from_the_first_pins_with_it_until_its_step_is_protected():
    meter = TurnMeter()
    seconds = []
    for now_s, turn, protected in [
        (1.0, -1, -1), (2.0, 5, -1), (3.0, 5, -1), (4.5, -1, 5), (9.0, -1, 5),
        (10.0, 7, 5), (11.0, 8, 7), (13.0, -1, 8),
    ]:  # fmt: skip
        meter.note(Pins(turn=turn, protected=protected), now_s)
        seconds.append(meter.last_s)
    assert seconds == [-1, -1, -1, 2.5, 2.5, 2.5, 1.0, 2.0]


def test_a_turn_that_protects_nothing_is_not_measured():
    meter = TurnMeter()
    for now_s, turn in [(1.0, 5), (2.0, -1), (3.0, 7)]:
        meter.note(Pins(turn=turn), now_s)
    assert meter.last_s == -1
