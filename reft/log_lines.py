"""The log of reft's programs: one line a record, of bounded length, in a file of bounded size.

    record ─► characters of control escaped, cut at LINE_MAX ─► FILE, at FILE_BYTES ─► FILE.1

Names of nodes and reasons of errors come from other nodes. Unescaped, they could forge lines of the
log, or give orders to the terminal of the person who reads it.

Kills, purges, jobs that a daemon frees by itself, refusals and changes of certificates are audit
lines, of the logger `reft.audit`:

    reft.audit WHAT: KEY=VALUE KEY=VALUE …

A value of letters, digits and ._:/@+- stands as it is; any other one is a JSON string. So nobody
can forge a field by a name. All fields have an equal part of the line, and a longer value is cut.
So nobody can push a field out of the line by a long name.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import logging
import logging.handlers
import os
import queue
import re
import sys
import threading
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

from reft.errors import FIX

audit_log = logging.getLogger("reft.audit")
LINE_MAX: Final = 4096  # characters of a message; tracebacks come behind it, whole
ESCAPE_MAX: Final = 12  # characters of JSON that stand for one: two surrogates
FILE_BYTES: Final = 16 << 20
WAITING_MAX: Final = 4096  # lines for a file that takes none at present
CLOSE_S: Final = 2.0  # for these lines, at the end of a program
ROOM_S: Final = 0.1  # for one line in a burst; a file that takes nothing for so long hangs
_FACTS: Final = {"name": "reft.daemon", "levelno": logging.ERROR, "levelname": "ERROR"}
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
# C0 and C1, and what changes the order or the lines of a text: separators, marks of direction
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._:/@+-]+")
_CONTROL_BUT_LINES: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape(text: str, pattern: re.Pattern[str] = _CONTROL) -> str:
    """Returns the text with each character of control as an escape, such as \\x1b."""
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escape_lines(text: str) -> str:
    """Returns the text with each character of control but line breaks as an escape."""
    return escape(text, _CONTROL_BUT_LINES)


def audit(what: str, **facts: object) -> None:
    """Logs an audit line, as a warning: few settings hide those.

    Args:
        what: has happened; a constant of the caller.
        facts: about it. Their texts may come from others.
    """
    part = LINE_MAX // (len(facts) + 1)  # of each field, and of `what`
    fields = (f"{key}={_value(str(value), part - len(key) - 2)}" for key, value in facts.items())
    audit_log.warning("%s: %s", what, " ".join(fields))


def _value(text: str, most: int) -> str:
    """Returns the value of a field, with at most so many characters."""
    if len(text) <= most and _PLAIN.fullmatch(text):
        return text
    quoted = json.dumps(text)
    if len(quoted) <= most:
        return quoted
    end = f"... ({len(text)} characters)"
    return json.dumps(text[: (most - len(end) - 2) // ESCAPE_MAX] + end)


class LineFormatter(logging.Formatter):
    """Formats a record as one line of bounded length, and its traceback behind it."""

    def __init__(self) -> None:
        super().__init__(_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = escape(record.message.replace(FIX, f" {FIX.strip()} "))
        record.message = text if len(text) <= LINE_MAX else f"{text[:LINE_MAX]}… ({len(text)} characters)"
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        return escape_lines(super().formatException(ei))  # type: ignore[arg-type]


class LogFileHandler(logging.handlers.RotatingFileHandler):
    """Writes a log file; at FILE_BYTES the file becomes FILE.1, and a new one begins.

    Args:
        path: of the file.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._missing = 0  # lines that the disk did not take since the last one that it took
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line. After lines that the disk did not take, another one says so."""
        missing = self._missing
        super().emit(record)
        if missing and self._missing == missing:
            self._missing = 0
            words = "up to %d lines before the last one are missing: the log could not be written"
            super().emit(logging.makeLogRecord({**_FACTS, "msg": words, "args": (missing,)}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Says once on stderr that the disk takes no lines: no traceback for each."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._missing += 1
        if self._missing == 1:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may lie there, too, or be closed
                sys.stderr.write(
                    f"the log {self.baseFilename} can't be written: {error.strerror}. Lines are missing until it can; "
                    "make room there, or name another file (--log)\n"
                )

    def _open(self) -> TextIOWrapper:
        def create(path: str, flags: int) -> int:
            return os.open(path, flags, 0o644)  # whatever the umask is, no other user writes lines

        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=create)

    def doRollover(self) -> None:
        """Begins a new file. Where the folder takes no FILE.1, the file doubles its size first.

        Else the log would end at FILE_BYTES, for example in /var/log, where only the file is ours.
        """
        try:
            super().doRollover()
        except OSError:
            self.stream = self._open()
            if os.fstat(self.stream.fileno()).st_size >= 2 * self.maxBytes:
                self.stream.truncate(0)

    def reopen(self) -> None:
        """Opens the path anew: another program has renamed or removed the file."""
        self.acquire()
        try:
            earlier, self.stream = self.stream, self._open()  # stays as it is if the path can't be opened
            if earlier is not None:
                with contextlib.suppress(OSError):  # a full disk takes its last bytes no more
                    earlier.close()
        finally:
            self.release()


class LogOrder(enum.Enum):
    """Tells the thread of a log something else than a line."""

    REOPEN = enum.auto()
    END = enum.auto()


class QueuedLogHandler(logging.Handler):
    """Gives lines to a thread that writes the file.

    So a file system that hangs stops only that thread. Lines beyond WAITING_MAX are counted, and
    the log says later how many are missing.

    Args:
        file: takes the lines; no other code writes there.
    """

    def __init__(self, file: LogFileHandler) -> None:
        super().__init__()
        self._file = file
        # WAITING_MAX lines at most. A Queue would lock itself out if __del__ logs within `put`.
        self._waiting: queue.SimpleQueue[logging.LogRecord | LogOrder] = queue.SimpleQueue()
        self._missing = 0
        self._thread = threading.Thread(target=self._write, name="reft-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hands a line over. Its words are made here, since their values may change."""
        end_s = time.monotonic() + ROOM_S
        while self._waiting.qsize() >= WAITING_MAX:
            if self._missing or time.monotonic() >= end_s:
                self._missing += 1
                return
            time.sleep(0.001)
        line = copy.copy(record)
        try:
            line.msg, line.args = record.getMessage(), None
            self._waiting.put(line)
        except Exception:
            self.handleError(record)

    def reopen(self) -> None:
        """Lets the thread open the path anew, behind the lines that wait."""
        if self._waiting.qsize() < WAITING_MAX:  # else the file hangs, and another signal comes
            self._waiting.put(LogOrder.REOPEN)

    def close(self) -> None:
        """Waits for the lines, CLOSE_S at most, and closes the file."""
        self._waiting.put(LogOrder.END)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._file.stream = None  # type: ignore[assignment]  # to close a file that hangs would hang
        self._file.close()
        super().close()

    def _write(self) -> None:
        while (each := self._waiting.get()) is not LogOrder.END:
            if isinstance(each, logging.LogRecord):
                self._file.emit(each)
            else:
                self._reopen()
            self._say_missing()
        self._say_missing()

    def _say_missing(self) -> None:
        if not self._missing or not self._waiting.empty():  # asked without the lock: emit may wait for room
            return
        with self.lock:  # type: ignore[union-attr]  # logging holds this lock around emit
            missing, self._missing = self._missing, 0
        words = "%d lines before this one are missing: the log took nothing, and %d others waited"
        self._file.emit(logging.makeLogRecord({**_FACTS, "msg": words, "args": (missing, WAITING_MAX)}))

    def _reopen(self) -> None:
        try:
            self._file.reopen()
        except OSError as error:
            words = "SIGHUP: the log can't be opened anew: %s"
            self._file.emit(logging.makeLogRecord({**_FACTS, "msg": words, "args": (error,)}))


def begin_log(path: Path | None = None) -> QueuedLogHandler | None:
    """Lets this process log to stderr, or to a file.

    Args:
        path: of the file; None: stderr.

    Returns:
        The handler of the file, to close at the end of the program; None for stderr.

    Raises:
        OSError: the file can't be opened.
    """
    if path is None:
        handler: logging.StreamHandler[Any] = logging.StreamHandler(sys.stderr)
    else:
        handler = LogFileHandler(path)
    handler.setFormatter(LineFormatter())
    queued = QueuedLogHandler(handler) if isinstance(handler, LogFileHandler) else None
    logging.basicConfig(handlers=[queued or handler], level=logging.INFO)
    return queued
