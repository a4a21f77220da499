"""Tests of failpoints: their syntax, when they fire, and their actions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from reft.errors import ConfigError
from reft.failpoints import Failpoints, InjectedFault

DROP = "round.send:drop"


def test_without_entries_nothing_happens():
    assert not Failpoints().hit("round.send", step=1)
    assert not Failpoints(DROP).hit("other.point")


def test_a_failpoint_fires_a_number_of_times():
    failpoints = Failpoints(f"{DROP}:after=1:times=2")
    assert [failpoints.hit("round.send") for _ in range(5)] == [False, True, True, False, False]


def test_drop_returns_true():
    assert Failpoints(DROP).hit("round.send")


def test_raise_names_the_point_and_its_facts():
    with pytest.raises(InjectedFault, match=r"save\.begin fired with .*'step': 4"):
        Failpoints("save.begin:raise").hit("save.begin", step=4)


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_kill_and_stop(action, number):
    code = f"from reft.failpoints import Failpoints; Failpoints('a:{action}').hit('a')"
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.getcwd()})
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    child.returncode = 0
    if action == "stop":
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == number
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    else:
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == number


def test_after_ignores_the_first_hits():
    points = Failpoints(f"{DROP}:after=2")
    assert [points.hit("round.send") for _ in range(4)] == [False, False, True, True]


def test_only_hits_that_match_are_counted():
    points = Failpoints(f"{DROP}:after=1:rank=1")
    assert [points.hit("round.send", rank=rank) for rank in (0, 1, 0, 1)] == [False, False, False, True]


def test_a_missing_fact_does_not_match():
    assert not Failpoints(f"{DROP}:rank=0").hit("round.send")


def test_a_range_of_steps():
    points = Failpoints(f"{DROP}:from=3:until=5")
    assert [step for step in range(8) if points.hit("round.send", step=step)] == [3, 4, 5]
    assert points.hit("round.send")


def test_one_exact_step():
    points = Failpoints(f"{DROP}:step=3:epoch=1")
    hits = [(step, epoch) for step in (2, 3) for epoch in (1, 2) if points.hit("round.send", step=step, epoch=epoch)]
    assert hits == [(3, 1)]


def test_several_entries_of_one_point():
    points = Failpoints("a:drop:step=1,a:raise:step=2,b:drop")
    assert points.hit("a", step=1) and points.hit("b")
    with pytest.raises(InjectedFault):
        points.hit("a", step=2)
    assert not points.hit("a", step=3)


@pytest.mark.parametrize(
    "text", ["a", "a:", "a:explode", "a:drop:after", "a:drop:after=x", "a:drop:rank=-1", "a:drop:"]
)
def test_invalid_entries_are_refused(text):
    with pytest.raises(ConfigError, match="failpoint"):
        Failpoints(text)
