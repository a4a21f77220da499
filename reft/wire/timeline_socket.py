"""How a person gets the timeline of a living trainer: a small socket of the trainer's own, no call of training's.

    reft-cli timeline ─► Status: rank, pid, epoch ─► @reft-timeline-UID-PID ─► JSON, until the end of the stream

The name is abstract: it needs no folder, and ends with the process that made it. Both sides look at who the other is: only
the same user, or root, is answered. A trainer of another host or network namespace can't be reached this way: ask there.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from reft.errors import ReftError

REPLY_DEADLINE_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid, as Linux gives them


def address(pid: int) -> str:
    """The abstract name of a trainer's socket."""
    return f"\0reft-timeline-{os.getuid()}-{pid}"


def fetch(pid: int, deadline_s: float = REPLY_DEADLINE_S) -> dict[str, Any]:
    """The trace of a trainer on this host, see `reft.client.snapshot.timeline`.

    Raises:
        ReftError: it does not answer within the deadline, or it is another user's.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(deadline_s)
        try:
            line.connect(address(pid))
            if not _is_ours(line):
                raise ReftError(f"process {pid} is another user's.")
            with line.makefile("rb") as stream:
                found: dict[str, Any] = json.loads(stream.read())
                return found
        except (OSError, ValueError) as error:
            raise ReftError(f"process {pid} gives no timeline: {error}.", "ask on the node where it trains") from error


def _is_ours(line: socket.socket) -> bool:
    _, uid, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid in (os.getuid(), 0) or os.getuid() == 0


class TimelineServer:
    """Answers questions for this process's timeline, in a thread that sleeps otherwise.

    Args:
        trace: makes the answer, in JSON types.
    """

    def __init__(self, trace: Callable[[], Mapping[str, Any]]) -> None:
        self._trace = trace
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(address(os.getpid()))
            self._listener.listen(4)
        except OSError:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="reft-timeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and frees the name."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(REPLY_DEADLINE_S)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with (
                line,
                contextlib.suppress(OSError, RuntimeError),
            ):  # the caller has gone, or training went on meanwhile
                line.settimeout(REPLY_DEADLINE_S)
                if _is_ours(line):
                    line.sendall(json.dumps(self._trace()).encode())
