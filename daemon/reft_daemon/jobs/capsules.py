"""The messages that carry capsules between this node and its holders.

    capsules_for(holder) ─► Keep ─► holder: keep ─► acknowledged ─► note_kept ─► round

`reft/core/commit/capsules.py` says which capsules are owed, and when a sealed step counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from reft.core.commit.round import Outcome
from reft.core.commit.version import Epoch, Version
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs import rounds
from reft_daemon.jobs.job_record import JobRecord


def keep(job: JobRecord, request: pb.KeepRequest) -> None:
    """Keeps capsules of another node's ranks.

    Raises:
        StaleEpoch, ConfigError, NoRoom: see CapsuleStore.keep.
    """
    job.check_epoch(request.epoch)
    # known first: otherwise a newer capsule could displace one of a whole version
    if request.HasField("outcome"):
        rounds.hear_outcome(job, messages.outcome_from(request.outcome))
    decision = messages.decision_from(job.record.decision)
    outcome = job.round.outcome if job.round else Outcome()
    # The base and the guard may come from runs of the job with more ranks.
    world = max(manifest.world for manifest in messages.manifests_from(job.record).values())
    for record in request.capsules:
        job.capsule_replication.store.keep(record, decision, outcome, world)
    if job.round is not None:
        rounds.settle_capsules(job, outcome)


def capsules_for(job: JobRecord, holder: int) -> list[pb.CapsuleRecord]:
    """Returns the capsules that a holder of this node still lacks.

    They fill at most one message.
    """
    return job.capsule_replication.batch(job.slots.all.values(), job.epoch, holder)


def note_kept(job: JobRecord, holder: int, epoch: Epoch, records: Iterable[pb.CapsuleRecord]) -> None:
    """Notes that a holder keeps these records now."""
    if job.round is None or epoch != job.epoch:
        return
    acks = job.capsule_replication.capsule_acks
    kept_steps = [(record.rank, record.version.step) for record in records]
    is_news = False
    for rank, due in acks.acknowledge(holder, kept_steps).items():
        is_news = job.round.hear_rank(rank, due, acks.digests_of(rank)) or is_news
    if is_news:
        rounds.publish(job)


def capsule(job: JobRecord, rank: int, version: Version) -> pb.CapsuleRecord | None:
    """Returns a rank's record, from the rank's own slot, a checkpoint or the store."""
    slots = [*job.slots.all.values(), *job.slots.stored.values()]
    return job.capsule_replication.record(slots, rank, version)
