"""The local socket connects a trainer or an agent to its own daemon.

It carries messages beside gRPC.

    trainer, agent                                       daemon
      LocalRequest: report ───────────────────────────►    takes the report in
                    ◄─────────────── LocalReply: report    once the newest step is decided,
                                                           or after wait_ms
      LocalRequest: slots (+ descriptors given back) ─►
                    ◄── LocalReply: descriptors (+ these)  at once
      LocalRequest: who ──────────────────────────────►
                    ◄─────────────── LocalReply: caller    at once

A frame is its message's length, 4 bytes, little-endian, and protobuf. Descriptors travel with the
frame's first byte.

* A trainer that reports never waits: neither for the connection nor for a daemon that does not
  read.
* A descriptor that arrived belongs to the caller, or is closed.
* Lost: a connection that ends loses the messages under way. The trainer connects again. Its next
  report names all undecided steps. Slots are requested again. The kernel closes descriptors that no
  process received.
* Late: a report of a passed step changes nothing. An older outcome does not undo a newer one.
* Repeated: a report changes nothing the second time. Slots are handed out again. A memfd that was
  given back is kept once.

Why not gRPC: gRPC can't pass descriptors, and can't say which process has called. A container's
processes do not know their pids in the daemon's pid namespace; the kernel tells the daemon
(SO_PEERCRED). Reports could be a gRPC stream, but a trainer must not hold a living channel while
the user's code forks: see "What waits for whom" in reft/DESIGN.md.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError, Message

from reft.errors import AttachError
from reft.wire.messages import OLDEST, PROTOCOL, check_protocol
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb

MESSAGE_MAX: Final = 16 << 20  # bytes: 16 steps with the digests of 70,000 cells each
REQUEST_MAX: Final = 4096  # bytes of any request except a report
DESCRIPTORS_MAX: Final = 32
READ_BYTES: Final = 64 << 10
_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")


def frame(message: Message) -> bytes:
    """Returns a message with its length before it."""
    body = message.SerializeToString()
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits the bytes of a connection into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the messages that these bytes complete.

        Raises:
            ValueError: a message is longer than MESSAGE_MAX, or no bytes came and a message is
                incomplete.
        """
        if self._data and not data:
            raise ValueError("a message ended early")
        self._data += data
        bodies, at = [], 0
        while len(self._data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, at)
            if length > MESSAGE_MAX:
                raise ValueError(f"a message of {length} bytes; the limit is {MESSAGE_MAX}")
            end = at + _LENGTH.size + length
            if end > len(self._data):
                break
            bodies.append(bytes(self._data[at + _LENGTH.size : end]))
            at = end
        del self._data[:at]
        return bodies


def peer(connection: socket.socket) -> tuple[int, int]:
    """Returns pid and uid of the other end. The pid is 0 if it has none in this pid namespace."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Returns the next bytes of a connection, and their descriptors, which the caller owns.

    Raises:
        OSError: the connection has failed, or this process has no room for the descriptors.
    """
    data, descriptors, is_cut = receive_descriptors(connection, READ_BYTES, DESCRIPTORS_MAX)
    if is_cut:
        limits = f"as many files open as it may (ulimit -n), or more than {DESCRIPTORS_MAX} came at once"
        raise OSError(errno.EMFILE, f"the receiving process has {limits}")
    return data, descriptors


def receive_descriptors(connection: socket.socket, nbytes: int, count: int) -> tuple[bytes, list[int], bool]:
    """Returns the next bytes, their descriptors, and whether descriptors found no room here.

    Then there are none. The caller owns the descriptors. A program that this process executes does
    not get them: it would hold the memory. `socket.recv_fds` tells neither.

    Args:
        connection: a unix socket.
        nbytes: the most bytes.
        count: the most descriptors.

    Raises:
        OSError: the connection has failed.
    """
    received = array.array("i")
    space = socket.CMSG_SPACE(count * received.itemsize)
    data, passed, flags, _ = connection.recvmsg(nbytes, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, body in passed:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(body[: len(body) - len(body) % received.itemsize])
    descriptors, is_cut = list(received), bool(flags & socket.MSG_CTRUNC)
    if is_cut:
        close_all(descriptors)
    return data, descriptors, is_cut


def close_all(descriptors: list[int]) -> None:
    """Closes these descriptors, and empties the list."""
    while descriptors:
        os.close(descriptors.pop())


class ReportConnection:
    """Sends a trainer's reports. One thread reads `replies`, any thread may send.

    Args:
        path: of the socket, from HelloReply.local_socket.

    Raises:
        OSError: no daemon listens there, or too many connections wait to be accepted.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._rest: threading.Thread | None = None
        try:
            self._socket.settimeout(0)  # a daemon that does not accept must not block the trainer
            self._socket.connect(path)
            self._socket.settimeout(None)
        except OSError:
            self._socket.close()
            raise

    def send(self, report: pb.ReportRequest) -> None:
        """Sends without waiting: a thread sends the bytes that the daemon does not take in at once.

        Args:
            report: the report.

        Raises:
            OSError: the connection has ended.
            BlockingIOError: the daemon has not taken in the report before.
        """
        if self._rest is not None and self._rest.is_alive():
            raise BlockingIOError("an earlier report is still on its way")
        data = frame(pb.LocalRequest(report=report, protocol=PROTOCOL, oldest=OLDEST))
        sent = self._socket.send(data, socket.MSG_DONTWAIT)
        if sent < len(data):
            self._rest = threading.Thread(target=self._send_rest, args=(data[sent:],), name="reft-report", daemon=True)
            self._rest.start()

    def _send_rest(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the connection has ended, so `replies` ends too
            self._socket.sendall(data)

    def replies(self) -> Iterator[pb.LocalReply]:
        """Yields the daemon's replies, until the connection ends."""
        frames = FrameReader()
        with contextlib.suppress(OSError):
            while data := self._socket.recv(READ_BYTES):
                for body in frames.feed(data):
                    yield pb.LocalReply.FromString(body)

    def close(self) -> None:
        """Ends the connection; `replies` ends too."""
        with contextlib.suppress(OSError):  # the other side has ended the connection
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def ask_slots(path: str, request: pb.SlotsRequest, give: Sequence[int], deadline_s: float) -> list[int]:
    """Returns the descriptors that the daemon hands out; the caller owns them.

    Args:
        path: of the socket, from HelloReply.local_socket.
        request: names of the slots.
        give: descriptors to give back, for the slots named in request.returned.
        deadline_s: for the reply.

    Raises:
        AttachError: the daemon refused, or did not answer within the deadline.
    """
    reply, descriptors = _exchange(path, pb.LocalRequest(slots=request), give, deadline_s)
    if reply.WhichOneof("what") != "descriptors" or reply.descriptors != len(descriptors):
        close_all(descriptors)
        raise AttachError(f"the daemon refused the slots: {reply.error or 'no reply.'}")
    return descriptors


@dataclass(frozen=True)
class CallerProcess:
    """A process as its daemon sees it.

    Attributes:
        process: pid and start time.
        parent: pid of the process that started it; 0 if the daemon can't see that process.
    """

    process: Process
    parent: int


def introduce(path: str, deadline_s: float) -> CallerProcess:
    """Returns this process as the daemon sees it.

    Args:
        path: of the socket, from HelloReply.local_socket.
        deadline_s: for the reply.

    Raises:
        AttachError: the daemon does not see this process, or did not answer within the deadline.
    """
    reply, descriptors = _exchange(path, pb.LocalRequest(who=True), [], deadline_s)
    close_all(descriptors)
    if reply.WhichOneof("what") != "caller":
        raise AttachError(f"the daemon did not say who this process is: {reply.error or 'no reply.'}")
    return CallerProcess(Process(reply.caller.pid, reply.caller.pid_start), reply.caller.parent)


def _exchange(
    path: str, request: pb.LocalRequest, give: Sequence[int], deadline_s: float
) -> tuple[pb.LocalReply, list[int]]:
    """Returns a request's reply and descriptors; the caller owns the descriptors.

    The reply is empty if none came.
    """
    request.protocol, request.oldest = PROTOCOL, OLDEST
    frames, descriptors = FrameReader(), list[int]()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(deadline_s)
            connection.connect(path)
            socket.send_fds(connection, [frame(request)], list(give))
            while True:
                data, received = receive(connection)
                descriptors += received
                bodies = frames.feed(data)
                if bodies or not data:
                    break
        reply = pb.LocalReply.FromString(bodies[0] if bodies else b"")
        if bodies and not reply.error:
            check_protocol(reply.protocol, reply.oldest, "the daemon speaks", "this trainer")
        return reply, descriptors
    except AttachError:
        close_all(descriptors)
        raise
    except (OSError, ValueError, DecodeError) as error:
        close_all(descriptors)
        raise AttachError(f"the daemon's local socket {path} failed: {error}.") from error
