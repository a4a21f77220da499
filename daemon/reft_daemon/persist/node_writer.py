"""This node's part of checkpoints: its own slots, written by the persister.

Persist(version, attempt) ─► a new attempt: the one before ends ─► the persister writes the slots
                          ─► the same attempt: how far it is
                          ─► a smaller attempt: late; nothing changes
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.core.persist.stored_names import is_lineage
from reft.errors import ConfigError, FormatError, ReftError
from reft.wire import messages
from reft.wire.manifest import placement_of
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.headers import header_of
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.persist.persister import Persister
from reft_daemon.persist.slot_copy import SlotRange, SlotSource, stored_bytes

log = logging.getLogger("reft.daemon")
_END: Final = 1 << 62


@dataclass
class NodePart:
    """What this node writes of a checkpoint.

    Attributes:
        version: the version.
        attempt: of the coordinator.
        task: ends with the work.
        written_bytes: so far.
        total_bytes: of this node; 0: not known yet.
        index_digest: once all is written.
        error: why it has failed.
    """

    version: Version
    attempt: int
    task: asyncio.Task[None] | None = None
    written_bytes: int = 0
    total_bytes: int = 0
    index_digest: str = ""
    error: str = ""


class NodeWriter:
    """Writes this node's slots of all jobs, each job's newest attempt.

    Args:
        persister: None: this daemon does not write to storage.
    """

    def __init__(self, persister: Persister | None) -> None:
        self.persister = persister
        self._parts: dict[str, NodePart] = {}

    async def persist(self, job: JobRecord, request: pb.PersistRequest) -> pb.PersistReply:
        """Begins this node's part of a checkpoint; returns how far it is.

        A part that was begun before goes on.

        Raises:
            ConfigError: this daemon does not write to storage.
        """
        if self.persister is None or not is_lineage(request.lineage) or request.lineage != job.record.manifest.lineage:
            raise ConfigError(f"this daemon can't persist job {job.id}.", "start each daemon with --persist DIR")
        version, part = messages.version_from(request.version), self._parts.get(job.id)
        if part is None or part.attempt < request.attempt:
            earlier = part.task if part is not None else None
            if earlier is not None:
                earlier.cancel()
            part = self._parts[job.id] = NodePart(version, request.attempt)
            part.task = asyncio.ensure_future(self._write(job, job.record, part, earlier))
        elif part.attempt > request.attempt:
            return pb.PersistReply(error=f"attempt {part.attempt} is under way.")
        return pb.PersistReply(
            written_bytes=part.written_bytes, total_bytes=part.total_bytes, index_digest=part.index_digest,
            error=part.error,
        )  # fmt: skip

    def end_earlier(self, job: JobRecord) -> None:
        """Ends the work of an earlier epoch of the job."""
        part = self._parts.get(job.id)
        if part is not None and part.version.epoch != job.epoch:
            self.drop(job.id)

    def drop(self, name: str) -> None:
        """Ends the work for a job."""
        if name in self._parts and (task := self._parts.pop(name).task) is not None:
            task.cancel()

    def close(self) -> None:
        """Ends all work, and does not wait for it."""
        for name in list(self._parts):
            self.drop(name)

    async def _write(
        self, job: JobRecord, record: pb.JobRecord, part: NodePart, earlier: asyncio.Task[None] | None
    ) -> None:
        """Writes this node's slots, or notes why not."""
        assert self.persister is not None
        if earlier is not None:
            await asyncio.wait({earlier})

        def note(nbytes: int) -> None:
            part.written_bytes = nbytes

        try:
            manifest, index = record.manifest, record.node_index
            ranges = await asyncio.to_thread(stored_ranges, manifest, index)
            slots, part.total_bytes = slots_to_store(job, part.version, ranges)
            place = index, part.attempt
            part.index_digest = await self.persister.write(job.id, manifest.lineage, part.version, place, slots, note)
            part.written_bytes = part.total_bytes
        except Exception as error:  # also a bug: the coordinator would ask for this attempt for ever
            if not isinstance(error, ReftError | OSError | ValueError):
                log.error("job=%s %s can't be written", job.id, part.version, exc_info=error)
            part.error = error.message if isinstance(error, ReftError) else str(error) or repr(error)


def stored_ranges(manifest: pb.Manifest, node_index: int) -> dict[int, list[SlotRange]]:
    """Returns rank → the bytes of its slots' data that go to storage.

    Parity is left out: it can be computed again.

    Raises:
        FormatError, ValueError: the manifest contradicts itself.
    """
    ranks = manifest.nodes[node_index].ranks
    if not manifest.layouts:
        return {rank: [SlotRange(0, _END)] for rank in ranks}
    placement = placement_of(manifest)
    parts = {rank: placement.rank_placement(rank) for rank in ranks}
    return {
        rank: [SlotRange(0, part.parity_offset), SlotRange(part.unreplicated_offset, _END)]
        for rank, part in parts.items()
    }


def slots_to_store(
    job: JobRecord, version: Version, ranges: Mapping[int, list[SlotRange]]
) -> tuple[list[SlotSource], int]:
    """Returns this node's slots of a version, and how many bytes go to storage.

    Raises:
        FormatError: a rank has no such slot here.
    """
    sources, nbytes = [], 0
    for rank in sorted(ranges):
        for slot in job.slots.of_rank(rank):
            header = header_of(job.id, slot)
            if header is not None and header.state is SlotState.SEALED and header.version == version:
                sources.append(SlotSource(rank, slot.descriptor, ranges[rank]))
                nbytes += stored_bytes(header, ranges[rank])
                break
        else:
            raise FormatError(f"no slot of rank {rank} has {version} any more.")
    return sources, nbytes
