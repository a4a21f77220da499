"""Tests of placement reviews: when they are due, and that training survives their failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reft.client.attach.reattach import NOTHING, PlacementReviews, _end_snapshots, is_due
from reft.core.commit.version import Epoch, Version
from reft.errors import AttachError


def test_reviews_are_due_at_powers_of_two():
    assert [steps for steps in range(70) if is_due(steps)] == [2, 4, 8, 16, 32, 64]


class Exchange:
    """A rank group of two ranks; the test gives the other rank's answers."""

    def __init__(self, other: dict[str, Any] | Exception) -> None:
        self.group: object | None = object()
        self.rank, self.other, self.met = 0, other, 0

    def gather_or_raise(self, act: Any, extra_s: float = 0, deadline_s: float | None = None) -> list[dict[str, Any]]:
        self.met += 1
        if isinstance(self.other, Exception):
            raise self.other
        return [act(), self.other]

    def close(self) -> None:
        self.group = None


def snapshots(unplanned_leaves: tuple[str, ...] = (), retires: bool = True) -> Any:
    return SimpleNamespace(
        unplanned_leaves=unplanned_leaves,
        reporter=SimpleNamespace(mismatched=frozenset()),
        retire=lambda deadline_s: retires,
    )


def reviews(other: dict[str, Any] | Exception) -> Any:
    return PlacementReviews(SimpleNamespace(rank_group=Exchange(other)), (), 10)  # type: ignore[arg-type]


def test_ranks_exchange_only_when_a_review_is_due():
    it, held = reviews({"misfits": False}), snapshots()
    assert all(it.at(step, held) is held for step in range(11, 75))
    assert it.context.rank_group.met == 6


def test_a_missing_rank_ends_the_reviews_not_the_snapshots():
    it, held = reviews(AttachError("not all came")), snapshots(("leaf",))
    assert it.at(12, held) is held and it.at(14, held) is held
    assert it.context.rank_group.met == 1


def test_a_failed_reattach_ends_the_snapshots_not_training(caplog):
    it = reviews({"misfits": True})
    assert it.at(12, snapshots(retires=False)) is None
    assert "takes no more snapshots" in caplog.text and it.context.rank_group.group is None


BASE, OWN = Version(Epoch(2, b"b" * 16), 6), Epoch(3, b"c" * 16)


@pytest.mark.parametrize(
    ("known", "told", "newest"),
    [(BASE, None, (2, 6)), (BASE, 7, (3, 7)), (Version(OWN, 8), 7, (3, 8)), (BASE, 3, (2, 6)), (None, None, NOTHING)],
    ids=["nothing new", "the daemon heard first", "the rank heard first", "a step that was discarded", "nothing"],
)
def test_the_base_is_the_newest_version_that_a_rank_or_daemon_knows_to_be_whole(known, told, newest):
    """A daemon that knows a whole version may have freed older data."""
    acts = []
    ended = SimpleNamespace(
        whole=known, is_discarded=lambda step: step <= 3, retire=lambda deadline_s: acts.append("closed") or True,
        leases=SimpleNamespace(whole=lambda: acts.append("asked") or (None if told is None else Version(OWN, told))),
    )  # fmt: skip
    assert tuple(_end_snapshots(8, ended)) == newest
    assert acts == ["closed", "asked"], "what is asked for sooner may be let go of in between"
