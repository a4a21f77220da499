"""Frames between `reft-cli export` and the program that reads a checkpoint's files for it.

    reft-cli    rank | offset | nbytes ──────────────────► program
                ◄────────── fails | length | bytes of the file, or an error as JSON

Answers come in the order of their requests. So requests may be sent ahead.
"""

from __future__ import annotations

import json
import os
import select
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, NamedTuple

_REQUEST: Final = struct.Struct("<IQQ")
_ANSWER: Final = struct.Struct("<?Q")
ERROR_MAX: Final = 1 << 16


class FileRequest(NamedTuple):
    """Bytes of a rank's file.

    Attributes:
        rank: whose file.
        offset: of the first byte.
        nbytes: their number.
    """

    rank: int
    offset: int
    nbytes: int

    def encode(self) -> bytes:
        """Returns the frame."""
        return _REQUEST.pack(*self)


class AnswerHeader(NamedTuple):
    """The head of an answer.

    Attributes:
        is_error: whether an error follows, as JSON, instead of bytes of the file.
        nbytes: that follow.
    """

    is_error: bool
    nbytes: int


def read_request(stream: BinaryIO) -> FileRequest | None:
    """Returns the next request; None at the end."""
    frame = stream.read(_REQUEST.size)
    return FileRequest(*_REQUEST.unpack(frame)) if len(frame) == _REQUEST.size else None


def write_answer(stream: BinaryIO, data: bytes | memoryview) -> None:
    """Writes bytes of a file.

    Raises:
        OSError: nobody reads.
    """
    stream.write(_ANSWER.pack(False, len(data)))
    stream.write(data)
    stream.flush()


def write_error(stream: BinaryIO, error: Mapping[str, Any]) -> None:
    """Writes an error.

    Raises:
        OSError: nobody reads.
    """
    text = json.dumps(error).encode()
    stream.write(_ANSWER.pack(True, len(text)))
    stream.write(text)
    stream.flush()


def receive_answer(descriptor: int, timeout_s: float) -> AnswerHeader:
    """Returns the head of the next answer; see `receive_into` for the rest.

    Raises:
        TimeoutError: no byte came in time.
        EOFError: the program has ended.
    """
    frame = bytearray(_ANSWER.size)
    receive_into(descriptor, memoryview(frame), timeout_s)
    return AnswerHeader(*_ANSWER.unpack(frame))


def receive_into(descriptor: int, into: memoryview, timeout_s: float) -> None:
    """Fills `into` from a pipe.

    Args:
        descriptor: of the pipe, which nothing else reads.
        into: gets the bytes.
        timeout_s: the longest time without a byte.

    Raises:
        TimeoutError: no byte came in time.
        EOFError: the program has ended.
    """
    poll, done = select.poll(), 0
    poll.register(descriptor, select.POLLIN)
    while done < len(into):
        if not poll.poll(timeout_s * 1000):
            raise TimeoutError
        count = os.readv(descriptor, [into[done:]])
        if not count:
            raise EOFError
        done += count
