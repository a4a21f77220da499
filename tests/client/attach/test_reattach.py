"""Tests of placement reviews and of the decisions of a re-attach."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from reft.client.attach import reattach as module
from reft.client.attach.api import _with_reviews
from reft.client.attach.plan import recover
from reft.client.attach.reattach import (
    NOTHING,
    PlacementReviews,
    _reason,
    all_mismatched,
    carry_out,
    digest_of_leaves,
    find_mismatched,
    given_up,
    hold,
    lease_alone,
    resume,
)
from reft.client.attach.run import AttachResult
from reft.client.link.rank_group import RanksMissing
from reft.core.commit.relayout import LayoutOutcome, LayoutReport
from reft.core.commit.version import Epoch, Version
from reft.errors import AttachError, DaemonUnavailable, NoRoom
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb
from tests.support import attaches
from tests.support.daemons import until


class Exchange:
    """A rank group of two ranks; the test gives the other rank's answers, one after the other."""

    def __init__(self, *others: dict[str, Any] | Exception) -> None:
        self.group: object | None = object()
        self.rank, self.world, self.others, self.met = 0, 2, list(others), 0

    def gather_or_raise(self, act: Any, extra_s: float = 0, deadline_s: float | None = None) -> list[dict[str, Any]]:
        self.met += 1
        other = self.others.pop(0)
        if isinstance(other, Exception):
            raise other
        return [act(), other]

    def close(self) -> None:
        self.group = None


def reporter(**layout: int) -> Any:
    return SimpleNamespace(
        layout=LayoutOutcome(**layout),
        layout_report=LayoutReport(),
        send=lambda: None,
        close=lambda: None,
        mismatched=frozenset(),
    )


def snapshots(misfits: bool = False, **layout: int) -> Any:
    return SimpleNamespace(
        misfits=lambda: misfits,
        reporter=reporter(**layout),
        retire=lambda: None,
        facts=SimpleNamespace(epoch=OWN),
        is_held=False,
    )


def context_of(*others: dict[str, Any] | Exception) -> Any:
    rank_group = Exchange(*others)
    return SimpleNamespace(rank_group=rank_group, rank=0, settings=SimpleNamespace(failpoints=""))


def ended(reviews: PlacementReviews) -> PlacementReviews:
    """Waits until the attempt has ended."""
    assert reviews._thread is not None
    reviews._thread.join(20)
    assert not reviews._thread.is_alive()
    return reviews


@pytest.fixture
def attempts(monkeypatch):
    """Yields the results of attempts, which a test appends; the calls take them one by one."""
    results: list[Any] = []

    def attempt(*_: Any) -> Any:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result, SimpleNamespace(mismatched=["leaf"])

    monkeypatch.setattr(module, "reattach", attempt)
    return results


def test_a_mark_without_a_difference_exchanges_nothing():
    reviews, held = PlacementReviews(context_of(), (), 10), snapshots()
    assert all(reviews.at(step, held) is held for step in range(11, 75))
    assert reviews._thread is None and held.reporter.layout_report.joined == 0


def test_a_misfit_is_reported_and_no_exchange_begins_before_all_ranks_wait():
    reviews, held = PlacementReviews(context_of(), (), 10), snapshots(misfits=True)
    assert reviews.at(11, held) is held and held.reporter.layout_report.joined == 1
    assert reviews.at(12, held) is held, "the thread waits, and no mark does"
    assert reviews.end(held) is held
    assert not ended(reviews).context.rank_group.met


def test_the_wish_of_another_rank_is_joined():
    reviews, held = PlacementReviews(context_of(), (), 10), snapshots(wanted=1)
    reviews.at(11, held)
    assert held.reporter.layout_report.joined == 1
    reviews.end(held)


def test_a_later_mark_takes_the_new_snapshotter_and_the_old_one_is_closed(attempts, capsys):
    reviews, held, new = PlacementReviews(context_of(), (), 10), snapshots(True, joined=1), snapshots()
    closed = threading.Event()
    held.retire = closed.set
    attempts.append(new)
    assert reviews.at(11, held) is held
    until(lambda: reviews._ready is new, 20, what="the new snapshotter")
    assert not closed.is_set(), "marks still use the old one"
    assert reviews.at(12, held) is new and closed.wait(20)
    assert "the placement was made anew; ranks differ in leaf" in capsys.readouterr().err
    assert ended(reviews).at(13, new) is new and reviews.mismatched == ("leaf",)


def test_a_failed_attempt_is_tried_again_at_a_later_mark(attempts, caplog):
    reviews, held, new = PlacementReviews(context_of(), (), 10), snapshots(True, joined=1), snapshots()
    attempts += [AttachError("no room"), new]
    reviews.at(11, held)
    ended(reviews)
    assert "no room" in caplog.text and "Training goes on." in caplog.text
    reviews.at(12, held)
    assert held.reporter.layout_report.joined == 1, "one step after the first attempt it is too early"
    reviews.at(13, held)
    assert held.reporter.layout_report.joined == 2, "all ranks must wait anew"
    held.reporter.layout = LayoutOutcome(2, 2)
    until(lambda: reviews._ready is new, 20, what="the new snapshotter")
    assert reviews.end(held) is new


def test_a_missing_rank_ends_the_reviews_not_the_snapshots(attempts, caplog):
    reviews, held = PlacementReviews(context_of(), (), 10), snapshots(True, joined=1)
    attempts.append(RanksMissing("not all came"))
    assert not reviews.is_over
    reviews.at(11, held)
    ended(reviews)
    assert reviews.is_over
    held.reporter.layout = LayoutOutcome(2, 2)
    assert all(reviews.at(step, held) is held for step in range(12, 40)) and not attempts
    said = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1 and "reft no longer reviews its placement: not all came" in said[0]
    assert "while replicas differ no step becomes whole.\nFix: restart the job" in said[0]


def test_a_rank_that_is_missing_after_the_decision_ends_the_snapshots_and_the_log_says_so(attempts, caplog):
    reviews, held = PlacementReviews(context_of(), (), 10), snapshots(True, joined=1)
    held.is_held = True
    attempts.append(RanksMissing("not all came"))
    reviews.at(11, held)
    ended(reviews)
    assert "Until the job restarts, no snapshot is taken.\nFix: restart the job" in caplog.text


def test_a_daemon_that_is_down_for_several_tries_ends_no_attempt(monkeypatch, caplog):
    """Otherwise the snapshots would be held until the job restarts."""
    acts: list[Any] = []
    down = [DaemonUnavailable("no daemon answers")] * 3

    def act(name: str, fails: bool = False) -> Any:
        acts.append(name)
        if fails and down:
            raise down.pop()
        return name

    def decide(context: Any, introduction: Any, plan: Any, trains: bool) -> Any:
        assert trains, "the ranks stay registered"
        return act(f"decide {plan}", plan == "first")

    monkeypatch.setattr(module, "decide", decide)
    monkeypatch.setattr(module, "secure", lambda context, introduction, plan: act(f"secure {plan}"))
    closing: Any = SimpleNamespace(wait=lambda pause_s: acts.append(pause_s))
    context: Any = SimpleNamespace(rank=0)
    first: Any = "first"
    assert carry_out(context, None, first, lambda: act("later", True), closing) == "later"  # type: ignore[arg-type]
    assert acts == ["decide first", 1.0, "later", 2.0, "later", 4.0, "later", "decide later", "secure later"]
    assert caplog.text.count("rank 0 takes no snapshots until its daemons have the new layout") == 3


@pytest.mark.parametrize(
    ("is_leader", "answers", "closes_after", "acts"),
    [
        (True, [None], 9, ["resume", "undo"]),
        (True, [DaemonUnavailable("no answer"), NoRoom("too many calls"), None], 9,
         ["resume", "undo", 1.0, "undo", 2.0, "undo"]),
        (True, [AttachError("no such job")], 9, ["resume", "undo"]),
        (True, [DaemonUnavailable("no answer")], 1, ["resume", "undo", 1.0]),
        (False, [], 9, ["resume"]),
    ],
    ids=["heard", "lost twice", "refused", "the session ends", "not the leader"],
)  # fmt: skip
def test_a_daemon_is_told_until_it_answers_that_the_old_layout_goes_on(is_leader, answers, closes_after, acts):
    done: list[Any] = []

    def call(method: str, request: pb.PinRequest) -> None:
        assert method == "Pin" and request.undo
        done.append("undo")
        if (answer := answers.pop(0)) is not None:
            raise answer

    def wait(pause_s: float) -> bool:
        done.append(pause_s)
        return sum(isinstance(each, float) for each in done) >= closes_after

    held: Any = SimpleNamespace(facts=SimpleNamespace(epoch=OWN), resume=lambda: done.append("resume"))
    introduction: Any = SimpleNamespace(
        is_leader=is_leader, job=SimpleNamespace(id="job"), daemon=SimpleNamespace(call=call)
    )
    resume(introduction, held, SimpleNamespace(wait=wait))  # type: ignore[arg-type]
    assert done == acts and not answers


BASE, OWN = Version(Epoch(2, b"b" * 16), 6), Epoch(3, b"c" * 16)


@pytest.mark.parametrize(
    ("known", "told", "newest"),
    [(BASE, None, (2, 6)), (BASE, 7, (3, 7)), (Version(OWN, 8), 7, (3, 8)), (BASE, 3, (2, 6)), (None, None, NOTHING)],
    ids=["nothing new", "the daemon heard first", "the rank heard first", "a step that was discarded", "nothing"],
)
def test_the_base_is_the_newest_version_that_a_rank_or_daemon_knows_to_be_whole(known, told, newest):
    """A daemon that knows a whole version may have freed older data."""
    acts = []
    held = SimpleNamespace(
        round=SimpleNamespace(whole=known, is_discarded=lambda step: step <= 3),
        hold=lambda deadline_s: acts.append("held"),
        facts=SimpleNamespace(epoch=OWN),
    )
    call = lambda *_: acts.append("pinned") or pb.PinReply(whole=told)  # noqa: E731
    introduction: Any = SimpleNamespace(
        is_leader=True, job=SimpleNamespace(id="job"), daemon=SimpleNamespace(call=call)
    )
    assert hold(context_of({"whole": list(NOTHING)}), introduction, held) == newest  # type: ignore[arg-type]
    assert acts == ["held", "pinned"], "what is asked for sooner may be let go of in between"
    assert hold(context_of({"whole": [4, 1]}), introduction, held) == (4, 1)  # type: ignore[arg-type]


def test_leaves_are_compared_at_the_newest_step_that_all_ranks_have():
    held: Any = SimpleNamespace(
        thread=SimpleNamespace(
            leaf_digests=deque([(6, {"a\n0": "1"}), (7, {"a\n0": "2", "b\n0": "3"}), (8, {"a\n0": "4"})])
        ),
        reporter=SimpleNamespace(mismatched=frozenset()),
    )
    others = {6: digest_of_leaves({"a\n0": "1"}), 7: "another"}
    context = context_of(
        {"differs": True, "steps": {str(step): digest for step, digest in others.items()}},
        {"digests": {"a\n0": "9", "b\n0": "3"}},
    )
    names = ["a", "b", "optimizer.a"]
    assert find_mismatched(context, held, names, threading.Event()) == ["a", "optimizer.a"]
    nothing = context_of({"differs": False, "steps": {}})
    assert find_mismatched(nothing, held, names, threading.Event()) == []


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


@pytest.mark.parametrize("error", [NoRoom("memory is full."), OSError(24, "Too many open files")])
def test_a_new_layout_goes_on_without_slots_that_cannot_be_had_now(error, caplog):
    """The decision is stored. A snapshotter leases its slots when the next snapshot is due."""

    def refuse(*_: object) -> Any:
        raise error

    part = SimpleNamespace(unplanned_offset=4096)
    plan: Any = SimpleNamespace(placement=SimpleNamespace(rank_placement=lambda rank: part))
    introduction: Any = SimpleNamespace(rank=1, state=SimpleNamespace(table=b""))
    assert lease_alone(introduction, plan, SimpleNamespace(lease=refuse)) == []
    assert "rank 1 gets no slots for the new layout" in caplog.text


@pytest.mark.parametrize(("requested", "slots"), [(0, 3), (5, 5)])
def test_a_session_keeps_its_number_of_slots_in_later_layouts(requested, slots):
    """A new layout may have state to exchange, but no room for a fourth slot was made."""
    reviews: list[PlacementReviews] = []
    session = SimpleNamespace(review=reviews.append, step=0)
    manifest = attaches.begun().manifest
    assert manifest.slots == 3
    _with_reviews(attaches.context(slots=requested), AttachResult(session, manifest))
    assert reviews[0].context.settings.slots == slots
