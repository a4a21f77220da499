"""Frames between `reft-cli export` and the program that reads a checkpoint."""

from __future__ import annotations

import io
import os

import pytest

from reft.wire import range_pipe
from reft.wire.range_pipe import FileRequest


def test_requests_come_back_until_the_end() -> None:
    wanted = [FileRequest(0, 0, 0), FileRequest(70_000, 1 << 40, 4 << 20)]
    stream = io.BytesIO(b"".join(each.encode() for each in wanted) + b"cut")
    assert [range_pipe.read_request(stream), range_pipe.read_request(stream)] == wanted
    assert range_pipe.read_request(stream) is None


def test_answers_and_errors_come_back_and_silence_and_an_end_are_told_apart() -> None:
    read_end, write_end = os.pipe()
    with open(write_end, "wb") as stream:
        range_pipe.write_answer(stream, b"12345")
        range_pipe.write_error(stream, {"error": "why"})
        into = bytearray(5)
        assert range_pipe.receive_answer(read_end, 1.0) == (False, 5)
        range_pipe.receive_into(read_end, memoryview(into), 1.0)
        assert into == b"12345"
        is_error, nbytes = range_pipe.receive_answer(read_end, 1.0)
        assert is_error
        range_pipe.receive_into(read_end, memoryview(bytearray(nbytes)), 1.0)
        with pytest.raises(TimeoutError):
            range_pipe.receive_answer(read_end, 0.0)
    with pytest.raises(EOFError):
        range_pipe.receive_answer(read_end, 1.0)
    os.close(read_end)
