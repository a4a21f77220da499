"""The step records: slots for gradient records, and the recorder that writes them.

Only where nodes copy other ranks' state (protect="aor"), and after the rank's ordinary slots.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from reft.client.attach.arguments import AttachContext
from reft.client.attach.introduce import Introduction
from reft.client.attach.plan import AttachPlan
from reft.client.link.exchange import together
from reft.client.link.reports import Reporter
from reft.client.link.slots import SlotLeases
from reft.client.memory.cuda import Device
from reft.client.records.record_copy import DeviceRecordCopy, HostRecordCopy, RecordCopy
from reft.client.records.record_plan import RecordPlan, plan_records
from reft.client.records.record_slots import RecordSlots
from reft.client.records.record_writer import RecordWriter
from reft.client.records.recorder import GradientRecorder
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.coding.placement import Placement
from reft.core.commit.gradient_records import record_slots
from reft.errors import UnsupportedState, message, remedy

log = logging.getLogger("reft")


@dataclass(frozen=True)
class RecordMemory:
    """What a rank records, and where.

    Attributes:
        plan: what a record holds.
        slots: the record slots.
    """

    plan: RecordPlan
    slots: RecordSlots


def lease_records(
    context: AttachContext, introduction: Introduction, plan: AttachPlan, leases: SlotLeases
) -> RecordMemory | None:
    """Returns the record slots of this rank; None if it records nothing.

    All ranks call it together.

    Raises:
        NoRoom: the slots don't fit into memory.
    """
    if not any(lane.is_copies for lane in plan.placement.guard_lanes):
        return None
    return together(context.rank_group, lambda: _lease(context, introduction, plan, leases))


def lease_records_alone(
    context: AttachContext, introduction: Introduction, plan: AttachPlan, leases: SlotLeases
) -> RecordMemory | None:
    """Does so for a new layout in mid-training; returns None if it fails."""
    try:
        return _lease(context, introduction, plan, leases)
    except Exception as error:  # this process may lack room for a file, a mapping or a thread, too
        log.warning("rank %d records no gradients: %s%s", context.rank, message(error), remedy(error))
        return None


def _lease(
    context: AttachContext, introduction: Introduction, plan: AttachPlan, leases: SlotLeases
) -> RecordMemory | None:
    try:
        record_plan = plan_of(plan.placement, context.rank, introduction.state.tracked)
    except UnsupportedState as error:  # only in a job that goes on: a fresh start refuses such state
        log.warning("rank %d records no gradients, and turns exchange copies: %s", context.rank, message(error))
        return None
    if record_plan is None:
        return None
    data_bytes = record_plan.layout.data_bytes
    slots = leases.lease_records(record_slots(context.request.every), data_bytes)
    records = [record for way in plan.recovery.replays.values() for record in way.records]
    replayed = frozenset(each.version for each in records if each.rank == context.rank and each.version)
    more = RecordSlots(slots, lambda count, mapped: leases.lease_records(count, data_bytes, mapped), replayed)
    return RecordMemory(record_plan, more)


def plan_of(placement: Placement, rank: int, tracked: TrackedObjects) -> RecordPlan | None:
    """Returns what a rank records; None if that is nothing.

    Raises:
        UnsupportedState: see `plan_records`.
    """
    place = placement.guard_lane_of(rank)
    if place is None:
        return None
    lane = placement.guard_lanes[place[0]]
    owners = [lane.members[member] for member in lane.copied_members(place[1])]
    record_plan = plan_records(placement, rank, owners, tracked)
    return record_plan if record_plan.layout.items else None


def make_recorder(
    memory: RecordMemory, introduction: Introduction, reporter: Reporter, cpu: int | None, mark: int | None
) -> GradientRecorder:
    """Returns the recorder of the new epoch.

    Args:
        memory: what this rank records, and where.
        introduction: has the device of this rank.
        reporter: reports of the new epoch.
        cpu: the CPU that snapshots are copied on; None leaves the choice to the scheduler.
        mark: the completed step; None for a new layout in mid-training.
    """
    device = introduction.state.device
    copy: RecordCopy = DeviceRecordCopy(Device(device)) if device.type == "cuda" else HostRecordCopy()
    writer = RecordWriter(memory.plan, memory.slots, reporter, copy, cpu)
    return GradientRecorder(memory.plan, writer, copy, mark)
