"""Capsules that this node keeps for ranks of other nodes: one file a (rank, version) in the job's folder of the arena.

    JOB/capsule-3.2-<id of the epoch, hex>-17      rank 3, epoch 2, step 17

    offset    what                 size
    0         the struct HEAD      84      magic, format major and minor, job, size of the body
    84        checksum             8       xxh3_64 of head and body, little-endian
    92        body                 …       protobuf CapsuleRecord

Each stays open: if somebody removes the files, what they hold stays as long as this process, as slots do.
A file is written whole and renamed into place, so a daemon that dies leaves all of it or a draft that the next one removes.
A file that is no capsule, or not the one that its name says, is renamed to *.bad, reported, and never offered: it is an
erasure. Everything here runs in the event loop: a record has at most 9 MiB, and mostly a few KiB.
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

from reft.core.commit.capsules import DIGESTS_MAX, surplus
from reft.core.commit.decision import Decision, counts
from reft.core.commit.round import Outcome
from reft.core.commit.version import Version
from reft.core.text import counted
from reft.errors import AttachError, ConfigError, FormatError, StaleEpoch
from reft.wire import messages
from reft.wire.slot_format import CAPSULE_MAX
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.shortage import is_shortage

log = logging.getLogger("reft.daemon")
MAGIC: Final = b"REFTCAPS"
MAJOR: Final = 1
MINOR: Final = 0
HEAD: Final = struct.Struct("<8sHH64sQ")
CHECKSUM: Final = struct.Struct("<Q")
BODY_MAX: Final = CAPSULE_MAX + DIGESTS_MAX + 4096  # what is neither capsule nor digests takes far less than a page


def encode(job: str, record: pb.CapsuleRecord) -> bytes:
    """The bytes of a capsule's file."""
    body = record.SerializeToString()
    head = HEAD.pack(MAGIC, MAJOR, MINOR, job.encode(), len(body))
    return head + CHECKSUM.pack(_checksum(head, body)) + body


def decode(data: bytes) -> tuple[str, pb.CapsuleRecord]:
    """The job and the record that a capsule's file holds.

    Raises:
        FormatError: it is no such file, was cut or changed, or has a newer major version.
    """
    begin = HEAD.size + CHECKSUM.size
    if len(data) < begin or data[:8] != MAGIC:
        raise FormatError("this is not a capsule: the magic number is missing.")
    _, major, minor, job, size = HEAD.unpack_from(data)
    if major > MAJOR:
        raise FormatError(f"the capsule has format {major}.{minor}; this reft reads up to {MAJOR}.")
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
class _Kept:
    path: Path
    descriptor: int
    file_bytes: int
    unreplicated_bytes: int


@dataclass
class CapsuleStore:
    """The capsules of one job that lie here.

    Args:
        arena: where their files lie; their bytes count in its held_bytes.
        job: whose.
    """

    arena: Arena
    job: str
    _kept: dict[int, dict[Version, _Kept]] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        return sum(each.file_bytes for versions in self._kept.values() for each in versions.values())

    def adopt(self) -> None:
        """Takes over what an earlier daemon of this arena kept.

        Raises:
            OSError: it can't be opened for now.
        """
        for path in sorted((self.arena.folder / self.job).glob("capsule-*")):
            if path.suffix == ".bad":
                continue
            if path.suffix == ".new":
                path.unlink()  # its daemon died before it was whole, and so it was never acknowledged
                continue
            try:
                self._take(path)
            except (OSError, FormatError) as error:
                if is_shortage(error):
                    raise
                _set_aside(path, error)

    def keep(self, record: pb.CapsuleRecord, decision: Decision, outcome: Outcome, world: int) -> None:
        """Stores a record; one that is here already, or that nobody will ask for, changes nothing.

        Raises:
            ConfigError: it is larger than a capsule may be, or of a rank that the job does not have.
            StaleEpoch: it belongs to another history than the decision's.
            NoRoom, AttachError: it can't be written, for lack of room or for another reason.
        """
        check_record(record, world)
        version = messages.version_from(record.version)
        if not counts(version, decision):
            raise StaleEpoch(
                f"{version} of rank {record.rank} is not of the history of epoch {decision.epoch.counter}."
            )
        versions = self._kept.setdefault(record.rank, {})
        if version in versions or version in surplus([*versions, version], decision, outcome):
            return
        data = encode(self.job, record)
        self.arena.check_room(len(data))
        path = self.arena.write_file(self.job, _name(record.rank, version), data)
        try:
            self._take(path)
        except (OSError, FormatError) as error:
            raise AttachError(f"the capsule of rank {record.rank}, {version}, can't be kept: {error}.") from error

    def prune(self, decision: Decision, outcome: Outcome) -> None:
        """Lets go of what no recovery can need any more."""
        for rank, versions in self._kept.items():
            for version in surplus(versions, decision, outcome):
                self._drop(rank, version)

    def copies(self) -> list[pb.CapsuleHeader]:
        """What is kept, for an inventory."""
        return [
            pb.CapsuleHeader(
                rank=rank, version=messages.version_to(version), unreplicated_bytes=each.unreplicated_bytes
            )
            for rank, versions in sorted(self._kept.items())
            for version, each in sorted(versions.items(), key=lambda item: item[0].order)
        ]

    def get(self, rank: int, version: Version) -> pb.CapsuleRecord | None:
        """A rank's record; None if it is not kept, or turns out to be damaged.

        Raises:
            OSError: it can't be read for now.
        """
        each = self._kept.get(rank, {}).get(version)
        if each is None:
            return None
        try:
            return self._read(each.path.name, each.descriptor)
        except (OSError, FormatError) as error:
            if is_shortage(error):
                raise
            _set_aside(each.path, error)
            self._drop(rank, version)
            return None

    def free(self) -> None:
        """Lets go of everything."""
        for rank, versions in self._kept.items():
            for version in list(versions):
                self._drop(rank, version)

    def _read(self, name: str, descriptor: int) -> pb.CapsuleRecord:
        size = os.fstat(descriptor).st_size
        if size > BODY_MAX + HEAD.size + CHECKSUM.size:
            raise FormatError(f"{size} bytes; a capsule's record has at most {BODY_MAX} bytes.")
        job, record = decode(os.pread(descriptor, size, 0))
        if job != self.job or _name(record.rank, messages.version_from(record.version)) != name:
            raise FormatError(f"it says job {job!r}, rank {record.rank}, {messages.version_from(record.version)}.")
        return record

    def _take(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            record = self._read(path.name, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        kept = _Kept(path, descriptor, os.fstat(descriptor).st_size, record.unreplicated_bytes)
        self._kept.setdefault(record.rank, {})[messages.version_from(record.version)] = kept
        self.arena.held_bytes += kept.file_bytes

    def _drop(self, rank: int, version: Version) -> None:
        each = self._kept[rank].pop(version)
        self.arena.held_bytes -= each.file_bytes
        os.close(each.descriptor)
        each.path.unlink(missing_ok=True)


def check_record(record: pb.CapsuleRecord, world: int) -> None:
    """Raises ConfigError for a record that no daemon of the job would send."""
    if record.rank >= world:
        raise ConfigError(f"a capsule of rank {record.rank} came; the job has {counted(world, 'rank')}.")
    if record.version.step > messages.STEP_MAX:
        raise ConfigError(f"a capsule of step {record.version.step} came; steps end at {messages.STEP_MAX}.")
    for what, size, limit in (
        ("capsule", len(record.capsule), CAPSULE_MAX),
        ("table of digests", len(record.digests), DIGESTS_MAX),
    ):
        if size > limit:
            raise ConfigError(
                f"the {what} of rank {record.rank} has {size} bytes; the limit is {limit}.",
                "keep large state in tensors of the model, or attach with larger chunks",
            )


def _name(rank: int, version: Version) -> str:
    return f"capsule-{rank}.{version.epoch.counter}-{version.epoch.ident.hex()}-{version.step}"


def _set_aside(path: Path, error: Exception) -> None:
    log.error("capsule %s can't be used, it is kept as *.bad: %s", path, error)
    with contextlib.suppress(OSError):  # it may be gone
        path.rename(path.with_name(path.name + ".bad"))
