"""Pulls ranges from another node's mover, and folds them into parity; see `range_protocol`."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reft.core.coding.erasure import code_for
from reft.core.coding.two_level import fold_piece
from reft.core.commit.version import Version
from reft.errors import ReftError
from reft.wire.certificate_role import Role, role_of
from reft.wire.slot_format import Bytes
from reft.wire.tls import Tls
from reft_daemon.mover import range_protocol as protocol
from reft_daemon.mover.range_protocol import RangeRequest, RangeStatus
from reft_daemon.mover.range_server import lower_priority


class MoverAddress(NamedTuple):
    """Where a mover listens.

    Attributes:
        host: name or number.
        port: the TCP port.
        name: of the node, as in its daemon's certificate.
    """

    host: str
    port: int
    name: str


@dataclass(frozen=True)
class RangePull:
    """What one connection is to bring.

    Attributes:
        source: where the source's mover listens.
        ticket: for this connection.
        version: of the source's slot.
        rank: the source.
        ranges: offset in the source's section or behind it, offset in the piece, length; in this
            order.
        code: k and f of the code that makes parity of the pieces.
        column: the source's data shard in this code.
        block_bytes: size of a block of a piece; ignored with f = 1.
    """

    source: MoverAddress
    ticket: bytes
    version: Version
    rank: int
    ranges: Sequence[tuple[int, int, int]]
    code: tuple[int, int] = (1, 1)
    column: int = 0
    block_bytes: int = 1


class SourceRefused(ReftError):
    """The source can't give a range.

    Args:
        status: why not.
    """

    def __init__(self, status: RangeStatus) -> None:
        super().__init__(protocol.WORDS.get(status, "can't give the range"))
        self.status = status


def connect(pull: RangePull, tls: Tls | None) -> socket.socket:
    """Returns a connection that the source has admitted.

    Raises:
        protocol.BrokenConnection: the source does not answer, does not know the ticket, or has
            the certificate of another user or node.
    """
    try:
        connection = socket.create_connection(pull.source[:2], protocol.CONNECT_S)
    except OSError as error:
        raise protocol.BrokenConnection(f"{pull.source.host}:{pull.source.port}: {error}.") from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lower_priority(connection)
        if tls is not None:
            connection = tls.client_context().wrap_socket(connection)
            _check_role(role_of(connection.getpeercert()), tls.role.user, pull.source)
        protocol.send(connection, protocol.MAGIC + pull.ticket)
        head = bytearray(protocol.HEAD.size)
        if not protocol.receive_into(connection, memoryview(head), protocol.CONNECT_S):
            raise protocol.BrokenConnection("the source did not admit the ticket.")
        protocol.decode_head(bytes(head), 0)
    except OSError as error:
        connection.close()
        raise protocol.BrokenConnection(f"{pull.source.host}:{pull.source.port}: {error}.") from error
    except protocol.BrokenConnection:
        connection.close()
        raise
    return connection


def _check_role(role: Role | None, user: str, source: MoverAddress) -> None:
    """Raises BrokenConnection if the certificate is not that of this user's daemon on the node."""
    if role is None or role.user != user or not role.is_daemon_on(source.name):
        raise protocol.BrokenConnection(
            f"the certificate at {source.host}:{source.port} is of {role}; "
            f"the daemon of user {user} on node {source.name} was called."
        )


def fold_ranges(connection: socket.socket, pull: RangePull, parity: Bytes) -> Iterator[int]:
    """Asks for all ranges, and XORs each frame into the parity after its digest.

    Args:
        connection: admitted by the source.
        pull: the ranges.
        parity: the f parities of the parity slot.

    Yields:
        The number of bytes of each range, once the range is folded.

    Raises:
        protocol.BrokenConnection: the connection ended, or a frame has a wrong digest.
        SourceRefused: the source can't give a range.
    """
    waiting: deque[tuple[int, int]] = deque()  # offset in the parity and length of requests under way
    buffer, head = np.empty(protocol.RANGE_MAX, np.uint8), bytearray(protocol.HEAD.size)
    todo, code = iter(pull.ranges), code_for(*pull.code)

    def ask() -> None:
        for offset, target, length in todo:
            protocol.send(connection, RangeRequest(pull.version, pull.rank, offset, length).encode())
            waiting.append((target, length))
            return

    for _ in range(protocol.WINDOW):
        ask()
    while waiting:
        target, length = waiting.popleft()
        _receive(connection, memoryview(head))
        status, digest = protocol.decode_head(bytes(head), length)
        if status is not RangeStatus.OK:
            raise SourceRefused(status)
        frame = buffer[:length]
        _receive(connection, frame.data)
        ask()
        if protocol.frame_digest(frame.data) != digest:
            raise protocol.BrokenConnection(f"a frame of {length} bytes has a wrong digest.")
        whole = -(-length // pull.block_bytes) * pull.block_bytes if code.w > 1 else length
        buffer[length:whole] = 0  # behind the source's section
        fold_piece(code, pull.column, buffer[:whole], parity, target, pull.block_bytes)
        yield length


def _receive(connection: socket.socket, target: memoryview) -> None:
    if not protocol.receive_into(connection, target, protocol.FRAME_S):
        raise protocol.BrokenConnection("the source has ended the connection.")
