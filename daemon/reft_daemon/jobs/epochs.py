"""Begins an epoch of a job: by the decision of an attach, or by adoption after a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Generator, Iterable, Mapping
from typing import NamedTuple

from reft.core.commit.decision import Decision
from reft.core.commit.pins import Pins
from reft.core.commit.relayout import accepts_base
from reft.core.commit.version import Version
from reft.core.membership.job_identity import check_name
from reft.core.recovery.restart_loop import next_count
from reft.errors import AttachError, ConfigError, StaleEpoch
from reft.wire import messages
from reft.wire.messages import MANIFEST_MAX
from reft.wire.process import machine
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import write_record
from reft_daemon.arena.slices import garbage_collection_paused
from reft_daemon.jobs import parity, rounds, trainers
from reft_daemon.jobs.capsule_replication import NodePlacement, node_placement
from reft_daemon.jobs.changes import ChangeKind
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease, lease_from, refuse_living
from reft_daemon.jobs.persistence import add_leases
from reft_daemon.jobs.undo import record_to_keep

log = logging.getLogger("reft.daemon")


def decide(
    job: JobRecord,
    request: pb.DecideRequest,
    placement: NodePlacement = NodePlacement(),  # noqa: B008  frozen
) -> Generator[None, None, bool]:
    """Takes the decision of a new attach, or of a new layout, in slices.

    If the decision is repeated, or can't be recorded, nothing changes. Records may have megabytes:

        checks, a record beside the one in force ─► … ─► drafts of its files ─► … ─► last slice
           └► others see and change the job as it was ◄────────┘                       │
                            checked again, all at once: files replaced, decision taken ◄┘

    So the decision is written before it is taken, and nobody sees a part of it. What others do
    between the slices, such as a lease, comes before the decision: the last slice checks again.
    Trainers that decide a new layout stay registered, and write no slot that they had before.

    Args:
        job: the job of the decision.
        request: the decision.
        placement: what the placement says about this node.

    Returns:
        Whether the decision is in force. False if the job has changed between the slices: nothing
        was changed here, and the decision can be tried anew.

    Raises:
        StaleEpoch: a decision of a newer epoch is in force.
        AlreadyAttached: a trainer of the earlier epoch lives, and could overwrite what the new
            attach reads.
        AttachError: the base of a new layout is older than a version that is known to be whole, or
            the guard older than one that is known to be protected; or the record can't be written.
        NoRoom: there is no room for the record.
    """
    if not is_new(job.record, request):
        return True
    sequence = job.arena.job_files.next_sequence(job.id)
    facts = _facts(job, request)
    record = yield from next_record(job.record, request, placement.holders)
    if facts.restores is not None:
        record.restores.CopyFrom(facts.restores)
    if not request.goes_back:  # a refused attach undoes its own decision, not a person's
        record.before.CopyFrom(record_to_keep(job))
        record.before.ClearField("before")
        yield
    add_leases(record, facts.kept_leases)
    # A decision that can't be written down is not taken: nothing of the job has changed yet.
    if not (yield from write_record(job.arena, record, sequence, lambda: _facts(job, request) == facts)):
        return False
    if request.goes_back:
        log.warning("job=%s goes back to %s, by reft-cli recover --step", job.id, request.decision.base.step)
    job.record, job.leases = record, facts.kept_leases
    for lease in job.leases.values():
        lease.given_slots.clear()
    job.guard_lanes, job.sections = placement.guard_lanes, placement.sections
    rounds.start(job)
    job.degraded.start_epoch(job.record)
    job.since_s = job.ended_s = time.monotonic()
    job.changes.put(job.id, ChangeKind.EPOCH)
    return True


class DecisionFacts(NamedTuple):
    """What a decision takes over from the epoch before.

    Attributes:
        kept_leases: rank → the trainer that decides a new layout, and stays.
        restores: how often the job was restored, this decision included; None: it was not.
    """

    kept_leases: dict[int, Lease]
    restores: pb.RestoreCount | None


def _facts(job: JobRecord, request: pb.DecideRequest) -> DecisionFacts:
    """Returns what a decision takes over.

    Raises:
        AlreadyAttached, AttachError: the decision can't be taken now, see `decide`.
    """
    kept_leases = leases_to_keep(job.leases, request.trainers)
    refuse_living(job.id, {rank: lease for rank, lease in job.leases.items() if rank not in kept_leases})
    if kept_leases:
        check_kept(job, messages.decision_from(request.decision))
    # a new layout restores nothing, and after a person's choice counting begins anew
    restores = job.restores if kept_leases else None if request.goes_back else restores_with(job, request)
    return DecisionFacts(kept_leases, restores)


def adopt(job: JobRecord) -> None:
    """Takes over slots, living trainers and the epoch's round from an earlier daemon.

    Raises:
        OSError: a slot, a capsule or a trainer can't be examined for now.
    """
    job.degraded.start_epoch(job.record)
    slots, job.slots.unreadable = job.arena.adopt(job.id)
    job.slots.add(slots)
    job.capsule_replication.store.adopt()
    parity.place(job)
    rounds.start(job)
    for entry in job.record.leases:
        lease = job.leases[entry.rank] = lease_from(entry)
        lease.given_slots.update(slot.name for slot in job.slots.current_of_rank(entry.rank))
    # only after all leases are known: the end of a trainer writes the record
    for rank, lease in list(job.leases.items()):
        if lease.closed:
            continue
        if job.record.machine == machine():
            trainers.watch(job, rank, lease)
        else:  # the pids are of another boot or pid namespace: other processes have them now
            trainers.note_end(job, rank, lease)
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


def next_record(
    record: pb.JobRecord, request: pb.DecideRequest, holders: Iterable[int]
) -> Generator[None, None, pb.JobRecord]:
    """Makes the record of the epoch that a decision begins, a manifest in each slice.

    Args:
        record: of the job until now; its manifests don't change.
        request: the decision.
        holders: the nodes that keep the capsules of this node's ranks.
    """
    decision = messages.decision_from(request.decision)
    base, guard = earlier_manifest(record, request, decision.base), guard_manifest(record, request, decision)
    following = pb.JobRecord(
        decision=request.decision,
        node_index=request.node_index,
        had_whole=record.had_whole or decision.base is not None,
        holders=holders,
        dropped=request.dropped,
        not_recomputed=record.not_recomputed,
        accepted_tokens=messages.earlier_tokens(messages.admitting_tokens(record), request.manifest.token),
    )
    following.manifest.CopyFrom(request.manifest)
    yield
    if base is not None:
        following.base_manifest.CopyFrom(base)
        yield
    if guard is not None:
        following.guard_manifest.CopyFrom(guard)
        yield
    return following


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


def place(request: pb.DecideRequest) -> NodePlacement:
    """Returns what the placement of a decision says about this node; for a thread.

    Raises:
        ConfigError, FormatError: no attach makes such a decision, or its manifest can't be placed.
    """
    check_decision(request)
    with garbage_collection_paused():
        return node_placement(request.manifest, request.node_index)


def check_decision(request: pb.DecideRequest) -> None:
    """Raises ConfigError for a decision that no attach makes."""
    manifest = request.manifest
    name = check_name(manifest.job)
    ranks = [rank for node in manifest.nodes for rank in node.ranks]
    is_complete = len(ranks) == manifest.world and sorted(ranks) == list(range(manifest.world))
    if manifest.ByteSize() > MANIFEST_MAX or not is_complete:
        raise ConfigError(f"the manifest of job {name} does not name each of its {manifest.world} ranks once.")
    if request.node_index >= len(manifest.nodes):
        raise ConfigError(f"the manifest of job {name} has no node {request.node_index}.")
    messages.check_tokens(manifest)
    messages.check_decision(name, request.decision)
    for what, earlier in (("base", request.base_manifest), ("guard", request.guard_manifest)):
        if request.HasField(f"{what}_manifest") and (earlier.job != name or earlier.ByteSize() > MANIFEST_MAX):
            raise ConfigError(
                f"the {what}'s manifest names job {earlier.job!r} and has {earlier.ByteSize()} bytes; it must name job "
                f"{name} and may have {MANIFEST_MAX} bytes."
            )
