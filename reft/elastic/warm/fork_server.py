"""The fork server: a process that has imported torch, and forks one agent's workers (warm.py).

    agent ─── order: command, environment, folder, stdin, stdout, stderr, "go" ──────────► server
    server ── fork ──► intermediate process, which exits ── fork ────────────────────────► worker
    agent ◄── pid of the worker, when it leads a session and is a child of the agent ───── server
    agent ─── one byte through "go": run. If "go" closes: exit ──────────────────────────► worker

1. The server opens no device and has one thread when it forks, or it refuses to serve. A fork
   copies neither devices nor threads.
2. The intermediate process exits at once. So the kernel gives the worker to the nearest ancestor
   that adopts orphans: the agent. The agent is the worker's parent, as if it had started the
   worker. Exit codes, signals, and the worker's death with its agent work as usual.
3. A worker runs no line of its script before its agent knows its pid and sends "go".
4. A worker asks torch whether CUDA was used before the fork. If so, the worker exits, and the agent
   starts a new process instead.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import runpy
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from reft.console import say
from reft.wire.process import oom_score, set_oom_score

LENGTH = struct.Struct("<Q")  # before each message
ORDER_FDS = 4  # stdin, stdout, stderr, go
# Run with -c, so that `__main__` is empty. sys.path[0] is set as in a worker, except under
# PYTHONSAFEPATH.
BOOT = (
    "import sys\nif sys.path[0] == '': sys.path[0] = sys.argv[1]\n"
    "from reft.elastic.warm.fork_server import main\ndel sys\nmain()"
)
# Files whose frames come before the script's first line in a traceback.
LAUNCHING_FILES = (
    __file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>",
)  # fmt: skip
BAD_FORK = b"bad"  # sent instead of a pid
TITLE_ROOM = 2048  # bytes of padding in the server's command line, so that a worker's command fits there
SERVER_OOM_SCORE = 500  # of 1000
_STAT_ARGUMENTS = 45, 46  # fields of /proc/self/stat after the name: begin and end of the command line


class ForkFailed(Exception):
    """A fork, or the preparation for forks, failed; the message says why.

    Attributes:
        is_final: whether the next try would fail in the same way.
    """

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


@dataclass(frozen=True)
class WorkerOrder:
    """The order for one worker.

    Attributes:
        command: python -u SCRIPT.py … or python -u -m MODULE …
        environment: all variables of the worker.
        folder: the worker's current folder.
        descriptors: stdin, stdout, stderr and go, as numbered in this process.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    descriptors: Sequence[int]


def send(control: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends one message with file descriptors."""
    data = json.dumps(message).encode()
    if descriptors:
        socket.send_fds(control, [LENGTH.pack(len(data))], descriptors)
    else:
        control.sendall(LENGTH.pack(len(data)))
    control.sendall(data)


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Returns the next message and its descriptors; None if the other side has ended."""
    head, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, ORDER_FDS)
    data = _exactly(control, LENGTH.size - len(head)) if head else None
    if data is None:
        return None
    body = _exactly(control, LENGTH.unpack(head + data)[0])
    return None if body is None else (json.loads(body), list(descriptors))


def _exactly(control: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = control.recv(count - len(data))
        if not part:
            return None
        data += part
    return data


def prepare(modules: Sequence[str]) -> None:
    """Imports the modules that workers need, and checks that forks will work.

    Raises:
        ForkFailed: an import failed, or started a thread or opened a device.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # a module may raise anything on import
            raise ForkFailed(f"importing {name} failed: {type(error).__name__}: {error}") from error
    _try_fork()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise ForkFailed(
            f"importing {', '.join(modules)} has started threads ({threads - 1}), and a fork does not copy threads"
        )
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ForkFailed(f"importing {', '.join(modules)} has opened a CUDA device, and a forked process can't use it")
    gc.collect()
    gc.freeze()  # otherwise a collection in a worker would copy shared pages


def _try_fork() -> None:
    """Forks once for nothing: libraries such as numpy's OpenBLAS then end their threads."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def serve(control: socket.socket) -> WorkerOrder | None:
    """Forks workers until the agent ends, then returns None. In a worker: returns its order."""
    while (received := receive(control)) is not None:
        message, descriptors = received
        order = WorkerOrder(message["command"], message["environment"], message["folder"], descriptors)
        try:
            pid = _fork()
        except OSError as error:
            send(control, {"error": f"the fork failed: {error}"})
        except ForkFailed as error:
            send(control, {"error": str(error), "final": error.is_final})
        else:
            if not pid:
                control.close()
                return order
            send(control, {"pid": pid})
        for descriptor in descriptors:
            os.close(descriptor)
    return None


def _fork() -> int:
    """Forks a worker: returns 0 in the worker, and its pid in the server.

    Raises:
        OSError: no worker was made.
        ForkFailed: the worker has exited, because CUDA was used before the fork.
    """
    read_end, write_end = os.pipe()
    intermediate = os.fork()
    if intermediate:
        os.close(write_end)
        with os.fdopen(read_end, "rb") as file:
            pid = file.read()
        os.waitpid(intermediate, 0)  # now the worker is a child of the agent
        if not pid:
            raise OSError("the kernel made no process")
        if pid == BAD_FORK:
            raise ForkFailed(
                "a module that the fork server imported has used CUDA, and a forked process can't use it", is_final=True
            )
        return int(pid)
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    os.setsid()
    if _is_in_bad_fork():
        os.write(write_end, BAD_FORK)
        os._exit(1)
    os.write(write_end, str(os.getpid()).encode())
    os.close(write_end)
    os.close(read_end)
    return 0


def _is_in_bad_fork() -> bool:
    """Returns whether torch says that CUDA was used before this fork.

    The server has imported torch_internals with torch: `reft.elastic.warm.warm.MODULES`.
    """
    if "torch" not in sys.modules:
        return False
    from reft.elastic.torch_internals import is_in_bad_fork

    return is_in_bad_fork()


class _ScriptLoader(importlib.machinery.SourceFileLoader):
    """Runs a script as `python SCRIPT` does: without reading or writing a .pyc file."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


def run(order: WorkerOrder) -> None:
    """Turns this process into the worker of the order.

    It is as if Python had been started for the worker.
    """
    *standard, go = order.descriptors
    if not os.read(go, 1):
        os._exit(1)  # the agent has ended, or has started another process instead
    os.close(go)
    for standard_number, descriptor in enumerate(standard):
        os.dup2(descriptor, standard_number)
        os.close(descriptor)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    _reseed()
    importlib.invalidate_caches()
    main = sys.modules["__main__"]
    vars(main).pop("main", None)
    is_module = order.command[2] == "-m"
    target, *arguments = order.command[3 if is_module else 2 :]
    sys.argv, sys.orig_argv = [target, *arguments], list(order.command)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = place_of(target, is_module)
    _entitle(order.command)
    try:
        if is_module:
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what python -m runs
        else:
            path = os.path.abspath(target)  # as in a cold start, in __file__ and in tracebacks
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            vars(main).update(__file__=path, __cached__=None, __loader__=loader)
            _ScriptLoader("__main__", path).exec_module(main)
    except Exception as error:
        trace = _script_traceback(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _reseed() -> None:
    """Seeds the generators of numpy and torch again.

    They are seeded on import, so all workers would draw the same numbers. Python's own generator
    seeds itself after a fork.
    """
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def place_of(target: str, is_module: bool) -> str:
    """Returns the first entry of sys.path: the script's folder, or the current one for a module."""
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))


def _script_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback from the first line of the script on."""
    while trace and trace.tb_frame.f_code.co_filename in LAUNCHING_FILES:
        trace = trace.tb_next
    return trace


def _entitle(command: Sequence[str]) -> None:
    """Replaces the server's command line by the worker's, for example in the output of ps."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(fields[i]) for i in _STAT_ARGUMENTS)
    capacity = end - begin
    if begin == 0 or capacity < TITLE_ROOM:
        return
    title = " ".join(command).encode(errors="surrogateescape")[: capacity - 2]
    # If the last byte is not zero, the kernel shows the text up to the first zero.
    ctypes.memmove(begin, title.ljust(capacity - 1, b"\0") + b".", capacity)


def main() -> None:
    """Runs the server: `python -u -c BOOT PLACE CONTROL MODULES PADDING`."""
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    try:
        order, score = _serve_ready(control)
    except ConnectionError:
        return  # the agent has ended meanwhile
    if order is not None:
        if not set_oom_score(score):
            say(f"oom_score_adj of this worker stays {oom_score()}, not {score}.")
        run(order)


def _serve_ready(control: socket.socket) -> tuple[WorkerOrder | None, int]:
    """Imports the modules, then serves; returns the result of `serve`, and the agent's oom score.

    Raises:
        ConnectionError: the agent has ended.
    """
    try:
        prepare(sys.argv[3].split("+"))
    except ForkFailed as error:
        send(control, {"error": str(error)})
        return None, 0
    # The server holds nothing that a new one would not have, so it goes first when memory is short.
    # A worker holds the training, so it gets the agent's score back.
    score = oom_score()
    set_oom_score(max(score, SERVER_OOM_SCORE))
    send(control, {"ready": True})
    return serve(control), score
