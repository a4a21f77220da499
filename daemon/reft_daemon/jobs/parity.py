"""The parity slots of one job here: reserved, chosen for turns, emptied and freed.

    lease ─► two for each rank of this node in a guard lane ─► written by turns (peers/turns.py)
               ▲                                                 │ other lanes, after an attach
               └── the lane's sizes fit, and nobody freed them   ▼
                                            kept while they have parity of the protected version
                                            or of the guard ─► freed

A parity slot has the ordinary format: the header's rank is the member, its layout the digest of the
lane. A memfd ends with its daemon, because no trainer holds it. Then the next turn makes new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from reft.core.budget import SLOTS, SLOTS_EXCHANGE
from reft.core.coding.exchange import PARITY_BUFFERS, GuardLane
from reft.core.commit.decision import counts
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.errors import ReftError
from reft.wire import messages
from reft.wire.slot_format import Geometry, Header
from reft_daemon.arena.arena import PARITY, SlotFile, fits, next_names
from reft_daemon.arena.headers import header_of
from reft_daemon.jobs.capsule_replication import NodePlacement, node_placement
from reft_daemon.jobs.job_record import JobRecord

log = logging.getLogger("reft.daemon")


class LocalLane(NamedTuple):
    """A guard lane of which a rank of this node is a member.

    Attributes:
        number: of the lane in the job.
        lane: the lane.
        member: index of the rank in the lane's members.
    """

    number: int
    lane: GuardLane
    member: int

    @property
    def rank(self) -> int:
        return self.lane.members[self.member]


def place(job: JobRecord) -> None:
    """Finds the lanes of the decision in force; without them nothing is exchanged.

    An earlier reft may have written the record.
    """
    placement = NodePlacement()
    if job.record.HasField("decision") and job.record.manifest.slots >= SLOTS_EXCHANGE:
        try:
            placement = node_placement(job.record.manifest, job.record.node_index)
        except ReftError as error:
            log.error("job=%s nothing is exchanged: %s", job.id, error)
    job.guard_lanes, job.sections = placement.guard_lanes, placement.sections


def local_lanes(job: JobRecord) -> list[LocalLane]:
    """Returns the lanes of which this node keeps parity: one for each member here."""
    ranks = set(job.ranks)
    return [
        LocalLane(number, lane, member)
        for number, lane in enumerate(job.guard_lanes)
        for member, rank in enumerate(lane.members)
        if rank in ranks
    ]


def sent_bytes(job: JobRecord) -> int:
    """Returns the bytes that this node sends in a turn."""
    return sum(local.lane.sent_bytes(local.member) for local in local_lanes(job))


def parity_bytes(job: JobRecord) -> int:
    """Returns the memory of all parity slots here."""
    return sum(slot.file_bytes for slot in job.slots.parity.values())


def extra_slot_bytes(job: JobRecord) -> int:
    """Returns the memory of slots that ranks have only for the exchange."""
    slots = [job.slots.current_of_rank(local.rank)[SLOTS:] for local in local_lanes(job)]
    return sum(slot.file_bytes for extra in slots for slot in extra)


def kept_version(job: JobRecord) -> Version | None:
    """Returns the version whose parity stays: the protected or the kept one, else the guard."""
    step = job.round.outcome.pins.guarded_step if job.round is not None else -1
    if step >= 0:
        return Version(job.epoch, step)
    return messages.decision_from(job.record.decision).guard


def buffers(job: JobRecord, local: LocalLane) -> list[SlotFile]:
    """Returns the parity slots that turns of a lane write here, at most two."""
    names = fitting_parity(_headers(job, local.rank), geometry_of(job, local), kept_version(job))
    return [job.slots.parity[name] for name in names]


def sealed_parity(job: JobRecord, local: LocalLane, version: Version) -> SlotFile | None:
    """Returns the sound slot with parity of a version, if there is one."""
    for name, header in _headers(job, local.rank).items():
        if header and header.version == version and header.state is SlotState.SEALED:
            if header.layout == local.lane.digest:
                return job.slots.parity[name]
    return None


def geometry_of(job: JobRecord, local: LocalLane) -> Geometry:
    """Returns the sizes of a parity slot."""
    return Geometry(0, local.lane.parity_bytes, job.record.manifest.chunk_bytes)


def missing_parity(job: JobRecord, rank: int) -> dict[str, Geometry]:
    """Returns name → sizes of the parity slots that a rank still needs."""
    lanes = [local for local in local_lanes(job) if local.rank == rank]
    if not lanes:
        return {}
    count = PARITY_BUFFERS - len(buffers(job, lanes[0]))
    return dict.fromkeys(next_names(job.slots.names, rank, count, PARITY), geometry_of(job, lanes[0]))


def settle(job: JobRecord) -> None:
    """Empties parity that does not count, and frees parity slots that nobody needs.

    Only after all ranks have restored: until then the attach may be refused.
    """
    decision, kept = messages.decision_from(job.record.decision), kept_version(job)
    needed = {slot.name for local in local_lanes(job) for slot in buffers(job, local)}
    for name, slot in list(job.slots.parity.items()):
        header = header_of(job.id, slot)
        version = header.version if header else None
        if version is not None and version == kept:
            continue
        if name not in needed:
            job.arena.free(job.slots.parity.pop(name))
        elif version is not None and not counts(version, decision):
            slot.map.empty()


def _headers(job: JobRecord, rank: int) -> dict[str, Header | None]:
    return {slot.name: header_of(job.id, slot) for slot in job.slots.parity.values() if slot.rank == rank}


# Decisions


def fitting_parity(headers: Mapping[str, Header | None], wanted: Geometry, kept: Version | None) -> list[str]:
    """Returns the names of the parity slots that turns write, at most PARITY_BUFFERS.

    Args:
        headers: name → header of each parity slot of the rank; None for a damaged slot.
        wanted: the geometry that the lane needs.
        kept: the version whose parity stays. A slot with this version comes first.
    """
    names = [name for name, header in headers.items() if header is not None and fits(header.geometry, wanted)]

    def order(name: str) -> tuple[bool, str]:
        header = headers[name]
        return header is None or kept is None or header.version != kept, name

    return sorted(names, key=order)[:PARITY_BUFFERS]
