"""What a restore opens and decides before it loads: the records of its steps.

slots and capsules ─► OldRank (stays on this rank) ─┐
                  └─► OpenReport (to all ranks) ────┴─► RestoreMatch: which bytes go where
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore.decode import StripeDecoder
from reft.client.restore.remote_slots import SlotOpener
from reft.client.snapshot.replica_check import earlier_digests
from reft.client.state import serialization
from reft.client.state.host_state import HostState
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.coding.placement import Placement
from reft.core.layout.layout import Layout, Leaf
from reft.core.recovery.lost_slots import refuse_unguarded
from reft.core.recovery.plan import SlotReaders, TransferPlan
from reft.core.recovery.recovery import HeldSlot, RecoveryPlan
from reft.core.recovery.replica_samples import capsule_digests
from reft.core.recovery.stripes import parity_number, replay_number
from reft.failpoints import Failpoints
from reft.replay.fold import HOST
from reft.wire.capsule_format import NameTable
from reft.wire.messages import places_from, table_from
from reft.wire.slot_format import SlotMap

# [step, cell, digest] of bytes that the replicas of a cell compare
Samples = tuple[tuple[int, ...], ...]
Tree = Mapping[str, Any]
NO_LEAVES = Layout((), (), 0)


@dataclass(frozen=True)
class RestoreContext:
    """What every step of one rank's restore needs.

    Attributes:
        plan: a recovery plan with a base.
        placement: the placement that the base was written with.
        names: for each old rank the names in the base's manifest; capsules refer to them.
        rank: this rank, of the new job.
        nodes: node id → its ranks, of the new job.
        opener: opens slots and capsules.
        tracked: the objects to restore.
        tensor_index: the current index of the tracked objects.
        host: host state.
        buffer: memory for tensors to create; if too small, another one is allocated.
        decoder: decodes lost shards.
        device: where this rank's optimizers compute.
        failpoints: let tests make a replay fail.
    """

    plan: RecoveryPlan
    placement: Placement
    names: Sequence[NameTable]
    rank: int
    nodes: Mapping[str, Sequence[int]]
    opener: SlotOpener
    tracked: TrackedObjects
    tensor_index: TensorIndex
    host: HostState
    buffer: HugePageBuffer
    decoder: StripeDecoder
    device: torch.device = HOST
    failpoints: Failpoints = field(default_factory=Failpoints)

    @cached_property
    def readers(self) -> SlotReaders:
        """Which new ranks read which slot, and keep which capsule."""
        slot_nodes = {number: source.node for number, source in self.slots.items()}
        readers = SlotReaders.of(slot_nodes, self.nodes, len(self.placement.domains))
        # A rank that keeps a lost rank's capsule also replays its section. Only this rank has it.
        made = {replay_number(self.placement, old): readers.keeper_of[old] for old in self.plan.replays}
        return replace(
            readers,
            reader_of={**readers.reader_of, **made},
            node_of_slot={**readers.node_of_slot, **dict.fromkeys(made, "")},
        )

    @cached_property
    def slots(self) -> dict[int, HeldSlot]:
        """Old rank, or parity number → its slot at hand."""
        parity = {parity_number(self.placement, old): held for old, held in self.plan.parity.items()}
        return {**self.plan.sources, **parity}

    @cached_property
    def stored(self) -> list[int]:
        """The old ranks whose slots are files of a checkpoint, ascending."""
        return [old for old, source in sorted(self.plan.sources.items()) if source.is_stored]

    @cached_property
    def lost(self) -> list[int]:
        """The old ranks without a slot, ascending."""
        return [old for old in range(len(self.placement.domains)) if old not in self.plan.sources]


@dataclass(frozen=True)
class OldRank:
    """What this rank opened of one old rank.

    Attributes:
        tree: the capsule's tree.
        samples: the samples of its replicas, at the base and at the steps before the base.
        slot: its slot; None if it is lost.
        layout: the leaves in the slot's table; empty if the slot is lost.
        places: name → where the leaf's bytes are, from the same table.
        lost_digests: the digests of the lost slot's chunks; empty if the slot is not lost.
    """

    tree: Tree
    samples: Samples
    slot: SlotMap | None = None
    layout: Layout = NO_LEAVES
    places: Mapping[str, int] = field(default_factory=dict)
    lost_digests: bytes = b""


def open_old_rank(context: RestoreContext, old: int) -> OldRank:
    """Opens the slot of an old rank; its capsule, if the slot is lost.

    Raises:
        FormatError: the slot, the capsule or the table is damaged.
    """
    source, names = context.plan.sources.get(old), context.names[old]
    if source is None:
        record = context.opener.capsule(context.plan, old)
        tree = serialization.decode(record.capsule, names)
        if old in context.plan.sections:
            refuse_unguarded(context.placement, old, tree["absent"], record.unreplicated_bytes, len(record.digests))
        return OldRank(tree, _samples(context, old, tree), lost_digests=record.digests)
    slot = context.opener.slot(source)
    tree, table = serialization.decode(slot.capsule(), names), slot.table()
    return OldRank(tree, _samples(context, old, tree), slot, table_from(table), places_from(table))


def _samples(context: RestoreContext, old: int, tree: Tree) -> Samples:
    own = capsule_digests(tree)
    if not own:
        return ()  # no cell of this rank has replicas
    return tuple(map(tuple, own + earlier_digests(context.opener.remote.earlier(context.plan, old))))


@dataclass(frozen=True)
class CapsuleFacts:
    """What a restore into another shape must know of one old rank.

    Attributes:
        absent: names of predicted leaves that did not exist.
        others: table of the leaves that lie elsewhere than the placement says; empty if none do.
        digests: part of the host state → its digest.
        step: the snapshot's step.
        marked: whether a mark of the loop took the snapshot.
    """

    absent: tuple[str, ...]
    others: bytes
    digests: dict[str, str]
    step: int
    marked: bool


@dataclass(frozen=True)
class OpenReport:
    """What one rank tells all ranks of the slots and capsules that it opened.

    Attributes:
        damaged: old ranks whose slots or capsules are damaged.
        samples: old rank → its samples.
        facts: old rank → the facts in its capsule; empty in a restore of the same shape.
    """

    damaged: tuple[int, ...] = ()
    samples: dict[int, Samples] = field(default_factory=dict)
    facts: dict[int, CapsuleFacts] = field(default_factory=dict)


@dataclass(frozen=True)
class RestoreMatch:
    """Which bytes go where, for one new rank.

    Attributes:
        opened: what this rank opened, by old rank.
        leaves: the leaves to make, in the order in which they are created.
        plans: their operations fill the live memory, one plan after the other.
        layout: the leaves of the live memory, with their offsets there.
        offsets: name of a plan's target → where it begins in the live memory.
        tree: the host state of this rank.
        lists: see `HostStateResharding`.
        lines: messages for the user; the same on all ranks.
    """

    opened: Mapping[int, OldRank]
    leaves: Sequence[Leaf]
    plans: tuple[TransferPlan, ...]
    layout: Layout
    offsets: Mapping[str, int]
    tree: Tree
    lists: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
