"""Undoes a decision whose attach was refused, so that a refused attach changes nothing.

    decide ─► the record before is kept in the new record ─┬─► a version is whole: forgotten
                                                           └─► attach raises on every rank: undo

    job before the decision     after undo
    failed, ended               the same: manifest, decision, leases, slots of the base
    new here                    purged by the registry

Until the first trainer of the epoch gets slots, nothing that the record before needs is emptied or
freed. After that, versions older than the base, and slots that the plan has dropped, may be gone.
The base and the guard stay: see `slots.is_superfluous`.

Some nodes may undo the decision while others can't. Then a daemon of the decision's own nodes has a
lower decision, so the decision does not count (`reft/core/recovery/lineage.py`). No version of its
epoch can be whole: on the nodes that undo, no rank has written a slot.
"""

from __future__ import annotations

import logging
import time

from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.headers import header_of
from reft_daemon.jobs import parity, rounds
from reft_daemon.jobs.changes import ChangeKind
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import lease_from
from reft_daemon.jobs.persistence import save_or_log

log = logging.getLogger("reft.daemon")


def record_to_keep(job: JobRecord) -> pb.JobRecord:
    """Returns the record that a refused attach brings back.

    It is the record in force, or the record before it if no slot was written since. The caller
    copies the record, without its own record before.
    """
    return job.record.before if job.record.HasField("before") and not was_written(job) else job.record


def was_written(job: JobRecord) -> bool:
    """Whether a rank here has written a slot in the epoch in force."""
    headers = (header_of(job.id, slot) for slot in job.slots.all.values())
    return any(header and header.version and header.version.epoch == job.epoch for header in headers)


def may_undo(job: JobRecord) -> bool:
    """Whether the decision in force has no trainer here, and none has written a slot."""
    return job.record.HasField("before") and not job.is_live and not was_written(job)


def undo(job: JobRecord) -> None:
    """Brings back the record before the decision in force."""
    refused = job.epoch
    if not job.may_be_refused:
        _free_empty(job)
    job.slots.close_stored()  # the next attach opens its own: fetched objects are memory
    before = pb.JobRecord()
    before.CopyFrom(job.record.before)
    job.record = before
    # All these trainers had ended before the decision came.
    job.leases = {entry.rank: lease_from(entry) for entry in before.leases}
    job.slots.add([job.slots.retired.pop(name) for name in list(job.slots.retired)])
    job.round = None
    parity.place(job)
    rounds.start(job)
    if job.round is not None:
        for rank in job.ranks:
            rounds.report_sealed_slots(job, rank)
    job.degraded.start_epoch(job.record)
    job.since_s = job.ended_s = time.monotonic()
    save_or_log(job)
    job.changes.put(job.id, ChangeKind.EPOCH)
    log.warning(
        "job=%s the attach of epoch %d was refused: %s", job.id, refused.counter,
        f"epoch {messages.epoch_from(before.decision.epoch).counter} is in force again"
        if before.HasField("decision") else "the job is dropped",
    )  # fmt: skip


def _free_empty(job: JobRecord) -> None:
    """Frees the slots that the refused attach got, which may be large."""
    for slots in (job.slots.current, job.slots.retired):
        for name, slot in list(slots.items()):
            header = header_of(job.id, slot)
            if header is not None and header.version is None:
                job.arena.free(slots.pop(name))
