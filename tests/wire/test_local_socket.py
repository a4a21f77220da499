"""Tests the local socket and the trainer's end: reports never wait, descriptors never leak."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from reft.errors import AttachError
from reft.wire import local_socket
from reft.wire.local_socket import MESSAGE_MAX, FrameReader, ReportConnection, frame
from reft.wire.messages import OLDEST, PROTOCOL
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.descriptors import await_closed, own_descriptors

REPORTS = [
    pb.ReportRequest(job="job", rank=1),
    pb.ReportRequest(job="job", steps=pb.StepReport(until=7, sealed=[pb.SealedStep(step=7)])),
]
SLOTS = pb.SlotsRequest(job="job", rank=1, slots=["rank-1.slot-0", "rank-1.slot-1"])
SPOKEN = {"protocol": PROTOCOL, "oldest": OLDEST}
REQUESTS = [
    pb.LocalRequest(),  # an empty body
    pb.LocalRequest(report=REPORTS[1], protocol=PROTOCOL),
    pb.LocalRequest(slots=SLOTS),
    pb.LocalRequest(who=True),
]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000])
def test_messages_round_trip_in_pieces_of_any_size(size):
    data = b"".join(map(frame, REQUESTS))
    frames, messages = FrameReader(), []
    for at in range(0, len(data), size):
        messages += frames.feed(data[at : at + size])
    assert [pb.LocalRequest.FromString(body) for body in messages] == REQUESTS
    assert frames.feed(b"") == [], "the end, with no message begun"


@pytest.mark.parametrize("length", [MESSAGE_MAX + 1, 1 << 31, (1 << 32) - 1])
def test_a_message_that_is_too_long_is_refused_by_its_length(length):
    with pytest.raises(ValueError, match=f"{length} bytes; the limit is {MESSAGE_MAX}"):
        FrameReader().feed(struct.pack("<I", length))
    assert FrameReader().feed(struct.pack("<I", MESSAGE_MAX)) == []


def test_the_end_within_a_message_is_an_error():
    data = frame(REQUESTS[1])
    for size in range(1, len(data)):
        frames = FrameReader()
        assert frames.feed(data[:size]) == []
        with pytest.raises(ValueError, match="ended early"):
            frames.feed(b"")


@given(st.binary(max_size=64))
def test_any_bytes_are_requests_or_incomplete_or_an_error_that_is_expected(data):
    try:
        for body in FrameReader().feed(data):
            pb.LocalRequest.FromString(body)
    except (ValueError, DecodeError):
        pass


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.settimeout(20)
        listening.bind(str(tmp_path / "s"))
        listening.listen(4)
        yield listening


# Reports


def test_a_connection_without_a_daemon_fails(tmp_path):
    with pytest.raises(OSError):
        ReportConnection(str(tmp_path / "none"))


def test_a_daemon_that_does_not_accept_blocks_no_trainer(tmp_path):
    """The daemon's queue fills up: then the next connection is refused at once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen(0)
        waiting = []
        with pytest.raises(BlockingIOError):
            for _ in range(10):
                waiting.append(ReportConnection(str(tmp_path / "s")))
                waiting[-1].send(REPORTS[0])  # this does not wait either
        for connection in waiting:
            connection.close()


def test_a_report_that_is_not_read_blocks_no_trainer_and_arrives_whole(listener):
    """A thread sends bytes beyond the kernel's buffer; until then the next report is refused."""
    connection = ReportConnection(listener.getsockname())
    there, _ = listener.accept()
    large = pb.ReportRequest(job="x" * (4 << 20))
    connection.send(large)  # the daemon does not read yet
    with pytest.raises(BlockingIOError):
        connection.send(REPORTS[0])
    frames, messages = FrameReader(), []
    while not messages:
        messages += frames.feed(there.recv(1 << 20))
    connection._rest.join(20)
    connection._rest = threading.current_thread()  # as if the thread still sent the rest
    with pytest.raises(BlockingIOError):
        connection.send(REPORTS[0])
    connection._rest = None
    connection.send(REPORTS[0])
    messages += frames.feed(there.recv(1 << 20))
    requests = [pb.LocalRequest.FromString(body) for body in messages]
    assert [request.report for request in requests] == [large, REPORTS[0]]
    assert {(request.protocol, request.oldest) for request in requests} == {(PROTOCOL, OLDEST)}
    there.close()
    connection.close()


def test_replies_end_with_the_connection_whichever_side_ends_it(listener):
    for ends in ("theirs", "ours"):
        connection = ReportConnection(listener.getsockname())
        there, _ = listener.accept()
        there.sendall(frame(pb.LocalReply(report=pb.ReportReply(until=3), calls=1)))
        messages = []
        first = threading.Event()

        def read(connection=connection, messages=messages, first=first):
            for reply in connection.replies():
                messages.append(reply.report.until)
                first.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert first.wait(20)
        (there if ends == "theirs" else connection).close()
        reader.join(20)
        assert not reader.is_alive() and messages == [3], ends
        there.close()
        connection.close()


# Slots and the caller's identity


@contextmanager
def served(folder: Path, answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serves a socket on which `answer` handles one call."""
    path = folder / "s"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield str(path)
        thread.join()


def answering(reply: bytes | pb.LocalReply, descriptors: tuple[int, ...] = ()) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        _, given, _, _ = socket.recv_fds(connection, 4096, 8)
        local_socket.close_all(given)
        socket.send_fds(connection, [reply if isinstance(reply, bytes) else frame(reply)], list(descriptors))

    return answer


def test_descriptors_arrive_even_if_the_reply_comes_in_pieces(tmp_path):
    memfd = os.memfd_create("test")
    os.write(memfd, b"hello")

    def answer(connection: socket.socket) -> None:
        (body,) = FrameReader().feed(connection.recv(4096))
        assert pb.LocalRequest.FromString(body) == pb.LocalRequest(slots=SLOTS, **SPOKEN)
        assert local_socket.peer(connection) == (os.getpid(), os.getuid())
        data = frame(pb.LocalReply(descriptors=1, **SPOKEN))
        socket.send_fds(connection, [data[:3]], [memfd])
        connection.sendall(data[3:])

    with served(tmp_path, answer) as path:
        (descriptor,) = local_socket.ask_slots(path, SLOTS, [], 5)
    assert os.pread(descriptor, 5, 0) == b"hello"
    assert not os.get_inheritable(descriptor), "a program that a script executes would hold the slot's memory"
    os.close(descriptor)
    os.close(memfd)


def test_descriptors_for_which_there_is_no_room_are_an_error_that_says_so(tmp_path):
    limits, before = resource.getrlimit(resource.RLIMIT_NOFILE), own_descriptors()

    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        socket.send_fds(connection, [frame(pb.LocalReply(descriptors=2, **SPOKEN))], [0, 0])

    try:
        with served(tmp_path, answer) as path, pytest.raises(AttachError, match="ulimit -n"):
            local_socket.ask_slots(path, SLOTS, [], 60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await_closed(before)


BAD_REPLIES = [
    (b"", 0, "no reply"),
    (b"\5\0", 0, "ended early"),
    (struct.pack("<I", 2) + b"\xff\xff", 0, "failed"),
    (struct.pack("<I", MESSAGE_MAX + 1), 1, "the limit is"),
    (pb.LocalReply(status=9, error="gone"), 0, "gone"),
    (pb.LocalReply(status=9, error="gone"), 1, "gone"),
    (pb.LocalReply(report=pb.ReportReply(), **SPOKEN), 1, "no reply"),
    (
        pb.LocalReply(report=pb.ReportReply(), protocol=OLDEST - 1),
        1,
        f"the daemon speaks protocol {OLDEST - 1}, this",
    ),
]


@pytest.mark.parametrize(
    ("reply", "count", "why"),
    [
        *BAD_REPLIES,
        (pb.LocalReply(descriptors=2, **SPOKEN), 1, "refused"),
        (pb.LocalReply(descriptors=0, **SPOKEN), 1, "refused"),
        (pb.LocalReply(descriptors=1, protocol=PROTOCOL + 2, oldest=PROTOCOL + 1), 1, "and older ones from"),
    ],
)
def test_an_answer_that_does_not_fit_is_an_error_and_leaks_nothing(tmp_path, reply, count, why):
    before = own_descriptors()
    with served(tmp_path, answering(reply, (0,) * count)) as path:
        with pytest.raises(AttachError, match=why):
            local_socket.ask_slots(path, SLOTS, [], 5)
    await_closed(before)


def test_slots_that_are_given_back_are_acknowledged_or_refused(tmp_path):
    request = pb.SlotsRequest(job="job", returned=["rank-0.slot-0"])
    with served(tmp_path, answering(pb.LocalReply(descriptors=0, **SPOKEN))) as path:
        assert local_socket.ask_slots(path, request, [0], 5) == []
    with served(tmp_path, answering(pb.LocalReply(status=15, error="it is no memfd"))) as path:
        with pytest.raises(AttachError, match="it is no memfd"):
            local_socket.ask_slots(path, request, [0], 5)


def test_a_process_gets_its_identity(tmp_path):
    reply = pb.LocalReply(caller=pb.Caller(pid=7, pid_start=8, parent=6), **SPOKEN)
    with served(tmp_path, answering(reply)) as path:
        assert local_socket.introduce(path, 5) == local_socket.CallerProcess(Process(7, 8), 6)


@pytest.mark.parametrize(
    ("reply", "count", "why"), [*BAD_REPLIES, (pb.LocalReply(descriptors=1, **SPOKEN), 1, "did not say who")]
)
def test_an_introduction_without_a_caller_is_an_error_and_leaks_nothing(tmp_path, reply, count, why):
    before = own_descriptors()
    with served(tmp_path, answering(reply, (0,) * count)) as path:
        with pytest.raises(AttachError, match=why):
            local_socket.introduce(path, 5)
    await_closed(before)


def test_a_missing_or_silent_daemon_is_an_error(tmp_path, listener):
    with pytest.raises(AttachError, match=r"local socket .* failed"):
        local_socket.ask_slots(str(tmp_path / "none"), SLOTS, [], 1)
    with pytest.raises(AttachError, match="timed out"):
        local_socket.ask_slots(listener.getsockname(), SLOTS, [], 0.1)
