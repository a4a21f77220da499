"""The line's framing, and its trainer's end: nothing waits, whatever the other side does."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from reft.wire.line import MESSAGE_MAX, Frames, Line, frame
from reft.wire.v1 import daemon_pb2 as pb

REQUESTS = [
    pb.ReportRequest(job="job", rank=1),
    pb.ReportRequest(),  # an empty body
    pb.ReportRequest(job="job", said=pb.Said(until=7, sealed=[pb.SealedStep(step=7)])),
]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000])
def test_messages_come_out_as_they_went_in_however_they_are_cut(size):
    data = b"".join(map(frame, REQUESTS))
    frames, found = Frames(), []
    for at in range(0, len(data), size):
        found += frames.feed(data[at : at + size])
    assert [pb.ReportRequest.FromString(body) for body in found] == REQUESTS


def test_a_message_that_is_too_long_is_refused_before_it_comes():
    with pytest.raises(ValueError, match=f"{MESSAGE_MAX + 1} bytes; the limit is {MESSAGE_MAX}"):
        Frames().feed(struct.pack("<I", MESSAGE_MAX + 1))
    assert Frames().feed(struct.pack("<I", MESSAGE_MAX)) == []


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.settimeout(20)
        listening.bind(str(tmp_path / "s"))
        listening.listen(4)
        yield listening


def test_nobody_listens(tmp_path):
    with pytest.raises(OSError):
        Line(str(tmp_path / "none"))


def test_a_report_that_is_not_taken_in_holds_up_nobody_and_arrives_whole(listener):
    """More bytes than the kernel buffers: the rest follows from a thread; until then the next is refused, not mixed in."""
    line = Line(listener.getsockname())
    there, _ = listener.accept()
    large = pb.ReportRequest(job="x" * (4 << 20))
    line.send(large)  # nobody reads yet
    with pytest.raises(BlockingIOError):
        line.send(REQUESTS[0])
    frames, found = Frames(), []
    while not found:
        found += frames.feed(there.recv(1 << 20))
    line._rest.join(20)
    line._rest = threading.current_thread()  # as if it still sent: what follows would stand in the midst of it
    with pytest.raises(BlockingIOError):
        line.send(REQUESTS[0])
    line._rest = None
    line.send(REQUESTS[0])
    found += frames.feed(there.recv(1 << 20))
    assert [pb.ReportRequest.FromString(body) for body in found] == [large, REQUESTS[0]]
    there.close()
    line.close()


def test_replies_end_with_the_connection_whoever_ends_it(listener):
    for ends in ("theirs", "ours"):
        line = Line(listener.getsockname())
        there, _ = listener.accept()
        there.sendall(frame(pb.ReportReply(whole=3, calls=1)))
        found = []
        first = threading.Event()

        def read(line=line, found=found, first=first):
            for reply in line.replies():
                found.append(reply.whole)
                first.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert first.wait(20)
        (there if ends == "theirs" else line).close()
        reader.join(20)
        assert not reader.is_alive() and found == [3], ends
        there.close()
        line.close()
