"""The requests of the small socket, and what a caller makes of the daemon's answer."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.errors import AttachError
from reft.wire import handout
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb

REQUEST = pb.HandoutRequest(job="job", rank=1, slots=["rank-1.slot-0", "rank-1.slot-1"])
BODY = REQUEST.SerializeToString()
FRAME = struct.pack("<I", len(BODY)) + BODY


def test_a_request_is_known_once_it_is_complete():
    for size in range(len(FRAME)):
        assert handout.parse(FRAME[:size]) is None
    assert handout.parse(FRAME) == REQUEST
    assert handout.parse(FRAME + b"more") == REQUEST


@pytest.mark.parametrize("length", [handout.REQUEST_MAX + 1, 1 << 31, (1 << 32) - 1])
def test_a_length_above_the_limit_is_refused_before_the_bytes_come(length):
    with pytest.raises(ValueError, match=f"the limit is {handout.REQUEST_MAX}"):
        handout.parse(struct.pack("<I", length))


def test_bytes_that_are_no_request():
    with pytest.raises(ValueError, match="no request"):
        handout.parse(struct.pack("<I", 3) + b"\xff\xff\xff")


@given(st.binary(max_size=64))
def test_any_bytes_are_a_request_or_incomplete_or_a_value_error(data):
    try:
        handout.parse(data)
    except ValueError:
        pass


@contextmanager
def served(folder: Path, answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A socket on which one call is answered by `answer`."""
    path = str(folder / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        thread.join()


def test_descriptors_travel(tmp_path):
    memfd = os.memfd_create("test")
    os.write(memfd, b"hello")

    def answer(connection: socket.socket) -> None:
        assert handout.parse(connection.recv(4096)) == REQUEST
        assert handout.peer(connection) == (os.getpid(), os.getuid())
        connection.sendmsg([b"\1"], handout.ancillary([memfd]))

    with served(tmp_path, answer) as path:
        (descriptor,) = handout.ask(path, REQUEST, [], 5)
    assert os.pread(descriptor, 5, 0) == b"hello"
    os.close(descriptor)
    os.close(memfd)


def answering(reply: bytes, descriptors: tuple[int, ...] = ()) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        socket.recv_fds(connection, 4096, 8)
        connection.sendmsg([reply], handout.ancillary(descriptors))

    return answer


def descriptors_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("reply", "count"), [(b"", 0), (b"\0gone", 0), (b"\2", 1), (b"\0", 1)])
def test_an_answer_that_does_not_fit_is_an_error_and_leaks_nothing(tmp_path, reply, count):
    before = descriptors_open()
    with served(tmp_path, answering(reply, (0,) * count)) as path:
        with pytest.raises(AttachError, match=r"gone|no reply|refused"):
            handout.ask(path, REQUEST, [], 5)
    assert descriptors_open() == before


def test_slots_that_are_given_back_are_acknowledged_or_refused(tmp_path):
    request = pb.HandoutRequest(job="job", returned=["rank-0.slot-0"])
    with served(tmp_path, answering(b"\0")) as path:
        assert handout.ask(path, request, [0], 5) == []
    os.unlink(path)
    with served(tmp_path, answering(b"\0it is no memfd")) as path:
        with pytest.raises(AttachError, match="it is no memfd"):
            handout.ask(path, request, [0], 5)


def test_a_process_is_told_who_it_is(tmp_path):
    reply = b"\1" + pb.Caller(pid=7, pid_start=8, parent=6).SerializeToString()
    with served(tmp_path, answering(reply)) as path:
        assert handout.introduce(path, 5) == handout.Caller(Process(7, 8), 6)


@pytest.mark.parametrize(("reply", "count"), [(b"", 0), (b"\0not seen", 0), (b"\1\xff", 0), (b"\0", 1)])
def test_an_introduction_that_says_nobody_is_an_error_and_leaks_nothing(tmp_path, reply, count):
    before = descriptors_open()
    with served(tmp_path, answering(reply, (0,) * count)) as path:
        with pytest.raises(AttachError, match="did not say who this process is: "):
            handout.introduce(path, 5)
    assert descriptors_open() == before


def test_nobody_there_and_nobody_answering(tmp_path):
    with pytest.raises(AttachError, match="handout socket"):
        handout.ask(str(tmp_path / "none"), REQUEST, [], 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(AttachError, match="timed out"):
            handout.ask(str(tmp_path / "s"), REQUEST, [], 0.1)
