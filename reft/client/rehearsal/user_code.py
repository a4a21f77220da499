"""Tells the user's code from that of Python, of installed packages and of reft."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Final, NamedTuple

import torch

PACKAGES: Final = frozenset({"site-packages", "dist-packages"})
# Folders of code that is not the user's, beside the packages.
FOLDERS: Final = tuple(
    os.path.join(os.path.realpath(folder), "")
    for folder in (
        sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"],
        os.path.dirname(torch.__file__), Path(__file__).parents[2],
    )
)  # fmt: skip


class SourceLine(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int

    @property
    def code(self) -> str:
        """The text of the line; empty if the file can't be read."""
        return linecache.getline(self.file, self.number).strip()

    @property
    def short_file(self) -> str:
        """The file, relative to the folder of the script if the file lies there."""
        folder = Path(main_file()).parent
        return str(Path(self.file).relative_to(folder)) if Path(self.file).is_relative_to(folder) else self.file


def main_module() -> ModuleType | None:
    """Returns the module that runs as the script."""
    return sys.modules.get("__main__")


def main_file() -> str:
    """Returns the file of the script; empty if there is none."""
    return getattr(main_module(), "__file__", None) or ""


def is_users(file: str) -> bool:
    """Returns whether a file holds the user's code. The script always does."""
    if not file or file.startswith("<"):
        return False
    if file == main_file():
        return True
    return PACKAGES.isdisjoint(Path(file).parts) and not os.path.realpath(file).startswith(FOLDERS)


def frames() -> Iterator[FrameType]:
    """Yields the frames of this thread, the innermost first."""
    return frames_of(inspect.currentframe())


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame, then its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back
