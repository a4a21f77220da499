"""Storage with faults: the calls of `os`, counted, refused, or lost when the machine stops."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Killed(BaseException):
    """Stands for a SIGKILL between two calls."""


@dataclass
class FaultyStorage:
    """Passes the calls of `os` on, unless `before` or `after` raises.

    A model of what is durable goes along: a file's bytes since their last sync, and a folder's
    names since its own. `stop_machine` takes away all else.

    Attributes:
        root: below it everything is tracked.
        before: called with each call's number and name; may raise.
        after: the same, after the call has had its effect.
        largest_write: bytes that one write takes at most.
        calls: the names of all calls so far.
    """

    root: Path
    before: Callable[[int, str], None] = lambda number, name: None
    after: Callable[[int, str], None] = lambda number, name: None
    largest_write: int = 1 << 40
    calls: list[str] = field(default_factory=list)
    _bytes: dict[int, bytes] = field(default_factory=dict)  # inode → durable bytes
    _names: dict[Path, set[str]] = field(default_factory=dict)  # folder → durable names
    _paths: dict[int, Path] = field(default_factory=dict)  # descriptor → path

    def _call(self, call: str, act: Callable[..., Any], *arguments: Any) -> Any:
        number = len(self.calls)
        self.calls.append(call)
        self.before(number, call)
        result = act(*arguments)
        self.after(number, call)
        return result

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor: int = self._call("create" if flags & os.O_CREAT else "open", os.open, path, flags, mode)
        self._paths[descriptor] = path
        return descriptor

    def close(self, descriptor: int) -> None:
        path = self._paths.pop(descriptor)
        self._call("close" if path.is_file() else "close folder", os.close, descriptor)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        count: int = self._call("write", os.pwrite, descriptor, data[: self.largest_write], offset)
        return count

    def ftruncate(self, descriptor: int, length: int) -> None:
        self._call("truncate", os.ftruncate, descriptor, length)

    def fsync(self, descriptor: int) -> None:
        self._call("sync" if self._paths[descriptor].is_file() else "sync folder", self._sync, descriptor)

    def fdatasync(self, descriptor: int) -> None:
        self._call("sync data", self._sync, descriptor)

    def _sync(self, descriptor: int) -> None:
        path = self._paths[descriptor]
        if path.is_dir():
            self._names[path] = set(os.listdir(path))
        else:
            self._bytes[os.fstat(descriptor).st_ino] = path.read_bytes()

    def link(self, source: Path, target: Path) -> None:
        self._call("link", os.link, source, target)

    def unlink(self, path: Path) -> None:
        self._call("unlink", os.unlink, path)

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        self._call("mkdir", os.mkdir, path, mode)

    def rmdir(self, path: Path) -> None:
        self._call("rmdir", os.rmdir, path)

    def listdir(self, path: Path) -> list[str]:
        names: list[str] = self._call("list", os.listdir, path)
        return names

    def stat(self, path: Path) -> os.stat_result:
        result: os.stat_result = self._call("stat", os.stat, path)
        return result

    def close_all(self) -> None:
        """Closes what a killed process had open."""
        for descriptor in self._paths:
            os.close(descriptor)
        self._paths.clear()

    def stop_machine(self) -> None:
        """Takes away what was never synced."""
        self.close_all()
        self._stop(self.root)

    def _stop(self, folder: Path) -> None:
        for name in os.listdir(folder):
            path = folder / name
            if name not in self._names.get(folder, set()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_dir():
                self._stop(path)
            else:
                path.write_bytes(self._bytes.get(path.stat().st_ino, b""))


def fail(call: str, code: int, nth: int = 0) -> Callable[[int, str], None]:
    """Returns a `before` that refuses the nth call of a name, and all after it."""
    seen = [0]

    def before(_: int, name: str) -> None:
        if name == call:
            seen[0] += 1
            if seen[0] > nth:
                raise OSError(code, os.strerror(code))

    return before


def lose_reply(call: str, code: int = errno.EIO) -> Callable[[int, str], None]:
    """Returns an `after` that answers a call with an error, although it had its effect."""

    def after(_: int, name: str) -> None:
        if name == call:
            raise OSError(code, os.strerror(code))

    return after


def kill_at(number: int) -> Callable[[int, str], None]:
    """Returns a `before` that ends the process at its call of this number."""

    def before(at: int, _: str) -> None:
        if at == number:
            raise Killed

    return before
