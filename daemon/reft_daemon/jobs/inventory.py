"""Says what this node holds of one job, for a plan of another process."""

from __future__ import annotations

from collections.abc import Collection

from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.headers import header_messages
from reft_daemon.jobs.job_record import JobRecord


def fill_inventory(reply: pb.InventoryReply, job: JobRecord, left_out: Collection[str] = ()) -> None:
    """Adds manifests, decision, slots and capsules of a job to an inventory.

    Args:
        reply: the inventory.
        job: the job.
        left_out: the manifests that the asker has: names of their fields.
    """
    reply.slots.extend(header_messages(job.id, [*job.slots.readable.values(), *job.slots.stored.values()]))
    reply.records.extend(header_messages(job.id, job.slots.records.values()))
    reply.capsules.extend(job.capsule_replication.store.headers())
    reply.had_whole = job.record.had_whole
    reply.trained_s, reply.failed, reply.reached = job.trained_s, job.has_failed, job.reached
    reply.not_recomputed = job.record.not_recomputed
    if job.restores is not None:
        reply.restores.CopyFrom(job.restores)
    reply.troubles.extend(
        f"rank {rank}: {lease.trouble}" for rank, lease in sorted(job.leases.items()) if lease.trouble
    )
    if job.record.HasField("decision"):
        reply.decision.CopyFrom(job.record.decision)
    for name in ("manifest", "base_manifest", "guard_manifest"):
        if job.record.HasField(name) and name not in left_out:
            getattr(reply, name).CopyFrom(getattr(job.record, name))
