"""Tests which rank of this node is named as hung, and which one may be killed."""

from __future__ import annotations

import os

import pytest

from reft.core.membership.failure_detector import NodeReport, Signal, WatchedNode
from reft.core.membership.progress import GAPS_MIN, HUNG_MIN_S, Stall
from reft.wire.process import Process
from reft_daemon.jobs.leases import Lease
from reft_daemon.membership.rank_progress import KILL_AFTER_S, RankProgress, awaited_stall, stall_to_kill

ALIVE = object()  # stands for the watch of a living process
OWN, EARLIER, LATER = Stall(1, 5, 9.0, 0.1), Stall(0, 4, 9.0, 0.1), Stall(0, 6, 9.0, 0.1)


def node(signal: Signal = Signal.SUSPECT, stall: Stall | None = None, since_s: float = 0.0) -> WatchedNode:
    return WatchedNode("n", word=NodeReport("n", signal, "", stall), signal=signal, since_s=since_s)


@pytest.mark.parametrize(
    ("others", "awaited"), [([], OWN), ([node(stall=EARLIER)], EARLIER), ([node(stall=LATER), WatchedNode("m")], OWN)]
)
def test_the_job_waits_for_the_rank_with_the_oldest_step(others, awaited):
    assert awaited_stall(OWN, others) is awaited


@pytest.mark.parametrize(
    ("stall", "own", "others", "is_killed"),
    [
        (OWN, node(), [], True),
        (OWN, node(), [node(stall=LATER)], True),
        (None, node(), [], False),
        (OWN, node(Signal.HEALTHY), [], False),
        (OWN, node(since_s=100 - KILL_AFTER_S / 2), [], False),
        (OWN, node(), [node(stall=EARLIER)], False),
        (OWN, node(), [node(Signal.OFFLINE)], False),
        (OWN, node(), [node(Signal.UNHEALTHY)], False),
    ],
)
def test_only_the_awaited_rank_is_killed_and_only_after_a_while(stall, own, others, is_killed):
    assert stall_to_kill(stall, own, others, 100.0) is (stall if is_killed else None)


def test_a_rank_without_a_living_trainer_is_no_stall():
    lease = Lease(Process(os.getpid(), 1), 1, ALIVE)  # type: ignore[arg-type]
    progress, now_s = RankProgress(), 0.0
    for step in range(GAPS_MIN + 2):
        lease.step, now_s = step, now_s + 0.1
        assert progress.stall({3: lease}, now_s) is None
    now_s += HUNG_MIN_S + 10
    stall = progress.stall({3: lease}, now_s)
    assert stall is not None and (stall.rank, stall.step, stall.stopped) == (3, GAPS_MIN + 1, False)
    lease.watch = None
    assert progress.stall({3: lease}, now_s) is None
    lease.watch = ALIVE  # type: ignore[assignment]
    progress.forget()
    assert progress.stall({3: lease}, now_s + 0.1) is None
