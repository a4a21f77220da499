"""Serves ranges of sealed slots to the movers of other nodes, see `range_protocol`.

Each connection has a thread. Further connections wait until one of CONNECTIONS_MAX ends.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from reft.core.coding.erasure import code_for
from reft.core.coding.exchange import PieceSizes
from reft.core.coding.two_level import encode_piece
from reft.core.commit.slots import SlotState
from reft.errors import FormatError
from reft.wire.slot_format import Bytes, Header, chunk_digest, newest_header
from reft_daemon.mover import range_protocol as protocol
from reft_daemon.mover.range_protocol import BrokenConnection, RangeRequest, RangeStatus

log = logging.getLogger("reft.mover")
CONNECTIONS_MAX: Final = 64
FORGET_S: Final = 5.0  # threads of a forgotten job end within this time
SO_MAX_PACING_RATE: Final = 47  # Python has no name for it
PACING: Final = struct.Struct("@L")
SHARE_LEAST: Final = int(2 * protocol.RANGE_MAX / protocol.FRAME_S)  # bytes per second: a frame must come in time
LOW_PRIORITY: Final = 0x20  # DSCP CS1: below all other traffic, where the network looks at it

Frame = tuple[RangeStatus, memoryview, int]


@dataclass(frozen=True)
class OfferedSlot:
    """A slot of this node, mapped, from which ranges are served.

    Attributes:
        rank: whose slot it is.
        section: begin and size of the rank's unreplicated section in the slot's data.
        pages: all bytes of the slot.
        pieces: how the section is cut, if there are coded pieces behind it.
    """

    rank: int
    section: tuple[int, int]
    pages: Bytes
    pieces: PieceSizes | None = None


def frame_of(slots: Sequence[OfferedSlot], request: RangeRequest) -> Frame:
    """Returns status, bytes and digest of a range; the bytes are those of the mapping."""
    for slot in slots:
        if slot.rank != request.rank:
            continue
        with contextlib.suppress(FormatError):
            header = newest_header(slot.pages)
            if header.state is SlotState.SEALED and header.version == request.version:
                return _verified_frame(slot, header, request)
    return _refusal(RangeStatus.GONE)


def _refusal(status: RangeStatus) -> Frame:
    return status, memoryview(b""), 0


def _verified_frame(slot: OfferedSlot, header: Header, request: RangeRequest) -> Frame:
    """Returns the frame if its chunks are as sealed and the slot stays.

    Raises:
        FormatError: the slot's header is damaged.
    """
    (begin, nbytes), geometry = slot.section, header.geometry
    extents = _extents(slot, request)
    if extents is None or begin + nbytes > header.data_bytes:
        return _refusal(RangeStatus.OUTSIDE)
    data = slot.pages[geometry.data_offset : geometry.data_offset + header.data_bytes]
    digests = slot.pages[geometry.digests_offset :][: 8 * geometry.chunks].view("<u8")
    size = geometry.chunk_bytes
    chunks = {chunk for at, end in extents for chunk in range((begin + at) // size, -(-(begin + end) // size))}
    for chunk in sorted(chunks):
        if chunk_digest(data[chunk * size : (chunk + 1) * size]) != int(digests[chunk]):
            is_same = newest_header(slot.pages).seq == header.seq
            return _refusal(RangeStatus.DAMAGED if is_same else RangeStatus.GONE)
    section = data[begin : begin + nbytes]
    is_plain = request.offset < nbytes
    frame = section[request.offset :][: request.length].data if is_plain else _coded_frame(slot, section, request)
    digest = protocol.frame_digest(frame)
    if newest_header(slot.pages).seq != header.seq:
        return _refusal(RangeStatus.GONE)
    return RangeStatus.OK, frame, digest


def _extents(slot: OfferedSlot, request: RangeRequest) -> list[tuple[int, int]] | None:
    """Returns the parts of the section from which a frame is made; None: there is no such frame."""
    (_, nbytes), pieces, end = slot.section, slot.pieces, request.offset + request.length
    if not 0 < request.length <= protocol.RANGE_MAX:
        return None
    if end <= nbytes:
        return [(request.offset, end)]
    if pieces is None or request.offset < pieces.k * pieces.piece_bytes:
        return None
    piece, at = divmod(request.offset, pieces.piece_bytes)
    last = at + _whole_blocks(request.length, pieces)
    if piece >= pieces.k + pieces.coded or at % pieces.block_bytes or last > pieces.piece_bytes:
        return None
    begins = range(0, pieces.k * pieces.piece_bytes, pieces.piece_bytes)
    return [(begin + at, min(begin + last, nbytes)) for begin in begins if begin + at < nbytes]


def _whole_blocks(nbytes: int, pieces: PieceSizes) -> int:
    return -(-nbytes // pieces.block_bytes) * pieces.block_bytes


def _coded_frame(slot: OfferedSlot, section: Bytes, request: RangeRequest) -> memoryview:
    """Computes a range of a coded piece from the same range of all plain pieces."""
    pieces = slot.pieces
    assert pieces is not None, "only with coded pieces a range lies behind the section"
    piece, at = divmod(request.offset, pieces.piece_bytes)
    size = _whole_blocks(request.length, pieces)
    rows = []
    for number in range(pieces.k):
        row = section[number * pieces.piece_bytes + at :][:size]
        if row.nbytes < size:  # zeros follow the section
            held, row = row, np.zeros(size, np.uint8) if row.nbytes else np.broadcast_to(np.uint8(0), size)
            if held.nbytes:
                row[: held.nbytes] = held
        rows.append(row)
    coded = np.empty(size, np.uint8)
    encode_piece(code_for(pieces.k, pieces.coded), piece - pieces.k, rows, coded, pieces.block_bytes)
    return coded[: request.length].data


class RangeServer:
    """Listens for other movers, and answers those that have a ticket.

    Args:
        listener: a listening socket.
        tls: makes the context for a connection; None: plain TCP.
        bytes_per_s: of all paced connections together; 0: no limit.
    """

    def __init__(self, listener: socket.socket, tls: Callable[[], ssl.SSLContext] | None, bytes_per_s: int = 0) -> None:
        self._listener = listener
        self._tls = tls
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()  # guards all that follows
        self._offers: dict[str, tuple[OfferedSlot, ...]] = {}
        self._paces: dict[str, int] = {}  # job → bytes per second of its connections together; 0: not paced
        self._tickets: dict[bytes, tuple[str, float]] = {}  # ticket → job, and when it expires
        self._connections: dict[socket.socket, str] = {}  # admitted ones, and their jobs

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def offer(self, job: str, slots: Sequence[OfferedSlot]) -> None:
        """Serves these slots of a job from now on, and no others."""
        with self._changed:
            self._offers[job] = tuple(slots)

    def grant(self, job: str, ticket: bytes, pace: int = 0) -> None:
        """Admits one connection with this ticket to a job's slots.

        Args:
            job: the job.
            ticket: what the other side must send.
            pace: bytes per second of all the job's connections together; 0: as fast as it goes.
        """
        with self._changed:
            self._paces[job] = pace
            self._tickets[ticket] = job, time.monotonic() + protocol.TICKET_S
            while len(self._tickets) > protocol.TICKETS_MAX:
                del self._tickets[next(iter(self._tickets))]

    def forget(self, job: str) -> bool:
        """Serves the job no more; returns whether no thread holds its slots."""
        with self._changed:
            self._offers.pop(job, None)
            self._paces.pop(job, None)
            self._tickets = {ticket: entry for ticket, entry in self._tickets.items() if entry[0] != job}
            for connection, name in self._connections.items():
                if name == job:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
            return self._changed.wait_for(lambda: job not in self._connections.values(), FORGET_S)

    def serve(self) -> None:
        """Accepts connections until the listener is closed."""
        places = threading.BoundedSemaphore(CONNECTIONS_MAX)

        def serve_one(connection: socket.socket) -> None:
            try:
                self._serve_connection(connection)
            except (BrokenConnection, OSError) as error:
                log.info("a connection has ended: %s", error)
            finally:
                connection.close()
                places.release()

        while True:
            places.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                places.release()
                if self._listener.fileno() < 0:
                    return
                log.warning("a connection can't be accepted: %s", error)
                time.sleep(0.1)  # no descriptor is free; the connection waits
                continue
            threading.Thread(target=serve_one, args=(connection,), name="reft-serve", daemon=True).start()

    def _serve_connection(self, plain: socket.socket) -> None:
        plain.settimeout(protocol.CONNECT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lower_priority(plain)
        connection = self._tls().wrap_socket(plain, server_side=True) if self._tls else plain
        try:
            job = self._admit(connection)
            if not job:
                return
            self._share_rate()
            protocol.send(connection, protocol.HEAD.pack(RangeStatus.OK, 0, 0))
            self._answer_requests(connection, job)
        finally:
            with self._changed:
                self._connections.pop(connection, None)
                self._changed.notify_all()
            connection.close()
            self._share_rate()

    def _admit(self, connection: socket.socket) -> str:
        """Returns the job of the ticket that the other side sends; empty: it has none."""
        opening = bytearray(protocol.OPENING_BYTES)
        if not protocol.receive_into(connection, memoryview(opening), protocol.CONNECT_S):
            return ""
        if not opening.startswith(protocol.MAGIC):
            raise BrokenConnection("the other side has not sent the opening of a mover.")
        with self._changed:
            # A dict finds a ticket by its hash. A ticket is random and used once, so the time of
            # this tells nothing that helps.
            job, expires_s = self._tickets.pop(bytes(opening[len(protocol.MAGIC) :]), ("", 0.0))
            if not job or time.monotonic() > expires_s:
                raise BrokenConnection("the ticket is unknown, was used, or is older than 60 s.")
            self._connections[connection] = job
        return job

    def _answer_requests(self, connection: socket.socket, job: str) -> None:
        request = bytearray(protocol.REQUEST.size)
        while protocol.receive_into(connection, memoryview(request), protocol.FRAME_S):
            with self._changed:
                slots = self._offers.get(job, ())
            status, frame, digest = frame_of(slots, protocol.decode_request(bytes(request)))
            protocol.send(connection, protocol.HEAD.pack(status, len(frame), digest))
            protocol.send(connection, frame)

    def _share_rate(self) -> None:
        """Gives each connection an equal part of its job's pace, and of the limit."""
        with self._changed:
            paced = {connection: job for connection, job in self._connections.items() if self._paces.get(job)}
            counts = Counter(paced.values())
            for connection, job in paced.items():
                shares = [self._paces[job] // counts[job]]
                if self._bytes_per_s:
                    shares.append(self._bytes_per_s // len(paced))
                with contextlib.suppress(OSError):  # a connection that has just ended
                    share = PACING.pack(max(min(shares), SHARE_LEAST))
                    connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, share)


def lower_priority(connection: socket.socket) -> None:
    """Marks a connection's packets as less urgent than all others."""
    with contextlib.suppress(OSError):  # the mark is only a hint
        if connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, LOW_PRIORITY)
        else:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOW_PRIORITY)
