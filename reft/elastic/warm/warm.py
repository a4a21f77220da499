"""--rdzv-conf=warm=yes: workers are forked from a process that has imported torch already, instead of starting Python anew.

    agent ── starts, with itself ──► fork server (reft.elastic.warm.fork_server): imports, waits
    torch wants a worker ─► Handler._popen ─► the server forks one, the agent adopts it ─► a Popen like any other

Nothing is forked before torch wants a worker, so there is one warm process an agent, never one that might join late.
torch_patch.py is the seam. A worker that can't be forked is started as torch does, and a line says why.

Why not `torchrun --start-method=forkserver --run-path` with a preload? That is as fast from the second restart
on, but with torch 2.13 (seen before 2026-11-24, not tried again since)
  - the user must type the flag, and a job that was started without it stays slow;
  - it hangs when a worker ends by `sys.exit(None)` or `os._exit(0)`, and loses what a worker had not written yet;
  - a script can't import the modules beside it;
  - REFT_ROUND is what it was when the server started, so a restarted worker would join an old round;
  - workers are no children of the agent, so the guard can't end them with it.
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

# What the trainer's side imports, by name: it runs in workers, and is none of the agent's business.
MODULES = (
    "torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.optim.lr_scheduler", "reft.client.attach.api",
    "reft.client.restore.materialize",
)  # fmt: skip
START_S = 120.0  # for the imports; a cold worker needs as long
FORK_S = 20.0
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """One fork server.

    Args:
        modules: what it imports.
        place: see `fork_server.place_of`.
    """

    def __init__(self, modules: Sequence[str], place: str) -> None:
        self._control, theirs = socket.socketpair()
        command = [
            sys.executable, "-u", "-c", fork_server.BOOT, place, str(theirs.fileno()), "+".join(modules),
            "." * fork_server.TITLE_ROOM,
        ]  # fmt: skip
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self.is_ready = False

    def fork(self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """The pid of a new worker, a child of this process, which leads a session of its own.

        Args:
            descriptors: its stdin, stdout and stderr.

        Raises:
            Failed: there is none; the server is of no use any more.
        """
        order = {"command": list(command), "environment": dict(environment), "folder": os.getcwd()}
        wait, go = os.pipe()
        try:
            if not self.is_ready:
                self._hear("ready", START_S)
                self.is_ready = True
            with _adopting():
                fork_server.send(self._control, order, [*descriptors, wait])
                pid = int(self._hear("pid", FORK_S))
            os.write(go, b"!")
            return pid
        except OSError as error:  # it is gone, or too late: whatever it forks yet sees the end of "go" and ends
            raise ForkFailed(f"the fork server does not answer ({str(error) or type(error).__name__})") from error
        finally:
            os.close(wait)
            os.close(go)

    def _hear(self, what: str, patience_s: float) -> Any:
        self._control.settimeout(patience_s)
        got = fork_server.receive(self._control)
        if got is None:
            raise ForkFailed("the fork server has ended")
        if "error" in got[0]:
            raise ForkFailed(str(got[0]["error"]), got[0].get("final", False))
        return got[0][what]

    def close(self) -> None:
        """Ends it; its workers go on."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among our descendants become our children; only now, or grandchildren of others would gather here."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class WarmWorkers:
    """The agent's fork server, and torch's workers out of it.

    Args:
        extra: modules to import beside MODULES.
        place: see `fork_server.place_of`.
    """

    def __init__(self, extra: Sequence[str], place: str) -> None:
        self._modules, self._place = [*MODULES, *extra], place
        self._server: ForkServer | None = ForkServer(self._modules, place)
        self._said = ""
        self._undo: Callable[[], None] | None = None

    def install(self) -> None:
        """Makes torch's agent in this process take its workers from here, until `close`."""
        try:
            self._undo = torch_patch.install(self.start)
        except torch_patch.PrivateNameMissing as error:
            self.close()
            say(f"this torch or Python has no {error}, so warm=yes has no effect.")

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """A worker; None, after a line that says why, if it must be started cold."""
        if self._server is None:
            return None
        if not can_fork(command):
            self._say(f"started cold: {' '.join(command[:4])} … is no Python script that can be forked.")
            return None
        try:
            return ForkedProcess(command, self._server.fork(command, environment, descriptors))
        except ForkFailed as error:
            may_go_on = self._server.is_ready and not error.is_final
            self._server.close()
            self._server = ForkServer(self._modules, self._place) if may_go_on else None
            later = "the next ones are forked again" if may_go_on else "so will be all that follow"
            self._say(f"started cold, and {later}: {error}.")
            return None

    def _say(self, text: str) -> None:
        if text != self._said:
            say(f"a worker is {text}")
        self._said = text

    def close(self) -> None:
        """Ends the server, and puts torch back; workers go on."""
        if self._undo:
            self._undo()
        if self._server:
            self._server.close()
        self._server = None


def begin(extra: str) -> WarmWorkers:
    """Starts this agent's fork server; returns at once.

    Args:
        extra: modules to import beside MODULES, joined by +.
    """
    script = script_of(sys.argv)
    place = fork_server.place_of(script.removeprefix("-m "), script.startswith("-m "))
    warm = WarmWorkers([name for name in extra.split("+") if name], place)
    warm.install()
    return warm


def can_fork(command: Sequence[str]) -> bool:
    """Whether a command is one that torchrun makes of a Python script, for this very Python."""
    if len(command) < 3 or list(command[:2]) != [sys.executable, "-u"]:
        return False
    return len(command) > 3 if command[2] == "-m" else command[2].endswith(".py")
