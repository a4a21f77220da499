"""Tests who has a place at the mover's port. A flood pushes out only itself."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from reft.wire.tls import Tls
from reft_daemon.mover import range_client, range_server
from reft_daemon.mover import range_protocol as protocol
from reft_daemon.mover.range_client import MoverAddress, RangePull
from reft_daemon.mover.range_server import OfferedSlot, RangeServer
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import until
from tests.support.parity import CHUNK, SectionSource, at, section_source

OF_ADDRESS, UNPROVED, PROVED = 4, 8, 2
FLOOD = 20
STRANGER, PEER = "127.0.0.2", "127.0.0.1"
PUSHED_OUT = "others needed their place at the mover"


class CountingServer(RangeServer):
    """Tells who has entered."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.entered: list[str] = []

    def _enter(self, name: str, connection: socket.socket, host: str) -> None:
        super()._enter(name, connection, host)
        self.entered.append(host)


class Place:
    """A mover's server with few places, and those who call it."""

    def __init__(self, source: SectionSource, listener: socket.socket | None = None, tls: Tls | None = None) -> None:
        self.source, self.listener = source, listener or socket.socket()
        if not listener:
            self.listener.bind(("127.0.0.1", 0))
            self.listener.listen()
        self.server = CountingServer(self.listener, (lambda: tls) if tls else None)
        self.tls = tls
        self.offer("job")
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        self.callers: list[socket.socket] = []

    def offer(self, job: str) -> None:
        self.server.offer(job, [OfferedSlot(3, self.source.place, self.source.slot.map._slot)])

    def caller(self, host: str, first: bytes = b"") -> socket.socket:
        """Returns the connection of a caller from this address, who has sent these bytes."""
        made = socket.create_connection(("127.0.0.1", self.server.port), 20, (host, 0))
        self.callers.append(made)
        made.sendall(first)
        return made

    def ticket(self, job: str = "job") -> bytes:
        ticket = os.urandom(protocol.TICKET_BYTES)
        self.server.grant(job, ticket)
        return ticket

    def pull(self) -> RangePull:
        address = MoverAddress("127.0.0.1", self.server.port, "node1")
        return RangePull(address, self.ticket(), at(7), 3, [(0, 0, CHUNK)])

    def proved(self) -> tuple[socket.socket, RangePull]:
        """Returns a connection that was admitted, from PEER."""
        pull = self.pull()
        self.callers.append(range_client.connect(pull, self.tls))
        return self.callers[-1], pull

    def serves(self, connection: socket.socket, pull: RangePull) -> bool:
        """Whether an admitted connection gets the bytes of its ranges."""
        parity = np.zeros(CHUNK, np.uint8)
        list(range_client.fold_ranges(connection, pull, parity))
        return parity.tobytes() == self.source.section[:CHUNK]

    def flood(self, *hosts: str, first: bytes = b"", count: int = FLOOD) -> list[socket.socket]:
        """Opens connections from these addresses by turns; returns once all have entered."""
        before = len(self.server.entered)
        made = [self.caller(hosts[i % len(hosts)], first) for i in range(count)]
        until(lambda: len(self.server.entered) == before + count, what="the flood")
        return made

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self.listener.close()
        self.thread.join(20)
        for each in self.callers:
            each.close()
        until(lambda: not threads(), what="the end of the threads")


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "reft-serve"]


def open_of(connections: Sequence[socket.socket]) -> list[socket.socket]:
    """Returns those that have not ended; nothing was sent to any of them."""
    poll = select.poll()
    for each in connections:
        poll.register(each, select.POLLIN)
    ended = {number for number, _ in poll.poll(0)}
    return [each for each in connections if each.fileno() not in ended]


@pytest.fixture
def new_place(monkeypatch) -> Iterator[Callable[..., Place]]:
    for name, limit in (("OF_ADDRESS_MAX", OF_ADDRESS), ("UNPROVED_MAX", UNPROVED), ("PROVED_MAX", PROVED)):
        monkeypatch.setattr(range_server, name, limit)
    # No connection of this test may end by a deadline.
    monkeypatch.setattr(protocol, "CONNECT_S", 60.0)
    with contextlib.ExitStack() as stack:

        def new(*arguments: object, **named: object) -> Place:
            return stack.enter_context(
                contextlib.closing(Place(section_source(3, 2 * CHUNK, at(7)), *arguments, **named))
            )

        yield new


@pytest.fixture
def place(new_place) -> Place:
    return new_place()


@pytest.mark.parametrize("flooder", [STRANGER, PEER])
def test_a_peer_gets_its_ranges_in_a_flood_of_one_address(place, flooder):
    flood = place.flood(flooder)
    assert place.serves(*place.proved())
    assert len(open_of(flood)) == OF_ADDRESS - (flooder == PEER)
    until(lambda: len(threads()) <= OF_ADDRESS + 1, what="the end of the threads that were pushed out")


def test_a_peer_gets_its_ranges_in_a_flood_of_many_addresses(place):
    early = place.caller(PEER)  # its ticket comes late
    until(lambda: place.server.entered, what="the peer")
    flood = place.flood(*(f"127.0.1.{i}" for i in range(1, 4)))
    pull = place.pull()
    early.sendall(protocol.MAGIC + pull.ticket)
    assert early.recv(protocol.HEAD.size, socket.MSG_WAITALL) == protocol.HEAD.pack(0, 0, 0)
    assert place.serves(early, pull) and place.serves(*place.proved())
    assert len(open_of(flood)) == UNPROVED - 1


def test_a_connection_with_a_ticket_is_never_pushed_out(place):
    connections = [place.proved() for _ in range(PROVED)]
    place.flood(PEER)
    for each in connections:
        assert place.serves(*each)


def test_who_was_pushed_out_is_counted_once_and_said(place, caplog):
    caplog.set_level("INFO")
    flood = place.flood(STRANGER, first=protocol.MAGIC[:3])
    until(lambda: "others needed their place at the mover" in caplog.text, what="the line")
    assert f"{STRANGER} (" in caplog.text and len(caplog.records) == 1
    for each in flood:
        each.close()
    until(lambda: not threads(), what="the end of the flood")
    assert list(place.server._refusals.totals.values()) == [FLOOD - OF_ADDRESS, OF_ADDRESS], "each with one reason"
    assert not place.server._unproved and place.server._admission.add("1", STRANGER) == ""


def test_a_ticket_waits_for_a_place(place):
    served = [place.proved() for _ in range(PROVED)]
    pull = place.pull()
    late = place.caller(PEER, protocol.MAGIC + pull.ticket)
    until(lambda: pull.ticket not in place.server._tickets, what="the ticket")
    place.flood(STRANGER)
    assert open_of([late]) and all(place.serves(*each) for each in served)
    served.pop()[0].close()
    assert late.recv(protocol.HEAD.size, socket.MSG_WAITALL) == protocol.HEAD.pack(0, 0, 0)
    assert place.serves(late, pull)


@pytest.mark.parametrize("end", ["time", "flood", "forgotten"])
def test_a_ticket_that_finds_no_place_ends(place, end, monkeypatch):
    served = [place.proved() for _ in range(PROVED)]
    place.offer("other")
    wait_for = place.server._changed.wait_for
    if end == "time":  # only the wait for a place is short, and not that for the ticket
        monkeypatch.setattr(place.server._changed, "wait_for", lambda has_place, _: wait_for(has_place, 0.05))
    ticket = place.ticket("other")
    late = place.caller(PEER, protocol.MAGIC + ticket)
    until(lambda: ticket not in place.server._tickets, what="the ticket")
    if end == "flood":
        place.flood(PEER, count=OF_ADDRESS)
        until(lambda: len(threads()) == PROVED + OF_ADDRESS, what="the end of its thread")
    elif end == "forgotten":
        assert place.server.forget("other")
        served.pop()[0].close()
    assert late.recv(1) == b""
    assert all(place.serves(*each) for each in served)
    if end == "time":
        until(lambda: place.server._refusals.totals[f"{PROVED} others with tickets kept the mover busy"], what="why")


class ShortSocket(socket.socket):
    """A listener whose first call finds no free descriptor."""

    fails = True

    def accept(self) -> tuple[socket.socket, object]:
        if self.fails:
            self.fails = False
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_without_a_descriptor_callers_wait(new_place):
    listener = ShortSocket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    place = new_place(listener)
    assert place.serves(*place.proved())
    assert place.server._refusals.totals == {f"no connection could be accepted ({os.strerror(errno.EMFILE)})": 1}


def test_without_a_thread_a_caller_ends_and_the_next_is_served(place, monkeypatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        refused = place.caller(PEER)
        assert refused.recv(1) == b""
    assert place.serves(*place.proved())


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Tls:
    if why_not():
        pytest.skip(why_not())
    return Tls(*map(Path, Certificates(tmp_path_factory.mktemp("certificates")).flags("ours", "node1")[1::2]))


def test_a_caller_that_is_pushed_out_in_its_handshake_ends_at_once(new_place, tls):
    place = new_place(tls=tls)
    served = place.proved()
    place.flood(PEER, first=b"\x16\x03\x01\x02\x00\x01")  # half a handshake
    until(lambda: len(threads()) == OF_ADDRESS + 1, what="the end of the threads that were pushed out")
    assert place.serves(*served) and place.serves(*place.proved())


def test_a_handshake_has_a_time_limit(new_place, tls, monkeypatch):
    place = new_place(tls=tls)
    monkeypatch.setattr(protocol, "CONNECT_S", 0.05)
    with contextlib.suppress(ConnectionError):  # on a busy core its bytes come after the end
        assert place.caller(PEER, b"\x16\x03\x01\x02\x00\x01").recv(1) == b""


def test_a_peer_that_asks_for_nothing_gives_its_place_back(place, monkeypatch):
    monkeypatch.setattr(protocol, "FRAME_S", 0.05)
    connection, _ = place.proved()
    assert connection.recv(1) == b""


def test_tickets_that_nobody_uses_are_bounded():
    left, right = socket.socketpair()
    server = RangeServer(left, None)
    for i in range(protocol.TICKETS_MAX + 1):
        server.grant("job", i.to_bytes(protocol.TICKET_BYTES, "little"))
    tickets = {int.from_bytes(each, "little") for each in server._tickets}
    assert tickets == set(range(1, protocol.TICKETS_MAX + 1)), "the oldest one goes"
    left.close()
    right.close()


def test_a_connection_that_is_shut_down_stays_encrypted(tls):
    """Its thread may be about to read from it."""
    left, right = socket.socketpair()
    with right, tls.server_context().wrap_socket(left, server_side=True, do_handshake_on_connect=False) as connection:
        right.sendall(b"plain")
        range_server._shut_down(connection)
        with pytest.raises(ssl.SSLError):
            connection.recv(5)


def test_a_stranger_of_ipv6_counts_by_its_network():
    left, right = socket.socketpair()
    server = RangeServer(left, None)
    for i in range(range_server.OF_ADDRESS_MAX + 1):
        server._enter(str(i), right, f"fd00:0:0:1::{i:x}")
    assert server._refusals.totals == {PUSHED_OUT: 1}
    left.close()
    right.close()


def test_the_last_refusals_are_logged_though_nobody_calls_any_more(new_place, monkeypatch, caplog):
    monkeypatch.setattr(range_server, "SAY_S", 0.001)
    place = new_place()
    looks, say = [], place.server._refusals.say
    monkeypatch.setattr(place.server._refusals, "say", lambda now_s: (looks.append(now_s), say(now_s)))
    place.server._refusals.count("they are gone", "10.0.0.9")
    until(lambda: len(looks) > UNPROVED + PROVED + 1, what="more looks than there are threads")
    assert any("1 because they are gone" in each for each in caplog.messages)
    assert place.serves(*place.proved())
