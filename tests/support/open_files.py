"""Closes what objects of a daemon leave open in a test: there a process ends, here none does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from reft_daemon.arena.arena import Arena, SlotFile
from reft_daemon.arena.capsule_store import _CapsuleFile
from reft_daemon.jobs.leases import ProcessWatch


class OpenFiles:
    """The files of arenas, slots, capsules and watched processes that one test opens.

    It holds no object: the end of some of them is what tests look for.

    Args:
        monkeypatch: of the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._files: list[tuple[int, str]] = []
        self._note(monkeypatch, SlotFile, lambda slot: [(slot.descriptor, slot.path or "/memfd:reft-")])
        self._note(monkeypatch, _CapsuleFile, lambda file: [(file.descriptor, file.path)])
        self._note(monkeypatch, ProcessWatch, lambda watch: [(watch._descriptor, "anon_inode:[pidfd]")])
        self._note(
            monkeypatch,
            Arena,
            lambda arena: [
                (arena._lock, arena.folder / "lock"), (arena.reserve._descriptor, arena.folder / "#")
            ],
        )  # fmt: skip

    def _note(
        self, monkeypatch: pytest.MonkeyPatch, kind: type, files: Callable[[Any], Iterable[tuple[int, Path | str]]]
    ) -> None:
        begin = kind.__init__  # type: ignore[misc]

        def init(made: object, *arguments: object, **named: object) -> None:
            begin(made, *arguments, **named)
            self._files += [(descriptor, str(name)) for descriptor, name in files(made)]

        monkeypatch.setattr(kind, "__init__", init)

    def close(self) -> None:
        """Closes what is still open. The number may be another file's now: its name tells."""
        for descriptor, name in self._files:
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith(name):
                    os.close(descriptor)
