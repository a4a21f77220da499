"""Saves what a restarted daemon must know of a job, and frees a job's memory."""

from __future__ import annotations

import logging

from reft.errors import AttachError
from reft_daemon.jobs.job_record import JobRecord

log = logging.getLogger("reft.daemon")


def save(job: JobRecord) -> None:
    """Writes the record to the arena.

    Raises:
        NoRoom, AttachError: the record can't be written, for lack of room or for another reason.
    """
    del job.record.leases[:]
    for rank, lease in job.leases.items():
        pid, start = lease.process.pid, lease.process.start
        job.record.leases.add(rank=rank, pid=pid, pid_start=start, parent=lease.parent, closed=lease.closed)
    job.arena.write_record(job.record)


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
    job.slots.close_stored()
    job.capsule_replication.store.free()
    job.slots.clear()
    job.arena.forget(job.id)
    return freed
