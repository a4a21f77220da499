"""The fork server of an agent: a process that has imported torch, and from which workers are forked (warm.py).

    agent ──order: command, environment, folder; stdin, stdout, stderr, "go"──► server ──fork──► between ──fork──► worker
      ▲ ◄── the worker's pid, once it leads a session and belongs to the agent ──┘                  └ ends         waits for "go"
      └──────────────── one byte through "go": run; its end: exit without a trace ─────────────────────────────────┘

1. The server never opens a device and has one thread when it forks, or it refuses to serve: a fork copies neither.
2. `between` ends at once, so the kernel gives the worker to the nearest ancestor that adopts orphans, which is the agent: it is
   the worker's parent as if it had started it. Exit codes, signals, and death with the agent are as without us.
3. A worker runs nothing of its script before its agent has said so, and knows its pid.
4. A worker asks torch whether CUDA was used before the fork. If so it ends, and its agent starts a cold one.
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

LENGTH = struct.Struct("<Q")  # before each message
ORDER_FDS = 4  # stdin, stdout, stderr, go
# Run with -c, so that `__main__` is empty. sys.path[0] is what a worker's will be, but under PYTHONSAFEPATH.
BOOT = (
    "import sys\nif sys.path[0] == '': sys.path[0] = sys.argv[1]\n"
    "from reft.elastic.warm.fork_server import main\ndel sys\nmain()"
)
BAD_FORK = b"bad"  # in place of a pid
TITLE_ROOM = 2048  # bytes of the server's own command line, so that a worker's fits in its place
_STAT_ARGUMENTS = 45, 46  # fields of /proc/self/stat after the name: where the command line lies in memory


class ForkFailed(Exception):
    """What was asked for could not be done; the message says why.

    Attributes:
        is_final: whether the next try would fail alike.
    """

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


@dataclass(frozen=True)
class WorkerOrder:
    """One worker.

    Attributes:
        command: python -u SCRIPT.py … or python -u -m MODULE …
        environment: all of it.
        folder: the current one.
        descriptors: stdin, stdout, stderr and go, as this process numbers them.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    descriptors: Sequence[int]


def send(control: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """One message, with descriptors."""
    data = json.dumps(message).encode()
    if descriptors:
        socket.send_fds(control, [LENGTH.pack(len(data))], descriptors)
    else:
        control.sendall(LENGTH.pack(len(data)))
    control.sendall(data)


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors; None if the other side has ended."""
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
    """Imports what workers would.

    Raises:
        Failed: an import failed, or left what a fork does not copy.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # whatever a module does when it is imported
            raise ForkFailed(f"importing {name} failed: {type(error).__name__}: {error}") from error
    _try_fork()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise ForkFailed(
            f"importing {', '.join(modules)} has started threads ({threads - 1}), which a fork would not copy"
        )
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ForkFailed(f"importing {', '.join(modules)} has opened a CUDA device, which a fork can't use")
    gc.collect()
    gc.freeze()  # a collection in a worker would write to pages that all of them share


def _try_fork() -> None:
    """Forks in vain: libraries that heed forks, such as numpy's OpenBLAS, end their threads then."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def serve(control: socket.socket) -> WorkerOrder | None:
    """Forks until the agent ends: then None. In a worker: what it is to run."""
    while (got := receive(control)) is not None:
        said, descriptors = got
        order = WorkerOrder(said["command"], said["environment"], said["folder"], descriptors)
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
    """0 in the worker, its pid in the server.

    Raises:
        OSError: there is no worker.
        Failed: the worker has ended, since CUDA was used before the fork.
    """
    told, tell = os.pipe()
    between = os.fork()
    if between:
        os.close(tell)
        with os.fdopen(told, "rb") as file:
            pid = file.read()
        os.waitpid(between, 0)  # from here on the worker is the agent's child
        if not pid:
            raise OSError("no process could be made")
        if pid == BAD_FORK:
            raise ForkFailed("what the fork server imported has used CUDA, which a fork can't use", is_final=True)
        return int(pid)
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    os.setsid()
    if _is_in_bad_fork():
        os.write(tell, BAD_FORK)
        os._exit(1)
    os.write(tell, str(os.getpid()).encode())
    os.close(tell)
    os.close(told)
    return 0


def _is_in_bad_fork() -> bool:
    """Whether torch knows that CUDA was used before this fork; its name is private, and torch 2.13 has it."""
    torch: Any = sys.modules.get("torch")
    ask = getattr(getattr(torch, "cuda", None), "_is_in_bad_fork", None)
    return bool(ask and ask())


def run(order: WorkerOrder) -> None:
    """Becomes the worker that python itself would have made of the order."""
    *standard, go = order.descriptors
    if not os.read(go, 1):
        os._exit(1)  # the agent is gone, or has given us up and started another
    os.close(go)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    _reseed()
    importlib.invalidate_caches()
    main = sys.modules["__main__"]
    vars(main).pop("main", None)
    is_module = order.command[2] == "-m"
    what, *arguments = order.command[3 if is_module else 2 :]
    sys.argv, sys.orig_argv = [what, *arguments], list(order.command)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = place_of(what, is_module)
    _entitle(order.command)
    try:
        if is_module:
            runpy._run_module_as_main(what)  # type: ignore[attr-defined]  # what python -m runs
        else:
            path = os.path.abspath(what)  # as python has it in __file__ and in tracebacks, whatever was typed
            code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            vars(main).update(__file__=path, __cached__=None, __loader__=loader)
            exec(code, vars(main))
    except Exception as error:
        trace = _without_us(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _reseed() -> None:
    """Else all workers would draw the same numbers: these generators are seeded when imported. Python's own does that itself."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def place_of(what: str, is_module: bool) -> str:
    """What python puts first on sys.path: the script's folder, or the current one for a module."""
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(what))


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first line of the script on."""
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _entitle(command: Sequence[str]) -> None:
    """Shows the worker's command, not the server's, to who looks for it with ps."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(fields[i]) for i in _STAT_ARGUMENTS)
    room = end - begin
    if begin == 0 or room < TITLE_ROOM:
        return
    title = " ".join(command).encode(errors="surrogateescape")[: room - 2]
    # A last byte that is not zero tells the kernel that the text in front of it ends at the first zero.
    ctypes.memmove(begin, title.ljust(room - 1, b"\0") + b".", room)


def main() -> None:
    """`python -u -c BOOT PLACE CONTROL MODULES PADDING`."""
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    try:
        prepare(sys.argv[3].split("+"))
    except ForkFailed as error:
        send(control, {"error": str(error)})
        return
    send(control, {"ready": True})
    order = serve(control)
    if order is not None:
        run(order)
