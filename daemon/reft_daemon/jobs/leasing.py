"""Leases slots to the trainers of this node's ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from reft.core.budget import slots_to_make
from reft.core.commit.capsules import DIGESTS_MAX
from reft.errors import AlreadyAttached, AttachError, ConfigError
from reft.wire.local_socket import CallerProcess
from reft.wire.process import Process
from reft.wire.slot_format import Geometry
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import SlotFile, next_names
from reft_daemon.arena.headers import header_of
from reft_daemon.jobs import gradient_records, parity, rounds, trainers
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease
from reft_daemon.jobs.persistence import save
from reft_daemon.jobs.slots import fitting_slots, is_superfluous


async def reserve_parity(job: JobRecord, rank: int) -> None:
    """Makes the parity slots that a rank lacks: the memfds of an earlier daemon are gone.

    Raises:
        NoRoom, AttachError: they can't be made.
    """

    async def reserve() -> None:
        if geometries := parity.missing_parity(job, rank):
            job.slots.add(await job.allocator.create(rank, geometries, []))

    await job.allocator.run_alone(reserve)


async def lease(job: JobRecord, request: pb.LeaseRequest, caller: CallerProcess) -> list[SlotFile]:
    """Returns slots for one rank, every page present.

    Reuses the rank's earlier slots if they are large enough.

    Args:
        job: the job.
        request: the request.
        caller: the process that asks; it becomes the rank's trainer.

    Raises:
        StaleEpoch, AlreadyAttached, NoRoom: see each class.
        AttachError: the caller has closed its session, or has ended.
        OSError: the system does not say now whether the process lives.
    """
    job.check_epoch(request.epoch)
    check_request(request, job.ranks, bool(job.record.holders))
    check_trainer(job.id, request.rank, job.leases.get(request.rank), caller.process)
    return await job.allocator.run_alone(lambda: _lease_alone(job, request, caller))


async def _lease_alone(job: JobRecord, request: pb.LeaseRequest, caller: CallerProcess) -> list[SlotFile]:
    # A newer attach may have come while this lease waited. The ranks of that attach may still read
    # the slots that this lease would free.
    job.check_epoch(request.epoch)
    slots: list[SlotFile] = []
    if request.slots:
        slots = await slots_for(job, request)
    elif request.records:
        slots = await gradient_records.slots_for(job, request)
    # Making slots takes time. Meanwhile a newer attach may have come, or the session may be
    # closed.
    job.check_epoch(request.epoch)
    earlier_lease = job.leases.get(request.rank)
    check_trainer(job.id, request.rank, earlier_lease, caller.process)
    if earlier_lease is None or earlier_lease.watch is None:
        _register(job, request.rank, Lease(caller.process, caller.parent if request.under_agent else 0))
    lease = job.leases[request.rank]
    lease.given_slots.update(slot.name for slot in slots)
    if slots and job.round is not None:
        rounds.settle_capsules(job, job.round.outcome)  # of other histories: kept until now
    lease.wanted_slots = max(lease.wanted_slots, request.slots)
    return slots


def _register(job: JobRecord, rank: int, lease: Lease) -> None:
    """Makes a process the rank's trainer, and records the trainer.

    Raises:
        NoRoom, AttachError: the trainer can't be recorded, and is not registered: a restarted
            daemon would not know that it may write slots.
        OSError: the trainer can't be watched; nothing was changed.
    """
    earlier = job.leases.get(rank)
    trainers.watch(job, rank, lease)
    try:
        save(job)
    except AttachError:
        if lease.watch is not None:
            lease.watch.close()
        if earlier is None:
            del job.leases[rank]
        else:
            job.leases[rank] = earlier
        raise


async def slots_for(job: JobRecord, request: pb.LeaseRequest) -> list[SlotFile]:
    """Returns slots for a rank; makes those that are missing, and the rank's parity slots.

    All ranks have restored the base by now, and other nodes keep its capsules. So slots that
    nobody needs are freed before new memory is taken. While older slots must stay, the rank gets
    two slots only; a later lease makes the others.

    Raises:
        NoRoom, AttachError: new slots can't be made; slots that a trainer may write stay.
    """
    rank, geometry = request.rank, Geometry(request.table_bytes, request.data_bytes, request.chunk_bytes)
    empty_dropped(job)
    parity.settle(job)
    gradient_records.settle(job)
    headers = {slot.name: header_of(job.id, slot) for slot in job.slots.current_of_rank(rank)}
    names = fitting_slots(headers, geometry, request.slots)
    free_superfluous(job, names if len(names) < request.slots else job.slots.current)
    missing = slots_to_make(request.slots, len(names), holds_older(job, rank, names))
    new_names = next_names(job.slots.names, rank, missing)
    geometries = {**dict.fromkeys(new_names, geometry), **parity.missing_parity(job, rank)}
    new_slots = await job.allocator.create(rank, geometries, list(request.cpus)) if geometries else []
    if len(names) < request.slots:
        # Retired only now: if memory is short, the trainer continues with its old slots.
        job.slots.retire(slot for slot in job.slots.current_of_rank(rank) if slot.name not in names)
    job.slots.add(new_slots)
    return [job.slots.current[name] for name in (*names, *new_names)]


def empty_dropped(job: JobRecord) -> None:
    """Empties the slots that the decision has dropped, once in an epoch.

    All ranks have restored the base, so no rank refuses this attach for its state any more.
    """
    if not job.record.dropped:
        return
    slots = job.slots.all
    for name in job.record.dropped:
        header = header_of(job.id, slots[name]) if name in slots else None
        if (
            header is not None
            and header.version not in job.pinned
            and (header.version is None or header.version.epoch != job.epoch)
        ):
            slots[name].map.empty()
    del job.record.dropped[:]
    save(job)


def holds_older(job: JobRecord, rank: int, fitting: Collection[str]) -> bool:
    """Whether older slots of the rank, or retired slots of a pinned version, are held."""
    if any(slot.name not in fitting for slot in job.slots.of_rank(rank)):
        return True
    headers = (header_of(job.id, slot) for slot in job.slots.retired.values())
    return any(header is not None and header.version in job.pinned for header in headers)


def free_superfluous(job: JobRecord, kept: Collection[str]) -> None:
    """Frees the slots that nobody needs or may write, but not those in `kept`.

    No object of a freed slot is left when this function returns: each would hold the memory.
    """
    for slots in (job.slots.current, job.slots.retired):
        for name, slot in list(slots.items()):
            if name in kept or job.may_be_written(slot):
                continue
            if is_superfluous(header_of(job.id, slot), job.epoch, job.pinned):
                job.arena.free(slots.pop(name))


# Decisions


def check_request(request: pb.LeaseRequest, ranks: Collection[int], has_holders: bool) -> None:
    """Raises unless the rank trains here and its digests fit into a capsule.

    Args:
        request: the request.
        ranks: the ranks that train on this node.
        has_holders: whether other nodes keep the rank's capsules.

    Raises:
        AttachError: the rank trains on another node.
        ConfigError: the rank has too many digests.
    """
    if request.rank not in ranks:
        raise AttachError(f"rank {request.rank} is not one of this node's ranks {list(ranks)} in the manifest.")
    digest_bytes = 8 * -(-request.data_bytes // max(request.chunk_bytes, 1))
    if has_holders and digest_bytes > DIGESTS_MAX:
        raise ConfigError(
            f"rank {request.rank} has {digest_bytes} bytes of digests, which are part of its capsule; "
            f"the limit is {DIGESTS_MAX}.",
            "attach with a larger chunk_bytes",
        )


def refuse_trainer_of_others(job: JobRecord, jobs: Iterable[JobRecord], process: Process) -> None:
    """Raises AttachError if a process trains another job.

    An attach of one job ends that job's old trainers, and must never end a trainer of another.
    """
    for other in jobs:
        if other is not job and any(each.watch and each.process == process for each in other.leases.values()):
            raise AttachError(
                f"process {process.pid} trains job {other.id}, and asks for slots of job {job.id}.",
                "close the earlier session first: a process trains one job",
            )


def check_trainer(job: str, rank: int, lease: Lease | None, process: Process) -> None:
    """Raises unless the process is the rank's trainer, or may become its trainer.

    A process that has closed its session can't become the trainer again.

    Args:
        job: for messages.
        rank: the rank.
        lease: the rank's lease now; None if it has none.
        process: the process that asks for slots.

    Raises:
        AlreadyAttached: another process trains the rank.
        AttachError: the process has closed its session.
    """
    if lease and lease.watch and lease.process != process:
        raise AlreadyAttached(f"rank {rank} of job {job} is already attached by process {lease.process.pid}.")
    if lease and lease.closed and lease.process == process:
        raise AttachError(f"process {process.pid} has closed its session as rank {rank} of job {job}.")
