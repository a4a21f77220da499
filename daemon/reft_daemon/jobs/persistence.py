"""Saves what a restarted daemon must know of a job, and frees a job's memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from reft.errors import AttachError
from reft.wire.process import machine
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease

log = logging.getLogger("reft.daemon")


def save(job: JobRecord) -> None:
    """Writes the record to the arena.

    Raises:
        NoRoom, AttachError: the record can't be written, for lack of room or for another reason.
    """
    add_leases(job.record, job.leases)
    job.arena.job_files.write(job.record)


def add_leases(record: pb.JobRecord, leases: Mapping[int, Lease]) -> None:
    """Replaces the leases of a record."""
    del record.leases[:]
    record.machine = machine()
    for rank, lease in leases.items():
        process, closed, failed = lease.process, lease.closed, lease.failed
        record.leases.add(
            rank=rank, pid=process.pid, pid_start=process.start, parent=lease.parent, closed=closed, failed=failed
        )


def save_or_log(job: JobRecord) -> None:
    """Saves facts that only a restarted daemon needs.

    A failure is logged: this daemon can go on.
    """
    try:
        save(job)
    except AttachError as error:
        log.error("job=%s the record can't be saved, a restarted daemon may lack it: %s", job.id, error)


def free(job: JobRecord) -> int:
    """Frees all slots, capsules and the record of a job; returns the number of bytes."""
    freed = job.held_bytes
    job.allocator.drop()
    for lease in job.leases.values():
        if lease.watch:
            lease.watch.close()
    for slot in job.slots.files.values():
        job.arena.free(slot)
    unreadable_bytes = sum(job.slots.unreadable.values())  # a thread may count a slot while this sums up
    job.arena.held_bytes -= unreadable_bytes
    job.slots.close_stored()
    job.capsule_replication.store.free()
    job.slots.clear()
    job.arena.forget(job.id)
    return freed
