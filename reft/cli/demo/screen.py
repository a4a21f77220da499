"""Shows the demo: rows that stay, and on a terminal one row that is updated."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

ROW_S = 5.0  # between two rows if stdout is no terminal
HEAD = f"{'step':>8}{'loss':>10}{'held':>8}{'age':>9}"


@dataclass(frozen=True)
class Progress:
    """The progress of a training.

    Attributes:
        step: steps completed by all ranks.
        loss: mean loss of the last ten steps.
        held: the newest whole step.
        age_s: the age of that step.
    """

    step: int
    loss: float | None
    held: int | None
    age_s: float | None

    def row(self) -> str:
        """Returns the row as text."""
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        held = "-" if self.held is None else str(self.held)
        age = "-" if self.age_s is None else f"{self.age_s:.1f} s"
        return f"{self.step:>8}{loss:>10}{held:>8}{age:>9}"


class Screen:
    """Writes lines to `stream`.

    On a terminal every tenth step stays, and the row of the newest step is updated.

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
        """Prints one line that stays."""
        self._console.print(Text(text, style))
        self._console.file.flush()

    def begin(self) -> None:
        """Prints the head of the table of a new training."""
        self._shown_s, self._shown_step = time.monotonic(), 0
        self.say(HEAD, "dim")

    def end(self) -> None:
        """Removes the updated row at the end of a training."""
        if self._console.is_terminal:
            self._live.update(Text(""), refresh=True)

    def progress(self, now: Progress) -> None:
        """Shows the newest progress of the training."""
        if self._console.is_terminal:
            self._live.update(Text(now.row(), "dim"), refresh=True)
            due = now.step // 10 != self._shown_step // 10
        else:
            due = time.monotonic() - self._shown_s >= ROW_S
        if due and now.step > 0:
            self._shown_s, self._shown_step = time.monotonic(), now.step
            self.say(now.row())
