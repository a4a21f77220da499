"""Stores the capsules that this node keeps for ranks of other nodes.

There is one file per rank and version.

    JOB/capsule-3.2-<id of the epoch, hex>-17      rank 3, epoch 2, step 17

    offset    what                 size
    0         the struct HEAD      84      magic, format major and minor, job, size of the body
    84        checksum             8       xxh3_64 of head and body, little-endian
    92        body                 …       protobuf CapsuleRecord

Each file stays open. If somebody removes the file, its content stays until this process ends, as
with slots. A file is written whole, then renamed. A daemon that dies leaves the whole file, or a
draft that the next daemon removes. A file without a valid capsule, or with another capsule than its
name says, is renamed to *.bad, logged, and never offered. That capsule counts as lost. A capsule
of a newer format counts as lost, too, but stays as it is: the reft that wrote it may come again.
Everything here runs in the event loop: a record has at most 9 MiB, and mostly a few KiB.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import xxhash
from google.protobuf.message import DecodeError

from reft.core.commit.capsules import DIGESTS_MAX, capsules_to_drop
from reft.core.commit.decision import Decision, counts
from reft.core.commit.round import Outcome
from reft.core.commit.version import STEP_MAX, Version
from reft.core.text import counted
from reft.errors import AttachError, ConfigError, FormatError, StaleEpoch
from reft.wire import messages
from reft.wire.slot_format import CAPSULE_MAX
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.job_files import remove_file
from reft_daemon.arena.shortage import is_shortage

log = logging.getLogger("reft.daemon")
MAGIC: Final = b"REFTCAPS"
MAJOR: Final = 1
MINOR: Final = 0
HEAD: Final = struct.Struct("<8sHH64sQ")
CHECKSUM: Final = struct.Struct("<Q")
# 4096: the other fields take far less than a page
BODY_MAX: Final = CAPSULE_MAX + DIGESTS_MAX + 4096


class NewerCapsule(FormatError):
    """A capsule's file has a newer format than this reft reads."""


def encode(job: str, record: pb.CapsuleRecord) -> bytes:
    """Returns the bytes of a capsule's file."""
    body = record.SerializeToString()
    head = HEAD.pack(MAGIC, MAJOR, MINOR, job.encode(), len(body))
    return head + CHECKSUM.pack(_checksum(head, body)) + body


def decode(data: bytes) -> tuple[str, pb.CapsuleRecord]:
    """Returns the job and the record of a capsule's file.

    Raises:
        NewerCapsule: the file has a newer major version.
        FormatError: the data is no capsule file, or was cut or changed.
    """
    begin = HEAD.size + CHECKSUM.size
    if len(data) < begin or data[:8] != MAGIC:
        raise FormatError("this is not a capsule: the magic number is missing.")
    _, major, minor, job, size = HEAD.unpack_from(data)
    if major > MAJOR:
        raise NewerCapsule(
            f"the capsule has format {major}.{minor}; this reft reads up to {MAJOR}.",
            "use the reft that wrote it, or purge the job",
        )
    body = data[begin:]
    if len(body) != size or CHECKSUM.unpack_from(data, HEAD.size)[0] != _checksum(data[: HEAD.size], body):
        raise FormatError(f"the capsule's file has {len(body)} of {size} bytes, or a wrong checksum.")
    try:
        return job.rstrip(b"\0").decode("ascii", "replace"), pb.CapsuleRecord.FromString(body)
    except DecodeError as error:
        raise FormatError(f"the capsule can't be read: {error}.") from error


def _checksum(head: bytes, body: bytes) -> int:
    state = xxhash.xxh3_64(head)
    state.update(body)
    return state.intdigest()


@dataclass(frozen=True)
class _CapsuleFile:
    path: Path
    descriptor: int
    file_bytes: int
    unreplicated_bytes: int


@dataclass
class CapsuleStore:
    """The capsules of one job that this node keeps for other nodes.

    Args:
        arena: the arena of the files; `held_bytes` of the arena counts their bytes.
        job: name of the job.

    Attributes:
        newer_bytes: bytes of the capsules of a newer format.
    """

    arena: Arena
    job: str
    newer_bytes: int = 0
    _files: dict[int, dict[Version, _CapsuleFile]] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        files = (each for versions in self._files.values() for each in versions.values())
        return sum(each.file_bytes for each in files) + self.newer_bytes

    def adopt(self) -> None:
        """Takes over the capsules that an earlier daemon of this arena kept.

        Raises:
            OSError: a file can't be opened for now.
        """
        for path in sorted((self.arena.folder / self.job).glob("capsule-*")):
            if path.suffix == ".bad":
                continue
            if path.suffix == ".new":
                # The daemon died before the draft was whole. So no daemon acknowledged that
                # capsule.
                path.unlink()
                continue
            try:
                self._open_file(path)
            except NewerCapsule as error:
                log.error("capsule %s stays as it is: %s", path, error)
                nbytes = path.stat().st_size
                self.newer_bytes += nbytes
                self.arena.held_bytes += nbytes
            except (OSError, FormatError) as error:
                if is_shortage(error):
                    raise
                _set_aside(path, error)

    def keep(self, record: pb.CapsuleRecord, decision: Decision, outcome: Outcome, world: int) -> None:
        """Stores a record; skips one that is here already, or that no recovery needs.

        Raises:
            ConfigError: the record is too large, or names a rank that the job does not have.
            FormatError: the capsule has changed on its way.
            StaleEpoch: the record belongs to another history than the decision's.
            NoRoom, AttachError: the record can't be written, for lack of room or for another
                reason.
        """
        check_record(record, world)
        messages.check_capsule(record)
        version = messages.version_from(record.version)
        if not counts(version, decision):
            raise StaleEpoch(
                f"{version} of rank {record.rank} is not of the history of epoch {decision.epoch.counter}."
            )
        versions = self._files.setdefault(record.rank, {})
        if version in versions or version in capsules_to_drop([*versions, version], decision, outcome):
            return
        data = encode(self.job, record)
        self.arena.check_room(len(data))
        path = self.arena.write_file(self.job, _file_name(record.rank, version), data)
        try:
            self._open_file(path)
        except (OSError, FormatError) as error:
            raise AttachError(f"the capsule of rank {record.rank}, {version}, can't be kept: {error}.") from error

    def prune(self, decision: Decision, outcome: Outcome) -> None:
        """Removes the capsules that no recovery can need any more."""
        for rank, versions in self._files.items():
            for version in capsules_to_drop(versions, decision, outcome):
                self._drop(rank, version)

    def headers(self) -> list[pb.CapsuleHeader]:
        """Returns the headers of all capsules here, for an inventory."""
        return [
            pb.CapsuleHeader(
                rank=rank, version=messages.version_to(version), unreplicated_bytes=file.unreplicated_bytes
            )
            for rank, versions in sorted(self._files.items())
            for version, file in sorted(versions.items(), key=lambda item: item[0].order)
        ]

    def get(self, rank: int, version: Version) -> pb.CapsuleRecord | None:
        """Returns a rank's record; None if it is not here or is damaged.

        Raises:
            OSError: the record can't be read for now.
        """
        file = self._files.get(rank, {}).get(version)
        if file is None:
            return None
        try:
            return self._read(file.path.name, file.descriptor)
        except (OSError, FormatError) as error:
            if is_shortage(error):
                raise
            _set_aside(file.path, error)
            self._drop(rank, version)
            return None

    def free(self) -> None:
        """Removes all capsules of the job."""
        self.arena.held_bytes -= self.newer_bytes  # their files go with the job's folder
        self.newer_bytes = 0
        for rank, versions in self._files.items():
            for version in list(versions):
                self._drop(rank, version)

    def _read(self, name: str, descriptor: int) -> pb.CapsuleRecord:
        size = os.fstat(descriptor).st_size
        if size > BODY_MAX + HEAD.size + CHECKSUM.size:
            raise FormatError(f"{size} bytes; a capsule's record has at most {BODY_MAX} bytes.")
        job, record = decode(os.pread(descriptor, size, 0))
        if job != self.job or _file_name(record.rank, messages.version_from(record.version)) != name:
            raise FormatError(
                f"the file names job {job!r}, rank {record.rank}, {messages.version_from(record.version)}."
            )
        return record

    def _open_file(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            record = self._read(path.name, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        file = _CapsuleFile(path, descriptor, os.fstat(descriptor).st_size, record.unreplicated_bytes)
        self._files.setdefault(record.rank, {})[messages.version_from(record.version)] = file
        self.arena.held_bytes += file.file_bytes

    def _drop(self, rank: int, version: Version) -> None:
        file = self._files[rank].pop(version)
        self.arena.held_bytes -= file.file_bytes
        os.close(file.descriptor)
        remove_file(file.path)


def check_record(record: pb.CapsuleRecord, world: int) -> None:
    """Raises ConfigError for a record that no daemon of the job would send."""
    if record.rank >= world:
        raise ConfigError(f"a capsule of rank {record.rank} arrived; the job has {counted(world, 'rank')}.")
    if record.version.step > STEP_MAX:
        raise ConfigError(f"a capsule of step {record.version.step} arrived; the highest step is {STEP_MAX}.")
    for what, size, limit in (
        ("capsule", len(record.capsule), CAPSULE_MAX),
        ("table of digests", len(record.digests), DIGESTS_MAX),
    ):
        if size > limit:
            raise ConfigError(
                f"the {what} of rank {record.rank} has {size} bytes; the limit is {limit}.",
                "keep large state in tensors of the model, or attach with larger chunks",
            )


def _file_name(rank: int, version: Version) -> str:
    return f"capsule-{rank}.{version.epoch.counter}-{version.epoch.ident.hex()}-{version.step}"


def _set_aside(path: Path, error: Exception) -> None:
    log.error("capsule %s can't be used and is renamed to *.bad: %s", path, error)
    with contextlib.suppress(OSError):  # the file may be gone already
        path.rename(path.with_name(path.name + ".bad"))
