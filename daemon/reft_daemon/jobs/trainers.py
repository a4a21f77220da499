"""Watches the trainers of a job, and seals what an ended trainer left.

lease ─► watched ── session closed ──► released ─┐
                 └─ process died ────────────────┴─► saved, RANKS put ─► LANDED slots SEALED
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable

from reft.core.commit.slots import SlotState
from reft.errors import FormatError
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import SlotFile
from reft_daemon.arena.headers import header_of
from reft_daemon.jobs import leases, rounds
from reft_daemon.jobs.changes import ChangeKind
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease, ProcessWatch
from reft_daemon.jobs.persistence import save_or_log

log = logging.getLogger("reft.daemon")


def watch(job: JobRecord, rank: int, lease: Lease) -> None:
    """Watches the rank's trainer.

    Raises:
        OSError: the trainer can't be watched; nothing was changed.
    """
    with contextlib.suppress(ProcessLookupError):
        lease.watch = ProcessWatch(lease.process, lambda: note_end(job, rank, lease))
    job.leases[rank] = lease
    if lease.watch is None:
        note_end(job, rank, lease)


async def end_orphans(job: JobRecord, launch: str, pids: Iterable[int], by: str) -> None:
    """Ends orphans of this job: no process may write slots while an attach reads them.

    Args:
        job: the job.
        launch: of the attach.
        pids: of the processes that attach.
        by: who calls, for the audit lines.

    Raises:
        AlreadyAttached, AttachError: see `leases.end_orphans`.
    """
    await leases.end_orphans(job.id, job.leases, launch == job.record.manifest.launch, set(pids), launch, by)
    await asyncio.gather(*(seal_landed(job, rank) for rank in list(job.leases)))


def release(job: JobRecord, request: pb.ReleaseRequest, pid: int) -> None:
    """Ends a rank's lease: its session was closed, or its attach was refused.

    The slots stay for the job's time to live.

    Args:
        job: the job.
        request: the request.
        pid: of the caller.

    Raises:
        StaleEpoch: the rank belongs to an older attach.
    """
    job.check_epoch(request.epoch)
    lease = job.leases.get(request.rank)
    if lease and (not request.refused or lease.process.pid == pid):
        lease.closed, lease.failed, lease.refused = not request.refused, request.failed, request.refused
        if lease.watch:
            lease.watch.close()
        note_end(job, request.rank, lease)


def note_trouble(jobs: Iterable[JobRecord], pid: int, trouble: str) -> None:
    """Notes why a trainer's reports are refused, until one of its reports is taken.

    Args:
        jobs: all jobs; the reports can't be read.
        pid: of the trainer.
        trouble: the reason, perhaps with a remedy.
    """
    for job in jobs:
        for rank, lease in job.leases.items():
            if lease.process.pid == pid and lease.watch is not None and lease.trouble != trouble:
                log.warning("job=%s rank=%d reports are refused: %s", job.id, rank, trouble)
                lease.trouble = trouble


def note_end(job: JobRecord, rank: int, lease: Lease) -> None:
    """Notes that a rank's trainer has ended, and begins to seal its slots.

    After the last one no new layout is decided here: the pin ends, as a restarted daemon forgets.
    A flush to storage would wait for ever otherwise, and with it the slots.
    """
    lease.watch = None
    job.ended_s = time.monotonic()
    if job.round is not None and not job.is_live:
        job.round.is_pinned = False
    how = "closed" if lease.closed else "was refused" if lease.refused else "died"
    how += " after an exception" if lease.failed else ""
    level = logging.INFO if lease.has_ended_well else logging.WARNING
    log.log(level, "job=%s rank=%d trainer pid=%d %s", job.id, rank, lease.process.pid, how)
    save_or_log(job)
    job.changes.put(job.id, ChangeKind.RANKS)
    task = asyncio.ensure_future(seal_landed(job, rank))
    task.add_done_callback(_log_failure)


async def seal_landed(job: JobRecord, rank: int) -> None:
    """Digests and seals the slots that a dead trainer left LANDED.

    WRITING slots are torn, and stay so.
    """
    for slot in job.slots.of_rank(rank):
        header = header_of(job.id, slot)
        if header is None or header.state is not SlotState.LANDED:
            continue
        try:
            digests = await asyncio.to_thread(slot.digests)
            if slot.map.reread().state is SlotState.LANDED:
                slot.map.sealed(digests)
                log.info("job=%s rank=%d sealed %s for its ended trainer", job.id, rank, slot.map.header.version)
        except FormatError as error:
            log.error("job=%s rank=%d %s can't be sealed: %s", job.id, rank, header.version, error)
    rounds.report_sealed_slots(job, rank)


def take_back(job: JobRecord, slot: SlotFile) -> None:
    """Takes a memfd that a trainer returned after this daemon's restart.

    A trainer that can't tell a restart from a long silence returns all its memfds.
    """
    if slot.name in job.slots.files:
        job.arena.free(slot)
        return
    job.slots.add([slot])
    if slot.rank in job.leases:
        job.leases[slot.rank].given_slots.add(slot.name)
    rounds.report_sealed_slots(job, slot.rank)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("sealing the slots of an ended trainer failed: %s", task.exception())
