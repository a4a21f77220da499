"""Tests ranges over loopback: tickets, refusals, damage, slots that are written again."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from reft.core.coding.erasure import code_for
from reft.core.coding.exchange import PieceSizes
from reft.core.commit.slots import SlotState
from reft.wire.tls import Tls
from reft_daemon.mover import range_client, range_server
from reft_daemon.mover import range_protocol as protocol
from reft_daemon.mover.range_client import MoverAddress, RangePull, SourceRefused
from reft_daemon.mover.range_protocol import BrokenConnection, RangeRequest, RangeStatus
from reft_daemon.mover.range_server import OfferedSlot, RangeServer, frame_of
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import until
from tests.support.parity import CHUNK, at, fill, section_source
from tests.support.two_level import parity_of_table

TICKET = bytes(range(32))
SECTION = 5 * CHUNK + 77
UNPACED = 2**64 - 1  # as the kernel says


@pytest.fixture
def source():
    return section_source(3, SECTION, at(7))


@pytest.fixture
def server(source):
    made = RangeServer(socket.create_server(("127.0.0.1", 0)), None)
    made.offer("job", [OfferedSlot(3, source.place, source.slot.map._slot)])
    made.grant("job", TICKET)
    threading.Thread(target=made.serve, daemon=True).start()
    yield made
    made._listener.close()


def pull_of(server, ranges, ticket=TICKET, version=None, rank=3) -> RangePull:
    address = MoverAddress("127.0.0.1", server.port, "node1")
    return RangePull(address, ticket, version or at(7), rank, ranges)


def fetched(server, ranges, parity=None, **changes) -> bytes:
    """Pulls ranges into parity; returns the parity."""
    parity = np.zeros(8 * CHUNK, np.uint8) if parity is None else parity
    pull = pull_of(server, ranges, **changes)
    with contextlib.closing(range_client.connect(pull, None)) as connection:
        list(range_client.fold_ranges(connection, pull, parity))
    return parity.tobytes()


def plain(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 5)


def test_ranges_in_any_order_and_of_any_length_arrive(server, source):
    cuts = sorted({0, SECTION, *random.Random(1).sample(range(SECTION), 12)})
    ranges = [(begin, begin, end - begin) for begin, end in itertools.pairwise(cuts)]
    random.Random(2).shuffle(ranges)
    assert fetched(server, ranges)[:SECTION] == source.section


def test_a_range_asked_for_twice_is_given_twice(server, source):
    parity = fetched(server, [(0, 0, CHUNK), (CHUNK, CHUNK, CHUNK), (0, 0, CHUNK)])
    assert parity[: 2 * CHUNK] == bytes(CHUNK) + source.section[CHUNK : 2 * CHUNK], "XOR is not idempotent"


def test_a_ticket_opens_one_connection(server):
    fetched(server, [(0, 0, CHUNK)])
    with pytest.raises(BrokenConnection, match="ticket"):
        fetched(server, [(0, 0, CHUNK)])


def test_an_unknown_ticket_opens_nothing(server):
    with pytest.raises(BrokenConnection, match="ticket"):
        fetched(server, [(0, 0, CHUNK)], ticket=bytes(32))


def test_an_old_ticket_opens_nothing(server, monkeypatch):
    monkeypatch.setattr(protocol, "TICKET_S", -1.0)
    server.grant("job", bytes(32))
    with pytest.raises(BrokenConnection, match="ticket"):
        fetched(server, [(0, 0, CHUNK)], ticket=bytes(32))


def test_a_ticket_of_another_job_finds_no_slot(server):
    server.grant("other", bytes(32))
    with pytest.raises(SourceRefused) as refused:
        fetched(server, [(0, 0, CHUNK)], ticket=bytes(32))
    assert refused.value.status is RangeStatus.GONE


def test_the_server_reads_no_length_before_the_ticket(server):
    """An opening is of fixed size: whatever follows a wrong ticket is never looked at."""
    with plain(server) as connection:
        connection.sendall(protocol.MAGIC + bytes(32) + struct.pack("<Q", 1 << 62))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_another_protocol_is_refused(server):
    with plain(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: reft.example.org\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_a_connection_without_an_opening_ends(server, monkeypatch):
    monkeypatch.setattr(protocol, "CONNECT_S", 0.05)
    with plain(server) as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("changes", "range_", "status"),
    [
        ({"version": at(8)}, (0, 0, CHUNK), RangeStatus.GONE),
        ({"version": at(7, 2)}, (0, 0, CHUNK), RangeStatus.GONE),
        ({"rank": 2}, (0, 0, CHUNK), RangeStatus.GONE),
        ({}, (0, 0, 0), RangeStatus.OUTSIDE),
        ({}, (SECTION - 1, 0, 2), RangeStatus.OUTSIDE),
        ({}, ((1 << 64) - 1, 0, CHUNK), RangeStatus.OUTSIDE),
        ({}, (0, 0, (1 << 32) - 1), RangeStatus.OUTSIDE),
    ],
)
def test_what_a_source_does_not_have_is_refused_by_name(server, changes, range_, status):
    with pytest.raises(SourceRefused) as refused:
        fetched(server, [range_], **changes)
    assert refused.value.status is status


def test_a_range_longer_than_the_limit_is_refused(monkeypatch, server):
    monkeypatch.setattr(protocol, "RANGE_MAX", CHUNK)
    offered = server._offers["job"]
    assert frame_of(offered, RangeRequest(at(7), 3, 0, CHUNK))[0] is RangeStatus.OK
    assert frame_of(offered, RangeRequest(at(7), 3, 0, CHUNK + 1))[0] is RangeStatus.OUTSIDE


PIECES = PieceSizes(2, 2, 3 * CHUNK, CHUNK)  # two of three blocks; the section ends in the second one
CODED = 2 * 3 * CHUNK


def coded_offer(source) -> list[OfferedSlot]:
    return [OfferedSlot(3, source.place, source.slot.map._slot, PIECES)]


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (SECTION - 1, 2), (SECTION, 1), (CODED - CHUNK, CHUNK), (CODED + 64, CHUNK), (CODED + 2 * CHUNK, CHUNK + 1),
        (CODED + 6 * CHUNK, CHUNK), ((1 << 64) - CHUNK, CHUNK), (CODED, 0),
    ],
)  # fmt: skip
def test_coded_ranges_that_do_not_exist_are_refused(source, offset, length):
    request = RangeRequest(at(7), 3, offset, length)
    assert frame_of(coded_offer(source), request)[0] is RangeStatus.OUTSIDE


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize(("at_block", "blocks"), [(0, 1), (1, 1), (2, 1), (0, 3)])
def test_a_coded_range_is_that_of_the_table(source, parity, at_block, blocks):
    padded = np.zeros((2, 3 * CHUNK), np.uint8)
    padded.reshape(-1)[:SECTION] = np.frombuffer(source.section, np.uint8)
    expected = parity_of_table(code_for(2, 2), parity, list(padded), CHUNK)[at_block * CHUNK :][: blocks * CHUNK]
    request = RangeRequest(at(7), 3, CODED + parity * 3 * CHUNK + at_block * CHUNK, blocks * CHUNK - 5)
    status, frame, digest = frame_of(coded_offer(source), request)
    assert status is RangeStatus.OK and bytes(frame) == expected[:-5].tobytes()
    assert digest == protocol.frame_digest(memoryview(expected[:-5].tobytes()))


@pytest.mark.parametrize("chunk", range(6))
def test_damage_of_any_piece_is_damage_of_a_coded_range(source, chunk):
    """A range of the second block is made from the second chunk of each piece."""
    source.slot.map.data[CHUNK + chunk * CHUNK + 5] ^= 1
    request = RangeRequest(at(7), 3, CODED + CHUNK, CHUNK)
    status, frame, _ = frame_of(coded_offer(source), request)
    assert (status, len(frame)) == ((RangeStatus.DAMAGED, 0) if chunk in (1, 4) else (RangeStatus.OK, CHUNK))


def test_a_slot_written_again_while_a_range_is_coded_is_gone(source, monkeypatch):
    real = range_server.encode_piece

    def encode(*arguments):
        fill(source.slot, at(8), bytes(CHUNK + SECTION), SlotState.WRITING)
        real(*arguments)

    monkeypatch.setattr(range_server, "encode_piece", encode)
    assert frame_of(coded_offer(source), RangeRequest(at(7), 3, CODED, CHUNK))[0] is RangeStatus.GONE


def test_a_slot_that_is_being_written_is_gone(server, source):
    fill(source.slot, at(9), bytes(CHUNK), SlotState.LANDED)
    with pytest.raises(SourceRefused) as refused:
        fetched(server, [(0, 0, CHUNK)], version=at(9))
    assert refused.value.status is RangeStatus.GONE


def test_a_flipped_bit_of_the_source_is_damage_of_its_chunk_alone(server, source):
    source.slot.map.data[CHUNK + 2 * CHUNK + 5] ^= 1
    assert fetched(server, [(0, 0, 2 * CHUNK)])[: 2 * CHUNK] == source.section[: 2 * CHUNK]
    server.grant("job", TICKET)
    with pytest.raises(SourceRefused) as refused:
        fetched(server, [(2 * CHUNK + 100, 0, 8)])
    assert refused.value.status is RangeStatus.DAMAGED


def test_a_slot_written_again_during_the_digests_is_gone(server, source, monkeypatch):
    def digest(frame: memoryview) -> int:
        fill(source.slot, at(8), bytes(CHUNK + SECTION), SlotState.WRITING)
        return 0

    monkeypatch.setattr(protocol, "frame_digest", digest)
    assert frame_of(server._offers["job"], RangeRequest(at(7), 3, 0, CHUNK))[0] is RangeStatus.GONE


def test_damage_by_a_writer_is_no_damage_of_the_memory(server, source, monkeypatch):
    real = range_server.chunk_digest

    def digest(chunk):
        fill(source.slot, at(8), bytes(CHUNK + SECTION), SlotState.WRITING)
        return real(chunk)

    monkeypatch.setattr(range_server, "chunk_digest", digest)
    assert frame_of(server._offers["job"], RangeRequest(at(7), 3, 0, CHUNK))[0] is RangeStatus.GONE


def test_a_slot_written_again_while_it_is_sent_is_not_folded(server, source, monkeypatch):
    """The head has left, then a trainer writes the slot: the digest of the frame is wrong."""
    send = protocol.send

    def send_late(connection, data):
        if isinstance(data, memoryview) and len(data):
            fill(source.slot, at(8), bytes(CHUNK + SECTION), SlotState.WRITING)
        send(connection, data)

    monkeypatch.setattr(protocol, "send", send_late)
    parity = np.zeros(8 * CHUNK, np.uint8)
    with pytest.raises(BrokenConnection, match="wrong digest"):
        fetched(server, [(0, 0, CHUNK)], parity)
    assert not parity.any()


def test_a_forgotten_job_ends_its_connections_and_tickets(server):
    pull = pull_of(server, [(0, 0, CHUNK)])
    with contextlib.closing(range_client.connect(pull, None)) as connection:
        server.grant("job", bytes(32))
        assert server.forget("job")
        with pytest.raises(BrokenConnection):
            list(range_client.fold_ranges(connection, pull, np.zeros(CHUNK, np.uint8)))
    with pytest.raises(BrokenConnection, match="ticket"):
        fetched(server, [(0, 0, CHUNK)], ticket=bytes(32))


@contextlib.contextmanager
def paced_server(source: SimpleNamespace, bytes_per_s: int) -> Iterator[RangeServer]:
    server = RangeServer(socket.create_server(("127.0.0.1", 0)), None, bytes_per_s)
    for job in ("job", "other"):
        server.offer(job, [OfferedSlot(3, source.place, source.slot.map._slot)])
    threading.Thread(target=server.serve, daemon=True).start()
    yield server
    server._listener.close()


def rates(server: RangeServer) -> list[int]:
    """Returns the pace of each connection, the greatest first; UNPACED if it has none."""
    with server._changed:
        served = list(server._connections)
    numbers = [each.getsockopt(socket.SOL_SOCKET, range_server.SO_MAX_PACING_RATE, 8) for each in served]
    return sorted((range_server.PACING.unpack(number)[0] for number in numbers), reverse=True)


def opened(server: RangeServer, job: str, pace: int, ticket: bytes = TICKET) -> socket.socket:
    server.grant(job, ticket, pace)
    return range_client.connect(pull_of(server, []), None)


def test_all_connections_of_a_job_share_its_pace(source):
    with paced_server(source, 0) as server:
        connections = []
        for count in (1, 2):
            connections.append(opened(server, "job", 10 << 30))
            until(lambda count=count: rates(server) == [(10 << 30) // count] * count, what="the shares")
        connections.pop().close()
        until(lambda: rates(server) == [10 << 30], what="the whole pace")
        connections.pop().close()


def test_jobs_share_the_limit_and_none_has_more_than_its_pace(source):
    with paced_server(source, 8 << 20) as server, contextlib.ExitStack() as stack:
        for job, pace in (("job", 8 << 20), ("other", 1 << 20)):
            stack.enter_context(contextlib.closing(opened(server, job, pace)))
        until(lambda: rates(server) == [4 << 20, 1 << 20], what="the shares")


def test_a_job_without_a_pace_sends_as_fast_as_it_goes(source):
    with paced_server(source, 8 << 20) as server, contextlib.ExitStack() as stack:
        for job, pace in (("job", 0), ("other", 8 << 20)):
            stack.enter_context(contextlib.closing(opened(server, job, pace)))
        until(lambda: rates(server) == [UNPACED, 8 << 20], what="the rates")


def test_a_share_lets_a_frame_come_within_its_deadline(source):
    with paced_server(source, 0) as server, contextlib.closing(opened(server, "job", 1)):
        until(lambda: rates(server) == [range_server.SHARE_LEAST], what="the least share")
    assert protocol.RANGE_MAX / range_server.SHARE_LEAST < protocol.FRAME_S


def test_both_ends_mark_their_packets_as_less_urgent(source):
    with paced_server(source, 0) as server, contextlib.closing(opened(server, "job", 0)) as connection:
        until(lambda: server._connections, what="the connection")
        for end in (connection, *server._connections):
            assert end.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 8 << 2  # CS1


class FalseSource:
    """A source that answers each request with bytes of the test's choice, then ends."""

    def __init__(self, reply: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, args=(reply,), daemon=True).start()

    def _serve(self, reply: bytes) -> None:
        connection, _ = self._listener.accept()
        connection.recv(protocol.OPENING_BYTES, socket.MSG_WAITALL)
        connection.sendall(protocol.HEAD.pack(0, 0, 0))
        connection.recv(protocol.REQUEST.size, socket.MSG_WAITALL)
        with contextlib.suppress(OSError):  # the other side has given up
            connection.sendall(reply)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass


FRAME = bytes(range(256)) * 16
DIGEST = protocol.frame_digest(memoryview(FRAME))


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        protocol.HEAD.pack(0, CHUNK, DIGEST)[:-1],
        protocol.HEAD.pack(0, CHUNK, DIGEST) + FRAME[:-1],
        protocol.HEAD.pack(0, CHUNK, DIGEST ^ 1) + FRAME,
        protocol.HEAD.pack(0, CHUNK, DIGEST) + FRAME[:-1] + b"x",
        protocol.HEAD.pack(0, CHUNK + 1, DIGEST) + FRAME,
        protocol.HEAD.pack(0, 0, DIGEST),
        protocol.HEAD.pack(0, (1 << 32) - 1, DIGEST) + FRAME,
        protocol.HEAD.pack(1, CHUNK, DIGEST) + FRAME,
        protocol.HEAD.pack(99, 0, 0),
    ],
)
def test_no_broken_reply_is_folded(reply):
    parity = np.zeros(CHUNK, np.uint8)
    with pytest.raises(BrokenConnection):
        fetched(FalseSource(reply), [(0, 0, CHUNK)], parity)
    assert not parity.any()


def test_a_right_reply_is_folded():
    parity = np.ones(CHUNK, np.uint8)
    with pytest.raises(BrokenConnection):  # the second range never comes
        reply = protocol.HEAD.pack(0, CHUNK, DIGEST) + FRAME
        fetched(FalseSource(reply), [(0, 0, CHUNK), (CHUNK, 0, CHUNK)], parity)
    assert parity.tobytes() == bytes(byte ^ 1 for byte in FRAME)


def test_a_source_that_sends_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(protocol, "FRAME_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BrokenConnection, match="0 of"):
        list(range_client.fold_ranges(ours, pull_of_pair(), np.zeros(CHUNK, np.uint8)))


def pull_of_pair() -> RangePull:
    return RangePull(MoverAddress("", 0, ""), TICKET, at(7), 3, [(0, 0, CHUNK)])


# Certificates


@pytest.fixture
def certificates(tmp_path) -> Certificates:
    if why_not():
        pytest.skip(why_not())
    return Certificates(tmp_path)


def tls(certificates: Certificates, user: str = "alice", authority: str = "ours") -> Tls:
    return Tls(*map(Path, certificates.flags(authority, "node1", user)[1::2]))


def secured(server: RangeServer, certificates: Tls) -> RangeServer:
    server._tls = lambda: certificates
    return server


def test_a_source_admits_daemons_of_its_own_user_only(server, certificates):
    """All of them have the right ticket."""
    secured(server, tls(certificates))
    strangers = tls(certificates, "bob"), tls(certificates, authority="theirs"), Tls(*certificates.agent("ours"))
    for stranger in strangers:
        opening = protocol.MAGIC + TICKET
        with contextlib.suppress(ConnectionError, ssl.SSLError), stranger_connection(server, stranger) as connection:
            connection.sendall(opening)
            assert not connection.recv(1)
    with contextlib.closing(range_client.connect(pull_of(server, []), tls(certificates))):
        pass  # the ticket was not used up


def stranger_connection(server: RangeServer, stranger: Tls) -> ssl.SSLSocket:
    return stranger.client_context().wrap_socket(plain(server))


@pytest.mark.parametrize(("user", "node"), [("bob", "node1"), ("alice", "node2")])
def test_a_ticket_goes_to_the_right_daemon_only(server, certificates, user, node):
    """The server at the source's address has a certificate of the same authority."""
    secured(server, tls(certificates, user))
    pull = pull_of(server, [])
    pull = dataclasses.replace(pull, source=pull.source._replace(name=node))
    with pytest.raises(BrokenConnection, match=f"the daemon of user alice on node {node} was called"):
        range_client.connect(pull, tls(certificates))
    assert TICKET in server._tickets


def test_callers_without_a_ticket_are_counted_and_said_once(server, caplog):
    caplog.set_level("INFO", "reft.mover")
    for first in (
        b"GET / HTTP/1.1\r\n".ljust(protocol.OPENING_BYTES),
        protocol.MAGIC + bytes(protocol.TICKET_BYTES),
        b"REF",
    ):
        with socket.create_connection(server._listener.getsockname()) as stranger:
            stranger.sendall(first)
            stranger.shutdown(socket.SHUT_WR)
            assert not stranger.recv(1)
    assert server._refusals.totals.total() == 3
    until(lambda: caplog.records, what="the line about the first, which comes after its end")
    assert len(caplog.records) == 1, "a line for each of them would flood the log"
