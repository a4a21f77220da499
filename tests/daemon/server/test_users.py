"""Tests users who share an authority and a host: none of them reaches another one's job."""

from __future__ import annotations

import subprocess
import sys
from concurrent import futures
from pathlib import Path

import grpc
import psutil
import pytest

from reft.wire import rpc
from reft.wire.certificate_role import Role
from reft.wire.proof import JOB_KEY
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.server.callers import Door
from reft_daemon.server.doors import ROWS, MethodRow, Proof
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import until
from tests.support.jobs import Code, Job

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
ALICE = Role("alice", "test")
REMOTE = [row for row in ROWS if row.door is Door.REMOTE]
# Another user of the host, without a certificate: he says nothing, or speaks in plain text.
STRANGER = """
import encodings.idna, os, socket, ssl, sys
host, port, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.setuid(65534)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
for wrap in (context.wrap_socket, lambda plain: plain):
    with socket.create_connection((host, port), 10) as plain:
        try:
            connection = wrap(plain)
            connection.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + b"\\4" + bytes(5))
            print("answer" if connection.recv(1) else "end")
        except (ssl.SSLError, ConnectionError):
            print("end")
for name in ("daemon.sock", "daemon.sock.ln"):
    try:
        socket.socket(socket.AF_UNIX).connect(f"{folder}/{name}")
        print("connected")
    except PermissionError:
        print("end")
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def job(start, trainer, certificates) -> Job:
    """Alice's job on two nodes; a process trains on the first."""
    flags = certificates.flags("ours")
    job = Job([(start("--listen", "127.0.0.1:0", *flags), [rank]) for rank in range(2)]).decide()
    job.lease(0, trainer)
    return job


def status_of(row: MethodRow, job: Job, files: tuple[Path, Path, Path]) -> grpc.StatusCode:
    """Returns how a call ends whose caller expects one of alice's daemons."""
    key, cert, ca = Tls(*files).content
    name = ("grpc.ssl_target_name_override", ALICE.server_name)
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    with grpc.secure_channel(job.hellos[0].addresses[0], credentials, options=[name]) as channel:
        call = channel.stream_stream(f"/{row.method}")
        try:
            list(call(iter([b""]), metadata=(*rpc.PROTOCOL_METADATA, (JOB_KEY, "job")), timeout=20))
        except grpc.RpcError as error:
            return error.code()
    return Code.OK


def test_what_each_certificate_can_call(job, trainer, certificates):
    """No call has a proof. Whom the certificate admits, is asked for that next."""
    bobs = certificates.files("ours", "nodes", user="bob"), certificates.agent("ours", user="bob")
    for files in bobs:
        assert {row.method: status_of(row, job, files) for row in REMOTE} == {
            row.method: Code.UNAVAILABLE for row in REMOTE
        }
    until(lambda: "of another user than alice" in job.daemons[0].log.read_text(), what="the line about it")
    for files, is_daemon in ((certificates.files("ours", "nodes"), True), (certificates.agent("ours"), False)):
        for row in REMOTE:
            may_ask = is_daemon or row.from_agents
            expected = Code.UNAUTHENTICATED if may_ask else Code.PERMISSION_DENIED
            assert status_of(row, job, files) is (Code.OK if row.proof is Proof.NONE else expected), row.method
    assert psutil.Process(trainer.pid).is_running() and job.daemons[0].status("job").ranks[0].alive


def test_another_user_without_a_certificate_is_only_refused(job, trainer):
    if psutil.Process().uids().real:
        pytest.skip("only root can become another user")
    daemon = job.daemons[0]
    host, _, port = job.hellos[0].addresses[0].rpartition(":")
    command = [sys.executable, "-c", STRANGER, host, port, daemon.socket.parent]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["end"] * 4, done.stderr
    assert psutil.Process(trainer.pid).is_running() and daemon.status("job").ranks[0].alive


def test_another_users_daemon_in_place_of_a_dead_one_hears_nothing(job, certificates):
    """It has the dead one's host and port, and a certificate of the same authority."""
    heard: list[str] = []

    class Listener(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> None:
            heard.append(details.method)

    asked = pb.SurveyRequest(job="job", nodes=[job.manifest.nodes[1]])
    assert job.daemons[0].call("Survey", asked).nodes[0].HasField("reply")
    job.daemons[1].kill()
    until(lambda: not job.daemons[0].call("Survey", asked).nodes[0].HasField("reply"), what="the end to be noticed")
    key, cert, ca = Tls(*certificates.files("ours", "nodes", user="bob")).content
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Listener()], options=[("grpc.so_reuseport", 0)])
    server.add_secure_port(job.hellos[1].addresses[0], grpc.ssl_server_credentials([(key, cert)], ca, True))
    server.start()
    try:
        found = job.daemons[0].call("Survey", asked).nodes[0]
        assert not found.HasField("reply") and heard == []
        with rpc.channel(job.hellos[1].addresses[0], Tls(*certificates.agent("ours"))) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                pb_grpc.DaemonStub(channel).Hello(pb.HelloRequest(), timeout=10)
        error = rpc.error_of(refused.value, "node1:29700")
        assert "is not of a daemon of this user" in error.message and heard == []
    finally:
        server.stop(None)
