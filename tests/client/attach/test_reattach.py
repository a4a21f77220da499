"""Tests of placement reviews and of the decisions of a re-attach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reft.client.attach.plan import recover
from reft.client.attach.reattach import (
    NOTHING,
    PlacementReviews,
    _end_snapshots,
    _reason,
    all_mismatched,
    given_up,
    is_due,
)
from reft.core.commit.version import Epoch, Version
from reft.errors import AttachError
from reft.wire.inventory import JobSurvey
from tests.support import attaches


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
        misfits=lambda: bool(unplanned_leaves),
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
        round=SimpleNamespace(whole=known, is_discarded=lambda step: step <= 3),
        retire=lambda deadline_s: acts.append("closed") or True,
        slots=SimpleNamespace(daemon_whole=lambda: acts.append("asked") or (None if told is None else Version(OWN, told))),
    )  # fmt: skip
    assert tuple(_end_snapshots(8, ended)) == newest
    assert acts == ["closed", "asked"], "what is asked for sooner may be let go of in between"


FIRST = attaches.begun()


@pytest.mark.parametrize(("whole", "steps"), [((1, 8), [9]), ((1, 7), [8, 9]), ((0, 9), [7, 8, 9]), ((1, 9), [])])
def test_versions_that_nobody_knows_to_be_whole_are_given_up(whole, steps):
    """The round may have refused them, because replicas differ."""
    survey = attaches.survey_of(FIRST, {"a": [7, 8, 9], "b": [7, 8, 9]})
    erased = given_up(survey, whole)
    assert sorted({version.step for _, _, version in erased}) == steps
    assert {node for node, _, _ in erased} == (set("ab") if steps else set())


def test_capsules_of_versions_that_are_given_up_are_given_up_too():
    survey = attaches.survey_of(FIRST, {"a": [9]}, a=[(1, 9)])
    assert {slot for _, slot, _ in given_up(survey, (1, 8))} == {"rank-0.slot-9", "capsule-1"}


def test_nothing_is_given_up_if_only_a_daemon_has_heard_of_the_first_whole_version():
    survey = attaches.survey_of(FIRST, {"a": [8], "b": [8]})
    assert survey.inventory.had_whole and given_up(survey, NOTHING) == frozenset()


def test_before_any_whole_version_a_reattach_gives_up_all_and_starts_fresh():
    survey = attaches.survey_of(FIRST, {"a": [8], "b": [8]})
    for reply in survey.replies.values():
        reply.had_whole = False
    survey = JobSurvey(survey.replies)
    erased = given_up(survey, NOTHING)
    assert len(erased) == 2
    assert recover("job", survey, erased, not survey.inventory.had_whole).base is None


def test_a_reattach_keeps_all_leaves_apart_that_ever_differed():
    base = attaches.begun(mismatched=["base"]).manifest
    assert all_mismatched(["now"], ["known"], base) == ["base", "known", "now"]
    assert all_mismatched(["now"], ["now"], None) == ["now"]


def test_the_reason_names_the_leaves_that_differ_anew():
    assert _reason(["a"], ["a"]) == "it covers leaves that attach could not predict."
    assert (
        _reason(["a"], ["a", "e", "d", "c", "b"]) == "ranks differ in b, c, d and 1 more: each rank keeps its own copy."
    )
