"""Makes torchrun's agent take its workers from the fork server: the one file that changes torch and subprocess.

    torchrun wants a worker ─► SubprocessHandler._popen ─► start(command, environment, descriptors)
                                        ▲                   ├─ a process: wrapped as a Popen of the agent's
                                        └ installed ─► undo └─ None: torch starts the worker itself

What torch does with a worker afterwards is untouched. Private names that are used, and with what they were tried:
    api.get_subprocess_handler, SubprocessHandler._popen, ._stdout, ._stderr     torch 2.13
    subprocess.Popen._execute_child, ._child_created                            CPython 3.11
Where one is missing nothing is changed, and the caller is told which.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

Start = Callable[[Sequence[str], Mapping[str, str], Sequence[int]], "subprocess.Popen[bytes] | None"]


class PrivateNameMissing(Exception):
    """This torch or Python lacks a private name; the message is that name."""


class ForkedProcess(subprocess.Popen[bytes]):
    """A child that somebody else has forked: waits, signals and exit codes are Popen's own.

    Args:
        args: the command that it shows.
        pid: of a child of this process.
    """

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self._forked_pid = pid
        super().__init__(args)

    def _execute_child(self, *_: Any) -> None:
        self.pid, self._child_created = self._forked_pid, True


def install(start: Start) -> Callable[[], None]:
    """Makes torch's agent in this process ask `start` for its workers; what it returns puts torch back.

    Args:
        start: takes a command, all of its environment, and descriptors of its stdin, stdout and stderr.

    Raises:
        Unknown: a name is missing; nothing was changed.
    """
    wanted: list[tuple[Any, str]] = [(api, "get_subprocess_handler"), (SubprocessHandler, "_popen")]
    wanted += [(subprocess.Popen, "_execute_child"), (subprocess.Popen, "_child_created")]
    for holder, name in wanted:
        if not hasattr(holder, name):
            raise PrivateNameMissing(f"{holder.__name__}.{name}")
    before = api.get_subprocess_handler

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
            files = (getattr(self, "_stdout", None), getattr(self, "_stderr", None))
            descriptors = [0, *(file.fileno() if file else number for number, file in enumerate(files, 1))]
            return start(args, env, descriptors) or super()._popen(args, env)

    def undo() -> None:
        if api.get_subprocess_handler is Handler:
            api.get_subprocess_handler = before

    api.get_subprocess_handler = Handler
    return undo
