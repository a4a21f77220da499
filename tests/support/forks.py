"""Starts processes in some milliseconds: forks of a server that has imported their modules.

    Fork ── a line of JSON ──► python -m MODULE, which calls `serve(become)` ── fork ──► become(…)
         ◄── a number ───────

A server has one thread. It ends with its input, and then kills all its forks.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
POLL_S = 0.005
ROOM_NAME, ROOM_BYTES = "REFT_TEST_ROOM", 512


def enter(namespace: str) -> None:
    """Enters the namespace with this path; a process namespace takes effect for children only."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def enter_node(init: int, folder: str) -> int | None:
    """Enters the namespaces of a node, like nsenter, and goes on there in a child.

    Args:
        init: the node's first process; 0 is none, and then no child is made.
        folder: the working folder of the child.

    Returns:
        None where the program goes on; outside, the exit code of the child that has ended.
    """
    if not init:
        return None
    # Mounts are the last: in that namespace /proc is another one.
    for kind in ("net", "pid", "mnt"):
        enter(f"/proc/{init}/ns/{kind}")
    if child := os.fork():  # only a child is a process of the new namespace
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255
    os.chdir(folder)
    return None


class Server:
    """A fork server, as seen by the process that started it."""

    def __init__(self, module: str, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=theirs, cwd=ROOT, start_new_session=True,
            env={ROOM_NAME: "." * ROOM_BYTES, **os.environ, "PYTHONPATH": path, **environment},
        )  # fmt: skip
        theirs.close()
        self._line, self._lock = ours.makefile("rw"), threading.Lock()
        atexit.register(self._close, ours)

    def ask(self, **request: Any) -> Any:
        with self._lock:
            self._line.write(json.dumps(request) + "\n")
            self._line.flush()
            return json.loads(self._line.readline())

    def _close(self, ours: socket.socket) -> None:
        ours.shutdown(socket.SHUT_RDWR)
        self._process.wait()


@functools.cache
def server(module: str, **environment: str) -> Server:
    return Server(module, **environment)


class Fork:
    """One forked process, with the methods of Popen.

    Args:
        server: the server that forks the process.
        log: the file for the process's output.
        environment: the whole environment.
        **request: further entries of the request that `become` gets.
    """

    def __init__(self, server: Server, log: Path, environment: Mapping[str, str], **request: Any) -> None:
        self.returncode: int | None = None
        self._server = server
        log.touch()  # so that the file exists at once
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.pid: int = server.ask(log=str(log), environment=dict(environment), cwd=os.getcwd(), files=files, **request)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(reap=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        pause = threading.Event()
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            pause.wait(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # only `poll` reaps the process, so no other process has this pid
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# In the server


def serve(become: Callable[[dict[str, Any]], object]) -> None:
    """Forks a process for each request until the input ends.

    Each fork runs `become`, in a session, a folder and an environment of its own.
    """
    line = socket.socket(fileno=os.dup(0))
    children: set[int] = set()
    with line.makefile("r") as questions, line.makefile("w") as answers:
        for text in questions:
            request = json.loads(text)
            if "reap" in request:
                answer = _reap(request["reap"])
                children -= {request["reap"]} if answer is not None else set()
            elif answer := os.fork():
                children.add(answer)
            else:
                line.close()
                _end_as(become, request)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    for child in children:
        os.kill(child, signal.SIGKILL)


def _reap(pid: int) -> int | None:
    """Returns the exit code in Popen's form; None while the process lives."""
    ended_pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended_pid else None


def _end_as(become: Callable[[dict[str, Any]], object], request: dict[str, Any]) -> None:
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
        _show(request.get("marks", {}))
        os.environ.clear()
        os.environ.update(request["environment"])
        code = become(request)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1 if code else 0)


def _show(marks: Mapping[str, str]) -> None:
    """Writes variables to the place that /proc/PID/environ shows.

    A fork shows there the variables with which its server was started, so the server reserves room
    for more.
    """
    if not marks:
        return
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    at = getenv(ROOM_NAME.encode()) - len(ROOM_NAME) - 1
    text = b"".join(f"{name}={value}\0".encode() for name, value in marks.items()) + f"{ROOM_NAME}=".encode()
    size = len(ROOM_NAME) + 1 + ROOM_BYTES
    assert len(text) <= size, "no room for these marks"
    ctypes.memmove(at, text.ljust(size, b"."), size)
