"""Tests when a daemon is restarted, and when not."""

from __future__ import annotations

import fcntl
import threading
from types import SimpleNamespace

import pytest

from reft.config import Config
from reft.errors import AttachError, DaemonUnavailable
from reft.wire import daemon_launcher
from reft.wire.daemon_launcher import DaemonRestarter
from reft.wire.messages import OLDEST, PROTOCOL
from reft.wire.v1 import daemon_pb2 as pb


@pytest.fixture
def tried(monkeypatch) -> list:
    """Records the calls of the launcher."""
    calls: list = []

    def find(settings, flags=(), job=""):
        calls.append(tuple(flags))
        if "--fails" in flags:
            raise DaemonUnavailable("no", "none")
        return "unix:/d.sock", SimpleNamespace(pid=7)

    monkeypatch.setattr(daemon_launcher, "find", find)
    monkeypatch.setattr(daemon_launcher, "hello", lambda address, agent_pid: calls.append(agent_pid))
    return calls


def refuse(restarter: DaemonRestarter, address: str) -> None:
    restarter.refused(address)
    for thread in threading.enumerate():
        if thread.name == "reft-revive":
            thread.join(10)


@pytest.mark.parametrize(("protocol", "oldest"), [(0, 0), (OLDEST - 1, 1), (PROTOCOL + 2, PROTOCOL + 1)])
def test_a_daemon_that_answers_hello_with_another_protocol_is_refused(protocol, oldest):
    reply = pb.HelloReply(protocol=protocol, oldest=oldest)
    with pytest.raises(AttachError, match=rf"the daemon at unix:/d.sock speaks protocol {protocol}\b"):
        daemon_launcher.hello("unix:/d.sock", call=lambda *_: reply)


def test_a_newer_daemon_that_speaks_our_protocol_is_used():
    reply = pb.HelloReply(protocol=PROTOCOL + 2, oldest=OLDEST)
    assert daemon_launcher.hello("unix:/d.sock", call=lambda *_: reply) == reply


def named(answers: list, monkeypatch, **settings) -> tuple[str, pb.HelloReply]:
    """Finds a named daemon that gives these answers, after a restart; nothing sleeps."""
    monkeypatch.setattr(daemon_launcher.time, "sleep", lambda seconds: None)

    def call(*_):
        if isinstance(answer := answers.pop(0) if len(answers) > 1 else answers[0], Exception):
            raise answer
        return answer

    return daemon_launcher.find(Config(daemon="unix:/d.sock", **settings), call=call, is_restart=True)


def test_a_named_daemon_that_died_with_the_trainers_gets_time_to_come_back(monkeypatch):
    reply = pb.HelloReply(protocol=PROTOCOL, oldest=OLDEST)
    gone = DaemonUnavailable("no daemon answers.", "none")
    assert named([gone, gone, reply], monkeypatch) == ("unix:/d.sock", reply)


def test_a_named_daemon_that_does_not_come_back_is_said(monkeypatch):
    monkeypatch.setattr(daemon_launcher, "BACK_S", 0.05)
    with pytest.raises(DaemonUnavailable, match="no daemon answers"):
        named([DaemonUnavailable("no daemon answers.", "none")], monkeypatch)


@pytest.fixture
def address(tmp_path) -> str:
    (tmp_path / "d.sock").touch()
    return f"unix:{tmp_path}/d.sock"


def test_a_dead_daemon_is_restarted_with_its_flags(tried, address):
    refuse(DaemonRestarter(Config(), True, ["--listen", "h:0"], agent_pid=5), address)
    assert tried == [("--listen", "h:0"), 5]


def test_a_named_daemon_is_not_restarted(tried, address):
    refuse(DaemonRestarter(Config(daemon=address), True), address)
    assert not tried


def test_a_daemon_of_another_owner_is_not_restarted(tried, address):
    refuse(DaemonRestarter(Config(), False), address)
    assert not tried


def test_a_stopped_daemon_is_not_restarted(tried, tmp_path):
    refuse(DaemonRestarter(Config(), True), f"unix:{tmp_path}/d.sock")
    assert not tried


def test_restarts_pause_between_attempts(tried, address, monkeypatch, caplog):
    restarter = DaemonRestarter(Config(), True, ["--fails"])
    for _ in range(3):
        refuse(restarter, address)
    assert len(tried) == 1 and "can't be started again" in caplog.text
    now_s = daemon_launcher.time.monotonic()
    monkeypatch.setattr(daemon_launcher.time, "monotonic", lambda: now_s + daemon_launcher.PAUSE_S)
    refuse(restarter, address)
    assert len(tried) == 2


def own(tmp_path, **settings) -> Config:
    """Settings of a user whose runtime folder holds no daemon."""
    return Config(runtime_dir=str(tmp_path), daemon="", **settings)


def test_a_process_that_starts_no_daemon_and_never_ends_holds_nobody_up(tmp_path):
    """A stopped trainer, for example, keeps the lock as long as it is stopped."""
    tmp_path.chmod(0o700)
    with open(tmp_path / "start.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DaemonUnavailable, match=r"locked .*/start.lock for 0.2 s") as caught:
            daemon_launcher.find(own(tmp_path, attach_deadline_s=0.2))
    assert "fuser" in caught.value.hint


def test_a_folder_in_which_no_daemon_can_be_started_is_named_with_a_remedy(tmp_path):
    """As on a read-only file system: a folder lies where the lock would be made."""
    tmp_path.chmod(0o700)
    (tmp_path / "start.lock").mkdir()
    with pytest.raises(DaemonUnavailable, match=r"could not be started: .*start.lock") as caught:
        daemon_launcher.find(own(tmp_path))
    assert "REFT_RUNTIME_DIR" in caught.value.hint
