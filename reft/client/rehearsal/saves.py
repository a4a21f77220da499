"""Sees calls of torch.save, and the lines of the script that they come from.

torch.save asks each entry of torch's table of devices for the name of a tensor's memory. The
entry made here answers nothing, so the next one is asked, and files stay as they are. The entry
stays in the table for the life of the process: torch takes none out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import torch

from reft.client.rehearsal.user_code import SourceLine, frames, is_users

SAVING: Final = "torch.serialization"
DISTRIBUTED: Final = "torch.distributed.checkpoint"  # it saves by torch.save


class SaveTracer:
    """Notes the first save of tensors after each mark, on any thread.

    Args:
        on_error: called with an error, which never reaches training.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._pid = os.getpid()
        self._is_open = False
        self._saves: list[str] = []

    def start(self) -> None:
        """Begins to see calls."""
        self._is_open = True
        # torch sorts the table, and can't order two entries of one priority. No other one has this.
        torch.serialization.register_package(-id(self), self._on_memory, _answer_nothing)

    def take(self) -> list[str]:
        """Returns what was seen since the last mark."""
        taken, self._saves = self._saves, []
        return taken

    def close(self) -> None:
        """Ends the tracing."""
        self._is_open = False

    def _on_memory(self, _: object) -> None:
        if not self._is_open or self._saves or os.getpid() != self._pid:
            return
        try:
            if call := saving_call():
                self._saves.append(call)
        except Exception as error:
            self._on_error(error)


def _answer_nothing(*_: Any) -> None:
    """Stands where a device's entry moves memory at load time."""


def saving_call() -> str:
    """Returns the call that saves now, with the user's line; empty if reft saves."""
    call = ""
    for frame in frames():
        module = frame.f_globals.get("__name__", "")
        if module.startswith(DISTRIBUTED):
            call = DISTRIBUTED
        elif module == SAVING and frame.f_code.co_name == "save":
            call = "torch.save"
        elif call and module.startswith("reft."):
            return ""
        elif call and is_users(frame.f_code.co_filename):
            line = SourceLine(frame.f_code.co_filename, frame.f_lineno)
            return f"{call} at {line.short_file}:{line.number}"
    return call  # of a thread that the script did not begin
