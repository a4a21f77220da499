"""Tests the acceptor: whom it lets in, as whom, at which pace, and what it costs the others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path

import pytest

from reft.wire import local_socket
from reft.wire.certificate_role import Role
from reft.wire.process import stat_of
from reft.wire.tls import Tls
from reft_daemon.child.admission import AdmissionLimits
from reft_daemon.server import acceptor as served
from reft_daemon.server import relay
from reft_daemon.server.acceptor import Acceptor, AcceptorThread, _limits
from reft_daemon.server.callers import Caller, Door
from reft_daemon.server.relay import LINGER_BYTES, PIECE, PREFACE, UNPROVED_BURST
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import until
from tests.support.descriptors import await_closed, own_descriptors
from tests.support.flooder import FLOOD_NETWORK
from tests.support.ipv6 import DAEMON_NETWORK, PEER_NETWORK, has_ipv6, network_of_ipv6

WAIT_S = 20.0


class ShortSocket(socket.socket):
    """A listener whose first calls find no free descriptor."""

    fails = 1

    def accept(self) -> tuple[socket.socket, object]:
        if self.fails:
            self.fails -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class Place:
    """An acceptor for both doors, with a played gRPC server behind."""

    def __init__(self, folder: Path) -> None:
        self.thread, self.path = AcceptorThread(), folder / "d.sock"
        self.server = socket.socket(socket.AF_UNIX)
        self.server.settimeout(WAIT_S)
        self.server.bind(str(folder / "private"))
        self.server.listen()
        self.private = os.open(folder / "private", os.O_PATH)
        (folder / "private").unlink()
        self.sockets: list[socket.socket] = [self.server]
        self.acceptors: list[Acceptor] = []

    def listen(
        self, door: Door, listener: socket.socket | None = None, tls: Tls | None = None, host: str = "127.0.0.1"
    ) -> None:
        listener = listener or socket.socket(socket.AF_UNIX if door is Door.LOCAL else socket.AF_INET)
        listener.bind(str(self.path) if door is Door.LOCAL else (host, 0))
        listener.listen()
        self.address = listener.getsockname()
        self.acceptors.append(Acceptor(self.thread, door, [listener], os.dup(self.private), tls))

    def caller(
        self, first: bytes = PREFACE, host: str = "127.0.0.1", made: socket.socket | None = None
    ) -> socket.socket:
        """Returns the socket of a new caller, who has sent these bytes."""
        made = made or socket.socket(socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET)
        self.sockets.append(made)
        made.settimeout(WAIT_S)
        if not isinstance(self.address, str):
            made.bind((host, 0))
        made.connect(self.address)
        if first:
            made.sendall(first)
        return made

    def served(self, first: bytes = PREFACE) -> tuple[socket.socket, str]:
        """Returns the server's next connection, and its peer in gRPC's words."""
        connection, name = self.server.accept()
        self.sockets.append(connection)
        connection.settimeout(WAIT_S)
        assert exactly(connection, len(first)) == first
        return connection, f"unix-abstract:{name[1:].decode()}"

    def pair(
        self, host: str = "127.0.0.1", made: socket.socket | None = None
    ) -> tuple[socket.socket, socket.socket, str]:
        """Returns a caller, the server's end, and the peer's name."""
        return (self.caller(host=host, made=made), *self.served())

    def refused(self, reason: str) -> None:
        until(lambda: any(reason in each for each in self.thread.refusals.totals), what=reason)

    def turns(self, count: int = 10) -> None:
        """Returns once the acceptors' loop had so many turns."""

        async def wait() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(wait(), self.thread.loop).result(WAIT_S)

    def close(self) -> None:
        for acceptor in self.acceptors:
            self.run(acceptor.close())
        self.thread.close()
        for each in self.sockets:
            each.close()
        os.close(self.private)

    @staticmethod
    def run(call: Coroutine[None, None, None]) -> None:
        asyncio.run(call)


def exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def carries(caller: socket.socket, server: socket.socket) -> bool:
    caller.sendall(b"x")
    return server.recv(1) == b"x"


def ended(connection: socket.socket) -> bool:
    """Waits for the end of a connection; whether nothing came before."""
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Place]:
    monkeypatch.setattr(served, "CLOSE_S", 0.05)  # the played server does not end by itself
    made = Place(tmp_path)
    yield made
    made.close()


def test_a_caller_of_the_unix_socket_is_the_process_that_the_kernel_names(place):
    place.listen(Door.LOCAL)
    caller, server, peer = place.pair()
    assert place.thread.callers.of(peer) == Caller(Door.LOCAL, pid=os.getpid(), start=stat_of(os.getpid()).start)
    caller.close()
    assert ended(server)
    assert place.thread.callers.of(peer) is None


def test_a_caller_over_tcp_has_an_address(place):
    place.listen(Door.REMOTE)
    _, _, peer = place.pair(host="127.0.0.7")
    assert place.thread.callers.of(peer) == Caller(Door.REMOTE, address="127.0.0.7")


@pytest.mark.parametrize("door", Door)
def test_all_bytes_are_carried_both_ways_and_before_the_end(place, door):
    """More bytes than all buffers hold, so each side must wait for the other one."""
    place.listen(door)
    caller, server, peer = place.pair()
    place.thread.callers.note_proved(peer)
    data = os.urandom(3 << 20)
    for source, sink in ((caller, server), (server, caller)):
        sender = threading.Thread(target=source.sendall, args=(data,))
        sender.start()
        assert exactly(sink, len(data)) == data
        sender.join()
    server.sendall(data[:1000])
    server.close()
    assert exactly(caller, 2000) == data[:1000]
    assert not any("had to wait" in each for each in place.thread.refusals.totals)


@pytest.mark.parametrize("door", Door)
def test_a_server_that_ends_while_a_caller_sends_gets_its_answer_through(place, door, monkeypatch):
    """The server never reads what the caller sends, so all buffers are full at the end."""
    monkeypatch.setattr(relay, "LINGER_S", 3600.0)
    monkeypatch.setattr(relay, "PIECE", 1 << 14)
    place.listen(door)
    caller, server, peer = place.pair()
    place.thread.callers.note_proved(peer)
    caller.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        caller.send(bytes(LINGER_BYTES // 2))
    server.sendall(b"answer")
    server.close()
    caller.settimeout(WAIT_S)
    assert exactly(caller, 100) == b"answer", "and then the end, and no reset"
    caller.close()
    until(lambda: place.thread.callers.of(peer) is None, what="the end of the connection")


def test_a_caller_that_does_not_close_is_closed(place, monkeypatch):
    monkeypatch.setattr(relay, "LINGER_S", 0.05)
    place.listen(Door.REMOTE)
    caller, server, peer = place.pair()
    server.close()
    assert ended(caller)
    until(lambda: place.thread.callers.of(peer) is None, what="the end of the connection")
    with pytest.raises(OSError, match=r"reset|Broken"):
        while True:
            caller.sendall(b"x")


@pytest.mark.parametrize("is_proved", [False, True])
def test_a_caller_that_sends_and_never_reads_is_closed(place, monkeypatch, is_proved):
    """All buffers on the way to the caller are full, so the end of the server can't be told."""
    monkeypatch.setattr(relay, "LINGER_S", 0.05)
    monkeypatch.setattr(relay, "UNPROVED_PIECE", 1000)
    reads, read = [], relay._Stream._read
    monkeypatch.setattr(relay._Stream, "_read", lambda stream: (reads.append(1), read(stream)))
    place.listen(Door.REMOTE)
    caller, server, peer = place.pair()
    if is_proved:
        place.thread.callers.note_proved(peer)
    (carrying,) = place.acceptors[0]._relays.values()
    server.setblocking(False)

    def is_full() -> bool:
        with contextlib.suppress(BlockingIOError):
            while True:
                server.send(bytes(1 << 16))
        return bool(carrying._streams[1]._unsent)

    until(is_full, what="a caller whose buffers are full")
    assert len(carrying._streams[1]._unsent) <= (PIECE if is_proved else 1000)
    reads.clear()
    place.turns(100)
    assert len(reads) < 50, "the relay waits for the caller"
    server.close()
    caller.sendall(b"x")
    until(lambda: place.thread.callers.of(peer) is None, what="the end of the connection")


def test_a_caller_that_sends_on_is_closed(place, monkeypatch):
    monkeypatch.setattr(relay, "LINGER_S", 3600.0)
    place.listen(Door.REMOTE)
    caller, server, _ = place.pair()
    server.close()
    with pytest.raises(OSError, match=r"reset|Broken"):
        while True:
            caller.sendall(bytes(LINGER_BYTES))


def test_a_caller_of_another_user_is_closed_before_a_byte_is_read(place, monkeypatch):
    place.listen(Door.LOCAL)
    with monkeypatch.context() as patch:
        patch.setattr(local_socket, "peer", lambda connection: (os.getpid(), os.getuid() + 1))
        assert ended(place.caller(b""))
    place.refused("another user")
    _, _, peer = place.pair()  # the server's first connection is this one
    assert place.thread.callers.of(peer)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", PREFACE[:-1] + b"x" * 50])
def test_other_protocols_never_reach_the_server(place, first):
    place.listen(Door.REMOTE)
    assert ended(place.caller(first))
    place.refused("did not speak HTTP/2")
    place.pair()


def test_a_caller_that_ends_before_it_sends_anything_has_a_reason_of_its_own(place):
    place.listen(Door.REMOTE)
    place.caller(b"").close()
    place.refused("they ended the connection before they sent anything")
    assert len(place.thread.refusals.totals) == 1


def test_a_caller_that_refuses_the_certificate_of_the_daemon_is_said_to_do_so(place, certificates):
    place.listen(Door.REMOTE, tls=tls_of(certificates))
    tls_of(certificates).client_context().wrap_socket(place.caller(b"")).close()
    place.refused("before they sent anything: do they refuse the certificate of this daemon?")


def test_first_bytes_may_come_one_by_one_but_in_time(place, monkeypatch):
    place.listen(Door.REMOTE)
    slow = place.caller(PREFACE[:5])
    slow.sendall(PREFACE[5:])
    place.served()
    monkeypatch.setattr(relay, "FIRST_BYTES_S", 0.05)
    assert ended(place.caller(PREFACE[:5])) and ended(place.caller(b""))
    place.refused("no first bytes in time")


def test_a_flood_pushes_out_itself_and_neither_proved_callers_nor_other_addresses(place, monkeypatch):
    monkeypatch.setattr(served, "OF_ADDRESS_MAX", 2)
    place.listen(Door.REMOTE)
    other, other_server, _ = place.pair("127.0.0.2")
    peer, peer_server, name = place.pair()
    place.thread.callers.note_proved(name)
    first, second, _ = place.pair(), place.pair(), place.pair()
    assert ended(first[0]) and ended(first[1]) and place.thread.callers.of(first[2]) is None
    place.refused("others needed their place")
    for caller, server in ((other, other_server), (peer, peer_server), second[:2]):
        assert carries(caller, server)


def test_a_flood_over_ipv6_pushes_out_itself_and_no_proved_caller_of_its_address(place, monkeypatch):
    if not has_ipv6():
        pytest.skip("this host has no IPv6")
    monkeypatch.setattr(served, "OF_ADDRESS_MAX", 2)
    place.listen(Door.REMOTE, socket.socket(socket.AF_INET6), host="::1")
    peer, peer_server, name = place.pair("::1", socket.socket(socket.AF_INET6))
    place.thread.callers.note_proved(name)
    flood = [place.pair("::1", socket.socket(socket.AF_INET6)) for _ in range(4)]
    assert ended(flood[0][0]) and ended(flood[1][0])
    assert carries(peer, peer_server) and all(carries(*each[:2]) for each in flood[2:])
    assert place.thread.callers.of(name).address == "::1"


def test_all_addresses_of_a_network_of_ipv6_count_as_one(place, monkeypatch):
    """Else the flood would have as many places as addresses, and push out the oldest address."""
    monkeypatch.setattr(served, "OF_ADDRESS_MAX", 2)
    monkeypatch.setattr(served, "UNPROVED_MAX", 4)
    with network_of_ipv6() as new_socket:
        place.listen(Door.REMOTE, new_socket(), host=f"{DAEMON_NETWORK}1")
        other = place.pair(f"{PEER_NETWORK}1", new_socket())
        flood = [place.pair(f"{FLOOD_NETWORK}{i:x}", new_socket()) for i in range(1, 9)]
        assert all(ended(caller) for caller, _, _ in flood[:-2])
        assert all(carries(*each[:2]) for each in (other, *flood[-2:]))
        assert place.thread.refusals.totals == {"others needed their place": len(flood) - 2}


def test_a_process_of_this_node_pushes_out_only_itself(place, monkeypatch):
    monkeypatch.setattr(served, "OF_PROCESS_MAX", 2)
    place.listen(Door.LOCAL)
    with monkeypatch.context() as patch:
        patch.setattr(local_socket, "peer", lambda connection: (os.getppid(), os.getuid()))
        other, other_server, _ = place.pair()
    first, second, _ = place.pair(), place.pair(), place.pair()
    assert ended(first[0]) and ended(first[1]) and place.thread.callers.of(first[2]) is None
    for caller, server in ((other, other_server), second[:2]):
        caller.sendall(b"x")
        assert server.recv(1) == b"x"


def test_unproved_callers_are_slowed(place, monkeypatch):
    """A caller who has proved nothing gets so many bytes through; with a proof, all."""
    monkeypatch.setattr(relay, "REFILL_S", 3600.0)
    place.listen(Door.REMOTE)
    caller, server, peer = place.pair()
    data = os.urandom(8 * UNPROVED_BURST)
    sender = threading.Thread(target=caller.sendall, args=(data,))
    sender.start()
    received = exactly(server, UNPROVED_BURST)
    server.setblocking(False)
    place.pair()  # the loop had a turn meanwhile
    with pytest.raises(BlockingIOError):
        server.recv(1)
    place.refused("had to wait")
    server.settimeout(WAIT_S)
    place.thread.callers.note_proved(peer)
    assert received + exactly(server, len(data) - len(received)) == data
    sender.join()


def test_a_slowed_caller_goes_on_after_a_while(place, monkeypatch):
    monkeypatch.setattr(relay, "REFILL_S", 0.01)
    monkeypatch.setattr(relay, "UNPROVED_BYTES_S", 1 << 20)
    place.listen(Door.REMOTE)
    caller, server, _ = place.pair()
    data = os.urandom(2 * UNPROVED_BURST)
    caller.sendall(data)
    assert exactly(server, len(data)) == data
    assert list(place.thread.refusals.totals.values()) == [1], "said once, however often it waits"


def test_without_a_descriptor_callers_wait_and_are_served_later(place):
    place.listen(Door.REMOTE, ShortSocket(socket.AF_INET))
    place.pair()
    place.refused(os.strerror(errno.EMFILE))


def test_without_a_descriptor_the_acceptor_pauses(place, monkeypatch):
    """Else the loop would try again as fast as it can."""
    monkeypatch.setattr(served, "RETRY_S", 3600.0)
    listener = ShortSocket(socket.AF_INET)
    listener.fails = 1000
    place.listen(Door.REMOTE, listener)
    place.caller()
    place.refused(os.strerror(errno.EMFILE))
    place.turns()
    assert place.thread.refusals.totals.total() == 1


@pytest.mark.parametrize("pause_s", [3600.0, 0.001])
def test_a_flood_of_connections_leaves_turns_to_others(place, monkeypatch, pause_s):
    monkeypatch.setattr(served, "ACCEPTS", 2)
    monkeypatch.setattr(served, "PAUSE_S", pause_s)
    place.listen(Door.REMOTE)
    may_go_on = threading.Event()
    place.thread.loop.call_soon_threadsafe(may_go_on.wait)
    for _ in range(5):
        place.caller()
    may_go_on.set()
    for _ in range(2 if pause_s > 1 else 5):
        place.served()
    place.turns()
    assert len(place.acceptors[0]._relays) == (2 if pause_s > 1 else 5)


def test_a_server_that_is_gone_ends_its_callers_only(place):
    place.listen(Door.REMOTE)
    place.server.close()
    assert ended(place.caller())
    place.refused("no connection to the gRPC server")


def test_limits_leave_descriptors_for_slots():
    for door in Door:
        limits = _limits(door, 1024)
        assert 3 * limits.unproved <= 256 and 3 * limits.proved <= 256 and limits.of_address < limits.unproved
    remote = AdmissionLimits(served.OF_ADDRESS_MAX, served.UNPROVED_MAX, served.PROVED_MAX)
    assert _limits(Door.REMOTE, 1 << 20) == remote
    assert _limits(Door.LOCAL, 1 << 20) == AdmissionLimits(served.OF_PROCESS_MAX, served.LOCAL_MAX, 0)


def test_close_ends_all_connections_and_frees_all_descriptors(place):
    before = own_descriptors()
    place.listen(Door.REMOTE)
    caller, server, peer = place.pair()
    idle = place.caller(b"")
    place.run(place.acceptors.pop().close())
    assert ended(caller) and ended(server) and ended(idle) and place.thread.callers.of(peer) is None
    for each in (caller, server, idle):
        each.close()
    await_closed(before)


# TLS


def tls_of(certificates: Certificates, authority: str = "ours", **whose: str) -> Tls:
    return Tls(*map(Path, certificates.flags(authority, **whose)[1::2]))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    if why_not():
        pytest.skip(why_not())
    return Certificates(tmp_path_factory.mktemp("certificates"))


def encrypted(place: Place, tls: Tls) -> ssl.SSLSocket:
    """Returns a caller after its handshake, with the first bytes sent."""
    made = tls.client_context().wrap_socket(place.caller(b""))
    place.sockets.append(made)
    made.sendall(PREFACE)
    return made


def test_a_certificate_says_who_calls_and_all_bytes_are_carried(place, certificates):
    place.listen(Door.REMOTE, tls=tls_of(certificates))
    caller = encrypted(place, tls_of(certificates, node="far"))
    server, peer = place.served()
    role = Role("alice", "far")
    assert place.thread.callers.of(peer) == Caller(Door.REMOTE, address="127.0.0.1", role=role)
    assert caller.version() == "TLSv1.3" and caller.selected_alpn_protocol() == "h2"
    place.thread.callers.note_proved(peer)
    data = os.urandom(3 << 20)
    for source, sink in ((caller, server), (server, caller)):
        sender = threading.Thread(target=source.sendall, args=(data,))
        sender.start()
        assert exactly(sink, len(data)) == data
        sender.join()
    server.sendall(data[:1000])
    server.close()
    assert exactly(caller, 2000) == data[:1000]


def test_unproved_callers_are_slowed_under_tls_too(place, certificates, monkeypatch):
    """TLS has read more from the socket than may be carried yet; no byte is forgotten."""
    monkeypatch.setattr(relay, "REFILL_S", 0.01)
    monkeypatch.setattr(relay, "UNPROVED_BURST", 10_000)
    place.listen(Door.REMOTE, tls=tls_of(certificates))
    caller = encrypted(place, tls_of(certificates))
    server, peer = place.served()
    data = os.urandom(100_000)
    caller.sendall(data[:16_000])  # one record
    assert exactly(server, 16_000) == data[:16_000]
    place.thread.callers.note_proved(peer)
    caller.sendall(data[16_000:])
    assert exactly(server, 84_000) == data[16_000:]


def test_an_unproved_caller_gets_no_more_bytes_through_under_tls(place, certificates, monkeypatch):
    monkeypatch.setattr(relay, "REFILL_S", 3600.0)
    place.listen(Door.REMOTE, tls=tls_of(certificates))
    caller = encrypted(place, tls_of(certificates))
    server, peer = place.served()
    data = os.urandom(8 * UNPROVED_BURST)
    sender = threading.Thread(target=caller.sendall, args=(data,))
    sender.start()
    received = exactly(server, UNPROVED_BURST)
    server.setblocking(False)
    encrypted(place, tls_of(certificates))
    place.served()  # the loop had a turn meanwhile
    with pytest.raises(BlockingIOError):
        server.recv(1)
    server.settimeout(WAIT_S)
    place.thread.callers.note_proved(peer)
    assert received + exactly(server, len(data) - len(received)) == data
    sender.join()


def test_a_record_of_tls_that_is_larger_than_a_piece_is_carried_whole(place, certificates, monkeypatch):
    """The kernel does not know of bytes that TLS has read already."""
    monkeypatch.setattr(relay, "PIECE", 10_000)
    place.listen(Door.REMOTE, tls=tls_of(certificates))
    caller = encrypted(place, tls_of(certificates))
    server, peer = place.served()
    place.thread.callers.note_proved(peer)
    data = os.urandom(3 * 16_000)
    for i in range(3):
        caller.sendall(data[16_000 * i : 16_000 * (i + 1)])
        assert exactly(server, 16_000) == data[16_000 * i : 16_000 * (i + 1)]


@pytest.mark.parametrize(
    ("authority", "user", "reason"),
    [
        ("ours", "bob", "certificate is of another user"),
        ("strangers", "alice", "signed certificate in certificate chain)"),
    ],
)
def test_another_users_or_authoritys_certificate_is_closed_before_gRPC_reads(
    place, certificates, authority, user, reason
):  # fmt: skip
    place.listen(Door.REMOTE, tls=tls_of(certificates))
    context = tls_of(certificates, authority, user=user).client_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises((ssl.SSLError, ConnectionError)), context.wrap_socket(place.caller(b"")) as made:
        made.sendall(PREFACE)
        if not made.recv(1):
            raise ConnectionError
    place.refused(reason)
    encrypted(place, tls_of(certificates))
    place.served()  # the server's first connection


def test_callers_without_a_certificate_or_without_tls_are_refused(place, certificates):
    place.listen(Door.REMOTE, tls=tls_of(certificates))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises((ssl.SSLError, ConnectionError)), context.wrap_socket(place.caller(b"")) as made:
        made.recv(1)
    place.caller(b"GET / HTTP/1.0\r\n\r\n")
    for reason in ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "HTTP_REQUEST"):
        place.refused(f"TLS handshake failed ({reason})")


def test_a_handshake_has_a_time_limit(place, certificates, monkeypatch):
    monkeypatch.setattr(relay, "FIRST_BYTES_S", 0.05)
    place.listen(Door.REMOTE, tls=tls_of(certificates))
    assert ended(place.caller(b"")) and ended(place.caller(b"\x16\x03\x01"))
    place.refused("no first bytes in time")
