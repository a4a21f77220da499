"""Patches torch and subprocess, so that torchrun's agent gets its workers from the fork server.

    torchrun wants a worker ─► SubprocessHandler._popen ─► start(command, environment, descriptors)
                                  ▲                         ├─ a process: a Popen of a forked child
                                  └ installed ─► undo       └─ None: torch starts the worker itself

This is the only file that patches them. What torch later does with a worker is unchanged. The
private names that are used stand in reft.elastic.torch_internals, table WARM. If one is missing,
nothing is patched, and the caller gets the name.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from reft.elastic.torch_internals import WARM, missing, outputs_of

Start = Callable[[Sequence[str], Mapping[str, str], "Sequence[int] | None"], "subprocess.Popen[bytes] | None"]


class PrivateNameMissing(Exception):
    """This torch or Python lacks a private name; the message is that name."""


class ForkedProcess(subprocess.Popen[bytes]):
    """A child process that the fork server has forked, as a Popen.

    Waits, signals and exit codes are Popen's own.

    Args:
        args: the command that the child shows.
        pid: of a child of this process.
    """

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self._forked_pid = pid
        super().__init__(args)

    def _execute_child(self, *_: Any) -> None:
        self.pid, self._child_created = self._forked_pid, True


def install(start: Start) -> Callable[[], None]:
    """Makes torch's agent in this process get its workers from `start`; returns the undo function.

    Args:
        start: takes a command, all environment variables, and descriptors of stdin, stdout and
            stderr. No descriptors: this torch does not tell them, and must start the worker.

    Raises:
        PrivateNameMissing: a name is missing; nothing was changed.
    """
    for name in missing(WARM):
        raise PrivateNameMissing(str(name))
    original = api.get_subprocess_handler

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
            outputs = outputs_of(self)
            return start(args, env, None if outputs is None else [0, *outputs]) or super()._popen(args, env)

    def undo() -> None:
        if api.get_subprocess_handler is Handler:
            api.get_subprocess_handler = original

    api.get_subprocess_handler = Handler
    return undo
