"""Lists checkpoints, and keeps files of one open for a restore.

    attach        daemon                                 persister
    Stored      ─► list, load ──────────────────────────► every decision and manifest of the job
    OpenStored  ─► open ────────────────────────────────► opens files, or fetches objects;
                   ◄ how far it is, each HOLD_S             verifies their heads
                   slots of the job, kind STORED ◄─────── descriptors, and heads as memfds
    Inventory   ─► lists them as slots
    Decide      ─► the job takes them over; they are closed when a step of its epoch is whole

Invariants
  1. The daemon never opens, lists or stats storage. It reads data by descriptors, in threads of
     their own: storage that hangs stops these threads alone, and the daemon's end joins none.
  2. A stored slot is read-only. It is never leased, written, moved, scrubbed or rebuilt.
  3. Storage that can't be listed is an error, never an empty answer.
  4. The persister has verified the head of each file. So a chunk that differs is found by the
     digests of its slot, where it is read, like a chunk of any other slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from reft.core.commit.decision import Decision
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.core.membership.job_identity import check_name
from reft.core.persist.storage_url import is_url
from reft.core.persist.stored_names import checkpoint_name, is_lineage
from reft.errors import AttachError, ConfigError, FormatError
from reft.wire import messages
from reft.wire import stored_format as stored
from reft.wire.slot_format import slot_of_head
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import STORED, Arena, SlotFile
from reft_daemon.child.control_channel import DESCRIPTORS_MAX, ControlMessage, version_of
from reft_daemon.persist.persister import Persister, StorageFailed
from reft_daemon.persist.reader_pool import ReaderPool

log = logging.getLogger("reft.daemon")
LIST_S: Final = 60.0  # for one answer
PENDING_S: Final = 900.0  # opened files that no attach has taken over are closed after this time
HOLD_S: Final = 20.0  # that an answer waits for the files; objects take longer
READERS: Final = 4  # threads that read storage for other nodes
GONE: Final = (errno.ENOENT, errno.ESTALE)  # a checkpoint that retention has removed meanwhile


@dataclass
class StoredSlotFile(SlotFile):
    """A file of a checkpoint, open and read-only.

    Attributes:
        pool: of the threads that read the file.
        memory: counts the file, if it was fetched into memory.
        fetched_bytes: that `memory` counts.
    """

    pool: ReaderPool | None = None
    memory: Arena | None = None
    fetched_bytes: int = 0

    def free(self) -> None:
        """Closes the file."""
        super().free()
        if self.memory is not None:
            self.memory.held_bytes -= self.fetched_bytes

    def check_size(self) -> None:
        """Raises FormatError if the file was closed; does not ask storage, which may hang."""
        if self.descriptor < 0:
            raise FormatError(f"slot {self.name} was closed.")

    async def pread(self, size: int, offset: int) -> bytes:
        """Reads bytes of the file in a thread."""
        assert self.pool is not None, "the reader of checkpoints makes each such slot with one"
        return await self.pool.pread(self.descriptor, size, offset)


@dataclass
class OpeningTask:
    """Files of one job that are being opened.

    Attributes:
        request: which ones.
        task: opens them.
        asked_s: when an attach asked last.
        fetched_bytes: into memory, so far.
    """

    request: pb.OpenStoredRequest
    task: asyncio.Task[pb.OpenStoredReply]
    asked_s: float
    fetched_bytes: int = 0


class StoredReader:
    """Lists and opens checkpoints through the persister.

    Args:
        persister: of this daemon; None: this daemon has no storage.
        memory: counts what is fetched into memory; None: nobody counts it.

    Attributes:
        opened: job → name → slot, until the job's next decision.
    """

    def __init__(self, persister: Persister | None, memory: Arena | None = None) -> None:
        self._persister = persister
        self._memory = memory
        self._opening: dict[str, OpeningTask] = {}
        self._pool = ReaderPool(READERS)
        self._opened_s: dict[str, float] = {}
        self.opened: dict[str, dict[str, StoredSlotFile]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no files are open, or being opened, for an attach."""
        return not self._opening and not self.opened

    async def stored(self, request: pb.StoredRequest) -> pb.StoredReply:
        """Returns what storage holds of a job; with a name, that checkpoint's manifest.

        With a lineage alone it returns what that lineage holds.

        Raises:
            ConfigError: this daemon has no storage, or a name can't be one of storage.
            StorageFailed: storage can't be listed.
        """
        check_name(request.job)
        reply = pb.StoredReply(directory=str(self._persister.root) if self._persister else "")
        if not request.name:
            answer = await self._call({"do": "list", "job": request.job, "lineage": request.lineage})
            reply.lineages.extend(map(_lineage_of, json.loads(_text_of(answer)[0])))
            return reply
        _check_checkpoint(request.lineage, request.name)
        fields = {"do": "load", "job": request.job, "lineage": request.lineage, "name": request.name}
        answer = await self._call(fields, may_be_damaged=True)
        reply.damage = answer.get("error", "")
        if not reply.damage:
            manifest, ranks = _text_of(answer)
            reply.manifest.ParseFromString(stored.decode_manifest(manifest).job_manifest)
            reply.ranks.extend(json.loads(ranks))
        return reply

    async def store_decision(self, job: str, lineage: str, decision: Decision) -> None:
        """Keeps a decision on storage that no daemon has yet: a person goes back.

        Raises:
            ConfigError: this daemon has no storage, or the name is no lineage.
            StorageFailed: it is not on storage.
        """
        if self._persister is None or not is_lineage(lineage):
            raise ConfigError("this daemon has no storage (--persist), or the job is not persisted.")
        await self._persister.decide(job, lineage, decision)
        log.warning("job=%s goes back to %s, by reft-cli recover --step", job, decision.base)

    async def open(self, request: pb.OpenStoredRequest) -> pb.OpenStoredReply:
        """Opens files of a checkpoint, in place of those that are open for the job.

        With `asks_again` it returns after HOLD_S at the latest, perhaps with `opening`. The same
        request again waits on.

        Raises:
            ConfigError: this daemon has no storage, or a name can't be one of storage.
            StorageFailed: storage does not answer, or fails.
            AttachError: another attach has asked for other files meanwhile.
        """
        _check_checkpoint(request.lineage, request.name)
        opening = self._opening.get(request.job)
        if opening is None or opening.request != request:
            self.close_pending(request.job)
            task = asyncio.ensure_future(self._open(request))
            opening = self._opening[request.job] = OpeningTask(request, task, time.monotonic())
        opening.asked_s = time.monotonic()
        if not (await asyncio.wait({opening.task}, timeout=HOLD_S if request.asks_again else None))[0]:
            return pb.OpenStoredReply(opening=True, fetched_bytes=opening.fetched_bytes)
        if self._opening.get(request.job) is opening:
            del self._opening[request.job]
        if opening.task.cancelled():  # to a call that ends as cancelled gRPC sends no answer at all
            raise AttachError(f"the files for job {request.job} are opened for another attach now.", "attach again")
        return await opening.task

    async def _open(self, request: pb.OpenStoredRequest) -> pb.OpenStoredReply:
        def note(nbytes: int) -> None:
            if request.job in self._opening:
                self._opening[request.job].fetched_bytes = fetched_bytes + nbytes

        fetched_bytes = 0
        opened: dict[str, StoredSlotFile] = {}
        version = messages.version_from(request.version)
        step = DESCRIPTORS_MAX // 2  # a file and its head each
        try:
            for first in range(0, len(request.ranks), step):
                ranks = list(request.ranks[first : first + step])
                fields = {
                    "do": "open",
                    "job": request.job,
                    "lineage": request.lineage,
                    "name": request.name,
                    "ranks": ranks,
                }
                answer = await self._call(fields, may_be_damaged=True, note=note)
                if "error" in answer:
                    raise FormatError(answer["error"])
                self._add(opened, request.job, version, ranks, answer["descriptors"])
                self._count(list(opened.values())[first:], answer["fetched_bytes"])
                fetched_bytes += answer["fetched_bytes"]
        except BaseException as error:
            for slot in opened.values():
                slot.free()
            if isinstance(error, FormatError):
                return pb.OpenStoredReply(damage=error.message)
            raise
        self.opened[request.job], self._opened_s[request.job] = opened, time.monotonic()
        return pb.OpenStoredReply()

    def _add(
        self, opened: dict[str, StoredSlotFile], job: str, version: Version, ranks: Sequence[int],
        descriptors: Sequence[int],
    ) -> None:  # fmt: skip
        """Adds slots for files that were opened; `descriptors` has each file, then its head."""
        with contextlib.ExitStack() as undo:
            for descriptor in descriptors:
                undo.callback(os.close, descriptor)
            slots = []
            for rank, file, head in zip(ranks, descriptors[::2], descriptors[1::2], strict=True):
                slot = slot_of_head(_bytes_of(head), file)
                header = slot.header
                if (header.job, header.rank, header.version, header.state) != (job, rank, version, SlotState.SEALED):
                    raise FormatError(
                        f"the file of rank {rank} has {header.version} of rank {header.rank} of {header.job}."
                    )
                name = f"{STORED}-{rank}.slot-{version.step}"
                slots.append(StoredSlotFile(name, rank, file, None, header.geometry.file_bytes, slot, pool=self._pool))
            undo.pop_all()
        for head in descriptors[1::2]:
            os.close(head)
        opened.update((slot.name, slot) for slot in slots)

    def _count(self, slots: Sequence[StoredSlotFile], fetched_bytes: int) -> None:
        """Counts what was fetched into memory, with one of the slots that it belongs to."""
        if slots and self._memory is not None:
            slots[0].memory, slots[0].fetched_bytes = self._memory, fetched_bytes
            self._memory.held_bytes += fetched_bytes

    def capsule(self, job: str, rank: int, version: Version) -> pb.CapsuleRecord | None:
        """Returns the capsule of a file that is open for a job's next attach.

        Raises:
            FormatError: the capsule is damaged.
        """
        for slot in self.opened.get(job, {}).values():
            if slot.rank == rank and slot.map.header.version == version:
                return pb.CapsuleRecord(
                    rank=rank,
                    version=messages.version_to(version),
                    capsule=slot.map.capsule(),
                    capsule_digest=slot.map.header.capsule_digest,
                )
        return None

    def take(self, job: str) -> dict[str, StoredSlotFile]:
        """Returns the slots that are open for a job; the caller owns them."""
        self._opened_s.pop(job, None)
        return self.opened.pop(job, {})

    def close_pending(self, job: str) -> None:
        """Closes the files that no decision has taken over, and opens no more."""
        if opening := self._opening.pop(job, None):
            opening.task.cancel()
        for slot in self.take(job).values():
            slot.free()

    def expire(self, now_s: float) -> None:
        """Closes files whose attach has ended without a decision."""
        asked = {**self._opened_s, **{job: opening.asked_s for job, opening in self._opening.items()}}
        for job in [job for job, asked_s in asked.items() if now_s - asked_s > PENDING_S]:
            self.close_pending(job)

    def close(self) -> None:
        """Closes all files."""
        for job in {*self.opened, *self._opening}:
            self.close_pending(job)
        self._pool.close()

    async def _call(
        self, fields: Mapping[str, Any], may_be_damaged: bool = False, note: Callable[[int], None] | None = None
    ) -> ControlMessage:
        """Returns the persister's answer.

        With `may_be_damaged`, an answer that says so is returned, too.

        Raises:
            ConfigError: this daemon has no storage.
            StorageFailed: storage does not answer, or fails.
        """
        if self._persister is None:
            raise ConfigError("this daemon has no storage.", "start reft-daemon with --persist DIR")
        root = self._persister.root
        look = (
            "the network, and the credentials in this daemon's environment"
            if is_url(root)
            else "that the folder is there, mounted, and can be read"
        )
        remedy = f"check {look}; without it reft starts nothing from step 0"
        try:
            answer = await self._persister.ask(fields, LIST_S, note=note)
        except StorageFailed as error:
            raise StorageFailed(f"storage {root} does not answer: {error.message}", remedy) from error
        if "error" in answer and not (may_be_damaged and (answer["damaged"] or answer["errno"] in GONE)):
            raise StorageFailed(f"storage {root} can't be read: {answer['error']}.", remedy)
        return answer


def _lineage_of(row: Mapping[str, Any]) -> pb.StoredLineage:
    now_s = time.time()
    return pb.StoredLineage(
        ident=row["ident"],
        has_ended=row["has_ended"],
        decisions=[pb.Decision.FromString(bytes.fromhex(each)) for each in row["decisions"]],
        checkpoints=[
            pb.StoredCheckpoint(
                name=each["name"],
                version=messages.version_to(version_of(each["version"])),
                age_s=max(now_s - each["time_s"], 0.0),
            )
            for each in row["checkpoints"]
        ],
    )


def _text_of(answer: ControlMessage) -> list[bytes]:
    """Returns the texts of an answer's memfds, and closes them."""
    texts = []
    for descriptor in answer["descriptors"]:
        texts.append(_bytes_of(descriptor))
        os.close(descriptor)
    return texts


def _bytes_of(memfd: int) -> bytes:
    with open(memfd, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def _check_checkpoint(lineage: str, name: str) -> None:
    """Raises ConfigError if these are no names of folders that reft makes: they become a path."""
    if not is_lineage(lineage) or checkpoint_name(name) is None:
        raise ConfigError(f"lineage {lineage!r} with checkpoint {name!r} can't be on storage.")
