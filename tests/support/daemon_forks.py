"""Real daemons that start in some milliseconds: forked from a process that has imported `reft_daemon` once.

    DaemonFork ── a line of JSON ──► python -m tests.support.daemon_forks ── fork ──► a daemon, in a session of its own
               ◄── a number ───────

The server has one thread and nothing of gRPC but its import. It ends with its input, and its daemons with it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
POLL_S = 0.005


def enter(network: str) -> None:
    """Makes a network namespace this process's own."""
    with open(network) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns {network}")


class Server:
    """The process that daemons are forked from, as its owner sees it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.daemon_forks"], stdin=theirs, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._line, self._lock = ours.makefile("rw"), threading.Lock()
        atexit.register(self.close, ours)

    def ask(self, **request: Any) -> Any:
        with self._lock:
            self._line.write(json.dumps(request) + "\n")
            self._line.flush()
            return json.loads(self._line.readline())

    def close(self, ours: socket.socket) -> None:
        ours.shutdown(socket.SHUT_RDWR)
        self._process.wait()


@functools.cache
def server() -> Server:
    return Server()


class DaemonFork:
    """One daemon's process, with Popen's words.

    Args:
        arguments: flags of reft-daemon.
        environment: all of it.
        log: gets what it says.
        network: path of its network namespace; empty for ours.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, network: str = "") -> None:
        self.returncode: int | None = None
        self.pid: int = server().ask(
            arguments=list(arguments), environment=dict(environment), log=str(log), network=network, cwd=os.getcwd(),
            files=resource.getrlimit(resource.RLIMIT_NOFILE),
        )  # fmt: skip

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = server().ask(reap=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 1e9)
        pause = threading.Event()
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("reft-daemon", timeout or 0)
            pause.wait(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # nobody else reaps it, so the number is still its own
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def reap(pid: int) -> int | None:
    """The exit code of a daemon as Popen tells it; None while it lives."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def become(request: Mapping[str, Any]) -> None:
    """What a fork does to its end."""
    from reft_daemon.main import main

    code: object = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
        os.chdir(request["cwd"])
        silent, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, descriptor in enumerate((silent, log, log)):
            os.dup2(descriptor, number)
        os.close(silent)
        os.close(log)
        os.environ.clear()
        os.environ.update(request["environment"])
        if request["network"]:
            enter(request["network"])
        main(args=request["arguments"], prog_name="reft-daemon")
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1 if code else 0)


def serve() -> None:
    import reft_daemon.main  # noqa: F401

    line = socket.socket(fileno=os.dup(0))
    children: set[int] = set()
    with line.makefile("r") as questions, line.makefile("w") as answers:
        for text in questions:
            request = json.loads(text)
            if "reap" in request:
                answer = reap(request["reap"])
                children -= {request["reap"]} if answer is not None else set()
            elif answer := os.fork():
                children.add(answer)
            else:
                line.close()
                become(request)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    for child in children:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    serve()
