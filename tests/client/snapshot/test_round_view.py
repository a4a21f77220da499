"""What a rank must not overwrite, by one outcome."""

from __future__ import annotations

from types import SimpleNamespace

from reft.client.snapshot.round_view import KeptVersions, RoundView
from reft.core.commit.decision import Decision
from reft.core.commit.pins import Pins
from reft.core.commit.version import Epoch, Version

OLD, NEW = Epoch(1, b"o" * 16), Epoch(2, b"n" * 16)
BASE, GUARD = Version(OLD, 7), Version(OLD, 5)


def view_of(pins: Pins) -> RoundView:
    return RoundView(SimpleNamespace(pins=pins), Decision(NEW, BASE, (OLD,), GUARD))  # type: ignore[arg-type]


def new(*steps: int) -> set[Version]:
    return {Version(NEW, step) for step in steps}


def test_at_first_the_base_and_the_guard_are_kept():
    assert view_of(Pins()).kept == KeptVersions(BASE, frozenset({BASE, GUARD}))


def test_whole_and_pinned_versions_come_from_the_same_outcome():
    whole, pinned = view_of(Pins(3, 12, 10, 8)).kept
    assert whole == Version(NEW, 12) and pinned == new(8, 10, 12)
    assert view_of(Pins(1, 12, 10)).kept.pinned == {*new(10, 12), GUARD}


def test_discarded_steps_pin_nothing():
    """Their numbers counted calls of the optimizer: the base and the guard stay."""
    view = view_of(Pins(2, 9, 9, 8))
    view.discarded_until = 9
    assert view.kept == KeptVersions(BASE, frozenset({BASE, GUARD})) and view.whole_step == 7
    view.discarded_until = 8
    assert view.whole == Version(NEW, 9)
