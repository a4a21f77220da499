"""Carries the bytes of one connection between a caller and a gRPC server.

    caller ─► outer ─ do the first bytes begin HTTP/2? ─► inner, bound to a name ─► gRPC server
           ◄──────── at most one piece of bytes waits in each direction ────────◄

* Time: the handshake and the first bytes have FIRST_BYTES_S together. Until they are here, a caller
  costs one descriptor, and the gRPC server knows nothing of the connection.
* Pace: an unproved caller sends UNPROVED_BURST bytes, and then UNPROVED_BYTES_S each second. So a
  flood of calls, or a large message, costs the daemon little. The kernel makes the caller wait. A
  proved caller is not slowed.
* Memory: while one side takes no bytes, the relay reads no more from the other side.
* The end of either side ends the connection. What that side had sent before is passed on first.
  A server ends connections at their age, while callers send. A socket that is closed with unread
  bytes resets the connection, and the caller may lose the last answers. So what a caller still
  sends is read and dropped: LINGER_BYTES at most. Once the server takes no more, the caller has
  LINGER_S to take the last answers. Then the caller has LINGER_S to see the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Callable
from typing import Final

from reft_daemon.server.callers import Caller

FIRST_BYTES_S: Final = 10.0  # a handshake takes three round trips; on a flooded node each may take a second
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # begins each connection of HTTP/2
# Bytes: calls without messages, and one large request of a peer that a restart surprised (64 KiB).
UNPROVED_BURST: Final = 128 << 10
UNPROVED_BYTES_S: Final = 8 << 10  # about 50 health checks a second
REFILL_S: Final = 0.5
UNPROVED_PIECE: Final = 16 << 10  # bounds what waits for callers that do not read
PIECE: Final = 1 << 20  # memory of the loop, not of a connection, while callers take what is sent
LINGER_S: Final = 5.0  # a caller closes as soon as it has seen the end
LINGER_BYTES: Final = 1 << 20  # new calls that are on their way; a flood gets no more work done
_NOT_YET: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class CallerRefused(Exception):
    """A caller is refused; the text is the reason."""


class Relay:
    """Carries one connection, from the handshake to its end. Belongs to one event loop.

    Args:
        name: of the connection.
        caller: as far as known before the handshake.
        outer: the caller's socket, not blocking; perhaps TLS, before its handshake.
        scratch: PIECE bytes of memory that all relays of the loop share.
        slowed: called when the caller has sent UNPROVED_BURST bytes before `unpace`; None: the
            caller is not slowed.
        connect: returns the socket to the gRPC server; called when the first bytes are here. May
            raise CallerRefused or OSError.
        ended: called once, with the reason if the caller was refused, else with "".
    """

    def __init__(
        self, name: str, caller: Caller, outer: socket.socket, scratch: memoryview,
        slowed: Callable[[Relay], None] | None, connect: Callable[[Relay], socket.socket],
        ended: Callable[[Relay, str], None],
    ) -> None:  # fmt: skip
        self.name, self.caller, self.outer = name, caller, outer
        self._scratch, self._slowed, self._connect, self._ended = scratch, slowed, connect, ended
        self._loop = asyncio.get_running_loop()
        self._first = b""
        self._streams: list[_Stream] = []  # to the server, and to the caller
        self._droppable = LINGER_BYTES
        self._deadline = self._loop.call_later(FIRST_BYTES_S, self.end, "they sent no first bytes in time")
        self._loop.add_reader(outer, self._shake_hands if isinstance(outer, ssl.SSLSocket) else self._read_first)

    def _shake_hands(self) -> None:
        assert isinstance(self.outer, ssl.SSLSocket)
        self._loop.remove_writer(self.outer)
        try:
            self.outer.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLWantWriteError:
            self._loop.add_writer(self.outer, self._shake_hands)
            return
        except OSError as error:  # ssl.SSLError is one
            return self.end(f"their TLS handshake failed ({_tls_reason(error)})")
        self._loop.add_reader(self.outer, self._read_first)
        self._read_first()  # TLS may have read these bytes from the socket already

    def _read_first(self) -> None:
        try:
            data = self.outer.recv(UNPROVED_PIECE)
        except _NOT_YET:
            return
        except OSError:
            data = b""
        if not data and not self._first:
            why = ": do they refuse the certificate of this daemon?" if isinstance(self.outer, ssl.SSLSocket) else ""
            return self.end(f"they ended the connection before they sent anything{why}")
        self._first += data
        begin = self._first[: len(PREFACE)]
        if not data or not PREFACE.startswith(begin):
            return self.end("they did not speak HTTP/2")
        if len(begin) == len(PREFACE):
            self._open()

    def _open(self) -> None:
        """Connects to the gRPC server; both directions flow from now on."""
        try:
            inner = self._connect(self)
        except CallerRefused as refused:
            return self.end(str(refused))
        except OSError as error:
            return self.end(f"no connection to the gRPC server could be made ({error.strerror})")
        self._deadline.cancel()
        allowance, piece = (math.inf, PIECE) if self._slowed is None else (UNPROVED_BURST, UNPROVED_PIECE)
        # A server that takes no more may have sent an answer before, which to_caller passes on.
        to_server = _Stream(
            self.outer, inner, self._scratch, self.end, self._drop_from_now_on, self._note_slowed, piece, allowance
        )
        to_caller = _Stream(inner, self.outer, self._scratch, self._linger, self.end, _ignore, piece, math.inf)
        self._streams = [to_server, to_caller]
        to_server.forward(self._first)
        self._first = b""

    def _note_slowed(self) -> None:
        if self._slowed is not None:  # once for a connection
            self._slowed(self)
            self._slowed = None

    def unpace(self) -> None:
        """Carries at full speed from now on: the caller has proved who it is."""
        self._slowed = None
        for stream in self._streams:
            stream.unpace()

    def _linger(self) -> None:
        """Tells the caller the end of the server, and waits until the caller closes."""
        self._stop_streams()
        with contextlib.suppress(OSError):  # the caller has ended, too
            socket.socket.shutdown(self.outer, socket.SHUT_WR)  # an SSLSocket's own method forgets TLS
        self._drop_from_now_on()

    def _drop_from_now_on(self) -> None:
        """Drops what the caller sends, and ends after LINGER_S: the server has ended."""
        self._deadline.cancel()
        self._deadline = self._loop.call_later(LINGER_S, self.end)
        self._loop.add_reader(self.outer, self._drop)

    def _drop(self) -> None:
        """Reads what the caller sends after the server's end."""
        try:
            size = socket.socket.recv_into(self.outer, self._scratch)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        self._droppable -= size
        if not size or self._droppable <= 0:
            self.end()

    def _stop_streams(self) -> set[socket.socket]:
        """Carries nothing from now on; returns both sockets."""
        for stream in self._streams:
            stream.stop()
        sockets = {self.outer, *(stream.source for stream in self._streams)}
        for each in sockets:
            self._loop.remove_reader(each)
            self._loop.remove_writer(each)
        return sockets

    def end(self, reason: str = "") -> None:
        """Closes both sockets at once."""
        if self.outer.fileno() < 0:
            return
        self._deadline.cancel()
        sockets = self._stop_streams()
        self._ended(self, reason)  # the name counts no more before the socket that bears the name is closed
        for each in sockets:
            each.close()


class _Stream:
    """Carries bytes from one socket to another, as fast as they are taken.

    Args:
        source: where bytes come from.
        sink: where they go.
        scratch: see Relay.
        source_ended: called when the source has ended, and all its bytes were passed on.
        sink_ended: called when the sink takes no more bytes.
        slowed: called when the allowance is used up.
        piece: how many bytes to read at once.
        allowance: how many bytes to carry before the pace is UNPROVED_BYTES_S.
    """

    def __init__(
        self, source: socket.socket, sink: socket.socket, scratch: memoryview,
        source_ended: Callable[[], None], sink_ended: Callable[[], None], slowed: Callable[[], None],
        piece: int, allowance: float,
    ) -> None:  # fmt: skip
        self.source, self._sink, self._scratch = source, sink, scratch
        self._source_ended, self._sink_ended, self._slowed = source_ended, sink_ended, slowed
        self._piece, self._allowance = piece, allowance
        self._loop = asyncio.get_running_loop()
        self._unsent: bytes | memoryview = b""
        self._refill: asyncio.TimerHandle | None = None
        self._loop.add_reader(source, self._read)

    def _read(self) -> None:
        """Carries what has arrived, at most one piece."""
        if self._unsent or not self._allowance:
            return
        try:
            size = self._receive(int(min(self._piece, self._allowance)))
        except _NOT_YET:
            return
        except OSError:
            size = 0
        if not size:
            return self._source_ended()
        self._allowance -= size
        self.forward(self._scratch[:size])

    def _receive(self, limit: int) -> int:
        """Fills the scratch memory; returns the number of bytes, 0 at the end."""
        size = self.source.recv_into(self._scratch[:limit])
        if isinstance(self.source, ssl.SSLSocket):  # gives one TLS record at a time
            with contextlib.suppress(*_NOT_YET):
                while 0 < size < limit and (more := self.source.recv_into(self._scratch[size:limit])):
                    size += more
        return size

    def forward(self, data: bytes | memoryview) -> None:
        """Sends bytes. Stops reading if the sink is full, or the pace is reached."""
        try:
            sent = self._sink.send(data)
        except _NOT_YET:
            sent = 0
        except OSError:
            return self._sink_ended()
        if sent < len(data):
            self._unsent = bytes(data[sent:])  # the scratch memory is another relay's next
            self._loop.remove_reader(self.source)
            self._loop.add_writer(self._sink, self._flush)
        elif not self._allowance:
            self._wait_for_allowance()
        elif isinstance(self.source, ssl.SSLSocket) and self.source.pending():
            self._loop.call_soon(self._read)  # the kernel does not know of these bytes

    def _flush(self) -> None:
        try:
            self._unsent = self._unsent[self._sink.send(self._unsent) :]
        except _NOT_YET:
            return
        except OSError:
            self._loop.remove_writer(self._sink)
            return self._sink_ended()
        if not self._unsent:
            self._loop.remove_writer(self._sink)
            if self._allowance:
                self._go_on()
            else:
                self._wait_for_allowance()

    def _go_on(self) -> None:
        self._loop.add_reader(self.source, self._read)
        self._read()  # TLS may have read bytes from the socket already

    def _wait_for_allowance(self) -> None:
        self._slowed()
        self._loop.remove_reader(self.source)
        self._refill = self._loop.call_later(REFILL_S, self._allow, int(UNPROVED_BYTES_S * REFILL_S))

    def _allow(self, size: float) -> None:
        self._refill = None
        self._allowance += size
        self._go_on()

    def unpace(self) -> None:
        """Carries at full speed from now on."""
        self._piece = PIECE
        if self._refill is None:
            self._allowance = math.inf
        else:
            self._refill.cancel()
            self._allow(math.inf)

    def stop(self) -> None:
        """Ends the timer."""
        if self._refill is not None:
            self._refill.cancel()


def _ignore() -> None:
    pass


def _tls_reason(error: OSError) -> str:
    """Returns OpenSSL's reason, which the caller can't write; e.g. WRONG_VERSION_NUMBER."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message  # e.g. certificate has expired
    return (isinstance(error, ssl.SSLError) and error.reason) or "the connection ended"
