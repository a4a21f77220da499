"""Begins an epoch of a job: by the decision of an attach, or by adoption after a restart."""

from __future__ import annotations

import time
from collections.abc import Iterable

from reft.core.commit.version import Version
from reft.core.recovery.restart_loop import next_count
from reft.errors import StaleEpoch
from reft.wire import messages
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs import rounds, trainers
from reft_daemon.jobs.changes import ChangeKind
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease, refuse_living
from reft_daemon.jobs.persistence import save
from reft_daemon.jobs.undo import record_to_keep


def decide(job: JobRecord, request: pb.DecideRequest, holders: Iterable[int]) -> None:
    """Takes the decision of a new attach; a repeated decision changes nothing.

    Args:
        job: the job of the decision.
        request: the decision.
        holders: the nodes that keep the capsules of this node's ranks from now on.

    Raises:
        StaleEpoch: a decision of a newer epoch is in force.
        AlreadyAttached: a trainer of the earlier epoch lives, and could overwrite what the new
            attach reads.
    """
    if not is_new(job.record, request):
        return
    refuse_living(job.id, job.leases)
    before, restores = record_to_keep(job), restores_with(job, request)
    job.record = next_record(job.record, request, holders)
    if restores is not None:
        job.record.restores.CopyFrom(restores)
    job.record.before.CopyFrom(before)
    job.leases.clear()
    rounds.start(job)
    save(job)
    job.degraded.start_epoch(job.record)
    job.since_s = job.ended_s = time.monotonic()
    job.changes.put(job.id, ChangeKind.EPOCH)


def adopt(job: JobRecord) -> None:
    """Takes over slots, living trainers and the epoch's round from an earlier daemon.

    Raises:
        OSError: a slot, a capsule or a trainer can't be examined for now.
    """
    job.degraded.start_epoch(job.record)
    job.slots.add(job.arena.adopt(job.id))
    job.capsule_replication.store.adopt()
    rounds.start(job)
    for entry in job.record.leases:
        lease = job.leases[entry.rank] = Lease(Process(entry.pid, entry.pid_start), entry.parent, closed=entry.closed)
        lease.given_slots.update(slot.name for slot in job.slots.current_of_rank(entry.rank))
    # only after all leases are known: the end of a trainer writes the record
    for rank, lease in list(job.leases.items()):
        if not lease.closed:
            trainers.watch(job, rank, lease)
    for rank in job.ranks:
        rounds.report_sealed_slots(job, rank)
    job.changes.put(job.id, ChangeKind.RANKS)  # the slots may hold news for the other nodes


# Decisions


def is_new(record: pb.JobRecord, request: pb.DecideRequest) -> bool:
    """Whether a decision begins an epoch; False if it is in force already.

    Raises:
        StaleEpoch: a decision of a newer epoch is in force.
    """
    if not record.HasField("decision"):
        return True
    now, new = record.decision.epoch, request.decision.epoch
    if messages.epoch_from(new) == messages.epoch_from(now):
        return False
    if new.counter <= now.counter:
        raise StaleEpoch(f"epoch {new.counter} of job {record.manifest.job} is over; epoch {now.counter} is in force.")
    return True


def next_record(record: pb.JobRecord, request: pb.DecideRequest, holders: Iterable[int]) -> pb.JobRecord:
    """Returns the record of the epoch that a decision begins.

    Args:
        record: of the job until now.
        request: the decision.
        holders: the nodes that keep the capsules of this node's ranks.
    """
    base = messages.decision_from(request.decision).base
    return pb.JobRecord(
        manifest=request.manifest,
        decision=request.decision,
        node_index=request.node_index,
        had_whole=record.had_whole or base is not None,
        base_manifest=base_manifest(record, request, base),
        holders=holders,
        dropped=request.dropped,
    )


def restores_with(job: JobRecord, request: pb.DecideRequest) -> pb.RestoreCount | None:
    """Returns the count of restores with this decision; None for a fresh start."""
    before = messages.restores_from(job.restores) if job.restores is not None else None
    count = next_count(before, messages.decision_from(request.decision).base, job.reached)
    return None if count is None else messages.restores_to(count)


def base_manifest(record: pb.JobRecord, request: pb.DecideRequest, base: Version | None) -> pb.Manifest | None:
    """Returns the manifest under which the base was written; None if it is unknown.

    The decision may contain the manifest. Otherwise this daemon may know it from earlier decisions.
    """
    if request.HasField("base_manifest"):
        return request.base_manifest
    if base is None or not record.HasField("decision"):
        return None
    if base.epoch == messages.epoch_from(record.decision.epoch):
        return record.manifest
    # No version became whole since the last attach. So both decisions have the same base.
    earlier_base = messages.decision_from(record.decision).base
    is_same = earlier_base is not None and earlier_base.epoch == base.epoch and record.HasField("base_manifest")
    return record.base_manifest if is_same else None
