"""Tests certificates: which are refused, and what replaced files change."""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import socket
import ssl
import threading
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from reft.errors import ConfigError
from reft.wire import rpc
from reft.wire.certificate_role import Role, role_of
from reft.wire.tls import DAY_S, Tls, age_words
from tests.support.certificates import Certificates, openssl, why_not
from tests.support.daemons import until

SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # with this frame of HTTP/2 a server says that it is ready
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture
def certificates(tmp_path) -> Certificates:
    return Certificates(tmp_path)


def files(certificates: Certificates, authority: str, **whose: str) -> list[Path]:
    return [Path(name) for name in certificates.flags(authority, **whose)[1::2]]


@pytest.fixture
def serve():
    """Starts servers that accept clients of gRPC and say nothing more; returns their addresses."""
    with contextlib.ExitStack() as ends:

        def accept(listener: socket.socket, tls: Tls) -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                except OSError:
                    return  # the listener is closed
                with contextlib.suppress(OSError):
                    connection = ends.enter_context(tls.server_context().wrap_socket(plain, server_side=True))
                    connection.sendall(SETTINGS)

        def start(tls: Tls) -> str:
            listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
            ends.callback(listener.shutdown, socket.SHUT_RDWR)
            threading.Thread(target=accept, args=(listener, tls)).start()
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield start


def answers(address: str, tls: Tls) -> bool:
    """Returns whether client and server accept each other's certificates."""
    states: queue.Queue[grpc.ChannelConnectivity] = queue.Queue()
    with rpc.channel(address, tls) as channel:
        channel.subscribe(states.put, try_to_connect=True)
        while True:
            state = states.get(timeout=20)
            if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
                return state is grpc.ChannelConnectivity.READY


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
    openssl("pkcs8", "-topk8", "-in", key, "-passout", "pass:secret", "-out", tmp_path / "locked.key")
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


@pytest.mark.parametrize("label", ["X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_other_labels_of_certificates_that_openssl_takes_count_too(certificates, label):
    """Python's own reader refuses them: that ended the thread, and renewed files were not read."""
    ours = files(certificates, "ours")
    watched = Tls(*ours)
    watched.watch()
    text = files(certificates, "new")[0].read_text()
    certificates.replace("ours", "new")
    ours[0].write_text(text.replace(" CERTIFICATE-----", f" {label}-----"))
    watched.reread()
    until(lambda: watched.generation, what="new certificates")
    assert watched._files.content.sha256 == Tls(*files(certificates, "new"))._files.content.sha256


def test_the_thread_of_a_dropped_object_ends(certificates):
    earlier = set(threading.enumerate())
    watched = Tls(*files(certificates, "ours"))
    watched.watch()
    (thread,) = (each for each in threading.enumerate() if each.name == "reft-tls" and each not in earlier)
    assert thread.is_alive()
    del watched
    thread.join(10)
    assert not thread.is_alive()


# Roles


def test_the_role_is_that_of_the_certificate(certificates):
    assert Tls(*files(certificates, "ours", node="n1", user="bob")).role == Role("bob", "n1")
    assert Tls(*certificates.agent("ours", node="n1")).role == Role("alice", agent="n1")


def test_a_certificate_that_has_expired_still_has_its_role(certificates, tmp_path):
    """A daemon that starts again must serve its own trainers, also where a renewal has failed."""
    cert, key, ca = files(certificates, "ours", node="n1")
    assert Tls(expired(cert, key, ca, tmp_path), key, ca).role == Role("alice", "n1")


@pytest.mark.parametrize(
    ("age_days", "life_days", "words"),
    [
        (-0.1, 365, "counts from Jan  1 00:00:00 2026 GMT on: other nodes refuse it until then. Is the clock"),
        (0.1, 365, ""),
        (350, 365, ""),
        (352, 365, "ends at Jan  1 00:00:00 2027 GMT, in 13 days: other nodes refuse it then."),
        (364.5, 365, "ends at Jan  1 00:00:00 2027 GMT, in 12 h: "),
        (365, 365, "has ended at Jan  1 00:00:00 2027 GMT: other nodes refuse it, and no snapshot"),
        (0.8, 1, ""),
        (0.95, 1, "ends at Jan  2 00:00:00 2026 GMT, in 1 h: "),
    ],
)
def test_the_age_of_a_certificate(age_days, life_days, words):
    begin, end = "Jan  1 00:00:00 2026 GMT", {365: "Jan  1 00:00:00 2027 GMT", 1: "Jan  2 00:00:00 2026 GMT"}[life_days]
    said = age_words(begin, end, ssl.cert_time_to_seconds(begin) + age_days * DAY_S)
    assert said.startswith(words) and bool(said) == bool(words)


def test_a_certificate_that_has_expired_is_named_in_the_log_once(certificates, tmp_path, caplog):
    """Nothing else tells the node itself: its calls fail, and others say that it is silent."""
    cert, key, ca = files(certificates, "ours", node="n1")
    shutil.copy(expired(cert, key, ca, tmp_path), tmp_path / "cert.pem")
    tls = Tls(tmp_path / "cert.pem", key, ca)
    tls.watch()
    until(lambda: "cert.pem has ended at " in caplog.text, what="the complaint")
    assert "certificates.sh" in caplog.text
    shutil.copy(cert, tmp_path / "cert.pem")
    tls.reread()
    until(lambda: tls.generation == 1, what="the new certificate")
    assert caplog.text.count("cert.pem has ended at ") == 1


def expired(cert: Path, key: Path, ca: Path, folder: Path) -> Path:
    """Returns the same certificate, but it ends as it begins."""
    request, old = folder / "request", folder / "old.pem"
    openssl("x509", "-x509toreq", "-in", cert, "-signkey", key, "-copy_extensions", "copyall", "-out", request)
    signing = ("-CA", ca, "-CAkey", ca.with_suffix(".key"), "-copy_extensions", "copyall")
    openssl("x509", "-req", "-in", request, *signing, "-days", "0", "-out", old)
    return old


def test_a_certificate_without_a_user_is_refused(certificates):
    with pytest.raises(ConfigError, match=r"(?s)host.pem names no user.*certificates.sh"):
        Tls(*certificates.host("ours"))


def test_a_certificate_of_another_role_is_not_taken_over(certificates, caplog):
    ours, others = files(certificates, "ours"), files(certificates, "ours", user="bob")
    watched = Tls(*ours)
    watched.watch()
    for mine, other in zip(ours[:2], others[:2], strict=True):
        shutil.copy(other, mine)
    with caplog.at_level(logging.ERROR, "reft"):
        watched.reread()
        until(lambda: "is now of the daemon of user bob" in caplog.text, what="the complaint")
    assert watched.generation == 0 and watched.role.user == "alice"


def test_only_daemons_of_the_same_user_are_called(certificates, serve):
    """All these servers have the same host; certificate and key of each are of one authority."""
    mine = Tls(*certificates.agent("ours"))
    assert answers(serve(Tls(*files(certificates, "ours", node="n7"))), mine)
    assert not answers(serve(Tls(*files(certificates, "ours", user="bob"))), mine)
    assert not answers(serve(Tls(*certificates.agent("ours"))), mine), "an agent's key serves nothing"


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Returns both ends of a connection.

    Raises:
        OSError: one side refuses the other.
    """
    ends = socket.socketpair()
    with futures.ThreadPoolExecutor() as pool:
        accepted = pool.submit(server.wrap_socket, ends[0], server_side=True)
        try:
            made = client.wrap_socket(ends[1], server_hostname="reft")
            made.settimeout(10)
            accepted.result(10)
            made.sendall(b"?")  # in TLS 1.3 the client hears of a refusal after its own handshake
            accepted.result().sendall(accepted.result().recv(1))
            assert made.recv(1) == b"?"
        except BaseException:
            for end in ends:
                end.close()
            raise
        return accepted.result(), made


def test_sockets_of_both_contexts_know_each_others_role(certificates):
    daemon, agent = Tls(*files(certificates, "ours", node="n1")), Tls(*certificates.agent("ours", node="n2"))
    accepted, made = shake_hands(daemon.server_context(), agent.client_context())
    with accepted, made:
        assert role_of(accepted.getpeercert()) == agent.role and role_of(made.getpeercert()) == daemon.role
        assert accepted.selected_alpn_protocol() == "h2" and accepted.version() == "TLSv1.3"
    assert daemon.server_context() is daemon.server_context()
    assert daemon.server_context().minimum_version is agent.client_context().minimum_version is ssl.TLSVersion.TLSv1_2


def test_contexts_refuse_strangers(certificates):
    daemon, agent = Tls(*files(certificates, "ours")), Tls(*certificates.agent("ours"))
    stranger = Tls(*files(certificates, "theirs"))
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    for server, client in (
        (daemon.server_context(), stranger.client_context()),
        (stranger.server_context(), agent.client_context()),
        (daemon.server_context(), nobody),
        (agent.server_context(), daemon.client_context()),  # an agent's key serves nothing
    ):
        with pytest.raises(OSError):
            shake_hands(server, client)


def test_a_session_is_not_resumed(certificates):
    daemon, agent = Tls(*files(certificates, "ours")), Tls(*certificates.agent("ours"))
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        client = agent.client_context()
        client.maximum_version = version
        accepted, made = shake_hands(daemon.server_context(), client)
        with accepted, made:
            assert made.session is None or not made.session.has_ticket


def test_replaced_files_make_new_contexts(certificates):
    watched, new = Tls(*files(certificates, "ours")), Tls(*files(certificates, "new"))
    old = watched.server_context()
    watched.watch()
    certificates.replace("ours", "new")
    watched.reread()
    until(lambda: watched.generation == 1, what="new certificates")
    assert watched.server_context() is not old
    for end in shake_hands(watched.server_context(), new.client_context()):
        end.close()
    with pytest.raises(OSError):
        shake_hands(old, new.client_context())
