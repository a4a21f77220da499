"""A child whose caller gave up: its answer is closed, and a stuck process costs no thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reft.errors import AttachError
from reft_daemon.child.child_process import CANCEL_S, ChildGone, ChildProcess, RunningProcess
from reft_daemon.child.control_channel import DESCRIPTORS_MAX, receive_message, send_message
from reft_daemon.persist.persister import STALL_S, Persister
from tests.support.daemons import until


def with_child(
    act: Callable[[ChildProcess, RunningProcess, socket.socket], Awaitable[None]], cancel_s: float = 60.0
) -> None:
    """Runs `act` with a child that is only the other end of a channel."""

    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        process: Any = SimpleNamespace(pid=0, kill=lambda: None, wait=lambda: 0)
        loop, child = asyncio.get_running_loop(), ChildProcess("child", [], cancel_s=cancel_s)
        child.running = running = RunningProcess(process, ours, loop.create_future())
        loop.add_reader(ours, child._read, running)
        with theirs:
            await asyncio.wait_for(act(child, running, theirs), 60)
            child.end(running)

    asyncio.run(run())


def is_closed(reading: int) -> bool:
    """Returns whether the other end of a pipe is closed."""
    os.set_blocking(reading, False)
    try:
        return os.read(reading, 1) == b""
    except BlockingIOError:
        return False
    finally:
        os.close(reading)


def test_answer_that_comes_after_its_caller_was_cancelled_is_closed() -> None:
    async def act(child: ChildProcess, running: RunningProcess, theirs: socket.socket) -> None:
        call = asyncio.ensure_future(child.call(running, {"do": "open"}, 60, 7))
        assert await asyncio.to_thread(receive_message, theirs) == ({"do": "open", "id": 7}, [])
        call.cancel()
        assert await asyncio.to_thread(receive_message, theirs) == ({"do": "cancel", "command": 7}, [])
        reading, writing = os.pipe()
        send_message(theirs, {"done": 7}, [writing])
        os.close(writing)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert is_closed(reading)

    with_child(act)


@contextlib.contextmanager
def no_room_for_files() -> Iterator[None]:
    """Lets this process open no more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_answer_whose_files_have_no_room_here_is_an_error() -> None:
    async def act(child: ChildProcess, running: RunningProcess, theirs: socket.socket) -> None:
        call = asyncio.ensure_future(child.call(running, {"do": "open"}, 60, 7))
        await asyncio.to_thread(receive_message, theirs)
        with no_room_for_files():
            send_message(theirs, {"done": 7}, [0])
            answer = await call
        assert "ulimit -n" in answer["error"] and not answer["damaged"] and "descriptors" not in answer

    with_child(act)


def test_files_of_a_message_that_was_cut_are_closed() -> None:
    """The kernel cuts it alike where a part of the files has room."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, writing = os.pipe()
    with ours, theirs:
        socket.send_fds(theirs, [b'{"done": 7}'], [writing] * (DESCRIPTORS_MAX + 1))
        received = receive_message(ours)
    os.close(writing)
    assert received is not None and received[0]["done"] == 7 and received[0]["error"] and received[1] == []
    assert is_closed(reading)


def test_child_for_which_there_are_no_files_is_not_started() -> None:
    async def start() -> None:
        child = ChildProcess("child", ["-c", ""])
        with no_room_for_files(), pytest.raises(ChildGone, match=r"the child can't be started: \[Errno 24\] Too many"):
            await child.ensure()
        assert child.running is None

    asyncio.run(start())


def test_child_that_does_not_end_a_cancelled_command_in_time_is_killed() -> None:
    async def act(child: ChildProcess, running: RunningProcess, theirs: socket.socket) -> None:
        call = asyncio.ensure_future(child.call(running, {"do": "open"}, 60, 7))
        assert await asyncio.to_thread(receive_message, theirs) == ({"do": "open", "id": 7}, [])
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert child.running is None

    with_child(act, cancel_s=0.0)


def test_command_that_is_cancelled_as_its_answer_comes_is_cancelled() -> None:
    """Else the turn of a job that was purged would go on, with slots that are freed."""

    async def act(child: ChildProcess, running: RunningProcess, theirs: socket.socket) -> None:
        call = asyncio.ensure_future(child.call(running, {"do": "open"}, 60, 7))
        await asyncio.to_thread(receive_message, theirs)
        running.waiting[7].set_result({"done": 7})
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    with_child(act)


def test_start_that_is_cancelled_as_the_child_is_ready_is_cancelled() -> None:
    async def act(child: ChildProcess, running: RunningProcess, theirs: socket.socket) -> None:
        ensuring = asyncio.ensure_future(child.ensure())
        await asyncio.sleep(0)
        running.ready.set_result({"ready": True})
        await asyncio.sleep(0)
        ensuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ensuring

    with_child(act)


@pytest.mark.parametrize("is_freed", [True, False])
def test_slot_that_was_freed_fails_its_command_and_ends_no_child(is_freed: bool) -> None:
    """The child works for all jobs of the node."""

    async def act(child: ChildProcess, running: RunningProcess, theirs: socket.socket) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        os.close(writing)
        with pytest.raises(AttachError, match="a slot was freed before the child had it") as raised:
            await child.call(running, {"do": "begin"}, 60, 7, [-1 if is_freed else writing])
        assert not isinstance(raised.value, ChildGone) and child.running is running and not running.waiting
        await child.send(running, {"do": "drop"})
        assert await asyncio.to_thread(receive_message, theirs) == ({"do": "drop"}, [])

    with_child(act)


def test_message_that_waits_takes_the_slots_of_its_call() -> None:
    """While the child does not read, the slot is freed, and another file gets its number."""

    async def act(child: ChildProcess, running: RunningProcess, theirs: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                send_message(running.channel, {"do": "fill"})
        slot, other = os.memfd_create("slot"), os.memfd_create("other")
        os.write(slot, b"slot")
        sending = asyncio.ensure_future(child.send(running, {"do": "begin"}, [slot]))
        await asyncio.sleep(0)
        os.dup2(other, slot)
        while (received := await asyncio.to_thread(receive_message, theirs)) == ({"do": "fill"}, []):
            pass
        await sending
        assert received is not None
        message, (arrived,) = received
        assert message == {"do": "begin"} and os.pread(arrived, 9, 0) == b"slot"
        for each in (slot, other, arrived):
            os.close(each)

    with_child(act)


def test_persister_may_end_a_cancelled_command_as_slowly_as_storage_may_be() -> None:
    """A block, an fsync or a fetched range may take longer than commands of other children."""
    assert Persister("/storage").child.cancel_s == STALL_S > CANCEL_S


def test_answer_of_a_command_to_the_persister_that_is_cancelled_is_closed() -> None:
    """The answer has come, and the one who asked is cancelled before it goes on."""
    reading, writing = os.pipe()
    tasks: list[asyncio.Task[Any]] = []

    async def call(*_: object) -> dict[str, object]:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: tasks[0].cancel())
        return {"done": 1, "descriptors": [writing]}

    async def ensure() -> RunningProcess:
        return running

    running: Any = SimpleNamespace(progress={})
    persister = Persister("/storage")
    persister.child = SimpleNamespace(lingers=False, ensure=ensure, next_number=lambda: 1, call=call)  # type: ignore[assignment]

    async def run() -> None:
        tasks.append(asyncio.ensure_future(persister.ask({"do": "open"}, 60)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]

    asyncio.run(run())
    assert is_closed(reading)


class StuckProcess:
    """A killed process that ends when a test says so."""

    pid = 1

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def poll(self) -> int | None:
        return -9 if self.may_end.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        self.may_end.wait(timeout)
        return -9


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os.kill(os.getpid(), 9)", "ended by signal 9; the kernel sends it where memory is short"),
        ("os._exit(3)", "ended with exit code 3"),
    ],
)
def test_the_log_says_how_a_child_has_ended_by_itself(caplog: pytest.LogCaptureFixture, end: str, words: str) -> None:
    async def run() -> None:
        with pytest.raises(ChildGone, match="ended before it answered"):
            await ChildProcess("child", ["-c", f"import os; {end}"]).ensure()

    asyncio.run(run())
    until(lambda: words in caplog.text, what="the line of the log")


def test_callers_that_give_up_waiting_for_a_stuck_process_keep_no_thread():
    async def run() -> None:
        child, stuck = ChildProcess("mover", ["-c", "pass"]), StuckProcess()
        child._ended = cast(Any, stuck)
        before = set(threading.enumerate())  # some of earlier tests may end meanwhile
        try:
            for _ in range(3):  # the first one waits for the process, the others behind it
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(child.wait_ended(), 0.1)
            assert set(threading.enumerate()) <= before and child.lingers
        finally:
            stuck.may_end.set()
        await child.wait_ended()

    asyncio.run(run())
