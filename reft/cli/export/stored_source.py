"""Reads a checkpoint on storage for an export: DIR/JOB, or s3://BUCKET/PREFIX/JOB.

    list     which checkpoint counts
    read     a process reads its files: `reft_daemon.persist.file_reader`; requests are sent ahead

Storage that hangs stops that process alone. Without a byte for ANSWER_S the export is given up.
"""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from reft.cli import storage
from reft.cli.ask import NoSuchJob
from reft.cli.export.slot_reader import ExportReader
from reft.cli.export.sources import Erased, ExportState
from reft.cli.storage import StorageUnreadable
from reft.core.commit.version import Epoch, Version
from reft.core.persist.storage_url import is_url
from reft.core.text import counted
from reft.errors import AttachError, ConfigError, FormatError
from reft.wire.range_pipe import ERROR_MAX, FileRequest, receive_answer, receive_into
from reft.wire.slot_format import Bytes
from reft.wire.v1 import daemon_pb2 as pb

ANSWER_S: Final = 120.0  # an object store's requests end earlier, each with its own error
MANIFEST_MAX: Final = 512 << 20


class StoredFileProcess:
    """The process that reads the files of a checkpoint.

    Args:
        process: has begun, with pipes.
        root: of the storage, for messages.
    """

    def __init__(self, process: subprocess.Popen[bytes], root: str) -> None:
        assert process.stdin is not None and process.stdout is not None, "they are pipes"
        self._process, self._root = process, root
        self._requests, self._answers = process.stdin, process.stdout.fileno()
        self._asked: deque[FileRequest] = deque()

    def checkpoint(self) -> dict[str, Any]:
        """Returns the first answer: version, manifest and ranks of the checkpoint.

        Raises:
            StorageUnreadable: storage can't be read, or does not answer.
            FormatError: the checkpoint is damaged.
        """
        with self._deadline():
            text = bytearray(self._head(MANIFEST_MAX))
            receive_into(self._answers, memoryview(text), ANSWER_S)
        return dict(json.loads(text))

    def ask(self, rank: int, offset: int, nbytes: int) -> None:
        """Asks for bytes ahead. `read` must want them in the same order."""
        request = FileRequest(rank, offset, nbytes)
        with contextlib.suppress(BrokenPipeError):  # `read` says why
            self._requests.write(request.encode())
            self._requests.flush()
        self._asked.append(request)

    def read(self, rank: int, offset: int, into: Bytes) -> None:
        """Fills `into` with bytes of a rank's file.

        Raises:
            StorageUnreadable: storage can't be read, or does not answer.
            FormatError: the file is damaged, or gone.
        """
        request = FileRequest(rank, offset, into.nbytes)
        if not self._asked:
            self.ask(*request)
        asked = self._asked.popleft()
        assert asked == request, f"{asked} was asked for, not {request}"
        with self._deadline():
            nbytes = self._head(into.nbytes)
            if nbytes != into.nbytes:
                raise FormatError(f"{nbytes} of {into.nbytes} bytes came.")
            receive_into(self._answers, into.data, ANSWER_S)

    def _head(self, limit: int) -> int:
        """Returns how many bytes the next answer has, or raises its error."""
        answer = receive_answer(self._answers, ANSWER_S)
        if answer.nbytes > (ERROR_MAX if answer.is_error else limit):
            raise FormatError(f"an answer has {answer.nbytes} bytes.")
        if answer.is_error:
            text = bytearray(answer.nbytes)
            receive_into(self._answers, memoryview(text), ANSWER_S)
            error = json.loads(text)
            if error["is_damage"]:
                raise FormatError(error["error"], error["hint"])
            raise StorageUnreadable(f"{self._root} can't be read: {error['error']}", error["hint"])
        return answer.nbytes

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise StorageUnreadable(
                f"{self._root} gave no byte for {ANSWER_S:.0f} s.",
                "check that it is mounted, or the network to it, and export again",
            ) from error
        except EOFError as error:
            code = self._process.poll()
            raise StorageUnreadable(f"the program that reads {self._root} has ended ({code}).") from error

    def close(self) -> None:
        """Ends the process; one that the kernel holds is left to it."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        assert self._process.stdout is not None, "it is a pipe"
        self._process.stdout.close()


@dataclass(frozen=True)
class StoredSource:
    """A checkpoint of a job on storage.

    Args:
        root: the folder or object store that `reft-daemon --persist` names.
        job: name of the job.
        step: to export; -1: the newest one that counts.
        lineage: of the job; empty: the only one.
        key_file: the key of the checkpoints' MACs; None: MACs are not asked for.
    """

    root: str
    job: str
    step: int = -1
    lineage: str = ""
    key_file: Path | None = None

    @contextlib.contextmanager
    def open(self, erased: Erased = ()) -> Iterator[ExportState]:
        """Opens a checkpoint; nothing of it can be `erased`, since it has no copies.

        Raises:
            NoSuchJob: storage has no such job.
            ConfigError: several lineages or checkpoints are meant, or none.
            DamagedSlot: a file is damaged.
            StorageUnreadable: storage can't be read.
        """
        lineage, name = self._checkpoint()
        more = "--lineage", lineage["lineage"], "--name", name
        damaged = lineage["damaged"].items() if self.step < 0 else ()
        notes = tuple(f"checkpoint {each} is damaged, not used: {why}" for each, why in sorted(damaged))
        started = storage.start_audit("read", self.root, self.job, *more, key_file=self.key_file, stdin=subprocess.PIPE)
        files = StoredFileProcess(started, self.root)
        try:
            answer = files.checkpoint()
            try:
                manifest = pb.Manifest.FromString(base64.b64decode(answer["manifest"]))
            except (DecodeError, ValueError) as error:
                raise FormatError(f"the manifest of {self} can't be read: {error}.") from error
            counter, ident, step = answer["version"]
            version = Version(Epoch(counter, bytes.fromhex(ident)), step)
            slots = {rank: self._slot(rank, version, name, files) for rank in answer["ranks"]}
            yield ExportState(version, manifest, slots, stored=tuple(slots), notes=notes)
        finally:
            files.close()

    def __str__(self) -> str:
        return f"{self.root.rstrip('/')}/{self.job}"

    def _checkpoint(self) -> tuple[Mapping[str, Any], str]:
        """Returns lineage, as the program lists it, and name of the checkpoint."""
        documents = list(storage.audit("list", self.root, self.job, key_file=self.key_file))
        jobs = documents[0]["jobs"]
        lineages = [each for each in (jobs[0]["lineages"] if jobs else ()) if self.lineage in ("", each["lineage"])]
        if not lineages:
            raise NoSuchJob(f"{self} holds no checkpoints of such a job.", f"reft-cli list {self.root}/")
        going_on = [each for each in lineages if not each["ended"]] or lineages
        going_on = [each for each in going_on if each["checkpoints"]] or going_on  # an attach chooses so, too
        if len(going_on) > 1:
            names = ", ".join(each["lineage"] for each in going_on)
            raise ConfigError(f"{self} has several lineages: {names}.", "choose one by --lineage")
        (lineage,) = going_on
        rows = [each for each in lineage["checkpoints"] if self.step in (-1, each["step"])]
        rows = [each for each in rows if each["counts"]] or (rows if self.step >= 0 else [])
        if not rows:
            raise self._no_checkpoint(lineage)
        return lineage, rows[0]["name"]

    def _no_checkpoint(self, lineage: Mapping[str, Any]) -> AttachError:
        """Returns why a lineage has no checkpoint to export."""
        steps, damaged = ", ".join(str(each["step"]) for each in lineage["checkpoints"]), len(lineage["damaged"])
        what = "checkpoint that counts" if self.step < 0 else f"checkpoint of step {self.step}"
        held = f"it has the steps {steps}" if steps else "it has none"
        words = f" and {counted(damaged, 'damaged checkpoint')}" if damaged else ""
        if lineage["trouble"]:
            return AttachError(f"{self} has no {what}; {held}{words}.", lineage["trouble"])
        remedy = (
            "correct --step" if steps else f"reft-cli list {self.root.rstrip('/')}/ shows all jobs and lineages there"
        )
        return AttachError(f"{self} has no {what}; {held}{words}.", remedy)

    def _slot(self, rank: int, version: Version, name: str, files: StoredFileProcess) -> ExportReader:
        what = f"the file of rank {rank} in {self}, checkpoint {name},"
        return ExportReader(version, rank, partial(files.read, rank), what, ask=partial(files.ask, rank))


def stored_source(what: str, step: int, lineage: str, key_file: Path | None) -> StoredSource:
    """Returns the source for DIR/JOB or URL/JOB.

    Raises:
        ConfigError: it names no job, or the address has credentials.
    """
    whole = storage.root_of(what)
    root, _, job = whole.rpartition("/")
    if is_url(whole) and not is_url(root):
        raise ConfigError("the address names a bucket and no job.", "give s3://BUCKET/PREFIX/JOB")
    return StoredSource(root or "/", job, step, lineage, key_file)
