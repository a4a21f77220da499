"""The token that follows from a job key: agent ─► its daemon ─► the trainers of its launch."""

from __future__ import annotations

from contextlib import closing

import pytest

from reft.client.attach import introduce
from reft.client.attach.introduce import await_job_token
from reft.errors import AttachError, ConfigError
from reft.wire import daemon_launcher, rpc
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import DaemonProcess

TOKEN = bytes(range(32))


@pytest.fixture
def daemon():
    with closing(DaemonProcess("--listen", "127.0.0.1:0")) as daemon:
        yield daemon


def beat(daemon: DaemonProcess, **changes) -> pb.AgentBeatReply:
    hello = daemon_launcher.hello(daemon.address)
    node = pb.Node(name="n", id=hello.node_id, addresses=hello.addresses)
    request = pb.AgentBeatRequest(
        job="job",
        node_id=hello.node_id,
        launch="launch",
        round=1,
        pid=1,
        nodes=[node],
        token=b"s" * 32,
        job_token=TOKEN,
    )
    request.MergeFrom(pb.AgentBeatRequest(**changes))
    return rpc.call(daemon.address, "AgentBeat", request, 5.0)


def test_only_trainers_of_the_agents_launch_get_the_token_and_only_by_the_unix_socket(daemon):
    assert not daemon_launcher.hello(daemon.address, job="job", launch="launch").job_token
    beat(daemon)
    assert await_job_token(daemon.address, "any", "launch").job_token == TOKEN
    for launch in ("", "another"):
        assert not daemon_launcher.hello(daemon.address, job="job", launch=launch).job_token
    tcp = next(each for each in daemon_launcher.hello(daemon.address).addresses if not each.startswith("unix:"))
    assert not daemon_launcher.hello(tcp, job="job", launch="launch").job_token


def test_a_token_of_another_length_is_refused(daemon):
    with pytest.raises(ConfigError, match="32 bytes"):
        beat(daemon, job_token=b"short")


def test_a_trainer_whose_daemon_never_hears_the_agent_is_refused(daemon, monkeypatch):
    monkeypatch.setattr(introduce, "JOB_TOKEN_S", 0.1)
    with pytest.raises(AttachError, match=r"has a job key.*not got the job's token") as refused:
        await_job_token(daemon.address, "job", "launch")
    assert "REFT_DAEMON" in str(refused.value)
