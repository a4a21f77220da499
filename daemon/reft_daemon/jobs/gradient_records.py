"""The record slots of one job here: leased by trainers, read by replays, and freed.

    lease ─► so many for each rank whose node copies other ranks' state ─► written by the trainer
               ▲                                                             │ other size, or no
               └── their size fits ──────────────────────────────────────────┤ such rank here
                                                                             └─► freed

A record slot has the ordinary format; reft.wire.record_format says what is in it. Records of an
earlier epoch are of no use, so nothing keeps them. A memfd that a daemon's restart has taken away
comes back from its trainer.
"""

from __future__ import annotations

from reft.core.commit.slots import SlotState
from reft.wire.slot_format import Geometry
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import RECORD, SlotFile, next_names
from reft_daemon.arena.headers import header_of
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.slots import fitting_slots


def recording_ranks(job: JobRecord) -> set[int]:
    """Returns the ranks of this node that record gradients: members of a lane with copies."""
    return {rank for lane in job.guard_lanes if lane.is_copies for rank in lane.members} & set(job.ranks)


def given_up(job: JobRecord) -> str:
    """Returns why copies that auto has chosen are not recomputed any more; empty: they may be."""
    return job.record.not_recomputed if job.record.manifest.choice else ""


async def slots_for(job: JobRecord, request: pb.LeaseRequest) -> list[SlotFile]:
    """Returns the record slots of a rank; makes those that are missing.

    Slots of another size are freed. A lease that asks for fewer keeps all: a rank that restarts may
    have to replay the records in them.

    Raises:
        NoRoom, AttachError: new ones can't be made.
    """
    rank, geometry = request.rank, Geometry(0, request.record_bytes, request.chunk_bytes)
    held = {name: slot for name, slot in job.slots.records.items() if slot.rank == rank}
    names = fitting_slots({name: header_of(job.id, slot) for name, slot in held.items()}, geometry, len(held))
    for name in held.keys() - set(names):
        job.arena.free(job.slots.records.pop(name))
    new_names = next_names(job.slots.names, rank, max(request.records - len(names), 0), RECORD)
    geometries = dict.fromkeys(new_names, geometry)
    if geometries:
        job.slots.add(await job.allocator.create(rank, geometries, list(request.cpus)))
    return [job.slots.records[name] for name in (*names, *new_names)]


def settle(job: JobRecord) -> None:
    """Frees the record slots of ranks that record nothing here."""
    recording = recording_ranks(job)
    for name, slot in list(job.slots.records.items()):
        if slot.rank not in recording:
            job.arena.free(job.slots.records.pop(name))


def sealed_records(job: JobRecord, rank: int) -> dict[int, SlotFile]:
    """Returns mark → slot of the records that a rank has sealed in this epoch."""
    records: dict[int, SlotFile] = {}
    for slot in job.slots.records.values():
        header = header_of(job.id, slot) if slot.rank == rank else None
        if header and header.version and header.state is SlotState.SEALED and header.version.epoch == job.epoch:
            records[header.version.step] = slot
    return records
