"""Tests of every="auto" with real sessions: measured, agreed on, and applied by step number."""

from __future__ import annotations

import pytest

from reft.client.snapshot.round_view import KeptVersions, RoundView
from reft.core.commit.lag_backoff import MEMORY, OutcomeDelays
from reft.core.commit.snapshot_interval import PRIOR_S, FailureHistory, is_due
from reft.core.recovery.inventory import Inventory
from reft.errors import ConfigError
from tests.client.attach.test_run import make
from tests.scenarios.test_state_kinds import step_once
from tests.support.daemons import until

MOST_STEPS = 20_000  # a step takes 1 ms here, and the round is slow on a busy machine


def spied(session, monkeypatch):
    """Returns the list of steps that the session tries to snapshot."""
    taken = []
    original = session._window.snapshots.take

    def take(step, is_marked, pacing_plan=None, skipped=None):
        taken.append(step)
        return original(step, is_marked, pacing_plan)

    monkeypatch.setattr(session._window.snapshots, "take", take)
    return taken


def train_until(session, model, optimizer, enough):
    for _ in session.steps(MOST_STEPS):
        step_once(model, optimizer)
        if enough():
            session.step_end()  # the loop is left before its own mark
            return
    pytest.fail("the steps did not suffice")


def feed(session, monkeypatch, stall_s):
    """Fakes steps of 1 s, as in large models, and a given stall.

    In this test a real mark would cost as much time as a real step.
    """
    interval = session._window.cadence.interval
    observe = interval.observe
    monkeypatch.setattr(interval, "observe", lambda _, stall: observe(1.0, None if stall is None else stall_s))


def test_the_interval_grows_until_the_budget_is_met(attach, monkeypatch, caplog):
    model, optimizer = make()
    session = attach(model, optimizer, every="auto")
    feed(session, monkeypatch, 0.005)
    taken = spied(session, monkeypatch)
    train_until(session, model, optimizer, lambda: session.every > 1)
    pace = session._window.snapshots.reporter.interval
    assert pace.every == session.every == 5 and pace.start <= session.step
    stop = session.step + 40
    train_until(session, model, optimizer, lambda: session.step >= stop)
    heard = max(step for step in taken if step % 5) + 1  # the first step when this rank knew
    assert taken == [step for step in range(1, session.step + 1) if is_due(step, 1 if step < heard else 5)]
    assert "one step in 5 is snapshotted" in caplog.text
    sealed = session.seal(timeout=60)
    assert sealed.step == session.step, "a step that is not due is taken when it is asked for"
    session._window.cadence.restart()
    assert session.every == 1, "another epoch: all ranks begin anew, whatever each has heard of the last one"


def test_the_stall_is_measured(attach, monkeypatch):
    model, optimizer = make()
    session = attach(model, optimizer, every="auto")
    copy_engine, interval = session._window.snapshots.engine, session._window.cadence.interval
    seen = []
    monkeypatch.setattr(interval, "observe", lambda seconds, stall: seen.append((seconds, stall)))
    fence = copy_engine.fence

    def slow_fence():
        fence()
        copy_engine.copy_stats.stall_s += 7.0

    monkeypatch.setattr(copy_engine, "fence", slow_fence)
    train_until(session, model, optimizer, lambda: session.step >= 100)
    stalls = [stall for _, stall in seen if stall is not None]
    assert stalls and all(7.0 < stall < 30.0 for stall in stalls), "the fence, and the mark"
    assert [stall is None for _, stall in seen].count(True) >= 1, "a control step has none"


def test_every_step_but_control_steps_is_taken_within_the_budget(attach, monkeypatch):
    model, optimizer = make()
    session = attach(model, optimizer, every="auto")
    taken = spied(session, monkeypatch)
    feed(session, monkeypatch, 0.0005)
    train_until(session, model, optimizer, lambda: session.step >= 700)
    assert session.every == 1
    left_out = set(range(1, session.step + 1)) - set(taken)
    assert left_out == {step for step in range(1, session.step + 1) if not is_due(step, 1)}
    assert 5 <= len(left_out) <= 20
    found = session.overhead()
    assert found is None or found.low < found.mean < found.high


def test_a_fixed_interval_is_neither_measured_nor_agreed(attach, monkeypatch):
    model, optimizer = make()
    session = attach(model, optimizer, every=7)
    taken = spied(session, monkeypatch)
    train_until(session, model, optimizer, lambda: session.step >= 100)
    assert taken == list(range(7, session.step + 1, 7))
    assert session.every == 7 and session.overhead() is None and session._window.snapshots.reporter.requested_every == 0


@pytest.mark.parametrize("every", [0, -3, 1.5, "often", 1 << 32])
def test_an_invalid_interval_is_refused(attach, every):
    with pytest.raises(ConfigError, match="every is"):
        attach(*make(), every=every)


@pytest.mark.parametrize("tolerate", [-2, 64, 1 << 31, 1.5, "1"])
def test_an_invalid_number_of_lost_nodes_is_refused(attach, tolerate):
    with pytest.raises(ConfigError, match=r"tolerate is .*0 to 63"):
        attach(*make(), tolerate=tolerate)


def test_the_jobs_failures_give_the_mtbf_by_default(attach, monkeypatch):
    monkeypatch.setattr(Inventory, "history", FailureHistory(PRIOR_S, 1))
    model, optimizer = make()
    for given, expected in ((0.0, PRIOR_S), (60.0, 60.0)):
        monkeypatch.setenv("REFT_MTBF_S", str(given))
        session = attach(model, optimizer, every="auto")
        assert session._window.cadence.interval.mtbf_s == expected
        session.close()


def test_while_the_round_lags_some_due_steps_are_skipped(attach, monkeypatch, caplog):
    """Fakes a round that is 100 steps behind, after a sealed snapshot that became void.

    See `reft.core.commit.lag_backoff`.
    """
    model, optimizer = make()
    session = attach(model, optimizer, every=3)
    snapshots = session._window.snapshots
    monkeypatch.setattr(RoundView, "kept", KeptVersions(None, frozenset()))
    taken = spied(session, monkeypatch)
    for _ in session.steps(200):
        step_once(model, optimizer)
        if session.step == 100:
            snapshots.reporter._undecided.delays = OutcomeDelays(100, (30,) * MEMORY)
            monkeypatch.setattr(snapshots.reporter._undecided.delays, "note_decided", lambda *_: None)
    assert [step for step in taken if step <= 100] == list(range(3, 101, 3))
    assert [step for step in taken if step > 100] == [144, 192], "each 16th of the due ones, by its number"
    left_out = [step for step in range(102, 201, 3) if step not in taken]
    assert session.stats()["skipped"] >= len(left_out), "the other ranks hear that these are void"
    assert "only one of 16 due steps is snapshotted" in caplog.text
    until(lambda: snapshots.reporter._undecided.newest >= 198, what="the void of the last one that was left out")


def test_seal_takes_a_step_that_was_left_out(attach, monkeypatch):
    model, optimizer = make()
    session = attach(model, optimizer)
    snapshots, known = session._window.snapshots, RoundView.kept
    sealed = []
    for step in session.steps(60):
        if step == 50:
            monkeypatch.setattr(RoundView, "kept", KeptVersions(None, frozenset()))
            snapshots.reporter._undecided.delays = OutcomeDelays(50, (30,) * MEMORY)
        if step == 53:
            assert snapshots._left_out[0].step == 53
            monkeypatch.setattr(RoundView, "kept", known)
            sealed.append(session.seal(timeout=60))
        step_once(model, optimizer)
    assert (sealed[0].whole, sealed[0].step) == (True, 53)
