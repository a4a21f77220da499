"""Makes slots again that the scrub found damaged, from slots of other nodes.

    damaged slot, idle job ─► inventories of the job's nodes ─► plan without this slot
      ─► Rebuild: a draft beside it, paced ─► as it was sealed? ─► SEALED ─► damaged slot freed
                                                 no: the slot stays damaged, and the log says so
    damaged parity slot    ─► its lane is folded again, beside it ─► SEALED ─► damaged slot freed

This is what `reft-cli recover` does for the slots of a lost node, for one slot. The damaged slot
itself is never written: a trainer that leases it meanwhile ends the repair, and keeps the slot.
Leaves that exist once are decoded from the parity of the same version. A version that no turn
protected has none: its slot stays damaged. Parity is made again by the mover, as in a turn, and at
its pace; parity of an earlier attach is not.

A repair waits until no trainer of the job has lived here for a minute, and leaves alone an attach
that may still be refused. A slot that can't be repaired is tried again, since a node may come back.
A person's `reft-cli recover` does not wait for a repair. Both may make the same slot; a lease frees
the one that it does not need.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

import grpc

from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.recovery import RecoveryPlan, describe
from reft.errors import AttachError, FormatError, ReftError
from reft.wire import messages
from reft.wire.inventory import JobSurvey, is_itself, silence_in
from reft.wire.rebuild_request import rebuild_request
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.arena.arena import SlotFile
from reft_daemon.jobs import parity
from reft_daemon.jobs.inventory import fill_inventory
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.scrub import BYTES_PER_S, SlotKey, is_idle
from reft_daemon.peers.channels import reason_of
from reft_daemon.rebuild.rebuild import Rebuild
from reft_daemon.registry import Registry

log = logging.getLogger("reft.daemon")
LOOK_S = 5.0  # between two looks for damaged slots
AGAIN_S = 600.0  # between two tries of one slot
SURVEY_S = 3.0  # for the inventory of another node
PLANS_MAX = 4  # of one try: a source may turn out to be damaged too


class RepairTry(NamedTuple):
    """The last try to repair a slot.

    Attributes:
        version: the damaged version.
        at_s: when the try began.
        reason: why it failed; empty if that is not known.
    """

    version: Version
    at_s: float
    reason: str


async def repair_for_ever(registry: Registry) -> None:
    """Repairs damaged slots, one after the other, until this daemon ends."""
    tries: dict[SlotKey, RepairTry] = {}
    while True:
        try:
            await repair_next(registry, tries, time.monotonic())
        except Exception:  # a bug that one slot meets must not end the repairs of the others
            log.exception("a repair failed")
        await asyncio.sleep(LOOK_S)


async def repair_next(registry: Registry, tries: dict[SlotKey, RepairTry], now_s: float) -> None:
    """Tries to repair the damaged slot that is due, if there is one.

    Args:
        registry: of this daemon.
        tries: the last try of each slot; this function adds to it.
        now_s: the present time.
    """
    damaged = damaged_slots(registry.jobs.values(), now_s)
    for gone in tries.keys() - damaged.keys():
        del tries[gone]
    key = next_repair({key: version for key, (_, _, version) in damaged.items()}, tries, now_s)
    if key is None:
        return
    job, slot, version = damaged[key]
    last, tries[key] = tries.get(key), RepairTry(version, now_s, "")
    what = f"job={job.id} slot={slot.name}, rank {slot.rank}, {version}"
    try:
        await (_repair_parity if slot.is_parity else _repair)(registry, job, slot, version)
    except (ReftError, OSError, ValueError, grpc.RpcError) as error:
        tries[key] = RepairTry(version, now_s, reason_of(error))
        if last is None or (last.version, last.reason) != (version, tries[key].reason):
            log.error("%s stays damaged: %s", what, tries[key].reason)
        return
    registry.scrubbed.repaired += 1
    log.warning("%s was made again from other nodes", what)


def damaged_slots(jobs: Collection[JobRecord], now_s: float) -> dict[SlotKey, tuple[JobRecord, SlotFile, Version]]:
    """Returns the slots that the scrub found damaged, if they may be repaired now."""
    return {
        (job.id, slot.name): (job, slot, slot.damaged)
        for job in jobs
        if may_repair(job, now_s)
        for slot in job.slots.readable.values()
        if slot.damaged is not None and is_damaged(slot, slot.damaged)
    }


def is_damaged(slot: SlotFile, version: Version) -> bool:
    """Whether a slot still holds the version that was found damaged there."""
    if slot.descriptor < 0 or slot.damaged != version:
        return False
    try:
        header = slot.map.reread()
    except FormatError:
        return True  # its header is damaged, or its file was cut
    return header.state is SlotState.SEALED and header.version == version


def may_repair(job: JobRecord, now_s: float) -> bool:
    """Whether no trainer may write the job's slots here, and no attach is under way."""
    is_attaching = job.record.HasField("before")  # a refusal could still undo the decision in force
    newest_s = max(job.since_s, job.ended_s, *job.sealed_s.values(), 0.0)
    return job.record.HasField("decision") and not (job.is_live or is_attaching) and is_idle(now_s - newest_s)


async def _repair(registry: Registry, job: JobRecord, slot: SlotFile, version: Version) -> None:
    """Makes a version again in a new slot, and frees the damaged slot.

    Raises:
        ReftError: the version can't be made again now, or the job is attached meanwhile.
    """
    survey = await _survey(registry, job, slot, version)
    survey.inventory.refuse_rivals(job.id)
    erased: set[tuple[str, str, Version]] = set()
    for _ in range(PLANS_MAX):
        request = await asyncio.to_thread(request_for, survey, job.epoch, slot.rank, version, erased)
        reply = await Rebuild(registry, request, BYTES_PER_S).run()
        if not reply.damaged:
            break
        erased |= {(each.node, each.slot, version) for each in reply.damaged}
    else:
        raise AttachError(f"sources were found damaged in {PLANS_MAX} plans.", "see the lines above")
    if not is_damaged(slot, version) or job.may_be_written(slot):
        return  # somebody has written or freed the slot meanwhile
    for slots in (job.slots.current, job.slots.retired):
        if slots.get(slot.name) is slot:
            job.arena.free(slots.pop(slot.name))


async def _repair_parity(registry: Registry, job: JobRecord, slot: SlotFile, version: Version) -> None:
    """Makes parity of a version again in another slot, and frees the damaged one.

    Raises:
        ReftError: the parity can't be made again now.
    """
    lanes = [local for local in parity.local_lanes(job) if local.rank == slot.rank]
    if version.epoch != job.epoch or not lanes:
        raise AttachError(f"{version} is of an earlier attach; a turn of a newer step takes its place.")
    await registry.turns.make_again(job, lanes[0], version)
    if is_damaged(slot, version) and job.slots.parity.get(slot.name) is slot:
        job.arena.free(job.slots.parity.pop(slot.name))


async def _survey(registry: Registry, job: JobRecord, slot: SlotFile, version: Version) -> JobSurvey:
    """Returns what the nodes of the job hold that answer now.

    The capsule in the damaged slot counts if no node has another copy, and its digest is right.
    """
    own, record = registry.arena.node_id, job.record
    manifests = record.guard_manifest, record.base_manifest, record.manifest  # the newest one counts
    nodes = {node.id: node for manifest in manifests for node in manifest.nodes}
    others = [node for node in nodes.values() if node.id != own]
    surveyed = await asyncio.gather(*(_inventory(registry, job, node) for node in others))
    replies = {each.node.id: each.reply for each in surveyed if is_itself(each) and each.reply.HasField("decision")}
    replies[own] = pb.InventoryReply(node=nodes[own].name if own in nodes else own, node_id=own)
    fill_inventory(replies[own], job)
    wanted = messages.version_to(version)
    copies = (copy for reply in replies.values() for copy in reply.capsules)
    if not any(copy.rank == slot.rank and copy.version == wanted for copy in copies):
        capsule = job.capsule_replication.sealed_record([slot], slot.rank, version)
        if capsule is not None:
            replies[own].capsules.add(rank=slot.rank, version=wanted, unreplicated_bytes=capsule.unreplicated_bytes)
    return JobSurvey(replies, silence_in(surveyed))


async def _inventory(registry: Registry, job: JobRecord, node: pb.Node) -> pb.SurveyedNode:
    request, tokens = pb.InventoryRequest(job=job.id), messages.known_tokens(job.record.manifest)
    try:
        reply = await registry.peers.call(node, tokens, pb_grpc.DaemonStub, "Inventory", request, SURVEY_S)
    except (grpc.RpcError, OSError, ReftError) as error:
        return pb.SurveyedNode(node=node, trouble=reason_of(error))
    return pb.SurveyedNode(node=node, reply=reply)  # type: ignore[arg-type]


# Decisions


def next_repair(
    versions: Mapping[SlotKey, Version], tries: Mapping[SlotKey, RepairTry], now_s: float
) -> SlotKey | None:
    """Returns the damaged slot to repair next: one never tried, else the one tried longest ago.

    Args:
        versions: the damaged slots that may be repaired, and what they held.
        tries: the last try of each slot.
        now_s: the present time.
    """

    def tried_s(key: SlotKey) -> float:
        last = tries.get(key)
        return -math.inf if last is None or last.version != versions[key] else last.at_s

    return min((key for key in versions if now_s - tried_s(key) >= AGAIN_S), key=tried_s, default=None)


def request_for(
    survey: JobSurvey, epoch: Epoch, rank: int, version: Version, erased: Collection[tuple[str, str, Version]]
) -> pb.RebuildRequest:
    """Returns the request to make a rank's slot of exactly this version again.

    Args:
        survey: what is held; without the damaged slot.
        epoch: the epoch in force on this node.
        rank: the rank of the slot.
        version: what the slot held.
        erased: (node, name, version) of sources that were found damaged.

    Raises:
        AttachError: the nodes that answer don't hold enough, or another attach has come.
    """
    if survey.decision is None or survey.decision.epoch != epoch:
        raise AttachError("a newer attach of the job has decided on other nodes.")
    slots = {(each.node, each.slot, each.version) for each in survey.held if each.version is not None}
    capsules = {(each.node, each.slot, each.version) for each in survey.copies}
    plan = survey.rebuild_plan({*erased, *(each for each in slots | capsules if each[2] != version)})
    if plan.base != version:
        raise AttachError(" ".join([*_shortage(survey, plan, version), *_silence(survey)]))
    if rank in plan.sources:
        source = plan.sources[rank]
        raise AttachError(f"slot {source.slot} on node {survey.names[source.node]} holds the same.")
    return rebuild_request(survey, plan, [rank], {})


def _shortage(survey: JobSurvey, plan: RecoveryPlan, version: Version) -> list[str]:
    """Says why a version can't be made again."""
    names = {rank: node.name for node in survey.inventory.nodes.values() for rank in node.ranks}
    lines = [describe(each, survey.placements.get(version.epoch), names) for each in plan.partial]
    return lines[0] if lines else [f"{version} is of a history that does not count any more."]


def _silence(survey: JobSurvey) -> list[str]:
    return [f"No answer from {', '.join(survey.silent)}."] if survey.silent else []
