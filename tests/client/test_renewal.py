"""When the placement is reviewed, and what happens if that can't be done: training goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from reft.client.renewal import Reviews, is_due
from reft.errors import AttachError


def test_reviews_become_ever_more_seldom():
    assert [steps for steps in range(70) if is_due(steps)] == [2, 4, 8, 16, 32, 64]


class Exchange:
    """Two ranks, of which the other says what it is told to say."""

    def __init__(self, other: dict[str, Any] | Exception) -> None:
        self.group: object | None = object()
        self.rank, self.other, self.met = 0, other, 0

    def together(self, act: Any, extra_s: float = 0, deadline_s: float | None = None) -> list[dict[str, Any]]:
        self.met += 1
        if isinstance(self.other, Exception):
            raise self.other
        return [act(), self.other]

    def close(self) -> None:
        self.group = None


def snapshots(unforeseen: tuple[str, ...] = (), retires: bool = True) -> Any:
    return SimpleNamespace(
        unforeseen=unforeseen, reporter=SimpleNamespace(unlike=frozenset()), retire=lambda deadline_s: retires
    )


def reviews(other: dict[str, Any] | Exception) -> Any:
    return Reviews(SimpleNamespace(exchange=Exchange(other)), 10)  # type: ignore[arg-type]


def test_what_fits_goes_on_and_ranks_meet_only_when_a_review_is_due():
    it, held = reviews({"misfits": False}), snapshots()
    assert all(it.at(step, held) is held for step in range(11, 75))
    assert it.attachment.exchange.met == 6


def test_a_rank_that_does_not_come_ends_the_reviews_not_the_snapshots():
    it, held = reviews(AttachError("not all came")), snapshots(("leaf",))
    assert it.at(12, held) is held and it.at(14, held) is held
    assert it.attachment.exchange.met == 1


def test_a_renewal_that_fails_ends_the_snapshots_not_training(caplog):
    it = reviews({"misfits": True})
    assert it.at(12, snapshots(retires=False)) is None
    assert "takes no more snapshots" in caplog.text and it.attachment.exchange.group is None
