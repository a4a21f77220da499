"""Measures how long turns of the exchange last, as a rank hears of them."""

from __future__ import annotations

from reft.core.commit.pins import Pins


class TurnMeter:
    """How long the last turn lasted, by the pins known at each snapshot.

    A turn that begins and ends between two snapshots is not measured.

    Attributes:
        last_s: seconds of the last measured turn; -1 if none was.
    """

    def __init__(self) -> None:
        self.last_s = -1.0
        self._turn = -1
        self._began_s = 0.0

    def note(self, pins: Pins, now_s: float) -> None:
        """Takes the newest pins."""
        if 0 <= self._turn == pins.protected:
            self.last_s = now_s - self._began_s
        if pins.turn != self._turn:
            self._turn, self._began_s = pins.turn, now_s
