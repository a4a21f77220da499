"""--rdzv-conf=warm=yes: workers are forked from a process that has already imported torch.

    agent ── starts at its own start ──► fork server (reft.elastic.warm.fork_server): imports, waits
    torch wants a worker ─► _popen ─► the server forks it, the agent adopts it ─► an ordinary Popen

A worker is forked only when torch wants one. So there is one warm process per agent, and none that
could join late. torch_patch.py patches torch. If a worker can't be forked, torch starts it as
usual, and a line says why.

Why not `torchrun --start-method=forkserver --run-path` with a preload? From the second restart on
it is equally fast. But with torch 2.13 (seen before 2026-11-24, not tried again since)
  - the user must type the flag, and a job that was started without it stays slow;
  - it hangs if a worker ends by `sys.exit(None)` or `os._exit(0)`, and loses unwritten output;
  - a script can't import the modules in its own folder;
  - REFT_ROUND keeps its value from the start of the server, so a restarted worker would join an old
    round;
  - workers are not children of the agent, so the orphan reaper can't end them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from reft.console import say
from reft.elastic.options import script_of
from reft.elastic.warm import fork_server, torch_patch
from reft.elastic.warm.fork_server import ForkFailed
from reft.elastic.warm.torch_patch import ForkedProcess

# Imported in the fork server by name, for the workers. The agent itself does not import the
# trainer's side.
MODULES = (
    "torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.optim.lr_scheduler", "reft.client.attach.api",
    "reft.client.restore.materialize", "reft.elastic.torch_internals",
)  # fmt: skip
START_S = 120.0  # for the imports; a cold start needs the same time
FORK_S = 20.0
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """The agent's connection to one fork server process.

    Args:
        modules: imported by the server.
        place: see `fork_server.place_of`.
    """

    def __init__(self, modules: Sequence[str], place: str) -> None:
        self._control, server_end = socket.socketpair()
        command = [
            sys.executable, "-u", "-c", fork_server.BOOT, place, str(server_end.fileno()), "+".join(modules),
            "." * fork_server.TITLE_ROOM,
        ]  # fmt: skip
        with server_end:
            self.process = subprocess.Popen(command, pass_fds=[server_end.fileno()], start_new_session=True)
        self.is_ready = False

    def fork(self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """Returns the pid of a new worker: a child of this process that leads its own session.

        Args:
            command: of the worker.
            environment: all variables of the worker.
            descriptors: stdin, stdout and stderr of the worker.

        Raises:
            ForkFailed: there is no worker, and the server can't be used any more.
        """
        order = {"command": list(command), "environment": dict(environment), "folder": os.getcwd()}
        worker_end, go = os.pipe()
        try:
            if not self.is_ready:
                self._hear("ready", START_S)
                self.is_ready = True
            with _adopting():
                fork_server.send(self._control, order, [*descriptors, worker_end])
                pid = int(self._hear("pid", FORK_S))
            os.write(go, b"!")
            return pid
        except OSError as error:
            # The server has ended or is too late. A worker that it still forks sees "go" closed,
            # and exits.
            raise ForkFailed(f"the fork server does not answer ({str(error) or type(error).__name__})") from error
        finally:
            os.close(worker_end)
            os.close(go)

    def _hear(self, field: str, patience_s: float) -> Any:
        self._control.settimeout(patience_s)
        received = fork_server.receive(self._control)
        if received is None:
            raise ForkFailed("the fork server has ended")
        if "error" in received[0]:
            raise ForkFailed(str(received[0]["error"]), received[0].get("final", False))
        return received[0][field]

    def close(self) -> None:
        """Ends the server; its workers continue."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Makes orphaned descendants children of this process, only inside the block.

    Outside the block, orphans of other programs would become children of the agent too.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class WarmWorkers:
    """The agent's fork server, and the workers that torch gets from it.

    Args:
        extra: modules to import besides MODULES.
        place: see `fork_server.place_of`.
    """

    def __init__(self, extra: Sequence[str], place: str) -> None:
        self._modules, self._place = [*MODULES, *extra], place
        self._server: ForkServer | None = ForkServer(self._modules, place)
        self._last_line = ""
        self._undo: Callable[[], None] | None = None

    def install(self) -> None:
        """Makes torch's agent in this process get its workers from here, until `close`."""
        try:
            self._undo = torch_patch.install(self.start)
        except torch_patch.PrivateNameMissing as error:
            self.close()
            say(f"this torch or Python has no {error}, so warm=yes has no effect.")

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int] | None
    ) -> subprocess.Popen[bytes] | None:
        """Returns a forked worker.

        If torch must start it, the result is None, after a line with the reason.

        Args:
            command: of the worker.
            environment: all variables of the worker.
            descriptors: stdin, stdout and stderr of the worker; None if this torch does not tell.
        """
        if self._server is None:
            return None
        if descriptors is None:
            self._say("started cold: this torch has no SubprocessHandler._stdout or ._stderr.")
            return None
        if not can_fork(command):
            self._say(f"started cold: {' '.join(command[:4])} … is not a Python script that can be forked.")
            return None
        try:
            return ForkedProcess(command, self._server.fork(command, environment, descriptors))
        except ForkFailed as error:
            can_fork_again = self._server.is_ready and not error.is_final
            self._server.close()
            self._server = ForkServer(self._modules, self._place) if can_fork_again else None
            outlook = "later workers are forked again" if can_fork_again else "all later workers too"
            self._say(f"started cold, {outlook}: {error}.")
            return None

    def _say(self, text: str) -> None:
        if text != self._last_line:
            say(f"a worker is {text}")
        self._last_line = text

    def close(self) -> None:
        """Ends the server and undoes the patch of torch; workers continue."""
        if self._undo:
            self._undo()
        if self._server:
            self._server.close()
        self._server = None


def begin(extra: str) -> WarmWorkers:
    """Starts this agent's fork server, and returns at once.

    Args:
        extra: modules to import besides MODULES, joined by +.
    """
    script = script_of(sys.argv)
    place = fork_server.place_of(script.removeprefix("-m "), script.startswith("-m "))
    warm = WarmWorkers([name for name in extra.split("+") if name], place)
    warm.install()
    return warm


def can_fork(command: Sequence[str]) -> bool:
    """Returns whether torchrun made the command from a Python script, for this same Python."""
    if len(command) < 3 or list(command[:2]) != [sys.executable, "-u"]:
        return False
    return len(command) > 3 if command[2] == "-m" else command[2].endswith(".py")
