"""Tests what is noted about the callers of connections."""

from __future__ import annotations

from reft_daemon.child.refusals import RefusalCounts
from reft_daemon.server.callers import UNCOUNTED, Caller, Callers, Door

WHY = "their calls had no valid proof"


def refused(callers: Callers, name: str, count: int) -> None:
    for _ in range(count):
        callers.note_refused(name, WHY)


def test_the_first_refused_calls_of_a_connection_do_not_count():
    """By the first ones a daemon learns the challenge, also after it has changed."""
    refusals = RefusalCounts()
    callers, proved = Callers(refusals), []
    callers.add("a", Caller(Door.REMOTE, address="10.0.0.7"), lambda: proved.append("a"))
    for _ in range(3):
        refused(callers, "a", UNCOUNTED)
        callers.note_proved("a")
    assert not refusals.totals and proved == ["a"]
    refused(callers, "a", UNCOUNTED + 2)
    assert refusals.totals == {WHY: 2}


def test_a_caller_that_is_refused_again_and_again_is_named(caplog):
    refusals = RefusalCounts()
    callers = Callers(refusals)
    callers.add("a", Caller(Door.REMOTE, address="10.0.0.7"))
    callers.add("b", Caller(Door.REMOTE, address="10.0.0.8"))
    refused(callers, "a", UNCOUNTED + 100)
    refused(callers, "b", UNCOUNTED)
    callers.remove("b")
    refused(callers, "b", 1)  # nobody knows whose it was
    refusals.say(0.0)
    assert caplog.messages == [f'refused at the doors: count=100 why="100 because {WHY}" by="10.0.0.7 (100)"']
