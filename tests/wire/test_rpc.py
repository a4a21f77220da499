"""Tests the table of errors and statuses, addresses, and names of methods."""

from __future__ import annotations

import ast
import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from reft import errors
from reft.errors import ConfigError, DaemonUnavailable, NoRoom, ReftError
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.registry import UnknownJob

ROOT = Path(__file__).parents[2]


class Failed(grpc.RpcError):
    """A failed call, as a stub raises it."""

    def __init__(self, code: grpc.StatusCode, details: str | None) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details


def raised_by_the_daemon() -> set[str]:
    """Returns names of error classes that the daemon raises.

    Its code in wire and core counts too.
    """
    ours = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, ReftError)}
    names = set()
    for folder in ("daemon/reft_daemon", "reft/wire", "reft/core"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "timeline_socket.py":
                continue  # between the CLI and trainers
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    names.add(ast.unparse(node.exc.func))
    return names & ours


def test_every_error_that_the_daemon_raises_has_a_status():
    raised = raised_by_the_daemon()
    assert {"ConfigError", "AttachError", "NoRoom", "StaleEpoch", "FormatError", "AlreadyAttached"} <= raised
    client_only = {"UnsupportedState"}  # of encoding a capsule, which the trainer alone does
    missing = {name for name in raised - client_only if getattr(errors, name) not in rpc.STATUS_OF}
    assert not missing


@pytest.mark.parametrize("kind", rpc.STATUS_OF, ids=lambda kind: kind.__name__)
def test_an_error_round_trips_through_its_status(kind):
    status = rpc.status_of(kind("the slots are gone."))
    back = rpc.error_of(Failed(status, "the slots are gone."), "unix:/d.sock")
    assert type(back) is kind and "the slots are gone." in str(back)


def test_no_two_errors_share_a_status():
    assert len(set(rpc.STATUS_OF.values())) == len(rpc.STATUS_OF)


def test_a_subclass_travels_as_its_parent_and_the_rest_as_internal():
    assert rpc.status_of(UnknownJob("none")) is grpc.StatusCode.FAILED_PRECONDITION
    assert rpc.status_of(ReftError("other")) is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("code", list(grpc.StatusCode))
@pytest.mark.parametrize("details", [None, "", "text"])
def test_any_failure_becomes_a_reft_error_with_a_text(code, details):
    error = rpc.error_of(Failed(code, details), "unix:/d.sock")
    assert isinstance(error, ReftError) and str(error)


@pytest.mark.parametrize("code", [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE])
def test_a_daemon_that_is_not_there_is_named_by_its_address(code):
    error = rpc.error_of(Failed(code, "refused"), "unix:/d.sock")
    assert type(error) is DaemonUnavailable and "unix:/d.sock" in str(error)


def test_a_socket_that_may_not_be_opened_is_another_users():
    error = rpc.error_of(Failed(grpc.StatusCode.UNAVAILABLE, "connect failed: Permission denied"), "unix:/d.sock")
    assert "one user" in error.hint and "start reft-daemon" not in error.hint


@pytest.mark.parametrize(
    "address", ["unix:/run/reft/d.sock", "unix:" + "a" * 107, "localhost:1", "[::1]:65535", "10.0.0.1:0"]
)
def test_addresses(address):
    assert rpc.check_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:",
        "unix:" + "a" * 108,
        "unix:" + "é" * 54,
        "host",
        ":1",
        "host:",
        "host:x",
        "host:²",
        "host:65536",
        "host:-1",
    ],
)
def test_bad_addresses(address):
    with pytest.raises(ConfigError):
        rpc.check_address(address)


def test_only_a_unix_socket_is_a_local_address():
    assert rpc.check_local_address("unix:/run/reft.sock") == "unix:/run/reft.sock"
    for address in ("localhost:29700", "unix:", "10.0.0.1:1"):
        with pytest.raises(ConfigError):
            rpc.check_local_address(address)


def test_a_method_has_its_full_name_and_the_class_of_its_replies():
    assert rpc.method_of(pb_grpc.DaemonStub, "Read") == ("/reft.v1.Daemon/Read", pb.Chunk)
    assert rpc.method_of(pb_grpc.PeerStub, "Announce") == ("/reft.v1.Peer/Announce", pb.OutcomeReply)
    with pytest.raises(KeyError):
        rpc.method_of(pb_grpc.PeerStub, "Read")


def test_a_connection_may_take_as_long_as_the_call(tmp_path):
    # A daemon that is not scheduled for a while: the kernel accepts the connection, and no bytes
    # come.
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "socket"))
        silent.listen()
        with rpc.channel(f"unix:{tmp_path}/socket") as channel, pytest.raises(grpc.RpcError) as failed:
            pb_grpc.DaemonStub(channel).Status(pb.StatusRequest(), timeout=1.5)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_call_without_a_listening_daemon_fails_at_once(tmp_path):
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(tmp_path / "socket"))
        with rpc.channel(f"unix:{tmp_path}/socket") as channel, pytest.raises(grpc.RpcError) as failed:
            pb_grpc.DaemonStub(channel).Status(pb.StatusRequest(), timeout=60)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_call_by_name_raises_the_error_that_its_status_stands_for(tmp_path):
    with pytest.raises(DaemonUnavailable, match="no daemon answers at"):
        rpc.call(f"unix:{tmp_path}/socket", "Status", pb.StatusRequest(), 60)


@contextlib.contextmanager
def answering(address: str, before: Callable[[grpc.ServicerContext], object] = id) -> Iterator[None]:
    """Serves at this address, and answers Status; `before` is called before each answer."""

    class Answering(pb_grpc.DaemonServicer):
        def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
            before(context)
            return pb.StatusReply()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    pb_grpc.add_DaemonServicer_to_server(Answering(), server)
    assert server.add_insecure_port(address)
    server.start()
    yield
    server.stop(None).wait()


def test_calls_share_a_connection_until_they_are_closed(tmp_path, monkeypatch):
    address, calls, made = f"unix:{tmp_path}/socket", rpc.DaemonCalls(), []
    channel = rpc.channel

    def counted(address: str) -> grpc.Channel:
        made.append(channel(address))
        return made[-1]

    monkeypatch.setattr(rpc, "channel", counted)
    status = functools.partial(calls.call, address, "Status", pb.StatusRequest(), 60)
    with answering(address):
        assert status() == status() == pb.StatusReply()
        with calls.channel(address) as shared:
            assert made == [shared]
        calls.close()
        assert status() == status() == pb.StatusReply()
    assert len(made) == 3
    for each in made:
        with pytest.raises(ValueError, match="closed channel"):
            rpc.invoke(each, "Status", pb.StatusRequest(), 60)
    calls.close()


def test_a_begun_call_runs_while_the_block_runs(tmp_path):
    address, calls, asked, done = f"unix:{tmp_path}/socket", rpc.DaemonCalls(), threading.Event(), threading.Event()

    def before(context: grpc.ServicerContext) -> None:
        asked.set()
        assert done.wait(60)

    with answering(address, before), contextlib.closing(calls):
        with calls.begun(address, "Status", pb.StatusRequest(), 60):
            assert asked.wait(60)
            done.set()


def test_an_error_of_the_block_cancels_the_call(tmp_path):
    address, calls, asked, ended = f"unix:{tmp_path}/socket", rpc.DaemonCalls(), threading.Event(), threading.Event()

    def before(context: grpc.ServicerContext) -> None:
        context.add_callback(ended.set)
        asked.set()
        assert ended.wait(30)

    with answering(address, before), contextlib.closing(calls):
        with pytest.raises(ValueError, match="block"), calls.begun(address, "Status", pb.StatusRequest(), 300):
            assert asked.wait(60)
            raise ValueError("block")
        assert ended.wait(20)


def test_a_begun_call_that_fails_is_an_error_of_the_block(tmp_path):
    address, calls = f"unix:{tmp_path}/socket", rpc.DaemonCalls()
    with pytest.raises(DaemonUnavailable), calls.begun(address, "Status", pb.StatusRequest(), 60):
        pass
    with answering(address), contextlib.closing(calls), calls.begun(address, "Status", pb.StatusRequest(), 60):
        pass  # the failed connection is not used again


def test_a_channel_does_not_share_the_failed_connection_of_another_one(tmp_path):
    address = f"unix:{tmp_path}/socket"
    with rpc.channel(address) as failed:
        for _ in range(3):  # gRPC waits longer after each failure
            with pytest.raises(grpc.RpcError):
                pb_grpc.DaemonStub(failed).Status(pb.StatusRequest(), timeout=60, wait_for_ready=False)
        with answering(address):
            assert rpc.call(address, "Status", pb.StatusRequest(), 60) == pb.StatusReply()


def test_a_daemon_that_was_started_after_a_call_failed_answers_the_next_call(tmp_path):
    """gRPC itself fails calls of that channel for up to a second."""
    address, calls = f"unix:{tmp_path}/socket", rpc.DaemonCalls()
    with pytest.raises(DaemonUnavailable):
        calls.call(address, "Status", pb.StatusRequest(), 60)
    with answering(address):
        assert calls.call(address, "Status", pb.StatusRequest(), 60) == pb.StatusReply()
    calls.close()


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7070: Ssl handshake failed: "
            "SSL_ERROR_SSL: error:100000f7: WRONG_VERSION_NUMBER: Invalid context",
            "Ssl handshake failed: SSL_ERROR_SSL: error:100000f7: WRONG_VERSION_NUMBER: Invalid context",
        ),
        ("the daemon is going away", "the daemon is going away"),
    ],
)
def test_the_reason_of_a_failed_connection_is_shown_in_full(details, reason):
    error = rpc.error_from(grpc.StatusCode.UNAVAILABLE, details, "node7:7070")
    assert f"no daemon answers at node7:7070: {reason}." in str(error)


def test_an_error_that_travels_keeps_its_remedy_apart():
    error = NoRoom("the slots need 3 GiB.", "attach with fewer slots")
    arrived = rpc.error_from(rpc.status_of(error), str(error), "unix:/s")
    assert type(arrived) is NoRoom
    assert (arrived.message, arrived.hint, str(arrived)) == (error.message, error.hint, str(error))


@pytest.mark.parametrize(
    "reason", ["Hostname Verification Check failed.", "OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: OK"]
)
def test_a_certificate_of_somebody_else_has_its_own_remedy(reason):
    details = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:5: {reason}"
    error = rpc.error_from(grpc.StatusCode.UNAVAILABLE, details, "node7:29700")
    assert isinstance(error, DaemonUnavailable) and "certificates.sh" in error.hint
    assert "the certificate at node7:29700 is not of a daemon of this user" in error.message
