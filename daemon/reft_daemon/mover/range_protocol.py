"""The range protocol: a holder's mover asks a source's mover for bytes of sealed slots.

    holder's daemon           holder's mover              source's mover           source's daemon
      OpenBulk(job, epoch) ──────────── gRPC, with the job's token ──────────────► a new ticket
      pull, with the ticket ─►                            ◄──────── the ticket is good for 60 s
                              connects (TCP or TLS)
                              OPENING: magic, ticket ───► known, and never used?
                              ◄─────────── HEAD(OK, 0, 0)  else the connection ends
                              REQUEST: range ───────────► sealed slot of exactly this version?
                                                          digests of all affected chunks as sealed?
                                                          digest of the frame; same header still?
                              ◄── HEAD(OK, length, digest) only now, then the bytes of the frame
                              digest as in the head?
                              folds the frame into the parity slot, once
                              REQUEST: next range ──────► …

Coded pieces lie behind the section (core/coding/exchange.py): the source computes their bytes from
its chunks, once these have their digests. The holder folds a frame into all its parities.

All numbers are little-endian and of fixed size. A holder may send WINDOW requests ahead. Replies
come in the order of the requests.

Invariants
  1. No length that a peer sends is believed before the peer has proved a ticket. A request's length
     is at most RANGE_MAX. The length in a head equals the one that was asked for.
  2. A ticket opens one connection to the slots of one job, within TICKET_S.
  3. A source sends only bytes of a sealed slot of exactly the version, whose chunks have the
     digests of the seal. If the slot is written again meanwhile, the frame's digest is wrong.
  4. A holder folds each range exactly once: in order, by one thread, after its digest.
  5. Each wait has a deadline: CONNECT_S for the opening, FRAME_S for a request, head or frame.

* Lost: a connection that ends loses the requests and frames under way. The holder counts what it
  has folded, and asks for the rest on a new connection, with a new ticket.
* Late: a request for a version that the slot no longer has is answered with GONE.
* Repeated: asking again is free. A source keeps nothing of a request. A ticket that is used again
  opens nothing.
"""

from __future__ import annotations

import socket
import struct
import time
from enum import IntEnum
from typing import Final, NamedTuple

import xxhash

from reft.core.commit.version import Epoch, Version
from reft.errors import ReftError

MAGIC: Final = b"REFTBLK1"
TICKET_BYTES: Final = 32
TICKET_S: Final = 60.0
PULLS_MAX: Final = 8  # of one mover at a time
TICKETS_MAX: Final = 4096  # not yet used; the oldest goes first
RANGE_MAX: Final = 4 << 20  # bytes of one frame
WINDOW: Final = 4  # requests that a holder sends ahead
CONNECT_S: Final = 5.0
FRAME_S: Final = 30.0  # a frame at 140 kB/s
OPENING_BYTES: Final = len(MAGIC) + TICKET_BYTES
REQUEST: Final = struct.Struct("<Q16sQIQI")  # epoch counter, epoch id, step, rank, offset, length
HEAD: Final = struct.Struct("<IIQ")  # status, length, xxh3_64 of the frame


class RangeStatus(IntEnum):
    """What became of a request, as the number that a head has."""

    OK = 0
    GONE = 1  # no sealed slot of exactly this version
    DAMAGED = 2  # the bytes are not as they were sealed
    OUTSIDE = 3  # the range is empty, too long, or not in the section or its coded pieces


WORDS: Final = {
    RangeStatus.GONE: "has no sealed slot of this version any more",
    RangeStatus.DAMAGED: "has bytes that changed in memory after the seal",
    RangeStatus.OUTSIDE: "has no such bytes: the nodes placed the job in different ways",
}


class RangeRequest(NamedTuple):
    """The bytes that a holder asks for.

    Attributes:
        version: of the slot.
        rank: the source, whose slot has the bytes.
        offset: begin in the section of the rank's unreplicated leaves, or in the coded pieces
            behind it.
        length: number of bytes.
    """

    version: Version
    rank: int
    offset: int
    length: int

    def encode(self) -> bytes:
        """Returns the request's bytes."""
        epoch = self.version.epoch
        return REQUEST.pack(epoch.counter, epoch.ident, self.version.step, self.rank, self.offset, self.length)


class BrokenConnection(ReftError):
    """The connection has ended, or the other side breaks the protocol."""


def decode_request(data: bytes) -> RangeRequest:
    """Returns the request of its bytes; any bytes give one."""
    counter, ident, step, rank, offset, length = REQUEST.unpack(data)
    return RangeRequest(Version(Epoch(counter, ident), step), rank, offset, length)


def decode_head(data: bytes, length: int) -> tuple[RangeStatus, int]:
    """Returns status and digest of a head.

    Args:
        data: the head.
        length: the number of bytes that were asked for.

    Raises:
        BrokenConnection: unknown status, or another length than `length`; 0 without OK.
    """
    number, told, digest = HEAD.unpack(data)
    if number not in RangeStatus.__members__.values():
        raise BrokenConnection(f"a head has the unknown status {number}.")
    if told != (length if number == RangeStatus.OK else 0):
        raise BrokenConnection(f"a head announces {told} bytes; {length} were asked for.")
    return RangeStatus(number), digest


def frame_digest(frame: memoryview) -> int:
    """Returns the digest of a frame. The interpreter's lock is free meanwhile."""
    state = xxhash.xxh3_64()
    state.update(frame)
    return state.intdigest()


def receive_into(connection: socket.socket, target: memoryview, deadline_s: float) -> bool:
    """Fills `target`; returns False if the other side closed before the first byte.

    Raises:
        BrokenConnection: it ended midway, or did not fill `target` in time.
    """
    end, count = time.monotonic() + deadline_s, 0
    while count < len(target):
        try:
            connection.settimeout(max(end - time.monotonic(), 0.001))
            received = connection.recv_into(target[count:])
        except OSError as error:  # TimeoutError and ssl.SSLError are of this kind
            raise BrokenConnection(f"{count} of {len(target)} bytes came in {deadline_s:g} s: {error}.") from error
        if not received:
            if not count:
                return False
            raise BrokenConnection(f"the connection ended after {count} of {len(target)} bytes.")
        count += received
    return True


def send(connection: socket.socket, data: bytes | memoryview) -> None:
    """Sends all bytes within FRAME_S.

    Raises:
        BrokenConnection: the other side does not take them in.
    """
    try:
        connection.settimeout(FRAME_S)
        connection.sendall(data)
    except OSError as error:
        raise BrokenConnection(f"{len(data)} bytes can't be sent: {error}.") from error
