"""When a daemon is started again, and when not."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from reft.config import Config
from reft.errors import DaemonUnavailable
from reft.wire import daemon_launcher
from reft.wire.daemon_launcher import DaemonRestarter


@pytest.fixture
def tried(monkeypatch) -> list:
    """What was asked of the starter."""
    found: list = []

    def find(settings, flags=(), job=""):
        found.append(tuple(flags))
        if "--fails" in flags:
            raise DaemonUnavailable("no", "none")
        return "unix:/d.sock", SimpleNamespace(pid=7)

    monkeypatch.setattr(daemon_launcher, "find", find)
    monkeypatch.setattr(daemon_launcher, "hello", lambda address, agent_pid: found.append(agent_pid))
    return found


def refuse(restarter: DaemonRestarter, address: str) -> None:
    restarter.refused(address)
    for thread in threading.enumerate():
        if thread.name == "reft-revive":
            thread.join(10)


@pytest.fixture
def address(tmp_path) -> str:
    (tmp_path / "d.sock").touch()
    return f"unix:{tmp_path}/d.sock"


def test_a_daemon_that_has_died_is_started_as_it_was(tried, address):
    refuse(DaemonRestarter(Config(), True, ["--listen", "h:0"], agent_pid=5), address)
    assert tried == [("--listen", "h:0"), 5]


def test_not_if_somebody_else_has_named_it(tried, address):
    refuse(DaemonRestarter(Config(daemon=address), True), address)
    assert not tried


def test_not_if_somebody_else_looks_after_it(tried, address):
    refuse(DaemonRestarter(Config(), False), address)
    assert not tried


def test_not_if_it_was_stopped(tried, tmp_path):
    refuse(DaemonRestarter(Config(), True), f"unix:{tmp_path}/d.sock")
    assert not tried


def test_not_again_and_again(tried, address, monkeypatch, caplog):
    restarter = DaemonRestarter(Config(), True, ["--fails"])
    for _ in range(3):
        refuse(restarter, address)
    assert len(tried) == 1 and "can't be started again" in caplog.text
    now_s = daemon_launcher.time.monotonic()
    monkeypatch.setattr(daemon_launcher.time, "monotonic", lambda: now_s + daemon_launcher.PAUSE_S)
    refuse(restarter, address)
    assert len(tried) == 2
