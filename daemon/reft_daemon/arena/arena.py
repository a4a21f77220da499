"""The arena: a node's slots as files of a tmpfs, or as memfds where the tmpfs is too small.

    DIR/                     0700, one daemon (flock on DIR/lock)
      node-id                random; an arena that starts empty is another node
      port                   the daemon's port if --listen names port 0; other nodes know this port
      JOB/record             JobRecord, replaced whole
      JOB/rank-3.slot-0      see reft.wire.slot_format; memfds have no file
      JOB/parity-3.slot-0    the same, with parity that rank 3's node keeps
      JOB/record-3.slot-0    the same, with gradients that rank 3 records: reft.wire.record_format
      JOB/capsule-…          of ranks of other nodes, see reft_daemon.arena.capsule_store

A daemon that starts takes over the files here. A file that is no valid slot is renamed to *.bad,
logged, and never offered. A slot of another format, as a newer reft writes, is renamed to
*.format-MAJOR; a daemon that reads this format takes the slot over again. Making slots and
computing their digests take long, so the daemon runs these in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from reft.core.budget import MemoryLimit, refusal
from reft.core.commit.version import Version
from reft.core.membership.job_identity import check_name
from reft.errors import AttachError, ConfigError, FormatError, NoRoom
from reft.failpoints import Failpoints
from reft.wire.messages import MANIFEST_MAX
from reft.wire.shm import advise, map_file
from reft.wire.slot_format import PAGE, READABLE, Bytes, Geometry, SlotMap, UnknownFormat
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena import limits
from reft_daemon.arena.huge_pages import make_huge
from reft_daemon.arena.pool import SpareFiles, SparePool
from reft_daemon.arena.reserve import SpaceReserve
from reft_daemon.arena.shortage import is_shortage

log = logging.getLogger("reft.daemon")
PINS_DIGEST_BYTES = 8  # before the pins in their file
RECORD_MAX = 2 * (2 * MANIFEST_MAX + (1 << 20))  # bytes: a record and the one before, each with two manifests
RANK, PARITY, RECORD = "rank", "parity", "record"  # kinds of slots: how their names begin
STORED = "stored"  # a file of a checkpoint, which does not lie in the arena
TMPFS, MEMFD, UNLINKED = "tmpfs", "memfd", "unlinked"
WEAKEST_FIRST = (UNLINKED, MEMFD, TMPFS)
_OWN_FILES = ("lock", "node-id", "port")  # files beside the folders of the jobs
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass
class SlotFile:
    """One slot that the daemon holds: the open file and its mapping."""

    name: str
    rank: int
    descriptor: int
    path: Path | None  # None for a memfd
    file_bytes: int
    _map: SlotMap
    damaged: Version | None = None  # the version whose bytes the scrub found changed

    @property
    def map(self) -> SlotMap:
        """The parts of the slot.

        Raises:
            FormatError: see `check_size`.
        """
        self.check_size()
        return self._map

    @property
    def is_parity(self) -> bool:
        """Whether the slot is for parity of the exchange. Then no trainer writes it."""
        return self.name.startswith(f"{PARITY}-")

    @property
    def is_record(self) -> bool:
        """Whether the slot is for gradient records. Then it holds no state of a rank."""
        return self.name.startswith(f"{RECORD}-")

    @property
    def is_stored(self) -> bool:
        """Whether the slot is a file on storage. Then nothing writes it."""
        return self.name.startswith(f"{STORED}-")

    @property
    def backing(self) -> str:
        """Where the slot's bytes lie: TMPFS, MEMFD or UNLINKED.

        UNLINKED: somebody else removed the file. The bytes stay until this process ends.
        """
        if not self.path:
            return MEMFD
        return TMPFS if os.fstat(self.descriptor).st_nlink else UNLINKED

    def check_size(self) -> None:
        """Raises FormatError if the slot was freed, or its file was cut.

        Touching the mapping of a cut file would kill the daemon.
        """
        if self.descriptor < 0:
            raise FormatError(f"slot {self.name} was freed.")
        if os.fstat(self.descriptor).st_size < self.file_bytes:
            raise FormatError(f"slot {self.name} was cut to {os.fstat(self.descriptor).st_size} bytes.")

    async def pread(self, size: int, offset: int) -> bytes:
        """Reads bytes of the slot's file."""
        return os.pread(self.descriptor, size, offset)

    def digests(self) -> np.ndarray:
        """Computes the digests of all chunks from the slot's bytes; uint64 [chunks]."""
        return np.fromiter(self.map.digests_of(0, self.map.chunks), np.uint64, self.map.chunks)

    def free(self) -> None:
        """Gives the memory back, once the trainer's mapping is gone too."""
        if self.path:
            self.path.unlink(missing_ok=True)
        os.close(self.descriptor)
        self.descriptor = -1  # a reader that still has this object must not reach another file


def fits(have: Geometry, want: Geometry) -> bool:
    """Whether a slot of geometry `have` can serve as one of geometry `want`."""
    return (
        have.chunk_bytes == want.chunk_bytes
        and have.table_capacity >= want.table_capacity
        and have.data_capacity >= want.data_capacity
    )


def next_names(taken: Iterable[str], rank: int, count: int, kind: str = RANK) -> list[str]:
    """Returns `count` unused names for slots of a rank."""
    rank_names = [name for name in taken if name.startswith(f"{kind}-{rank}.")]
    serial = 1 + max((int(name.rpartition("-")[2]) for name in rank_names), default=-1)
    return [f"{kind}-{rank}.slot-{serial + i}" for i in range(count)]


def claim_folder(folder: Path) -> Path:
    """Makes the folder if it is missing. It checks that only this user can write the folder.

    Raises:
        ConfigError: the folder is a link, belongs to another user, or others may write it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stats = folder.lstat()
    if not stat.S_ISDIR(stats.st_mode):
        raise ConfigError(f"{folder} is not a folder.", "name another path")
    if stats.st_uid != os.getuid():
        raise ConfigError(
            f"{folder} belongs to uid {stats.st_uid}, you are {os.getuid()}.", "name a folder of your own"
        )
    if stats.st_mode & 0o022:
        raise ConfigError(f"others may write {folder} (mode {stats.st_mode & 0o777:o}).", f"chmod 700 {folder}")
    return folder


class Arena:
    """The slots below one folder.

    Args:
        folder: made if it is missing.
        budget_bytes: --memory; 0 means that only the machine limits the arena.
        spare: see `reft_daemon.arena.pool`.
        failpoints: let tests end this daemon between a record and what follows.

    Raises:
        ConfigError: the folder can't be used, or holds files that no arena has made.
        AttachError: another daemon uses the folder.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        spare: SpareFiles = SpareFiles(),  # noqa: B008  frozen
        failpoints: Failpoints | None = None,
    ) -> None:
        self.folder = claim_folder(folder)
        if foreign := _foreign_name(folder):
            raise ConfigError(
                f"{folder} holds files that are not reft's, such as {foreign}; slots would be mixed with them.",
                "name an empty folder of a tmpfs, or a new one",
            )
        self.budget_bytes = budget_bytes
        self._failpoints = failpoints or Failpoints()
        self.held_bytes = 0
        # held while slots are made: one request at a time checks for free memory and takes it
        self.allocation_lock = asyncio.Lock()
        self.pool = SparePool(spare, folder, lambda: self.held_bytes, self._limits_of_spare)
        self._lock = lock_file(folder / "lock", "arena")
        self.reserve = SpaceReserve(folder)
        self.node_id = self._node_id()
        if not limits.is_tmpfs(folder):
            log.warning("slots lie in %s, which is not a tmpfs: the kernel writes them to a disk", folder)

    def _node_id(self) -> str:
        path = self.folder / "node-id"
        if not path.exists():
            self._write(path, secrets.token_hex(8).encode())
        return path.read_text()

    @property
    def port(self) -> int:
        """The previous daemon's TCP port, which other nodes still call; 0 if there was none."""
        try:
            return int((self.folder / "port").read_text())
        except (OSError, ValueError):
            return 0

    @port.setter
    def port(self, port: int) -> None:
        self._write(self.folder / "port", str(port).encode())

    def records(self) -> list[pb.JobRecord]:
        """Reads the job records that earlier daemons left.

        An invalid record is logged, and stays where it is.

        Raises:
            OSError: a record can't be opened for now.
        """
        records = []
        for path in sorted(self.folder.glob("*/record")):
            try:
                if path.stat().st_size > RECORD_MAX:
                    raise ValueError(f"{path.stat().st_size} bytes; the limit is {RECORD_MAX}")
                record = pb.JobRecord.FromString(path.read_bytes())
                if check_name(record.manifest.job) != path.parent.name:
                    raise ValueError(f"it names job {record.manifest.job!r}")
                if record.node_index >= max(len(record.manifest.nodes), 1):
                    raise ValueError(f"its manifest has no node {record.node_index}")
                _take_pins(record, path.with_name("pins"))
                records.append(record)
            except Exception as error:
                if is_shortage(error):
                    raise
                log.error("record %s can't be read, so the slots of its job are not offered: %s", path, error)
        return records

    def write_record(self, record: pb.JobRecord) -> None:
        """Replaces a job's record.

        A reader sees the whole old record or the whole new one.
        """
        self.write_file(record.manifest.job, "record", record.SerializeToString())

    def write_file(self, job: str, name: str, data: bytes) -> Path:
        """Writes a small file into the job's folder.

        A reader sees the whole old file or the whole new one.

        Raises:
            NoRoom, AttachError: the file can't be written, for lack of room or for another reason.
        """
        path = claim_folder(self.folder / job) / name
        self._write(path, data)
        return path

    def _write(self, path: Path, data: bytes) -> None:
        try:
            _replace(path, data)
        except OSError as error:
            with contextlib.suppress(OSError):
                if error.errno == errno.ENOSPC and self.reserve.release():
                    _replace(path, data)
                    return
            free = limits.file_system_free(self._lock)
            raise _no_room_or_attach_error(
                error,
                f"{len(data)} bytes can't be written to {path}: {error.strerror}; {free} are free.",
                f"make room in {self.folder.parent}, or give the daemon another tmpfs with --dir (REFT_DIR)",
            ) from error

    def adopt(self, job: str) -> list[SlotFile]:
        """Opens the slots that earlier daemons left of `job`.

        Raises:
            OSError: a slot can't be opened for now.
        """
        folder, slots = self.folder / job, []
        for path in sorted(each for major in READABLE for each in folder.glob(f"*-*.slot-*.format-{major}")):
            if not (original := path.with_suffix("")).exists():
                path.rename(original)
        for path in sorted(folder.glob("*-*.slot-*[0-9]")):
            if not re.fullmatch(rf"({RANK}|{PARITY}|{RECORD})-\d+\.slot-\d+", path.name):
                continue
            try:
                slots.append(self._open(job, path))
            except (OSError, FormatError) as error:
                if is_shortage(error):
                    raise
                suffix = f".format-{error.major}" if isinstance(error, UnknownFormat) else ".bad"
                log.error("slot %s can't be used and is renamed to *%s: %s", path, suffix, error)
                path.rename(path.with_name(path.name + suffix))
        return slots

    def _open(self, job: str, path: Path) -> SlotFile:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            slot = _map_slot(path.name, path, descriptor, os.fstat(descriptor).st_size)
            header = slot.map.header
            if header.job != job or not path.name.startswith(
                tuple(f"{kind}-{header.rank}." for kind in (RANK, PARITY, RECORD))
            ):
                raise FormatError(f"its header names job {header.job!r}, rank {header.rank}.")
            self.held_bytes += slot.file_bytes
            return slot
        except BaseException:
            os.close(descriptor)
            raise

    def take_back(self, job: str, rank: int, name: str, descriptor: int) -> SlotFile:
        """Takes a memfd that its trainer kept while the daemon was down.

        The arena owns the descriptor only if nothing is raised.

        Raises:
            FormatError: the descriptor is not a sealed memfd with a slot of that rank.
        """
        stats = os.fstat(descriptor)
        try:
            is_fixed = stat.S_ISREG(stats.st_mode) and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not is_fixed or not re.fullmatch(rf"({RANK}|{RECORD})-{rank}\.slot-\d{{1,9}}", name):
                raise FormatError(f"the descriptor for {name!r} is not a memfd of fixed size of rank {rank}.")
            slot = _map_slot(name, None, descriptor, stats.st_size)
        except OSError as error:
            raise FormatError(f"the descriptor for {name!r} is not a memfd that can be written: {error}.") from error
        if slot.map.header.job != job or slot.rank != rank:
            raise FormatError(f"the memfd's header names job {slot.map.header.job!r}, rank {slot.rank}.")
        self.held_bytes += slot.file_bytes
        return slot

    def check_room(self, need_bytes: int, slots: int = 0, who: str = "the slots need") -> None:
        """Raises NoRoom if `need_bytes` more would endanger the machine; allocates nothing.

        With `slots` 0 the bytes are a capsule's: a few KiB. Without capsules no version becomes
        whole, however many slots there are. So a capsule may use the machine's free margin, which
        slots must leave free. (Training takes memory from that margin too.)

        Args:
            need_bytes: further bytes.
            slots: the number of slots that the bytes are for.
            who: subject and verb of the message, if they are for slots.
        """
        margin = limits.MARGIN if slots else 0.0
        spare_bytes = self.pool.ready_bytes(slots)
        bounds = limits.limits(self.budget_bytes, self.held_bytes, spare_bytes=spare_bytes, margin=margin)
        reason = refusal(need_bytes, bounds, who if slots else "the capsule needs")
        if reason:
            raise NoRoom(reason)

    def room_bytes(self) -> int:
        """Returns how many bytes new slots may take now."""
        bounds = limits.limits(self.budget_bytes, self.held_bytes, spare_bytes=self.pool.bytes)
        return max(min(bound.free_bytes for bound in bounds), 0)

    def _limits_of_spare(self) -> list[MemoryLimit]:
        return limits.limits(self.budget_bytes, self.held_bytes + self.pool.bytes)

    def create(self, job: str, rank: int, geometries: Mapping[str, Geometry], cpus: list[int]) -> list[SlotFile]:
        """Makes slots with every page present, in the memory next to `cpus` (empty: anywhere).

        The caller must hold `allocation_lock`.

        Args:
            job: name of the job.
            rank: whose slots they are.
            geometries: name of each slot → its sizes.
            cpus: where the rank runs.

        Raises:
            NoRoom: the slots don't fit; nothing is left behind.
            AttachError: they can't be made for another reason; nothing is left behind.
        """
        need_bytes = sum(geometry.file_bytes for geometry in geometries.values())
        has_parity, has_records = (any(name.startswith(f"{kind}-") for name in geometries) for kind in (PARITY, RECORD))
        who = "the slots and the exchange's parity slots need" if has_parity else "the slots need"
        if has_records:
            who = "the slots for gradient records need"
        self.check_room(need_bytes, len(geometries), who)
        folder = claim_folder(self.folder / job)
        in_tmpfs = limits.file_system_free(folder) + self.pool.ready_bytes(len(geometries)) >= need_bytes
        # counted before the slots exist, so that no spare files take the same memory
        self.held_bytes += need_bytes
        new_slots: list[SlotFile] = []
        try:
            with _running_on(cpus):
                for name, geometry in geometries.items():
                    new_slots.append(self._make_slot(job, rank, folder / name if in_tmpfs else None, name, geometry))
        except OSError as error:
            self.held_bytes -= need_bytes - sum(slot.file_bytes for slot in new_slots)
            for slot in new_slots:
                self.free(slot)
            raise _no_room_or_attach_error(
                error,
                f"{geometry.file_bytes} bytes for slot {name} can't be allocated: {error}.",
                "attach with fewer slots",
            ) from error
        return new_slots

    def _make_slot(self, job: str, rank: int, path: Path | None, name: str, geometry: Geometry) -> SlotFile:
        size = geometry.file_bytes
        if path:
            # The slot gets its final name after its header. A daemon that dies here leaves no file
            # that looks like a slot.
            draft = path.with_name(f"{name}.new")
            spare_descriptor = self.pool.take(draft, size)
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(draft, flags, 0o600) if spare_descriptor is None else spare_descriptor
        else:
            descriptor = os.memfd_create(f"reft-{job}-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            pages = self._map_with_pages(descriptor, size, name)
            if not path:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            slot = SlotFile(name, rank, descriptor, path, size, SlotMap.create(pages, geometry, job, rank, descriptor))
            if path:
                draft.rename(path)
        except OSError:
            os.close(descriptor)
            if path:
                draft.unlink(missing_ok=True)
            raise
        return slot

    def _map_with_pages(self, descriptor: int, size: int, name: str) -> Bytes:
        """Maps a file and makes all its pages. They are huge pages where the kernel allows it."""
        present_bytes = os.fstat(descriptor).st_size  # bytes of a spare file; 0 for a new file
        if present_bytes < size:
            os.ftruncate(descriptor, size)
        pages = map_file(descriptor, size)[1]
        huge = make_huge(descriptor, pages, present_bytes)
        os.posix_fallocate(descriptor, 0, size)
        # the kernel's out-of-memory killer counts mapped pages against this process
        advise(pages, mmap.MADV_DONTNEED)
        log.info("%s: %d bytes, %d of them made as huge pages", name, size, huge)
        return pages

    def free(self, slot: SlotFile) -> None:
        """Frees one slot."""
        self.held_bytes -= slot.file_bytes
        slot.free()

    def forget(self, job: str) -> None:
        """Removes the folder of a job whose slots are freed."""
        shutil.rmtree(self.folder / job, ignore_errors=True)

    def close(self) -> None:
        """Releases the folder; removes it if it holds no job any more."""
        self.pool.close()
        self.reserve.close()
        # also empty where somebody has removed the folder
        if not any(path.is_dir() for path in self.folder.glob("*")):
            for name in _OWN_FILES:
                (self.folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # files of others keep the folder
                self.folder.rmdir()
        os.close(self._lock)


def _map_slot(name: str, path: Path | None, descriptor: int, size: int) -> SlotFile:
    if size < 2 * PAGE:
        raise FormatError(f"{size} bytes are too few for a slot.")
    header_map = SlotMap(map_file(descriptor, size)[1], descriptor)
    return SlotFile(name, header_map.header.rank, descriptor, path, size, header_map)


def _foreign_name(folder: Path) -> str:
    """Returns the name of a file that no arena has made.

    The name is empty if there is none. A folder with a node-id belonged to an arena before: it
    always counts as clean.
    """
    if (folder / "node-id").exists():
        return ""
    drafts = {f"{name}.new" for name in _OWN_FILES}
    for path in sorted(folder.iterdir()):
        is_job_folder = path.is_dir() and ((path / "record").exists() or not any(path.iterdir()))
        if path.name not in {*_OWN_FILES, *drafts} and not is_job_folder:
            return path.name
    return ""


def lock_file(path: Path, what: str) -> int:
    """Returns a descriptor that holds the lock on `path` until the descriptor is closed.

    Raises:
        AttachError: another process holds the lock; the message names the process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise AttachError(
            f"another reft-daemon (pid {holder or 'unknown'}) holds the {what} {path.parent}.",
            "use that daemon (reft-cli status), or start this one with another --socket and --dir",
        ) from error
    os.ftruncate(descriptor, 0)
    with contextlib.suppress(OSError):  # on a full disk the lock works without the pid, too
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


class _running_on:
    """Binds this thread to CPUs: the kernel places a page near the CPU that first touches it."""

    def __init__(self, cpus: list[int]) -> None:
        self._before = os.sched_getaffinity(0)
        self._wanted = set(cpus) & self._before or self._before

    def __enter__(self) -> None:
        os.sched_setaffinity(0, self._wanted)

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self._before)


def _no_room_or_attach_error(error: OSError, message: str, hint: str) -> AttachError:
    """Returns NoRoom if memory is short, else AttachError.

    For NoRoom the daemon drops ended jobs, which helps against no other error.
    """
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return NoRoom(message, hint)
    return AttachError(message)


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_pins(arena: Arena, record: pb.JobRecord) -> None:
    """Replaces a job's pins, without the rest of its record.

    Raises:
        NoRoom, AttachError: see `Arena.write_file`.
    """
    pins = pb.PinsRecord(epoch=record.decision.epoch, pins=record.pins).SerializeToString()
    arena.write_file(record.manifest.job, "pins", xxhash.xxh3_64_digest(pins) + pins)
    protected = record.pins.protected if record.pins.HasField("protected") else -1
    arena._failpoints.hit("record.pins", step=protected, epoch=record.decision.epoch.counter)


def _take_pins(record: pb.JobRecord, path: Path) -> None:
    """Puts a file's pins of the record's epoch into the record.

    Raises:
        ValueError: the file has changed. Older pins would let go of the protected step.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    if data[:PINS_DIGEST_BYTES] != xxhash.xxh3_64_digest(data[PINS_DIGEST_BYTES:]):
        raise ValueError(f"its pins in {path} do not fit their digest")
    saved = pb.PinsRecord.FromString(data[PINS_DIGEST_BYTES:])
    if saved.epoch == record.decision.epoch:
        record.pins.CopyFrom(saved.pins)
