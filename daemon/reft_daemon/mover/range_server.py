"""Serves ranges of sealed slots to the movers of other nodes, see `range_protocol`.

    a connection ─► unproved (child/admission.py) ─ a ticket ─► proved: served to its end
                     └► pushed out, if others of its address need the place

Each connection has a thread. With a ticket it waits for one of PROVED_MAX places, and is never
pushed out once it has one.
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
from reft.errors import FormatError, ReftError
from reft.wire.certificate_role import role_of
from reft.wire.slot_format import Bytes, Header, chunk_digest, newest_header
from reft.wire.tls import Tls
from reft_daemon.child.admission import Admission, AdmissionLimits, counted_address
from reft_daemon.child.refusals import RefusalCounts
from reft_daemon.mover import range_protocol as protocol
from reft_daemon.mover.range_protocol import BrokenConnection, RangeRequest, RangeStatus

log = logging.getLogger("reft.mover")
PROVED_MAX: Final = 64  # connections; each may compute a frame of RANGE_MAX
# Connections of one address without a ticket. A flood of 200 a second needs 0.6 s to fill them. A
# mover sends its ticket at once, with TLS a round trip or two later.
OF_ADDRESS_MAX: Final = 128
UNPROVED_MAX: Final = 256  # of all addresses; a thread that waits takes 20 KiB
SAY_S: Final = 1.0  # between two looks whether refusals are to be logged
RETRY_S: Final = 0.1  # after no connection could be accepted
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
        tls: reads the certificates for a connection; None: plain TCP.
        bytes_per_s: of all paced connections together; 0: no limit.
    """

    def __init__(self, listener: socket.socket, tls: Callable[[], Tls] | None, bytes_per_s: int = 0) -> None:
        self._listener = listener
        listener.settimeout(SAY_S)
        self._tls = tls
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()  # guards all that follows
        self._offers: dict[str, tuple[OfferedSlot, ...]] = {}
        self._paces: dict[str, int] = {}  # job → bytes per second of its connections together; 0: not paced
        self._tickets: dict[bytes, tuple[str, float]] = {}  # ticket → job, and when it expires
        self._connections: dict[socket.socket, str] = {}  # admitted ones, and their jobs
        self._admission = Admission(AdmissionLimits(OF_ADDRESS_MAX, UNPROVED_MAX, PROVED_MAX))
        self._unproved: dict[str, tuple[socket.socket, str]] = {}  # name → connection, host
        self._refusals = RefusalCounts()

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
                    _shut_down(connection)
            return self._changed.wait_for(lambda: job not in self._connections.values(), FORGET_S)

    def serve(self) -> None:
        """Accepts connections until the listener is closed."""
        # One more than there are connections: it pushes out another one, whose thread then ends.
        threads = threading.BoundedSemaphore(UNPROVED_MAX + PROVED_MAX + 1)

        def serve_one(connection: socket.socket, host: str) -> None:
            try:
                self._serve_connection(connection, host)
            except OSError as error:
                log.info("a connection has ended: %s", error)
            finally:
                connection.close()
                threads.release()

        while True:
            threads.acquire()
            connection: socket.socket | None = None
            try:
                connection, address = self._listener.accept()
                threading.Thread(
                    target=serve_one, args=(connection, str(address[0])), name="reft-serve", daemon=True
                ).start()
            except TimeoutError:  # no call has come; the last refusals may be due for the log
                threads.release()
                self._refusals.say(time.monotonic())
            except (OSError, RuntimeError) as error:  # no descriptor is free, or no thread
                threads.release()
                if connection is not None:
                    connection.close()
                if self._listener.fileno() < 0:
                    return
                reason = error.strerror if isinstance(error, OSError) else error
                self._refusals.count(f"no connection could be accepted ({reason})", "this mover")
                self._refusals.say(time.monotonic())
                time.sleep(RETRY_S)

    def _serve_connection(self, plain: socket.socket, host: str) -> None:
        connection, name = plain, str(plain.fileno())  # no other connection has this number until the end
        plain.settimeout(protocol.CONNECT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lower_priority(plain)
        try:
            tls = self._tls() if self._tls else None
            if tls is not None:
                connection = tls.server_context().wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            self._enter(name, connection, host)
            _shake_hands(connection, tls)
            job = self._admit(name, connection)
            if not job:
                return
            self._share_rate()
            protocol.send(connection, protocol.HEAD.pack(RangeStatus.OK, 0, 0))
            self._answer_requests(connection, job)
        except (ReftError, OSError) as error:
            self._note_end(name, connection, host, error)
        finally:
            with self._changed:
                self._unproved.pop(name, None)
                self._admission.remove(name)
                self._connections.pop(connection, None)
                self._changed.notify_all()
            connection.close()
            self._share_rate()
            self._refusals.say(time.monotonic())

    def _enter(self, name: str, connection: socket.socket, host: str) -> None:
        """Takes a place without a proof, perhaps that of another connection."""
        with self._changed:
            self._unproved[name] = connection, host
            displaced = self._admission.add(name, counted_address(host))
            if displaced:
                pushed_out, its_host = self._unproved.pop(displaced)
                _shut_down(pushed_out)
                self._refusals.count("others needed their place at the mover", its_host)
                self._changed.notify_all()

    def _note_end(self, name: str, connection: socket.socket, host: str, error: ReftError | OSError) -> None:
        """Logs why a connection has ended. Of callers without a ticket, it only counts them."""
        with self._changed:
            is_admitted, is_unproved = connection in self._connections, name in self._unproved
        if is_admitted:
            log.info("a connection has ended: %s", error)
        elif is_unproved:  # else it was pushed out, and is counted
            self._refusals.count("they showed no valid ticket to the mover", host)

    def _admit(self, name: str, connection: socket.socket) -> str:
        """Returns the job of the ticket that the other side sends; empty: the connection ends."""
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
            if not self._changed.wait_for(lambda: self._has_place(name), protocol.CONNECT_S):
                self._refusals.count(f"{PROVED_MAX} others with tickets kept the mover busy", self._unproved[name][1])
                return ""
            if self._unproved.pop(name, None) is None or job not in self._paces:
                return ""  # it was pushed out, or its job forgotten, while it waited
            self._connections[connection] = job
        return job

    def _has_place(self, name: str) -> bool:
        """Whether a connection with a ticket waits no more for a place."""
        return self._admission.prove(name) or name not in self._unproved

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


def _shake_hands(connection: socket.socket, tls: Tls | None) -> None:
    """Returns if another daemon of the same user has called; without TLS, at once.

    Raises:
        BrokenConnection: the certificate is another user's, or no daemon's.
        OSError: there is no such certificate.
    """
    if tls is None:
        return
    assert isinstance(connection, ssl.SSLSocket)
    connection.do_handshake()
    role = role_of(connection.getpeercert())
    if role is None or role.user != tls.role.user or not role.node:
        raise BrokenConnection(f"the caller's certificate is of {role}; a daemon of user {tls.role.user} may call.")


def _shut_down(connection: socket.socket) -> None:
    """Ends a connection that another thread uses, which then finds its end."""
    with contextlib.suppress(OSError):  # it has ended
        # An SSLSocket's own method would drop the encryption under the hands of that thread.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def lower_priority(connection: socket.socket) -> None:
    """Marks a connection's packets as less urgent than all others."""
    with contextlib.suppress(OSError):  # the mark is only a hint
        if connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, LOW_PRIORITY)
        else:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOW_PRIORITY)
