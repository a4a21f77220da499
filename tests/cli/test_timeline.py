"""`reft-cli timeline` with a real daemon and a session of this process, and their socket."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import reft
from reft.cli.main import main
from reft.cli.timeline import write
from reft.errors import ReftError
from reft.wire import timeline_socket
from tests.support.daemons import DaemonProcess


@pytest.fixture(scope="module")
def daemon():
    process = DaemonProcess()
    yield process
    process.close()


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["timeline", *arguments], catch_exceptions=False)


def trained(daemon: DaemonProcess, job: str, steps: int = 6) -> reft.Session:
    """Returns a session after some steps, with an idle time in each step."""
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = reft.attach(model, optimizer, daemon=daemon.address, job=job)
    for _ in session.steps(steps):
        with session.idle():
            session._window.snapshots.reporter.wait(session.step, 0.02)
        model(torch.randn(4, 256)).sum().backward()
        optimizer.step()
    assert session.seal(20)
    return session


def test_a_living_session_gives_its_trace(daemon, tmp_path):
    path = tmp_path / "trace.json"
    with trained(daemon, "told") as session:
        result = invoke("told", "--output", str(path), "--json", "--daemon", daemon.address)
        assert result.exit_code == 0, result.stderr
        document = json.loads(result.stdout)
        own = session.timeline(tmp_path / "own.json")
    assert (document["schema_version"], document["ranks"], document["silent"]) == (1, [0], {})
    trace = json.loads(path.read_text())
    assert len(trace["traceEvents"]) == document["events"] > 0 and set(trace["otherData"]) == {"rank 0"}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["name"] for event in events}
    assert {"idle", "other", "after step 1"} <= names
    copies = [event for event in events if event.get("args", {}).get("tier") and event["name"] not in ("idle", "fence")]
    assert copies and {event["cat"] for event in copies} <= {"gap", "beside compute", "fence"}
    assert all(event["dur"] >= 0 and event["pid"] == 0 for event in events)
    assert own == json.loads((tmp_path / "own.json").read_text())


def test_without_a_trace_the_verb_fails(daemon, tmp_path):
    assert invoke("no-such-job", "--daemon", daemon.address).exit_code == 11
    assert invoke("j", "--daemon", f"unix:{tmp_path}/none.sock").exit_code == 10
    trained(daemon, "closed", 3).close()
    result = invoke("closed", "--daemon", daemon.address, "--output", str(tmp_path / "none.json"))
    assert result.exit_code == 1 and not (tmp_path / "none.json").exists()
    assert "no rank of job closed trains on node" in result.stderr
    with trained(daemon, "living", 3):
        result = invoke("living", "--rank", "7", "--daemon", daemon.address)
        assert result.exit_code == 1 and "rank 7 of job living does not train on node" in result.stderr
        result = invoke("living", "--daemon", daemon.address, "--output", str(tmp_path / "no" / "where.json"))
        assert result.exit_code == 1 and "can't be written" in result.stderr


def test_a_path_that_is_no_plain_file_is_written_to_and_not_replaced(tmp_path):
    """If root replaced /dev/stdout, no process on the machine would have it any more."""
    pipe, link, real = tmp_path / "pipe", tmp_path / "link", tmp_path / "real"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write({"traceEvents": []}, pipe)
    assert os.read(reader, 100) == b'{"traceEvents": []}' and pipe.is_fifo()
    os.close(reader)
    real.write_text("old")
    link.symlink_to(real)
    write({"traceEvents": []}, link)
    assert link.is_symlink() and real.read_text() == '{"traceEvents": []}'
    with pytest.raises(ReftError, match="Is a directory"):
        write({}, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "real"] and not list(tmp_path.parent.glob(".*.part"))


def test_a_closed_timeline_server_frees_its_name():
    for _ in range(2):
        server = timeline_socket.TimelineServer(lambda: {"x": 1})
        assert timeline_socket.fetch(os.getpid()) == {"x": 1}
        server.close()
    with pytest.raises(ReftError, match="gives no timeline"):
        timeline_socket.fetch(os.getpid())


def test_a_trace_that_cannot_be_made_costs_its_caller_alone(caplog):
    traces = iter([{"a": object()}, {"b": 1}])
    server = timeline_socket.TimelineServer(lambda: next(traces))
    try:
        with pytest.raises(ReftError, match="gives no timeline"):
            timeline_socket.fetch(os.getpid())
        assert timeline_socket.fetch(os.getpid()) == {"b": 1}
    finally:
        server.close()
    assert "the timeline can't be made" in caplog.text


def test_a_server_without_room_for_a_caller_answers_later_ones():
    server = timeline_socket.TimelineServer(lambda: {"a": 1})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller, caller.makefile("rb") as answer:
            caller.connect(timeline_socket.address(os.getpid()))
            assert json.loads(answer.read()) == {"a": 1}
            caller_too = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with caller_too, caller_too.makefile("rb") as answer_too:
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
                try:
                    caller_too.connect(timeline_socket.address(os.getpid()))
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                assert json.loads(answer_too.read()) == {"a": 1}
        assert timeline_socket.fetch(os.getpid()) == {"a": 1}
    finally:
        server.close()


def test_a_forked_child_does_not_keep_the_name():
    """A loader's workers may outlive a session; the next session of the process needs the name."""
    reader, writer = os.pipe()
    started, say_started = os.pipe()
    server = timeline_socket.TimelineServer(lambda: {"x": 1})
    if not (child := os.fork()):
        os.close(writer)
        os.write(say_started, b".")  # Python's calls after a fork ran
        os.read(reader, 1)  # until the parent closes its end
        os._exit(0)
    try:
        assert timeline_socket.fetch(os.getpid()) == {"x": 1}
        assert os.read(started, 1) == b"."
        server.close()
        server = timeline_socket.TimelineServer(lambda: {"x": 2})
        assert timeline_socket.fetch(os.getpid()) == {"x": 2}
        server.close()
    finally:
        for descriptor in (writer, reader, started, say_started):
            os.close(descriptor)
        os.waitpid(child, 0)


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process needs root")
def test_root_gets_the_trace_of_another_users_trainer():
    script = (
        "import os, sys; from reft.wire import timeline_socket; os.setuid(65534); "  # reads its modules as root
        "server = timeline_socket.TimelineServer(lambda: {'x': 3}); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        trainer.stdout.readline()
        assert timeline_socket.fetch(trainer.pid) == {"x": 3}
        trainer.stdin.close()


class FakeConnection:
    """A connection whose other end has this user id."""

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def getsockopt(self, *_: int) -> bytes:
        return struct.pack("3i", 1, self.uid, 0)


def test_only_the_same_user_and_root_get_a_trace(monkeypatch):
    monkeypatch.setattr(timeline_socket.os, "getuid", lambda: 1000)
    assert [timeline_socket._is_same_user(FakeConnection(uid)) for uid in (1000, 0, 1001)] == [True, True, False]
