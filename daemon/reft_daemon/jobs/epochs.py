"""Begins an epoch of a job: by the decision of an attach, or by adoption after a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping

from reft.core.commit.decision import Decision
from reft.core.commit.pins import Pins
from reft.core.commit.relayout import accepts_base
from reft.core.commit.version import Version
from reft.core.recovery.restart_loop import next_count
from reft.errors import AttachError, StaleEpoch
from reft.wire import messages
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs import parity, rounds, trainers
from reft_daemon.jobs.capsule_replication import NodePlacement
from reft_daemon.jobs.changes import ChangeKind
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease, refuse_living
from reft_daemon.jobs.persistence import save
from reft_daemon.jobs.undo import record_to_keep

log = logging.getLogger("reft.daemon")


def decide(
    job: JobRecord,
    request: pb.DecideRequest,
    placement: NodePlacement = NodePlacement(),  # noqa: B008  frozen
) -> None:
    """Takes the decision of a new attach, or of a new layout.

    A repeated decision changes nothing.

    Trainers that decide a new layout stay registered. They have ended their snapshots, so they
    write no slot that they were given before.

    Args:
        job: the job of the decision.
        request: the decision.
        placement: what the placement says about this node: the nodes that keep the capsules of its
            ranks from now on, and the lanes of the exchange.

    Raises:
        StaleEpoch: a decision of a newer epoch is in force.
        AlreadyAttached: a trainer of the earlier epoch lives, and could overwrite what the new
            attach reads.
        AttachError: the base of a new layout is older than a version that is known to be whole, or
            the guard older than one that is known to be protected.
    """
    if not is_new(job.record, request):
        return
    kept_leases = leases_to_keep(job.leases, request.trainers)
    refuse_living(job.id, {rank: lease for rank, lease in job.leases.items() if rank not in kept_leases})
    if kept_leases:
        check_kept(job, messages.decision_from(request.decision))
    before = record_to_keep(job)
    # a new layout restores nothing, and after a person's choice counting begins anew
    restores = job.restores if kept_leases else None if request.goes_back else restores_with(job, request)
    job.record = next_record(job.record, request, placement.holders)
    if restores is not None:
        job.record.restores.CopyFrom(restores)
    if request.goes_back:
        log.warning("job=%s goes back to %s, by reft-cli recover --step", job.id, request.decision.base.step)
    else:  # a refused attach undoes its own decision, not a person's
        job.record.before.CopyFrom(before)
    job.leases = kept_leases
    for lease in kept_leases.values():
        lease.given_slots.clear()
    job.guard_lanes, job.sections = placement.guard_lanes, placement.sections
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
    parity.place(job)
    rounds.start(job)
    for entry in job.record.leases:
        lease = job.leases[entry.rank] = Lease(Process(entry.pid, entry.pid_start), entry.parent, closed=entry.closed)
        lease.given_slots.update(slot.name for slot in job.slots.current_of_rank(entry.rank))
    # only after all leases are known: the end of a trainer writes the record
    for rank, lease in list(job.leases.items()):
        if not lease.closed:
            trainers.watch(job, rank, lease)
    job.since_s = job.ended_s  # this daemon has not seen when the dead ones ended
    for rank in job.ranks:
        rounds.report_sealed_slots(job, rank)
    job.changes.put(job.id, ChangeKind.RANKS)  # the slots may hold news for the other nodes
    job.changes.put(job.id, ChangeKind.EPOCH)


def check_kept(job: JobRecord, decision: Decision) -> None:
    """Raises AttachError if this daemon may have freed the base or the guard.

    Then the base is older than a version that is whole, or the guard older than one that is
    protected, or was. This daemon can have forgotten the pin in a restart, and can have learnt of a
    newer version then.
    """
    pins = job.round.outcome.pins if job.round else Pins()
    whole, protected = (Version(job.epoch, step) if step >= 0 else None for step in (pins.whole, pins.guarded_step))
    if not accepts_base(decision.base, whole):
        raise AttachError(f"the base of the new layout is {decision.base}, but {whole} of job {job.id} is whole.")
    if decision.guard is not None and not accepts_base(decision.guard, protected):
        raise AttachError(f"the guard of the new layout is {decision.guard}, but {protected} was protected.")


# Decisions


def leases_to_keep(leases: Mapping[int, Lease], trainers: Collection[int]) -> dict[int, Lease]:
    """Returns the leases of living trainers that decide for themselves.

    Args:
        leases: rank → its trainer.
        trainers: pids of the trainers that decide.
    """
    return {rank: lease for rank, lease in leases.items() if lease.watch and lease.process.pid in trainers}


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
    decision = messages.decision_from(request.decision)
    return pb.JobRecord(
        manifest=request.manifest,
        decision=request.decision,
        node_index=request.node_index,
        had_whole=record.had_whole or decision.base is not None,
        base_manifest=earlier_manifest(record, request, decision.base),
        guard_manifest=guard_manifest(record, request, decision),
        holders=holders,
        dropped=request.dropped,
        not_recomputed=record.not_recomputed,
    )


def restores_with(job: JobRecord, request: pb.DecideRequest) -> pb.RestoreCount | None:
    """Returns the count of restores with this decision; None for a fresh start."""
    before = messages.restores_from(job.restores) if job.restores is not None else None
    count = next_count(before, messages.decision_from(request.decision).base, job.reached)
    return None if count is None else messages.restores_to(count)


def guard_manifest(record: pb.JobRecord, request: pb.DecideRequest, decision: Decision) -> pb.Manifest | None:
    """Returns the manifest of the guard's epoch; None if the base has the same."""
    if decision.guard is None or (decision.base is not None and decision.guard.epoch == decision.base.epoch):
        return None
    return earlier_manifest(record, request, decision.guard)


def earlier_manifest(record: pb.JobRecord, request: pb.DecideRequest, kept: Version | None) -> pb.Manifest | None:
    """Returns the manifest of an earlier version's epoch; None if it is unknown.

    The decision may contain the manifest. Otherwise this daemon may know it from earlier decisions.
    """
    if kept is None:
        return None
    known = {**messages.manifests_from(record), **messages.manifests_from(request)}
    return known.get(kept.epoch)
