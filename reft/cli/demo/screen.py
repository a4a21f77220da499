"""What a person sees while the demo runs: rows that stay, and on a terminal one row that moves."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

ROW_S = 5.0  # between rows where nobody watches
HEAD = f"{'step':>8}{'loss':>10}{'held':>8}{'age':>9}"


@dataclass(frozen=True)
class Progress:
    """Where a training is: steps completed by all ranks, mean loss of the last ten, newest whole step and its age."""

    step: int
    loss: float | None
    held: int | None
    age_s: float | None

    def row(self) -> str:
        """The row as text."""
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        held = "-" if self.held is None else str(self.held)
        age = "-" if self.age_s is None else f"{self.age_s:.1f} s"
        return f"{self.step:>8}{loss:>10}{held:>8}{age:>9}"


class Screen:
    """Lines on `stream`; if that is a terminal, every tenth step stays and the newest moves.

    Args:
        stream: stdout, or stderr if stdout is for a document.
    """

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._shown_s = 0.0
        self._shown_step = 0

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str = "", style: str = "") -> None:
        """One line that stays."""
        self._console.print(Text(text, style))
        self._console.file.flush()

    def begin(self) -> None:
        """The head of a table of a new training."""
        self._shown_s, self._shown_step = time.monotonic(), 0
        self.say(HEAD, "dim")

    def end(self) -> None:
        """The training is over: the row that moves goes."""
        if self._console.is_terminal:
            self._live.update(Text(""), refresh=True)

    def progress(self, now: Progress) -> None:
        """The newest state of the training."""
        if self._console.is_terminal:
            self._live.update(Text(now.row(), "dim"), refresh=True)
            due = now.step // 10 != self._shown_step // 10
        else:
            due = time.monotonic() - self._shown_s >= ROW_S
        if due and now.step > 0:
            self._shown_s, self._shown_step = time.monotonic(), now.step
            self.say(now.row())
