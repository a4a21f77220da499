"""The small socket over which a daemon hands out the file descriptors of slots, and tells a process who it is.

    trainer ──length, HandoutRequest (+ descriptors if it gives memfds back)──────► daemon
    trainer ◄──1 byte: count, descriptors │ 1, Caller │ 0, text of the error──────── daemon

gRPC can do neither. A daemon watches processes by the pids of its own pid namespace, and a process in a container does not
know its pid there; the kernel tells the daemon who has connected. So trainers and agents ask first, and name themselves in
all messages as the daemon sees them.

A lost reply is repeated by asking again; descriptors that nobody took are closed by the kernel.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from reft.errors import AttachError
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb

REQUEST_MAX: Final = 4096
DESCRIPTORS_MAX: Final = 32
_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")


@dataclass(frozen=True)
class Caller:
    """A process as its daemon sees it.

    Attributes:
        parent: pid of the process that started it; 0 if the daemon can't see that one.
    """

    process: Process
    parent: int


def ask(path: str, request: pb.HandoutRequest, give: Sequence[int], deadline_s: float) -> list[int]:
    """The descriptors that the daemon hands out; the caller owns them.

    Args:
        path: of the socket, from HelloReply.handout.
        give: descriptors to give back, for the slots named in request.returned.

    Raises:
        AttachError: the daemon refused, or did not answer within the deadline.
    """
    reply, descriptors = _exchange(path, request, give, deadline_s)
    is_error = reply[:1] == b"\0" and (len(reply) > 1 or not give)
    if not reply or reply[0] != len(descriptors) or is_error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise AttachError(f"the daemon refused the slots: {reply[1:].decode(errors='replace') or 'no reply'}.")
    return descriptors


def introduce(path: str, deadline_s: float) -> Caller:
    """This process as the daemon sees it.

    Args:
        path: of the socket, from HelloReply.handout.

    Raises:
        AttachError: the daemon does not see it, or did not answer within the deadline.
    """
    reply, descriptors = _exchange(path, pb.HandoutRequest(who=True), [], deadline_s)
    for descriptor in descriptors:
        os.close(descriptor)
    if reply[:1] != b"\1":
        raise AttachError(
            f"the daemon did not say who this process is: {reply[1:].decode(errors='replace') or 'no reply'}"
        )
    try:
        seen = pb.Caller.FromString(reply[1:])
    except DecodeError as error:
        raise AttachError(f"the daemon did not say who this process is: {error}.") from error
    return Caller(Process(seen.pid, seen.pid_start), seen.parent)


def _exchange(path: str, request: pb.HandoutRequest, give: Sequence[int], deadline_s: float) -> tuple[bytes, list[int]]:
    """A request's reply, and the descriptors that came with it; the caller owns them."""
    body = request.SerializeToString()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(deadline_s)
        try:
            connection.connect(path)
            socket.send_fds(connection, [_LENGTH.pack(len(body)) + body], list(give))
            reply, descriptors, _, _ = socket.recv_fds(connection, REQUEST_MAX, DESCRIPTORS_MAX)
        except OSError as error:
            raise AttachError(f"the daemon's handout socket {path} failed: {error}.") from error
    return reply, descriptors


def peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel knows it; the pid is 0 if this pid namespace has none for it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def parse(data: bytes) -> pb.HandoutRequest | None:
    """The request, or None while bytes are missing.

    Raises:
        ValueError: the length is above REQUEST_MAX, or the bytes are no request.
    """
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    if length > REQUEST_MAX:
        raise ValueError(f"a request of {length} bytes; the limit is {REQUEST_MAX}")
    if len(data) < _LENGTH.size + length:
        return None
    try:
        return pb.HandoutRequest.FromString(data[_LENGTH.size : _LENGTH.size + length])
    except DecodeError as error:
        raise ValueError(f"no request: {error}") from error


def ancillary(descriptors: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    """Descriptors as `sendmsg` wants them."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
