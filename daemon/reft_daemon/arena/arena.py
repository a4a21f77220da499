"""The arena: a node's slots as files of a tmpfs, or as memfds where the tmpfs is too small.

    DIR/                     0700, one daemon (flock on DIR/lock)
      node-id                random; an arena that starts empty is another node
      port                   the daemon's port if --listen names port 0; other nodes know this port
      JOB/record.0 …         see reft_daemon.arena.job_files
      JOB/rank-3.slot-0      see reft.wire.slot_format; memfds have no file
      JOB/parity-3.slot-0    the same, with parity that rank 3's node keeps
      JOB/record-3.slot-0    the same, with gradients that rank 3 records: reft.wire.record_format
      JOB/capsule-…          of ranks of other nodes, see reft_daemon.arena.capsule_store

A daemon that starts takes over the files here. A file that is no valid slot is renamed to *.bad,
logged, and never offered. A slot of another format, as a newer reft writes, stays under its name,
is counted and shown, and is freed only with its job, by a purge. A daemon that reads this format
takes the slot over again. Drafts of slots, *.new, which a killed daemon left, are removed. Making
slots and computing their digests take long, so the daemon runs these in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reft.core.budget import MemoryLimit, refusal
from reft.core.commit.version import Version
from reft.errors import AttachError, ConfigError, FormatError, NoRoom
from reft.failpoints import Failpoints
from reft.folders import claim_folder
from reft.wire.shm import map_file
from reft.wire.slot_format import FileSlotMap, Geometry, SlotMap, UnknownFormat
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena import limits
from reft_daemon.arena.huge_pages import make_huge
from reft_daemon.arena.job_files import (
    EARLIER_RECORD,
    RECORDS,
    FileCopy,
    JobFiles,
    check_size,
    encode_head,
    remove_file,
)
from reft_daemon.arena.pool import SpareFiles, SparePool
from reft_daemon.arena.reserve import SpaceReserve
from reft_daemon.arena.shortage import SHORTAGE_HINT, is_shortage, remedied
from reft_daemon.arena.slices import run_at_once

log = logging.getLogger("reft.daemon")
RANK, PARITY, RECORD = "rank", "parity", "record"  # kinds of slots: how their names begin
STORED = "stored"  # a file of a checkpoint, which does not lie in the arena
TMPFS, MEMFD, UNLINKED = "tmpfs", "memfd", "unlinked"
WEAKEST_FIRST = (UNLINKED, MEMFD, TMPFS)
_SLOT_NAME = rf"({RANK}|{PARITY}|{RECORD})-\d+\.slot-\d+"
DRAFT, SLICED_DRAFT = ".new", ".slices.new"
WRITE_SLICE = 4 << 20  # bytes
_OWN_FILES = ("lock", "node-id", "port")  # files beside the folders of the jobs
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass
class SlotFile:
    """One slot that the daemon holds: an open file.

    Its bytes are read and written through descriptors, and never mapped: a process that cuts the
    file can't end the daemon.
    """

    name: str
    rank: int
    descriptor: int
    path: Path | None  # None for a memfd
    file_bytes: int
    _map: SlotMap | None  # None: the slot was freed
    damaged: Version | None = None  # the version whose bytes the scrub found changed

    @property
    def map(self) -> SlotMap:
        """The parts of the slot.

        Raises:
            FormatError: see `check_size`.
        """
        self.check_size()
        assert self._map is not None, "check_size refuses slots that were freed"
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
        """Raises FormatError if the slot was freed, or its file was cut."""
        if self.descriptor < 0:
            raise FormatError(f"slot {self.name} was freed.")
        if (nbytes := os.fstat(self.descriptor).st_size) < self.file_bytes:
            raise FormatError(f"slot {self.name} was cut to {nbytes} of {self.file_bytes} bytes.")

    async def pread(self, size: int, offset: int) -> bytes:
        """Reads bytes of the slot's file."""
        return os.pread(self.descriptor, size, offset)

    def digests(self) -> np.ndarray:
        """Computes the digests of all chunks from the slot's bytes; uint64 [chunks]."""
        return np.fromiter(self.map.digests_of(0, self.map.chunks), np.uint64, self.map.chunks)

    def free(self) -> None:
        """Gives the memory back, once trainers and threads that use the slot are done, too."""
        if self.path:
            remove_file(self.path)
        os.close(self.descriptor)
        self.descriptor, self._map = -1, None  # a reader that has this object must not reach another file


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


class Arena:
    """The slots below one folder.

    Args:
        folder: made if it is missing.
        budget_bytes: --memory; 0 means that only the machine limits the arena.
        spare: see `reft_daemon.arena.pool`.
        failpoints: let tests end this daemon between a record and what follows.

    Raises:
        ConfigError: the folder can't be used, or holds files that no arena has made.
        AttachError: another daemon uses the folder, or the file system takes no file.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        spare: SpareFiles = SpareFiles(),  # noqa: B008  frozen
        failpoints: Failpoints | None = None,
    ) -> None:
        remedy = f"make {folder.parent} writable, and room in it, or name another tmpfs with --dir (REFT_DIR)"
        with remedied("slots", folder, remedy):
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
        with remedied("slots", folder, remedy):
            self._lock = lock_file(folder / "lock", "arena")
        self.reserve = SpaceReserve(folder)
        self.job_files = JobFiles(folder, self.write_files)
        self.node_id = self._node_id()
        if not limits.is_tmpfs(folder):
            log.warning("slots lie in %s, which is not a tmpfs: the kernel writes them to a disk", folder)

    def _node_id(self) -> str:
        path = self.folder / "node-id"
        if not path.exists():
            run_at_once(self._write({path: (secrets.token_hex(8).encode(),)}, DRAFT, _always))
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
        run_at_once(self._write({self.folder / "port": (str(port).encode(),)}, DRAFT, _always))

    def write_file(self, job: str, name: str, data: bytes) -> Path:
        """Writes a small file into the job's folder; see `write_files`."""
        self.write_files(job, {name: data})
        return self.folder / job / name

    def write_files(self, job: str, files: Mapping[str, bytes]) -> None:
        """Replaces small files in the job's folder: all of them, or none if there is no room.

        A reader sees each whole old file or whole new one.

        Args:
            job: name of the job.
            files: name → content. The first one is replaced first.

        Raises:
            NoRoom, AttachError: they can't be written, for lack of room or for another reason.
        """
        run_at_once(_write_in_folder(self, job, {name: (data,) for name, data in files.items()}, DRAFT, _always))

    def _write(
        self, files: Mapping[Path, Sequence[bytes]], draft: str, may_replace: Callable[[], bool]
    ) -> Generator[None, None, bool]:
        try:
            return (yield from _replace(files, draft, may_replace))
        except OSError as error:
            with contextlib.suppress(OSError):
                if error.errno == errno.ENOSPC and self.reserve.release():
                    return (yield from _replace(files, draft, may_replace))
            free, path = limits.file_system_free(self._lock), next(iter(files))
            nbytes = sum(len(part) for parts in files.values() for part in parts)
            raise _no_room_or_attach_error(
                error,
                f"{nbytes} bytes can't be written to {path}: {error.strerror}; {free} are free.",
                f"make room in {self.folder.parent}, or give the daemon another tmpfs with --dir (REFT_DIR)",
            ) from error

    def adopt(self, job: str) -> tuple[list[SlotFile], dict[str, int]]:
        """Opens the slots that earlier daemons left of `job`.

        Returns:
            The slots, and name → bytes of the slots of another format. These stay as they are: the
            reft that wrote them may come again. Only a purge of the job frees them.

        Raises:
            OSError: a slot can't be opened for now.
        """
        folder, slots, unreadable = self.folder / job, list[SlotFile](), dict[str, int]()
        for path in sorted(folder.glob("*-*.slot-*.new")):
            if re.fullmatch(rf"{_SLOT_NAME}\.new", path.name):
                log.warning("draft %s of a daemon that died is removed", path)
                remove_file(path)
        for path in sorted(folder.glob("*-*.slot-*.format-*")):  # as an earlier reft renamed them
            if not (original := path.with_suffix("")).exists():
                path.rename(original)
        for path in sorted(folder.glob("*-*.slot-*[0-9]")):
            if not re.fullmatch(_SLOT_NAME, path.name):
                continue
            try:
                slots.append(self._open(job, path))
            except UnknownFormat as error:
                log.error("slot %s stays as it is: %s", path, error)
                unreadable[path.name] = path.stat().st_size
                self.held_bytes += unreadable[path.name]
            except (OSError, FormatError) as error:
                if is_shortage(error):
                    raise
                log.error("slot %s can't be used and is renamed to *.bad: %s", path, error)
                path.rename(path.with_name(f"{path.name}.bad"))
        return slots, unreadable

    def _open(self, job: str, path: Path) -> SlotFile:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            slot = _slot_of(path.name, path, descriptor, os.fstat(descriptor).st_size)
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
            slot = _slot_of(name, None, descriptor, stats.st_size)
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
        folder = _claim_job_folder(self, job)
        in_tmpfs = limits.file_system_free(folder) + self.pool.ready_bytes(len(geometries)) >= need_bytes
        # counted before the slots exist, so that no spare files take the same memory
        self.held_bytes += need_bytes
        new_slots: list[SlotFile] = []
        try:
            with _running_on(cpus):
                for name, geometry in geometries.items():
                    new_slots.append(self._make_slot(job, rank, folder / name if in_tmpfs else None, name, geometry))
        except Exception as error:
            unmade_bytes = need_bytes - sum(slot.file_bytes for slot in new_slots)
            self.held_bytes -= unmade_bytes  # only now: the event loop may count a capsule during the sum
            for slot in new_slots:
                self.free(slot)
            if not isinstance(error, OSError | RuntimeError):  # RuntimeError: no thread can be started
                raise
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
        slot: SlotFile | None = None
        try:
            _make_pages(descriptor, size, name)
            if not path:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            slot = SlotFile(name, rank, descriptor, path, size, FileSlotMap.create_in(descriptor, geometry, job, rank))
            if path:
                draft.rename(path)
        except BaseException as error:
            slot = None  # the error's traceback holds this frame, and would hold the memory
            os.close(descriptor)
            if path:
                remove_file(draft)
            if isinstance(error, FormatError):  # another process has cut the file
                raise OSError(errno.EIO, error.message) from error
            raise
        return slot

    def free(self, slot: SlotFile) -> None:
        """Frees one slot."""
        slot.free()
        self.held_bytes -= slot.file_bytes

    def forget(self, job: str) -> None:
        """Removes the folder of a job whose slots are freed."""
        self.job_files.forget(job)

    def read_records(self) -> list[pb.JobRecord]:
        """Returns the jobs' records, and counts the memory of damaged jobs; see `JobFiles.read`."""
        records = self.job_files.read()
        self.held_bytes += sum(damaged.held_bytes for damaged in self.job_files.damaged.values())
        return records

    def free_damaged(self, job: str) -> int:
        """Frees a job whose record is damaged; returns the number of bytes."""
        nbytes = self.job_files.damaged[job].held_bytes
        self.held_bytes -= nbytes
        self.forget(job)
        return nbytes

    def close(self) -> None:
        """Releases the folder; removes it if it holds no job any more."""
        self.pool.close()
        self.reserve.close()
        # also empty where somebody has removed the folder
        if not any(path.is_dir() for path in self.folder.glob("*")):
            for name in _OWN_FILES:
                remove_file(self.folder / name)
            with contextlib.suppress(OSError):  # files of others keep the folder
                self.folder.rmdir()
        os.close(self._lock)


def _make_pages(descriptor: int, size: int, name: str) -> None:
    """Makes all pages of a file. They are huge pages where the kernel allows it."""
    present_bytes = os.fstat(descriptor).st_size  # bytes of a spare file; 0 for a new file
    if present_bytes < size:
        os.ftruncate(descriptor, size)
    # No byte of this mapping is touched: the kernel makes the pages. So a cut file is an error.
    huge = make_huge(descriptor, map_file(descriptor, size)[1], present_bytes)
    os.posix_fallocate(descriptor, 0, size)
    log.info("%s: %d bytes, %d of them made as huge pages", name, size, huge)


def _slot_of(name: str, path: Path | None, descriptor: int, size: int) -> SlotFile:
    slot_map = FileSlotMap(descriptor)
    return SlotFile(name, slot_map.header.rank, descriptor, path, size, slot_map)


def _foreign_name(folder: Path) -> str:
    """Returns the name of a file that no arena has made.

    The name is empty if there is none. A folder with a node-id belonged to an arena before: it
    always counts as clean.
    """
    if (folder / "node-id").exists():
        return ""
    drafts = {f"{name}.new" for name in _OWN_FILES}
    for path in sorted(folder.iterdir()):
        names = (*RECORDS, EARLIER_RECORD)
        is_job_folder = path.is_dir() and (any((path / name).exists() for name in names) or not any(path.iterdir()))
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


def _no_room_or_attach_error(error: OSError | RuntimeError, message: str, hint: str) -> AttachError:
    """Returns NoRoom if memory or the file system is short, else AttachError.

    For NoRoom the daemon drops ended jobs, which helps against no other error.
    """
    if _is_lack_of_room(error):
        return NoRoom(message, hint)
    return AttachError(message, SHORTAGE_HINT if is_shortage(error) else "")


def _is_lack_of_room(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM)


def write_record(
    arena: Arena, record: pb.JobRecord, sequence: int, may_write: Callable[[], bool]
) -> Generator[None, None, bool]:
    """Replaces a job's record, both copies, in slices. All is replaced in the last slice.

    Between the slices the record before is in force, and another write may replace that one.

    Args:
        arena: where the job's files lie.
        record: the record; nobody changes it meanwhile.
        sequence: `JobFiles.next_sequence`, from before the record was made.
        may_write: asked in the last slice.

    Returns:
        Whether the record was written: False if another write has begun since `sequence`, if the
        job was forgotten, or if `may_write` says no.

    Raises:
        NoRoom, AttachError: the record can't be written; the one before stays.
    """
    job, job_files = record.manifest.job, arena.job_files
    copy = FileCopy(sequence, record.SerializeToString())
    yield
    head = encode_head(copy)
    check_size(job, len(head) + len(copy.body))
    files = dict.fromkeys(RECORDS, (head, copy.body))
    try:
        is_written = yield from _write_in_folder(
            arena, job, files, SLICED_DRAFT, lambda: job_files.is_newest(job, sequence) and may_write()
        )
    except AttachError:
        if job_files.is_newest(job, sequence):
            raise
        return False  # perhaps the folder was removed with the job
    if is_written:
        job_files.drop_earlier(job)
    return is_written


def _write_in_folder(
    arena: Arena, job: str, files: Mapping[str, Sequence[bytes]], draft: str, may_replace: Callable[[], bool]
) -> Generator[None, None, bool]:
    """Replaces files of a job, see `_replace`. A new folder goes if that fails.

    Raises:
        NoRoom, AttachError: they can't be written; nothing was replaced.
    """
    folder = _claim_job_folder(arena, job)
    try:
        return (yield from arena._write({folder / name: parts for name, parts in files.items()}, draft, may_replace))
    except BaseException:
        with contextlib.suppress(OSError):  # a folder that is not new holds other files
            folder.rmdir()
        raise


def _claim_job_folder(arena: Arena, job: str) -> Path:
    """Makes a job's folder if it is missing.

    Raises:
        NoRoom, AttachError: it can't be made, or others may write it.
    """
    folder = arena.folder / job
    try:
        return claim_folder(folder)
    except OSError as error:
        kind = NoRoom if _is_lack_of_room(error) else AttachError
        raise kind(
            f"the folder {folder} can't be made for job {job}: {error.strerror}.",
            f"look what lies in its place, make room in {folder.parent}, or give the daemon another tmpfs with --dir (REFT_DIR)",
        ) from error
    except ConfigError as error:  # somebody has changed the folder; the caller has passed nothing wrong
        raise AttachError(error.message, error.hint) from error


def _always() -> bool:
    return True


def _replace(
    files: Mapping[Path, Sequence[bytes]], draft: str, may_replace: Callable[[], bool]
) -> Generator[None, None, bool]:
    """Writes all files as drafts, in slices, then renames them in the last slice.

    Args:
        files: path → content, in parts. The first file is replaced first.
        draft: what the names of the drafts end in. Writes with other drafts may come between.
        may_replace: asked before the drafts are renamed.

    Returns:
        Whether the files were replaced, as `may_replace` says.

    Raises:
        OSError: nothing was replaced.
    """
    drafts = {path.with_name(path.name + draft): path for path in files}
    (first, target), *others = drafts.items()
    try:
        for each, path in drafts.items():
            descriptor = os.open(each, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                for part in files[path]:
                    for begin in range(0, len(part), WRITE_SLICE):
                        file.write(memoryview(part)[begin : begin + WRITE_SLICE])
                        yield
        if not may_replace():
            return False
        first.rename(target)
        for each, path in others:
            try:
                each.rename(path)
            except OSError as error:  # the first file counts: somebody has removed the draft, or the folder
                log.error("%s can't be replaced, %s was: %s", path, target, error)
        return True
    finally:
        for each in drafts:  # none is left of those that were renamed
            each.unlink(missing_ok=True)


def write_pins(arena: Arena, record: pb.JobRecord) -> None:
    """Replaces a job's pins, without the rest of its record.

    Raises:
        NoRoom, AttachError: see `JobFiles.write_pins`.
    """
    arena.job_files.write_pins(record)
    protected = record.pins.protected if record.pins.HasField("protected") else -1
    arena._failpoints.hit("record.pins", step=protected, epoch=record.decision.epoch.counter)
