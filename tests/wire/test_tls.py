"""Tests certificates: which are refused, and what replaced files change."""

from __future__ import annotations

import logging
import shutil
import threading
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from reft.errors import ConfigError
from reft.wire import rpc
from reft.wire.tls import Tls
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture
def certificates(tmp_path) -> Certificates:
    return Certificates(tmp_path)


def files(certificates: Certificates, authority: str) -> list[Path]:
    return [Path(name) for name in certificates.flags(authority)[1::2]]


@pytest.fixture
def serve():
    """Starts servers; returns their addresses."""
    servers = []

    def start(tls: Tls) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(2))
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        port = server.add_secure_port("127.0.0.1:0", tls.server())
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None)


def answers(address: str, tls: Tls) -> bool:
    """Returns whether the server accepts a new connection."""
    with rpc.channel(address, tls) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
        return True


def test_a_missing_file_is_named(certificates, tmp_path):
    cert, key, ca = files(certificates, "ours")
    for given in ((tmp_path / "none", key, ca), (cert, tmp_path / "none", ca), (cert, key, tmp_path / "none")):
        with pytest.raises(ConfigError, match=r"(?s)none.*check --tls-cert"):
            Tls(*given)


def test_a_key_of_another_certificate_or_an_encrypted_key_is_refused(certificates, tmp_path):
    cert, key, ca = files(certificates, "ours")
    _, other, _ = files(certificates, "theirs")
    with pytest.raises(ConfigError, match="mismatch"):
        Tls(cert, other, ca)
    certificates._openssl("pkcs8", "-topk8", "-in", key.name, "-passout", "pass:secret", "-out", "locked.key")
    with pytest.raises(ConfigError, match="encrypted"):
        Tls(cert, tmp_path / "locked.key", ca)


def test_a_certificate_of_another_authority_is_refused(certificates, serve):
    ours, theirs = (Tls(*files(certificates, name)) for name in ("ours", "theirs"))
    address = serve(ours)
    assert answers(address, ours) and not answers(address, theirs)


def test_replaced_files_are_used_on_both_sides(certificates, serve):
    old, new = Tls(*files(certificates, "ours")), Tls(*files(certificates, "new"))
    watched = Tls(*files(certificates, "ours"))
    address, renewed = serve(watched), serve(new)
    watched.watch()
    assert answers(address, old) and not answers(renewed, watched)
    certificates.replace("ours", "new")
    watched.reread()
    until(lambda: watched.generation == 1, what="new certificates")
    assert answers(address, new) and not answers(address, old)
    assert answers(renewed, watched)


def test_files_that_do_not_fit_together_change_nothing_until_they_do(certificates, serve, caplog):
    ours, new = files(certificates, "ours"), files(certificates, "new")
    old, watched = Tls(*ours), Tls(*ours)
    address = serve(watched)
    watched.watch()
    shutil.copy(new[0], ours[0])  # the certificate is replaced first, its key later
    with caplog.at_level(logging.ERROR, "reft"):
        watched.reread()
        until(lambda: "stay as they were" in caplog.text, what="the complaint")
    assert watched.generation == 0 and answers(address, old)
    certificates.replace("ours", "new")
    watched.reread()
    until(lambda: watched.generation == 1, what="new certificates")
    assert answers(address, Tls(*new))


def test_the_thread_of_a_dropped_object_ends(certificates):
    earlier = set(threading.enumerate())
    watched = Tls(*files(certificates, "ours"))
    watched.watch()
    (thread,) = (each for each in threading.enumerate() if each.name == "reft-tls" and each not in earlier)
    assert thread.is_alive()
    del watched
    thread.join(10)
    assert not thread.is_alive()
