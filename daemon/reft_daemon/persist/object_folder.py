"""Files in an object store, by the calls of `storage_folder.py`.

    small file   one put that fails if the object exists; refused ─► get it: is it mine?
    rank's file  head ─► multipart upload, PART_BYTES each, without holes ─► complete
                 an error ─► abort; nothing is visible before complete
    the way back head: as long as the index says ─► ranges, FETCHES at a time ─► memfd with holes

Invariants
  1. An object appears whole under its name, or not at all. So no fsync and no temporary names.
  2. An object has no holes. `runs` tell where its bytes lie in the file; the index keeps them.
  3. A listing that fails is an error, never an empty one.
  4. Requests end by themselves: TIMEOUT each, RETRY_S with all repetitions. So a store that is away
     is named by its own error, before the daemon gives its persister up.
  5. No text of an error has a query or a body of a reply, which may have a secret.

A file is fetched into memory, since ranks get descriptors. Memory that held three snapshots has
room for one more, while a disk beside it may be small, or none. It is counted, and refused early.
Parts of an upload whose process was killed stay hidden in the bucket: obstore can't list them. A
rule of the bucket must remove them (AbortIncompleteMultipartUpload).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import numpy as np
import obstore
from obstore import exceptions, store

from reft.config import allows_plain_http
from reft.core.budget import refusal
from reft.errors import ConfigError, FormatError, NoRoom
from reft.wire.slot_format import Bytes
from reft.wire.stored_format import FileRun
from reft_daemon.arena.limits import limits
from reft_daemon.persist.storage_folder import ENTRIES_MAX

PART_BYTES: Final = 8 << 20
PARTS_MAX: Final = 10_000  # of one object, by S3's rules
UPLOADS: Final = 2  # parts of one file under way
FETCHES: Final = 4  # ranges of one file under way
FETCH_BYTES: Final = 4 << 20  # of one range: this process may take 100 MB
TIMEOUT: Final = timedelta(seconds=20)
RETRY_S: Final = 30.0
RETRIES: Final = 10
WORDS_MAX: Final = 300
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_DENIED: Final = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


def open_store(url: str) -> ObjectFolder:
    """Returns the prefix that `url` names; nothing is asked.

    Raises:
        ConfigError: the environment lacks what the store needs, e.g. the account.
    """
    try:
        objects = store.from_url(
            url,
            client_options={
                "timeout": TIMEOUT,
                "connect_timeout": timedelta(seconds=5),
                "allow_http": allows_plain_http(),
            },
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=RETRY_S),
                "backoff": {"max_backoff": timedelta(seconds=5)},
            },
        )
    except (exceptions.BaseError, ValueError) as error:
        raise ConfigError(f"--persist {url} can't be used: {words_of(error)}.", "see the DESIGN of persist") from error
    return ObjectFolder(objects, url)


def words_of(error: Exception) -> str:
    """Returns what the store said, without queries and bodies, which may have a secret."""
    text = str(error).partition("\n\nDebug source")[0]
    code = _CODE.search(text)
    text = re.sub(r"\?[^\s\"')]*", "", text.partition("<")[0]).strip().rstrip(":. ")
    return (f"{text} ({code[1]})" if code else text)[-WORDS_MAX:]


@contextlib.contextmanager
def storage_errors(address: str) -> Iterator[None]:
    """Raises the errors of the store as those of files."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address) from None
    except exceptions.AlreadyExistsError:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), address) from None
    except _DENIED as error:
        raise PermissionError(errno.EACCES, words_of(error), address) from None
    except (exceptions.BaseError, OSError) as error:  # an upload raises OSError, with the reply's body
        raise OSError(errno.EIO, words_of(error), address) from None


class ObjectFile:
    """A new object, written in ascending order. Bytes between two writes are not stored.

    Args:
        objects: the store.
        key: of the object.
        address: of the object, for messages.
        part_bytes: of each part of the upload.

    Attributes:
        runs: where the bytes of the object lie in the file.
    """

    def __init__(self, objects: Any, key: str, address: str, part_bytes: int) -> None:
        self._address = address
        self._runs: list[FileRun] = []
        self._writer: Any = obstore.open_writer(objects, key, buffer_size=part_bytes, max_concurrency=UPLOADS)

    @property
    def runs(self) -> tuple[FileRun, ...]:
        return tuple(self._runs)

    def write(self, data: memoryview, offset: int) -> None:
        """Appends the bytes that the file has at `offset`.

        Raises:
            OSError: the store does not take them.
        """
        begin, nbytes = self._runs[-1] if self._runs else FileRun(0, 0)
        if offset < begin + nbytes:
            raise OSError(errno.EINVAL, f"bytes at {offset} come after those at {begin + nbytes}", self._address)
        with storage_errors(self._address):
            self._writer.write(bytes(data))  # a copy: the upload goes on after this call
        if self._runs and offset == begin + nbytes:
            self._runs[-1] = FileRun(begin, nbytes + len(data))
        else:
            self._runs.append(FileRun(offset, len(data)))

    def complete(self, nbytes: int) -> None:
        """Ends the upload: the object is visible then, whole. Its last bytes up to `nbytes` are 0.

        Raises:
            OSError: the store does not take it. Then nothing is visible.
        """
        writer, self._writer = self._writer, None
        with storage_errors(self._address):
            writer.close()

    def abandon(self) -> None:
        """Aborts an upload that is given up; after `complete` it changes nothing."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(exceptions.BaseError, OSError):
                writer.__exit__(OSError, None, None)


class ObjectFolder:
    """One prefix in an object store.

    Args:
        objects: the store, at the prefix that `--persist` names.
        url: that prefix, for messages.
        key: of this folder below it; empty: the prefix itself.
    """

    def __init__(self, objects: Any, url: str, key: str = "") -> None:
        self._objects = objects
        self._url = url
        self._key = key

    @property
    def name(self) -> str:
        return self._key.rpartition("/")[2]

    def address(self, name: str = "") -> str:
        """Returns the folder, or a file in it, for messages."""
        return "/".join(each for each in (self._url, self._key, name) if each)

    def folder(self, name: str) -> ObjectFolder:
        """Returns a folder in this one; it need not exist."""
        return ObjectFolder(self._objects, self._url, self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key else name

    def make(self) -> None:
        """Does nothing: an object store has no folders."""

    def sync(self) -> None:
        """Does nothing: an object is durable when its put returns."""

    def remove_folder(self, name: str) -> None:
        """Does nothing: a folder without objects is none."""

    def create(self, name: str, nbytes: int = 0) -> ObjectFile:
        """Begins a new object of at most `nbytes`.

        Raises:
            OSError: the object exists, or the store does not answer.
        """
        path, address = self._path(name), self.address(name)
        try:
            with storage_errors(address):
                self._objects.head(path)
        except FileNotFoundError:
            return ObjectFile(self._objects, path, address, max(PART_BYTES, -(-nbytes // PARTS_MAX)))
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), address)

    def write(self, name: str, text: bytes) -> None:
        """Writes a small object.

        Raises:
            OSError: there is another one of that name, or the store does not take it.
        """
        if not self.put_if_absent(name, text):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.address(name))

    def put_if_absent(self, name: str, text: bytes) -> bool:
        """Writes a small object unless it exists; returns whether the object has this text.

        Args:
            name: the object's name.
            text: must differ from what any other writer writes there.

        Raises:
            OSError: the object can't be written.
        """
        try:
            with storage_errors(self.address(name)):
                self._objects.put(self._path(name), text, mode="create")
        except OSError as error:
            exists = isinstance(error, FileExistsError)
            try:
                if self.read(name, len(text)) == text:  # an earlier try of this put, whose reply was lost
                    return True
            except FormatError:  # a longer one
                pass
            except OSError as unread:
                raise (unread if exists else error) from None
            if not exists:
                raise
            return False
        return True

    def read(self, name: str, limit: int) -> bytes:
        """Returns a small object's bytes.

        Raises:
            OSError: the object is not there, or can't be read.
            FormatError: the object is longer than `limit`.
        """
        with storage_errors(self.address(name)):
            result = self._objects.get(self._path(name))
            if result.meta["size"] > limit:
                raise FormatError(f"{self.address(name)} is longer than {limit} bytes.")
            return bytes(result.bytes())

    def names(self) -> list[str]:
        """Returns the names in the folder, ascending; none if there is no such folder.

        Raises:
            OSError: the store can't be listed.
            FormatError: there are more than ENTRIES_MAX.
        """
        with storage_errors(self.address()):
            listed = self._objects.list_with_delimiter(self._key or None)
        paths = [*listed["common_prefixes"], *(each["path"] for each in listed["objects"])]
        if len(paths) > ENTRIES_MAX:
            raise FormatError(f"{self.address()} has {len(paths)} entries; at most {ENTRIES_MAX} are read.")
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})

    def time_s(self, name: str) -> float:
        """Returns when an object was written, or the newest one in a folder.

        The time is by the store's clock.

        Raises:
            OSError: there is none, or the store does not answer.
        """
        path, address = self._path(name), self.address(name)
        with contextlib.suppress(FileNotFoundError), storage_errors(address):
            return float(self._objects.head(path)["last_modified"].timestamp())
        with storage_errors(address):
            times = [each["last_modified"].timestamp() for listed in self._objects.list(path) for each in listed]
        if not times:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address)
        return float(max(times))

    def remove(self, name: str) -> None:
        """Removes an object; one that is gone already is no error.

        Raises:
            OSError: the object can't be removed.
        """
        with contextlib.suppress(FileNotFoundError), storage_errors(self.address(name)):
            self._objects.delete(self._path(name))

    def open(
        self, name: str, nbytes: int, runs: Sequence[FileRun], note: Callable[[int], object] = lambda nbytes: None
    ) -> int:
        """Fetches a rank's file into memory; returns a descriptor that nobody can write.

        Args:
            name: of the object.
            nbytes: of the file, with its holes.
            runs: where the bytes of the object lie in the file.
            note: gets the bytes of each range that was fetched.

        Raises:
            OSError: the object is not there, or can't be read.
            FormatError: the object has another length.
            NoRoom: it does not fit into memory.
        """
        path, address = self._path(name), self.address(name)
        need = sum(run.nbytes for run in runs)
        with storage_errors(address):
            have = self._objects.head(path)["size"]
        if have != need or not runs:
            raise FormatError(f"{address} has {have} bytes, another length than its index says, {need}.")
        if reason := refusal(need, limits(0, 0), f"{address}, which is fetched into memory, needs"):
            raise NoRoom(reason)
        descriptor = os.memfd_create("reft-fetched", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)

            def fetch(piece: tuple[int, int, int]) -> int:
                start, offset, length = piece
                with storage_errors(address):
                    data = self._objects.get_range(path, start=start, length=length)
                if len(data) != length:
                    raise FormatError(f"{address} ends after {start + len(data)} bytes.")
                return os.pwrite(descriptor, memoryview(data), offset)

            with ThreadPoolExecutor(FETCHES, "reft-fetch") as pool:
                try:
                    for fetched in pool.map(fetch, _pieces(runs)):
                        note(fetched)
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read_range(self, name: str, nbytes: int, runs: Sequence[FileRun], offset: int, into: Bytes) -> None:
        """Fills `into` with the bytes of a rank's file at `offset`. Holes are 0.

        Args:
            name: of the object.
            nbytes: of the file, with its holes.
            runs: where the bytes of the object lie in the file.
            offset: in the file.
            into: gets the bytes.

        Raises:
            OSError: the object is not there, or can't be read.
            FormatError: the object has another length.
        """
        address, need = self.address(name), sum(run.nbytes for run in runs)
        if not runs:
            raise FormatError(f"the index does not say where the bytes of {address} lie.")
        into[:] = 0
        for start, at, length in _overlaps(runs, offset, into.nbytes):
            with storage_errors(address):
                result = self._objects.get(self._path(name), options={"range": (start, start + length)})
                have, data = result.meta["size"], result.bytes()
            if have != need or len(data) != length:
                raise FormatError(f"{address} has {have} bytes, another length than its index says, {need}.")
            into[at : at + length] = np.frombuffer(data, np.uint8)


def _overlaps(runs: Sequence[FileRun], offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields (offset in the object, offset in the range, length) of all stored bytes."""
    start = 0
    for run in runs:
        begin, end = max(run.offset, offset), min(run.offset + run.nbytes, offset + nbytes)
        if begin < end:
            yield start + begin - run.offset, begin - offset, end - begin
        start += run.nbytes


def _pieces(runs: Sequence[FileRun]) -> Iterator[tuple[int, int, int]]:
    """Yields (offset in the object, offset in the file, length) of all ranges to fetch."""
    start = 0
    for run in runs:
        for at in range(0, run.nbytes, FETCH_BYTES):
            length = min(FETCH_BYTES, run.nbytes - at)
            yield start + at, run.offset + at, length
        start += run.nbytes
