"""A child whose caller gave up: its answer is closed, and a stuck process costs no thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reft_daemon.child.child_process import CANCEL_S, ChildProcess, RunningProcess
from reft_daemon.child.control_channel import receive_message, send_message
from reft_daemon.persist.persister import STALL_S, Persister


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


def test_child_that_does_not_end_a_cancelled_command_in_time_is_killed() -> None:
    async def act(child: ChildProcess, running: RunningProcess, theirs: socket.socket) -> None:
        call = asyncio.ensure_future(child.call(running, {"do": "open"}, 60, 7))
        assert await asyncio.to_thread(receive_message, theirs) == ({"do": "open", "id": 7}, [])
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert child.running is None

    with_child(act, cancel_s=0.0)


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


def test_callers_that_give_up_waiting_for_a_stuck_process_keep_no_thread():
    async def run() -> None:
        child, stuck = ChildProcess("mover", ["-c", "pass"]), StuckProcess()
        child._ended = cast(Any, stuck)
        before = threading.active_count()
        try:
            for _ in range(3):  # the first one waits for the process, the others behind it
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(child.wait_ended(), 0.1)
            assert threading.active_count() == before and child.lingers
        finally:
            stuck.may_end.set()
        await child.wait_ended()

    asyncio.run(run())
