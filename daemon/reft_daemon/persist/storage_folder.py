"""Files on storage: a crash at any instruction leaves a whole file or none.

    data         O_EXCL ─► write, fdatasync each SYNC_BYTES ─► fsync ─► close ─► fsync of the folder
    one of many  temporary name ─► fsync ─► link(2) to the name ─► unlink the temporary name
                 link: an error or "exists" ─► has the temporary file two links? then it was mine

Invariants
  1. A file counts only if another file names it with its digest. The last such file, MANIFEST.json,
     appears under its name complete or not at all.
  2. A failed fsync or close is an error for good: the kernel may have dropped the pages. Nothing is
     tried again on that file; the next attempt writes another one.
  3. Data that was written does not stay in the page cache, which would push slots out of a tmpfs.

NFS answers a link with an error if its reply was lost, although the link was made. So the number of
links of the temporary file decides. A file system without links (EPERM, EOPNOTSUPP) gets O_EXCL.
Only the persister's process uses this file: a storage that hangs stops that process alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from reft.errors import FormatError
from reft.wire.slot_format import Bytes, read_file
from reft.wire.stored_format import FileRun

SYNC_BYTES: Final = 64 << 20  # between two fdatasync of one file
ENTRIES_MAX: Final = 100_000  # of one folder
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)
_MODE: Final = 0o600


class StorageCalls(Protocol):
    """The calls of `os` that reach storage; a test puts faults between."""

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int: ...
    def close(self, descriptor: int) -> None: ...
    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int: ...
    def ftruncate(self, descriptor: int, length: int) -> None: ...
    def fsync(self, descriptor: int) -> None: ...
    def fdatasync(self, descriptor: int) -> None: ...
    def link(self, source: Path, target: Path) -> None: ...
    def unlink(self, path: Path) -> None: ...
    def mkdir(self, path: Path, mode: int = 0o777) -> None: ...
    def rmdir(self, path: Path) -> None: ...
    def listdir(self, path: Path) -> list[str]: ...
    def stat(self, path: Path) -> os.stat_result: ...


class StorageFile:
    """A new file on storage, written in ascending order.

    Args:
        path: must not exist.
        calls: the calls of `os`.

    Attributes:
        runs: none: the file has its holes itself, unlike an object.

    Raises:
        OSError: the file can't be made.
    """

    runs: Final[tuple[FileRun, ...]] = ()

    def __init__(self, path: Path, calls: StorageCalls) -> None:
        self._calls = calls
        self._path = path
        self._unsynced_bytes = 0
        self._descriptor = calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)

    def write(self, data: memoryview, offset: int) -> None:
        """Writes all of `data` at `offset`.

        Raises:
            OSError: storage is full, over quota or broken.
        """
        written = 0
        while written < len(data):
            count = self._calls.pwrite(self._descriptor, data[written:], offset + written)
            if count <= 0:
                raise OSError(errno.EIO, f"{self._path.name} takes no more bytes")
            written += count
        self._unsynced_bytes += written
        if self._unsynced_bytes >= SYNC_BYTES:
            self._calls.fdatasync(self._descriptor)
            self._drop_pages()

    def complete(self, nbytes: int) -> None:
        """Makes the file `nbytes` long, and durable; closes it.

        Raises:
            OSError: a byte may be missing on storage.
        """
        self._calls.ftruncate(self._descriptor, nbytes)
        self._calls.fsync(self._descriptor)
        self._drop_pages()
        descriptor, self._descriptor = self._descriptor, -1
        self._calls.close(descriptor)

    def abandon(self) -> None:
        """Closes a file that is given up; after `complete` it changes nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with contextlib.suppress(OSError):
                self._calls.close(descriptor)

    def _drop_pages(self) -> None:
        self._unsynced_bytes = 0
        with contextlib.suppress(OSError):  # advice; some file systems take none
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class StorageFolder:
    """One folder on storage.

    Args:
        path: the folder.
        calls: the calls of `os`.
        root: the storage itself, above this folder; None: the folder is the storage.
    """

    def __init__(self, path: Path, calls: StorageCalls = os, root: Path | None = None) -> None:
        self.path = path
        self._calls = calls
        self._root = root or path

    @property
    def name(self) -> str:
        return self.path.name

    def address(self, name: str = "") -> str:
        """Returns the folder, or a file in it, for messages."""
        return str(self.path / name)

    def folder(self, name: str) -> StorageFolder:
        """Returns a folder in this one; it need not exist."""
        return StorageFolder(self.path / name, self._calls, self._root)

    def make(self) -> None:
        """Makes the folder, and those between the storage and the folder, durable.

        Raises:
            OSError: a folder can't be made. The storage itself is never made: where nothing is
                mounted, checkpoints would go to another disk, and hide the real ones.
        """
        missing = []
        path = self.path
        self._calls.stat(self._root)
        while path != self._root and not self._exists(path):
            missing.append(path)
            path = path.parent
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another node was faster
                self._calls.mkdir(each, 0o700)
            StorageFolder(each.parent, self._calls).sync()

    def _exists(self, path: Path) -> bool:
        try:
            self._calls.stat(path)
        except FileNotFoundError:
            return False
        return True

    def create(self, name: str, nbytes: int = 0) -> StorageFile:
        """Begins a new file; `nbytes` matter in an object store only.

        Raises:
            OSError: the file can't be made, or exists.
        """
        return StorageFile(self.path / name, self._calls)

    def sync(self) -> None:
        """Makes the folder's names durable.

        Raises:
            OSError: a name may be missing on storage.
        """
        descriptor = self._calls.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._calls.fsync(descriptor)
        finally:
            self._calls.close(descriptor)

    def write(self, name: str, text: bytes) -> None:
        """Writes a small file, durable under its name.

        Raises:
            OSError: the file exists, or can't be written.
        """
        self._fill(self.create(name), text)

    def _fill(self, file: StorageFile, text: bytes) -> None:
        try:
            file.write(memoryview(text), 0)
            file.complete(len(text))
        finally:
            file.abandon()
        self.sync()

    def put_if_absent(self, name: str, text: bytes) -> bool:
        """Writes a small file unless the file exists; returns whether this call wrote the file.

        Args:
            name: the file's name.
            text: must differ from what any other writer writes there.

        Raises:
            OSError: the file can't be written.
        """
        temporary = f".{name}.{secrets.token_hex(8)}"
        try:
            self.write(temporary, text)
            try:
                self._calls.link(self.path / temporary, self.path / name)
            except OSError as error:
                if error.errno in _NO_LINKS:
                    return self._write_exclusive(name, text)
                if self._calls.stat(self.path / temporary).st_nlink != 2:  # else the link was made, and its reply lost
                    if error.errno == errno.EEXIST:
                        return False
                    raise
            self.sync()
            return True
        finally:
            with contextlib.suppress(OSError):
                self._calls.unlink(self.path / temporary)

    def _write_exclusive(self, name: str, text: bytes) -> bool:
        try:
            file = self.create(name)
        except FileExistsError:
            return self.read(name, len(text) + 1) == text
        try:
            self._fill(file, text)
        except OSError:
            # Storage may be full. A part of the text would be a damaged file for good.
            with contextlib.suppress(OSError):
                self._calls.unlink(self.path / name)
            raise
        return True

    def read(self, name: str, limit: int) -> bytes:
        """Returns a small file's bytes.

        Raises:
            OSError: the file is not there, or can't be read.
            FormatError: the file is longer than `limit`, or no ordinary file.
        """
        descriptor = self._calls.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(limit + 1)
        finally:
            self._calls.close(descriptor)
        if len(data) > limit:
            raise FormatError(f"{self.path.name}/{name} is longer than {limit} bytes.")
        return data

    def open(
        self, name: str, nbytes: int, runs: Sequence[FileRun], note: Callable[[int], object] = lambda nbytes: None
    ) -> int:
        """Opens a rank's file, read-only; returns the descriptor.

        Args:
            name: of the file.
            nbytes: length of the file.
            runs: none: the file was written by a folder, not into an object store.
            note: is not called: nothing is fetched.

        Raises:
            OSError: the file can't be opened.
            FormatError: the file has another length.
        """
        path = self.path / name
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if os.fstat(descriptor).st_size != nbytes or runs:
            os.close(descriptor)
            raise FormatError(f"{path} has another length than its index says, {nbytes}.")
        return descriptor

    def read_range(self, name: str, nbytes: int, runs: Sequence[FileRun], offset: int, into: Bytes) -> None:
        """Fills `into` with the bytes of a rank's file at `offset`; see `open`.

        Raises:
            OSError: the file can't be read.
            FormatError: the file has another length.
        """
        descriptor = self.open(name, nbytes, runs)
        try:
            read_file(descriptor, offset, into)
        finally:
            os.close(descriptor)

    def names(self) -> list[str]:
        """Returns the names in the folder, ascending.

        Raises:
            OSError: the folder can't be listed. A folder that does not exist is an error too.
            FormatError: there are more than ENTRIES_MAX.
        """
        names = self._calls.listdir(self.path)
        if len(names) > ENTRIES_MAX:
            raise FormatError(f"{self.path} has {len(names)} entries; at most {ENTRIES_MAX} are read.")
        return sorted(names)

    def time_s(self, name: str) -> float:
        """Returns when an entry was last written, by the storage's clock.

        Raises:
            OSError: the entry is not there.
        """
        return self._calls.stat(self.path / name).st_mtime

    def remove(self, name: str) -> None:
        """Removes a file; one that is gone already is no error.

        Raises:
            OSError: the file can't be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            self._calls.unlink(self.path / name)

    def remove_folder(self, name: str) -> None:
        """Removes an empty folder; one that has entries stays.

        Raises:
            OSError: the folder can't be removed.
        """
        try:
            self._calls.rmdir(self.path / name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
