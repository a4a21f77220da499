"""A child process of the daemon, which works on the daemon's commands.

    no process ──first command──► starting ──ready──► running ──it ends──► no process
                                                         every command without an answer fails

A new process is started at most once in PAUSE_S, and ever more rarely if processes end early. Each
command gets its answer before its caller goes on, also if the caller is cancelled. So nothing of a
cancelled command is still under way when the next one begins. A child that does not answer in time
is killed. A child that waits for a device in the kernel does not end then; until it has, no other
one is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from reft.config import child_environment
from reft.errors import AttachError
from reft_daemon.child.control_channel import ControlMessage, receive_message, send_message

log = logging.getLogger("reft.daemon")
START_S: Final = 20.0
SEND_S: Final = 5.0
CANCEL_S: Final = 10.0  # an answer after `cancel`
PAUSE_S: Final = 0.2  # between two starts; twice as long after each process that ended early
PAUSE_MAX_S: Final = 30.0
EARLY_S: Final = 60.0
LOOK_S: Final = 0.02  # between two looks whether a killed process has ended


class ChildGone(AttachError):
    """The child ended before it answered."""


@dataclass
class RunningProcess:
    """One process of a child.

    Attributes:
        ready: the child's first message.
        waiting: command → its answer.
        progress: command → bytes that it has moved; a child may say 0 when it begins a command.
        known: what the daemon has told this process, by a key of the caller's.
    """

    process: subprocess.Popen[bytes]
    channel: socket.socket
    ready: asyncio.Future[ControlMessage]
    waiting: dict[int, asyncio.Future[ControlMessage]] = field(default_factory=dict)
    progress: dict[int, int] = field(default_factory=dict)
    known: dict[str, tuple[object, ...]] = field(default_factory=dict)


class ChildProcess:
    """A child that runs while it has work.

    Args:
        name: what messages call the child.
        command: arguments of the interpreter; the channel's descriptor follows them.
        start_s: the time that a start may take.
        cancel_s: the time that a cancelled command may take until its answer: longer than any wait
            in the child that `cancel` does not end. Then the child is killed.
    """

    def __init__(self, name: str, command: Sequence[str], start_s: float = START_S, cancel_s: float = CANCEL_S) -> None:
        self.name = name
        self.start_s = start_s
        self.cancel_s = cancel_s
        self.moved_bytes = 0  # by all processes since this daemon started
        self.running: RunningProcess | None = None
        self._command = command
        self._ended: subprocess.Popen[bytes] | None = None  # killed, and perhaps not yet dead
        self._ends_itself: RunningProcess | None = None  # its channel has ended, and nobody here had killed it
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._started_s = -EARLY_S
        self._pause_s = PAUSE_S

    def next_number(self) -> int:
        """Returns a number that no other command has."""
        return next(self._numbers)

    async def ensure(self) -> RunningProcess:
        """Returns the process; starts it if it does not run.

        Raises:
            ChildGone: it does not start.
        """
        async with self._starting:
            if self.running is None:
                now = time.monotonic()
                early = now - self._started_s < EARLY_S
                self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S) if early else PAUSE_S
                await asyncio.sleep(max(self._started_s + self._pause_s - now, 0))
                await self.wait_ended()  # it must write nothing that the next one begins
                self.running = self._start()
            running = self.running
            # not wait_for: up to Python 3.11 it forgets a cancellation that comes with the result
            if not (running.ready.done() or (await asyncio.wait({running.ready}, timeout=self.start_s))[0]):
                self.end(running)
                raise ChildGone(f"the {self.name} did not start in {self.start_s:g} s.", "look at this daemon's log")
            running.ready.result()
            return running

    def _start(self) -> RunningProcess:
        self._started_s = time.monotonic()
        # The path is this process's own: the child must import the same reft.
        path = os.pathsep.join(os.path.abspath(each) for each in sys.path if each)
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.enter_context(ours)
                with theirs:
                    process = subprocess.Popen(
                        [sys.executable, *self._command, "--channel", str(theirs.fileno())], stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()], start_new_session=True, cwd="/",
                        env=child_environment(PYTHONPATH=path, REFT_FAILPOINTS=""),
                    )  # fmt: skip
            except OSError as error:  # no memory, or too many processes or files
                raise ChildGone(
                    f"the {self.name} can't be started: {error}.", "raise that limit, or free memory of this node"
                ) from error
            undo.pop_all()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        running = RunningProcess(process, ours, loop.create_future())
        loop.add_reader(ours, self._read, running)
        log.info("%s pid=%d started", self.name, process.pid)
        return running

    def _read(self, running: RunningProcess) -> None:
        """Takes the child's messages; at their end the child has ended."""
        try:
            while received := receive_message(running.channel):
                self._take(running, *received)
        except BlockingIOError:
            return
        except OSError:
            pass
        log.warning("%s pid=%d has ended", self.name, running.process.pid)
        self._ends_itself = running
        self.end(running)

    def _take(self, running: RunningProcess, message: ControlMessage, descriptors: Sequence[int]) -> None:
        if "moved" in message:
            if message["moved"] in running.waiting:  # else its caller has forgotten it
                running.progress[message["moved"]] = running.progress.get(message["moved"], 0) + message["bytes"]
            self.moved_bytes += message["bytes"]
        answer = running.waiting.pop(message.get("done", 0), None) if "done" in message else None
        if "ready" in message:
            answer = running.ready
        if answer is not None and not answer.done():
            answer.set_result({**message, "descriptors": list(descriptors)} if descriptors else message)
            return
        for descriptor in descriptors:
            os.close(descriptor)

    async def wait_ended(self) -> None:
        """Returns once the process that was killed last has ended."""
        # in no thread: one of the few of the event loop would be blocked as long as the process is
        while self.lingers:  # noqa: ASYNC110  a process that another thread reaps tells nobody
            await asyncio.sleep(LOOK_S)

    def end(self, running: RunningProcess) -> None:
        """Kills the process, and fails its commands."""
        if running is not self.running:
            return
        self.running, self._ended = None, running.process
        asyncio.get_running_loop().remove_reader(running.channel)
        running.process.kill()
        running.channel.close()
        gone = ChildGone(f"the {self.name} ended before it answered.", "look at this daemon's log")
        waiting: list[asyncio.Future[Any]] = [running.ready, *running.waiting.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(gone)
                answer.exception()  # marks it as retrieved: nobody may wait for it
        running.waiting.clear()
        # A thread that nobody joins: a process that waits for a device in the kernel may not end.
        reap = running.process.wait if self._ends_itself is not running else partial(self._log_end, running.process)
        threading.Thread(target=reap, name=f"reft-{self.name}", daemon=True).start()

    def _log_end(self, process: subprocess.Popen[bytes]) -> None:
        """Logs how a process has ended that nobody here had told to end."""
        code = process.wait()
        why = "the kernel sends it where memory is short: see dmesg" if code == -signal.SIGKILL else ""
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        log.warning("%s pid=%d ended %s%s", self.name, process.pid, how, f"; {why}" if why else "")

    @property
    def lingers(self) -> bool:
        """Whether a process that was killed has not ended yet. Another one is not started then."""
        return self._ended is not None and self._ended.poll() is None

    async def send(self, running: RunningProcess, message: ControlMessage, descriptors: Sequence[int] = ()) -> None:
        """Sends a message that has no answer.

        Raises:
            ChildGone: the child has ended.
            AttachError: a descriptor is closed: its slot was freed meanwhile. The child goes on.
        """
        end, are_copied = time.monotonic() + SEND_S, False
        with contextlib.ExitStack() as copies:
            while running is self.running:
                try:
                    send_message(running.channel, message, descriptors)
                    return
                except BlockingIOError:
                    if time.monotonic() > end:
                        self.end(running)
                    if not are_copied:
                        descriptors, are_copied = _copied(descriptors, copies), True
                    await asyncio.sleep(0.01)  # the child reads its commands at once, unless it is stopped
                except OSError as error:
                    if error.errno == errno.EBADF and descriptors:  # the channel is open while it is in use
                        raise AttachError(f"a slot was freed before the {self.name} had it.", "try again") from error
                    self.end(running)
        raise ChildGone(f"the {self.name} has ended.", "look at this daemon's log")

    async def call(
        self, running: RunningProcess, message: Mapping[str, Any], deadline_s: float,
        number: int = 0, descriptors: Sequence[int] = (),
    ) -> ControlMessage:  # fmt: skip
        """Sends a command; returns its answer.

        If the caller is cancelled, the command is cancelled, and its answer awaited, first. The
        answer's descriptors are closed then.

        Raises:
            ChildGone: the child has ended, or was killed because it did not answer in time.
            AttachError: see `send`.
        """
        number = number or self.next_number()
        answer = running.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self.send(running, {**message, "id": number}, descriptors)
            if not (await asyncio.wait({answer}, timeout=deadline_s))[0]:  # not wait_for: see `ensure`
                self.end(running)
                raise ChildGone(f"the {self.name} did not answer in {deadline_s:g} s, and was killed.")
            return answer.result()
        except asyncio.CancelledError:
            try:
                await self._cancel(running, number, answer)
            finally:
                close_untaken(answer)
            raise
        finally:
            running.waiting.pop(number, None)
            running.progress.pop(number, None)

    async def _cancel(self, running: RunningProcess, number: int, answer: asyncio.Future[ControlMessage]) -> None:
        with contextlib.suppress(ChildGone):
            await self.send(running, {"do": "cancel", "command": number})
            done, _ = await asyncio.wait({answer}, timeout=self.cancel_s)
            if not done:
                self.end(running)

    async def close(self) -> None:
        """Ends the child."""
        if self.running is not None:
            self.end(self.running)
        await self.wait_ended()


def _copied(descriptors: Sequence[int], copies: contextlib.ExitStack) -> list[int]:
    """Returns copies of descriptors, for a message that waits: the slots may be freed meanwhile.

    A number that is closed then may be the number of another slot when the message is sent.
    """
    copied = []
    for each in descriptors:
        copied.append(os.dup(each))
        copies.callback(os.close, copied[-1])
    return copied


def close_untaken(answer: asyncio.Future[ControlMessage]) -> None:
    """Closes the descriptors of an answer whose caller is gone; they may hold memory."""
    if answer.done() and not answer.cancelled() and answer.exception() is None:
        for descriptor in answer.result().get("descriptors", ()):
            os.close(descriptor)
