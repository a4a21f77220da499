"""Serves the timeline of a living trainer on a socket of its own. Training makes no call for it.

    reft-cli timeline ─► Status: rank, pid, epoch ─► @reft-timeline-UID-PID ─► JSON to the end

UID is the trainer's user. The name is abstract: it needs no folder, and ends with its process. A
forked child, such as a loader's worker, gives its copy up at once, or the name would outlive the
session. Both sides check each other's user. Only the same user, or root, gets an answer. A trainer
of another host or network namespace can't be reached: ask on that host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from reft.errors import ReftError

log = logging.getLogger("reft")
REPLY_DEADLINE_S = 5.0
AGAIN_S = 1.0  # after a caller could not be let in, for example because too many files are open
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid, as Linux gives them


def address(pid: int) -> str:
    """Returns the abstract name of a trainer's socket."""
    return f"\0reft-timeline-{_user_of(pid)}-{pid}"


def _user_of(pid: int) -> int:
    """Returns the user of a trainer: any if this process is root, else only its own."""
    if os.getuid() == 0:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("Uid:")).split()[1])
    return os.getuid()


def fetch(pid: int, deadline_s: float = REPLY_DEADLINE_S) -> dict[str, Any]:
    """Returns the trace of a trainer on this host, see `reft.client.snapshot.timeline`.

    Raises:
        ReftError: the trainer does not answer within the deadline, or belongs to another user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(deadline_s)
        try:
            connection.connect(address(pid))
            if not _is_same_user(connection):
                raise ReftError(f"process {pid} is another user's.")
            with connection.makefile("rb") as stream:
                trace: dict[str, Any] = json.loads(stream.read())
                return trace
        except (OSError, ValueError) as error:
            raise ReftError(f"process {pid} gives no timeline: {error}.", "ask on the node where it trains") from error


def _is_same_user(connection: socket.socket) -> bool:
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid in (os.getuid(), 0) or os.getuid() == 0


def _close(listener: weakref.ref[socket.socket]) -> None:
    if (living := listener()) is not None:
        living.close()


class TimelineServer:
    """Answers requests for this process's timeline, in a thread that sleeps otherwise.

    Args:
        trace: makes the answer, in JSON types.
    """

    def __init__(self, trace: Callable[[], Mapping[str, Any]]) -> None:
        self._trace = trace
        self._is_closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(address(os.getpid()))
            self._listener.listen(4)
        except OSError:
            self._listener.close()
            raise
        os.register_at_fork(after_in_child=partial(_close, weakref.ref(self._listener)))
        self._thread = threading.Thread(target=self._serve, name="reft-timeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and frees the name."""
        self._is_closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(REPLY_DEADLINE_S)
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._is_closing.wait(AGAIN_S)
                continue
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(REPLY_DEADLINE_S)
            if _is_same_user(connection):
                connection.sendall(json.dumps(self._trace()).encode())
        except (OSError, RuntimeError):
            pass  # the caller is gone; or training changed the trace meanwhile
        except Exception:  # a bug that one trace meets must not end the answers to later callers
            log.exception("the timeline can't be made")
