"""Keeps what a restarted daemon must know of each job, in two copies.

    JOB/record.0, JOB/record.1   a JobRecord in each; both are replaced at each write
    JOB/pins                     a PinsRecord at offset 0, and again at PINS_APART

    a copy   offset  what               size
             0       the struct HEAD    28     magic, format major and minor, sequence, body's size
             28      checksum           8      xxh3_64 of head and body, little-endian
             36      body               …      protobuf

    write    both copies as drafts ── no room ──► drafts removed; nothing has changed
             └► the first renamed: written ──► the second renamed
    slices   the same, with drafts of other names; if another write came between the slices, these
             drafts are removed, and that write counts: see `arena.write_record`
    read     the valid copy with the greater sequence counts; the other one is made again
             └── none is valid, or another job's ──► DamagedJob: shown, kept until it is purged

Both copies of a record have the same content. They differ only if a daemon died between two
renames; the older one was in force then, and nobody had an answer yet. The copies lie in pages of
their own: a page of memory that fails takes one of them.

Records were one file without checksum (JOB/record) before. Such a record is read if no copy exists,
and written in two copies then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import xxhash
from google.protobuf.message import DecodeError, Message

from reft.core.budget import format_bytes
from reft.core.membership.job_identity import JOB_NAME
from reft.core.text import counted
from reft.errors import AttachError, FormatError
from reft.wire.messages import MANIFEST_MAX
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.shortage import is_shortage

log = logging.getLogger("reft.daemon")
MAGIC: Final = b"REFTCOPY"
MAJOR: Final = 1
MINOR: Final = 0
HEAD: Final = struct.Struct("<8sHHQQ")
CHECKSUM: Final = struct.Struct("<Q")
SEQUENCE_MAX: Final = 1 << 63  # a greater one was never written
RECORD_MAX: Final = 2 * (3 * MANIFEST_MAX + (1 << 20))  # bytes of a copy: this record and the one before
RECORDS: Final = ("record.0", "record.1")
PINS: Final = "pins"
PINS_APART: Final = 4096  # bytes between the copies of the pins: a page
EARLIER_RECORD: Final = "record"  # of a reft before the copies
EARLIER_DIGEST_BYTES: Final = 8  # before its pins

M = TypeVar("M", bound=Message)
WriteFiles = Callable[[str, Mapping[str, bytes]], None]


class FileCopy(NamedTuple):
    """A valid copy.

    Attributes:
        sequence: grows with each write.
        body: what was written.
    """

    sequence: int
    body: bytes


class DamagedJob(NamedTuple):
    """A job whose record can't be read. Its slots stay until somebody purges the job.

    Attributes:
        job: name of the job.
        reason: what is wrong with the record.
        held_bytes: memory of all its files.
        slots: the number of its slots.
    """

    job: str
    reason: str
    held_bytes: int
    slots: int

    def error(self) -> FormatError:
        """Returns the error for a caller that asks for the job."""
        return FormatError(
            f"the record of job {self.job} on this node is damaged: {self.reason}. "
            f"Its memory here ({counted(self.slots, 'slot')}, {format_bytes(self.held_bytes)}) is kept, and not offered.",
            f"reft-cli purge {self.job} on this node frees it; then start the job again",
        )


def encode_copy(copy: FileCopy) -> bytes:
    """Returns the bytes of a copy."""
    return encode_head(copy) + copy.body


def encode_head(copy: FileCopy) -> bytes:
    """Returns the bytes of a copy up to its body."""
    head = HEAD.pack(MAGIC, MAJOR, MINOR, copy.sequence, len(copy.body))
    return head + CHECKSUM.pack(_checksum(head, copy.body))


def decode_copy(data: bytes) -> FileCopy:
    """Returns the copy at the begin of `data`.

    Raises:
        FormatError: the bytes are no copy, were cut or changed, or have a newer major format.
    """
    begin = HEAD.size + CHECKSUM.size
    if len(data) < begin or data[:8] != MAGIC:
        raise FormatError(f"its {len(data)} bytes do not begin as a copy.")
    _, major, minor, sequence, size = HEAD.unpack_from(data)
    if major > MAJOR:
        raise FormatError(
            f"it has format {major}.{minor}; this reft reads up to {MAJOR}.", "use the reft that wrote it"
        )
    if size > len(data) - begin:
        raise FormatError(f"it has {len(data) - begin} of {size} bytes.")
    body = data[begin : begin + size]
    if CHECKSUM.unpack_from(data, HEAD.size)[0] != _checksum(data[: HEAD.size], body):
        raise FormatError("its checksum is wrong.")
    if sequence > SEQUENCE_MAX:
        raise FormatError(f"it has sequence number {sequence}; the last one is {SEQUENCE_MAX}.")
    return FileCopy(sequence, body)


def newest_copy(copies: Iterable[bytes]) -> tuple[FileCopy, list[str]]:
    """Returns the valid copy with the greatest sequence, and what is wrong with the others.

    Raises:
        FormatError: no copy is valid.
    """
    valid: list[FileCopy] = []
    wrong: list[str] = []
    for i, data in enumerate(copies):
        try:
            valid.append(decode_copy(data))
        except FormatError as error:
            wrong.append(f"copy {i}: {error.message}")
    if not valid:
        raise FormatError(" ".join(wrong))
    newest = max(valid, key=lambda copy: copy.sequence)
    wrong += ["one copy is older than the other." for copy in valid if copy != newest]
    return newest, wrong


def _checksum(head: bytes, body: bytes) -> int:
    state = xxhash.xxh3_64(head)
    state.update(body)
    return state.intdigest()


@dataclass
class JobFiles:
    """The records of all jobs of one arena.

    Args:
        folder: the arena's folder.
        write_files: replaces files of a job, all or none; see `Arena.write_files`.

    Attributes:
        damaged: name → the job whose record could not be read.
        deciding: held while a decision is taken, in slices: drafts of two would have one name.
    """

    folder: Path
    write_files: WriteFiles
    damaged: dict[str, DamagedJob] = field(default_factory=dict)
    deciding: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sequences: dict[str, int] = field(default_factory=dict)

    def read(self) -> list[pb.JobRecord]:
        """Returns the records that earlier daemons left, and fills `damaged`.

        A folder without any finished file is removed: its daemon died before the first decision.

        Raises:
            OSError: a record can't be opened for now.
        """
        records = []
        for folder in sorted(self.folder.iterdir()):
            if folder.is_symlink() or not folder.is_dir() or not JOB_NAME.fullmatch(folder.name):
                continue
            try:
                if (record := self._read(folder)) is not None:
                    records.append(record)
            except (FormatError, OSError) as error:
                if is_shortage(error):
                    raise
                damaged = self.damaged[folder.name] = _damaged_job(folder, error)
                log.error("job=%s %s", folder.name, damaged.error().message)
        return records

    def refuse_damaged(self, job: str) -> None:
        """Raises FormatError if the job's record is damaged: see `DamagedJob`."""
        if job in self.damaged:
            raise self.damaged[job].error()

    def write(self, record: pb.JobRecord) -> None:
        """Replaces a job's record, both copies.

        Raises:
            NoRoom, AttachError: the record can't be written; the one before stays.
        """
        job = record.manifest.job
        data = encode_copy(FileCopy(self.next_sequence(job), record.SerializeToString()))
        check_size(job, len(data))
        self.write_files(job, dict.fromkeys(RECORDS, data))
        self.drop_earlier(job)

    def write_pins(self, record: pb.JobRecord) -> None:
        """Replaces a job's pins, without the rest of its record.

        Raises:
            NoRoom, AttachError: the pins can't be written; those before stay.
        """
        job = record.manifest.job
        pins = pb.PinsRecord(epoch=record.decision.epoch, pins=record.pins)
        copy = encode_copy(FileCopy(self.next_sequence(job), pins.SerializeToString()))
        self.write_files(job, {PINS: copy.ljust(PINS_APART, b"\0") + copy})

    def forget(self, job: str) -> None:
        """Removes the folder of a job."""
        self._sequences.pop(job, None)
        self.damaged.pop(job, None)
        shutil.rmtree(self.folder / job, ignore_errors=True)

    def next_sequence(self, job: str) -> int:
        """Returns the sequence number of a write that begins now."""
        self._sequences[job] = self._sequences.get(job, 0) + 1
        return self._sequences[job]

    def is_newest(self, job: str, sequence: int) -> bool:
        """Whether no other write has begun since `next_sequence`, and the job was not forgotten."""
        return self._sequences.get(job) == sequence

    def drop_earlier(self, job: str) -> None:
        """Removes the one copy of an earlier reft: there are two now."""
        remove_file(self.folder / job / EARLIER_RECORD)

    def _read(self, folder: Path) -> pb.JobRecord | None:
        """Returns a job's record; None if the folder holds nothing.

        Raises:
            FormatError, OSError: the record is damaged, or can't be read.
        """
        job = folder.name
        files = [path for path in folder.iterdir() if path.suffix != ".new"]
        if not files:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        is_earlier = not any((folder / name).exists() for name in RECORDS) and (folder / EARLIER_RECORD).exists()
        wrong = ["it was written without a checksum."] if is_earlier else []
        if is_earlier:
            record = _parsed(pb.JobRecord, _bytes_of(folder / EARLIER_RECORD))
        else:
            copy, wrong = newest_copy(_bytes_of(folder / name) for name in RECORDS)
            self._sequences[job] = copy.sequence
            record = _parsed(pb.JobRecord, copy.body)
        _check(record, job)
        wrong_pins = self._take_pins(record, folder / PINS, is_earlier)
        if wrong or wrong_pins:
            log.warning("job=%s its record is written again, in two copies: %s", job, " ".join([*wrong, *wrong_pins]))
            try:
                self.write(record)
                if wrong_pins:
                    self.write_pins(record)
            except AttachError as error:
                log.error("job=%s its record has no second copy: %s", job, error)
        return record

    def _take_pins(self, record: pb.JobRecord, path: Path, is_earlier: bool) -> list[str]:
        """Puts a file's pins of the record's epoch into the record.

        Returns:
            What is wrong with a copy of these pins.

        Raises:
            FormatError: the pins are damaged or missing. Older pins would let go of the protected
                step.
        """
        job = record.manifest.job
        if path.exists():
            copy, wrong = _saved_pins(_bytes_of(path))
            self._sequences[job] = max(self._sequences.get(job, 0), copy.sequence)
            saved = _parsed(pb.PinsRecord, copy.body)
            if saved.epoch == record.decision.epoch:
                record.pins.CopyFrom(saved.pins)
                return wrong
        if record.HasField("pins") and not is_earlier:
            raise FormatError("its pins are missing.")
        return []


def remove_file(path: Path) -> None:
    """Removes a file of the arena, if it is there.

    A failure is logged: somebody has taken the folder away, and others need this daemon.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.error("%s can't be removed, and may keep its memory: %s", path, error)


def check_size(job: str, nbytes: int) -> None:
    """Raises AttachError for a record that a restarted daemon would not read."""
    if nbytes > RECORD_MAX:
        raise AttachError(f"the record of job {job} has {nbytes} bytes; the limit is {RECORD_MAX}.")


def _saved_pins(data: bytes) -> tuple[FileCopy, list[str]]:
    """Returns the pins of a file, and what is wrong with a copy.

    Raises:
        FormatError: both copies are damaged.
    """
    digest, earlier = data[:EARLIER_DIGEST_BYTES], data[EARLIER_DIGEST_BYTES:]
    if data[: len(MAGIC)] != MAGIC and digest == xxhash.xxh3_64_digest(earlier):
        return FileCopy(0, earlier), ["they were written in one copy."]
    try:
        return newest_copy((data[:PINS_APART], data[PINS_APART:]))
    except FormatError as error:
        raise FormatError(f"its pins: {error.message}") from error


def _bytes_of(path: Path) -> bytes:
    """Returns a file's bytes, RECORD_MAX at most.

    A file that is missing, or can't be read, has none.

    Raises:
        OSError: the file can't be opened for now.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(RECORD_MAX)
    except FileNotFoundError:
        return b""
    except OSError as error:
        if is_shortage(error):
            raise
        log.error("%s can't be read: %s", path, error)
        return b""


def _parsed(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise FormatError(f"it can't be parsed: {error}.") from error


def _check(record: pb.JobRecord, job: str) -> None:
    """Raises FormatError if a record is not of this job, or contradicts itself."""
    if record.manifest.job != job:
        raise FormatError(f"it names job {record.manifest.job!r:.80}.")
    if record.node_index >= max(len(record.manifest.nodes), 1):
        raise FormatError(f"its manifest has no node {record.node_index}.")


def _damaged_job(folder: Path, error: Exception) -> DamagedJob:
    """Returns what a folder with a damaged record holds."""
    files = [path.lstat() for path in folder.rglob("*")]
    slots = sum(1 for path in folder.glob("*.slot-*") if path.suffix != ".new")
    reason = error.message if isinstance(error, FormatError) else str(error)
    return DamagedJob(folder.name, reason.rstrip("."), sum(512 * stats.st_blocks for stats in files), slots)
