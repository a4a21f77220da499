"""Tests what a daemon tells of its own node, with data only."""

from __future__ import annotations

import pytest

from reft.core.membership.failure_detector import LATE_S
from reft.wire.process import Process
from reft_daemon.jobs.leases import Lease
from reft_daemon.membership.own_facts import LATE_SHOWN_S, LoopLateness, died_trainers, has_completed, trainers_of

ALIVE = object()  # stands for the watch of a living process


def lease(pid: int, watch: object = None, closed: bool = False, failed: bool = False) -> Lease:
    return Lease(Process(pid, 1), 1, watch, closed, failed)  # type: ignore[arg-type]


LEASES = {0: lease(10), 1: lease(11, ALIVE), 2: lease(12, closed=True), 3: lease(13)}
FAILED = lease(14, closed=True, failed=True)  # closed because of an exception


def test_a_trainer_that_ended_with_an_open_session_has_died():
    assert died_trainers(LEASES, [0, 1, 2, 3, 4], ()) == ((0, 10), (3, 13))
    assert died_trainers(LEASES, [0, 1, 2], ()) == ((0, 10),), "rank 3 trains on another node"
    assert died_trainers(LEASES, [0, 3], {Process(10, 1)}) == ((3, 13),)


def test_a_session_that_an_exception_closed_is_no_good_end():
    assert died_trainers({0: FAILED}, [0], ()) == ((0, 14),)
    assert not has_completed({0: FAILED}, [0], False)


@pytest.mark.parametrize(
    ("ranks", "has_agent", "completed"),
    [([2], False, True), ([2], True, False), ([2, 3], False, False), ([2, 4], False, False), ([], False, False)],
)
def test_training_has_completed_once_all_sessions_are_closed(ranks, has_agent, completed):
    assert has_completed(LEASES, ranks, has_agent) is completed


def test_only_ended_trainers_are_ignored_unless_a_round_has_ended_all():
    assert {each.pid for each in trainers_of(LEASES, False)} == {10, 12, 13}
    assert {each.pid for each in trainers_of(LEASES, True)} == {10, 11, 12, 13}


def test_a_long_delay_is_shown_for_a_while():
    lateness = LoopLateness(100.0, 0.1)
    assert lateness.note_look(100.1) == pytest.approx(0.0) and lateness.shown_s(100.1) == 0.0
    assert lateness.note_look(100.2 + LATE_S / 2) == pytest.approx(LATE_S / 2)
    assert lateness.shown_s(100.5) == 0.0, "a short delay is not shown"
    assert lateness.note_look(160.0) > 59 and lateness.shown_s(160.0) > 59
    lateness.note_look(160.1)
    assert lateness.shown_s(160.0 + LATE_SHOWN_S - 0.1) > 59
    assert lateness.shown_s(160.0 + LATE_SHOWN_S) == 0.0
