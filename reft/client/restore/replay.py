"""Makes the sections of lost ranks again from older copies and the gradients since.

    copies of step P, records of P+1 … W ─► the owner's optimizer, on this rank's device ─┐
    capsule of W, with the owner's digests ───────────────────────────────────────────────┴► equal:
                                                                    a sealed slot in this process
    anything else ─► refused, with the reason: all ranks plan again without this replay

The rank that keeps the capsule of a lost rank does this. In the same shape that is the restarted
rank itself, so its own kind of device and of processor repeats what it did before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reft.client.restore.opened import RestoreContext
from reft.client.restore.remote_slots import REMOTE_BYTES_PER_S
from reft.core.layout.layout import Leaf
from reft.core.recovery.recovery import RecoveryPlan, SectionReplay
from reft.core.recovery.stripes import replay_number
from reft.errors import ReftError, message
from reft.replay.section_replay import replay
from reft.wire import messages
from reft.wire.replay_sections import owner_facts, replay_section
from reft.wire.slot_format import Geometry, SlotMap
from reft.wire.v1 import replay_pb2

FOLD_BYTES_PER_S = 20e6  # the slowest replay that is waited for
FIRST_S = 30.0  # for the first step of an optimizer in this process


@dataclass(frozen=True)
class ReplayReport:
    """What one rank tells all ranks of its replays.

    Attributes:
        refused: replay number → why its bytes must not be used.
    """

    refused: dict[int, str] = field(default_factory=dict)


def replay_s(plan: RecoveryPlan) -> float:
    """Returns how long ranks may wait for the replays of a plan, in seconds."""
    return sum(map(_replay_s, plan.replays.values()))


def _replay_s(way: SectionReplay) -> float:
    read_bytes = way.copies.data_bytes + sum(record.data_bytes for record in way.records)
    folded_bytes = way.copies.data_bytes * (1 + len(way.records))
    return FIRST_S + read_bytes / REMOTE_BYTES_PER_S + folded_bytes / FOLD_BYTES_PER_S


def replay_sections(
    context: RestoreContext, leaves_of: Mapping[int, Sequence[Leaf]]
) -> tuple[dict[int, SlotMap], ReplayReport]:
    """Replays the sections whose capsules this rank keeps.

    Args:
        context: what every step needs.
        leaves_of: old rank → its leaves in the base's manifest, for these ranks.

    Returns:
        Replay number → a sealed slot of the base's version. It has the section from byte 0 on.
    """
    made, refused = dict[int, SlotMap](), dict[int, str]()
    for old, way in sorted(context.plan.replays.items()):
        if context.readers.keeper_of[old] != context.rank:
            continue
        number = replay_number(context.placement, old)
        try:
            made[number] = _replayed(context, way, leaves_of[old])
        except ReftError as error:  # all ranks fall back together, and say why
            refused[number] = message(error)
        except Exception as error:  # a device without memory, too, which each restart would meet again
            refused[number] = f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.'):.200}."
    return made, ReplayReport(refused)


def _replayed(context: RestoreContext, way: SectionReplay, leaves: Sequence[Leaf]) -> SlotMap:
    """Returns a slot with a rank's section; each chunk was compared with its digest.

    Raises:
        ReftError: something can't be read, or the result is not the owner's section.
    """
    placement, old, opener = context.placement, way.rank, context.opener
    before = opener.remote.capsule(way.capsule.node, old, way.capsule.version)
    after = opener.capsule(context.plan, old)
    where = placement.guard_lane_of(old)
    assert where is not None and context.plan.base is not None, "a replayed rank is in a lane"
    lane, member = placement.guard_lanes[where[0]], where[1]
    column = lane.holders_of(member).index(lane.members.index(way.copies.rank))
    owner = owner_facts(placement, old, leaves, context.names[old])
    section = replay_section(owner, before, after, placement.chunk_bytes, column * lane.piece_bytes, 0)
    order = replay_pb2.ReplayOrder(
        base=messages.version_to(way.version), version=messages.version_to(context.plan.base), lane=lane.digest,
        data_bytes=section.nbytes, sections=[section],
    )  # fmt: skip
    geometry = Geometry(0, section.nbytes, placement.chunk_bytes)
    target = SlotMap.create(np.zeros(geometry.file_bytes, np.uint8), geometry, "replay", old)
    records = [opener.with_data(record) for record in way.records]
    replay(order, opener.with_data(way.copies), target, records, context.failpoints, context.device)
    return target
