"""The line between a rank and its own daemon: a small unix socket of its own, for what is said with every snapshot.

    trainer ──ReportRequest, with each answer──────────────────────────────► daemon
    trainer ◄──ReportReply, once the newest answer is decided, or it has waited─ daemon

Each message is its length, 4 bytes, little-endian, and protobuf. Here and not as a call of gRPC: a call took both sides some
3 ms of a core with every snapshot, this takes a tenth of it. Nothing is lost while the connection lasts; when it ends,
the trainer makes another one and says again what was not answered.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Final

from google.protobuf.message import Message

from reft.wire.v1 import daemon_pb2 as pb

MESSAGE_MAX: Final = 16 << 20  # bytes: 16 steps with the digests of 70,000 cells each
_READ_BYTES: Final = 64 << 10
_LENGTH: Final = struct.Struct("<I")


def frame(message: Message) -> bytes:
    """A message as it travels."""
    body = message.SerializeToString()
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts the bytes of a connection into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that these bytes complete.

        Raises:
            ValueError: one says that it is longer than MESSAGE_MAX.
        """
        self._data += data
        found, at = [], 0
        while len(self._data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, at)
            if length > MESSAGE_MAX:
                raise ValueError(f"a message of {length} bytes; the limit is {MESSAGE_MAX}")
            end = at + _LENGTH.size + length
            if end > len(self._data):
                break
            found.append(bytes(self._data[at + _LENGTH.size : end]))
            at = end
        del self._data[:at]
        return found


class Line:
    """The trainer's end. One thread reads `replies`, any may send.

    Args:
        path: of the socket, from HelloReply.line.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._rest: threading.Thread | None = None
        try:
            self._socket.settimeout(0)  # a daemon that does not accept must hold up nobody
            self._socket.connect(path)
            self._socket.settimeout(None)
        except OSError:
            self._socket.close()
            raise

    def send(self, request: pb.ReportRequest) -> None:
        """Sends without waiting: what the daemon does not take in at once follows from a thread.

        Raises:
            OSError: the connection has ended, or the daemon has not taken in what was sent before (BlockingIOError).
        """
        if self._rest is not None and self._rest.is_alive():
            raise BlockingIOError("an earlier report is still on its way")
        data = frame(request)
        sent = self._socket.send(data, socket.MSG_DONTWAIT)
        if sent < len(data):
            self._rest = threading.Thread(target=self._send_rest, args=(data[sent:],), name="reft-report", daemon=True)
            self._rest.start()

    def _send_rest(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # whoever reads hears of the end too
            self._socket.sendall(data)

    def replies(self) -> Iterator[pb.ReportReply]:
        """What the daemon says, until the connection ends."""
        frames = Frames()
        with contextlib.suppress(OSError):
            while data := self._socket.recv(_READ_BYTES):
                for body in frames.feed(data):
                    yield pb.ReportReply.FromString(body)

    def close(self) -> None:
        """Ends the connection; `replies` ends too."""
        with contextlib.suppress(OSError):  # the other side has ended it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
