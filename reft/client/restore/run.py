"""One restore: all ranks run the same steps together, into the same shape or into another one.

    open     the slots and capsules that this rank reads  ─► OpenReport ┐ damaged, or replicas that
                                                                        │ differ: counts as lost,
    match    which bytes go where; another shape asks the other ranks   │ and all ranks make a
    make     live tensors for every leaf                                │ new plan
    load     bytes over the process group; lost shards are decoded      │
                                                          ─► LoadReport ┘
    finish   inline leaves and host state                 ─► RestoreResult

`Restore` has the steps of the same shape, `ReshardRestore` those of another shape. A step returns
what the next step takes. A step stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch

from reft.client.link.exchange import gather, share, together
from reft.client.link.rank_group import RankGroup
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore.decode import StripeDecoder
from reft.client.restore.load import NO_RANK, LoadReport
from reft.client.restore.remote_slots import SlotOpener
from reft.client.restore.slot_reader import AtChunk, SlotReader
from reft.client.restore.transport import Transport
from reft.client.snapshot.replica_check import are_mismatched
from reft.client.state.host_state import HostState
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects
from reft.console import say
from reft.core.coding.placement import Placement
from reft.core.recovery.plan import SlotReaders
from reft.core.recovery.recovery import RecoveryPlan
from reft.errors import FormatError, RestoreError
from reft.wire.slot_format import SlotMap

# [step, cell, digest] of bytes that the replicas of a cell compare
Samples = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RestoreContext:
    """What every step of one rank's restore needs.

    Attributes:
        plan: a recovery plan with a base.
        placement: the placement that the base was written with.
        rank: this rank, of the new job.
        nodes: node id → its ranks, of the new job.
        opener: opens slots and capsules.
        tracked: the objects to restore.
        tensor_index: the current index of the tracked objects.
        host: host state.
        buffer: memory for tensors to create; if too small, another one is allocated.
        decoder: decodes lost shards.
    """

    plan: RecoveryPlan
    placement: Placement
    rank: int
    nodes: Mapping[str, Sequence[int]]
    opener: SlotOpener
    tracked: TrackedObjects
    tensor_index: TensorIndex
    host: HostState
    buffer: HugePageBuffer
    decoder: StripeDecoder

    @cached_property
    def readers(self) -> SlotReaders:
        """Which new ranks read which slot, and keep which capsule."""
        slot_nodes = {old: source.node for old, source in self.plan.sources.items()}
        return SlotReaders.of(slot_nodes, self.nodes, len(self.placement.domains))

    def near_slots(
        self, owners: Iterable[int], opened: Mapping[int, SlotMap], data_end: Callable[[int], int], at_chunk: AtChunk
    ) -> tuple[dict[int, SlotReader], set[int]]:
        """Returns readers of the slots that this rank reads itself, and the damaged ones.

        Args:
            owners: old ranks whose slots have needed bytes.
            opened: the slots that are open already.
            data_end: returns the end of the data to read, for an old rank.
            at_chunk: called before each chunk is read.
        """
        slots, damaged = {}, set()
        for old in owners:
            if old in self.plan.sources and self.readers.is_near(old, self.rank):
                try:
                    slot = opened[old] if old in opened else self.opener.slot(self.plan.sources[old])
                    slots[old] = SlotReader(slot, data_end(old), at_chunk)
                except FormatError:
                    damaged.add(old)
        return slots, damaged


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
        samples: old rank → its samples, at the base and at the steps before the base.
        facts: old rank → the facts in its capsule; empty in a restore of the same shape.
    """

    damaged: tuple[int, ...] = ()
    samples: dict[int, Samples] = field(default_factory=dict)
    facts: dict[int, CapsuleFacts] = field(default_factory=dict)


@dataclass(frozen=True)
class RestoreResult:
    """The result of one restore, the same on every rank apart from the tree.

    Attributes:
        damaged: old ranks whose slots or capsules are damaged. If there are any, nothing counts as
            restored.
        tree: the restored host state. The generators in it come back last. None if nothing was
            restored.
        lines: messages for the user about state that each old rank had of its own.
    """

    damaged: tuple[int, ...] = ()
    tree: Mapping[str, Any] | None = None
    lines: tuple[str, ...] = ()


Opened = TypeVar("Opened")
Matched = TypeVar("Matched")


class ShapedRestore(Protocol[Opened, Matched]):
    """The steps of one rank's restore into one shape; see the module."""

    @property
    def remote_read_s(self) -> float:
        """How much longer `load` may take because slots lie on other nodes, in seconds."""

    def open(self) -> tuple[Opened, OpenReport]:
        """Opens slots and capsules; reports damage and raises no error for it."""

    def match(self, opened: Opened, reports: Sequence[OpenReport], rank_group: RankGroup) -> Matched:
        """Decides which bytes go where. All ranks call it together.

        Raises:
            LayoutChanged: the state does not fit; the same on every rank.
        """

    def make(self, matched: Matched) -> Mapping[str, torch.Tensor]:
        """Returns the live tensor of every leaf, by name; creates missing ones.

        Raises:
            LayoutChanged: the leaves are not those of the model and optimizer.
        """

    def load(
        self, matched: Matched, tensors: Mapping[str, torch.Tensor], transport: Transport | None, at_chunk: AtChunk
    ) -> LoadReport:
        """Fills the live tensors. All ranks call it together.

        Raises:
            RestoreError: bytes are not available.
        """

    def finish(self, matched: Matched, tensors: Mapping[str, torch.Tensor]) -> RestoreResult:
        """Restores inline leaves and host state."""


def run_restore(
    restore: ShapedRestore[Opened, Matched],
    rank_group: RankGroup,
    transport: Callable[[], Transport | None],
    at_chunk: AtChunk,
) -> RestoreResult:
    """Runs all steps; all ranks call it together.

    Args:
        restore: this rank's steps.
        rank_group: all ranks of the job.
        transport: creates the transport between ranks, on all ranks together.
        at_chunk: called before each chunk is read, from several threads.

    Raises:
        LayoutChanged: the state does not fit; names the leaves.
        RestoreError: bytes are not available, or decoded bytes differ from the saved ones.
    """
    opened, opens = share(rank_group, restore.open, OpenReport)
    if damaged := damaged_at_open(opens):
        return RestoreResult(damaged)
    matched = restore.match(opened, opens, rank_group)
    tensors = together(rank_group, lambda: restore.make(matched))
    for is_last in (False, True):
        loads = gather(
            rank_group,
            lambda: restore.load(matched, tensors, transport(), at_chunk),
            LoadReport,
            restore.remote_read_s,
        )
        if damaged := damaged_at_load(loads, is_last):
            return RestoreResult(damaged)
        faults = {text for report in loads for text in report.faults}
        if not faults:
            break
        if rank_group.rank == 0:
            say(f"{min(faults)}. All ranks load again.")
    return restore.finish(matched, tensors)


def damaged_at_open(reports: Sequence[OpenReport]) -> tuple[int, ...]:
    """Returns the old ranks whose slots and capsules must not be used.

    If replicas differ, nobody knows which one is right: these are all old ranks.
    """
    damaged = {old for report in reports for old in report.damaged}
    if are_mismatched(samples for report in reports for samples in report.samples.values()):
        damaged |= {old for report in reports for old in report.samples}
    return tuple(sorted(damaged))


def damaged_at_load(reports: Sequence[LoadReport], is_last: bool) -> tuple[int, ...]:
    """Returns the old ranks whose slots must not be used any more.

    Bytes that changed on their way are loaded once more. If they change again, their source counts
    as damaged, and other copies are used.

    Args:
        reports: of all ranks.
        is_last: whether the load was already repeated.

    Raises:
        RestoreError: bytes are wrong again, and no other source would help.
    """
    damaged = {old for report in reports for old in report.damaged}
    faults = {text: old for report in reports for text, old in report.faults.items()}
    if is_last and not damaged:
        damaged = {old for old in faults.values() if old != NO_RANK}
        if faults and not damaged:
            raise RestoreError(
                f"{min(faults)}, twice.", "bring back the lost node's memory, or go back to a checkpoint"
            )
    return tuple(sorted(damaged))


def samples_of(digests: Sequence[Sequence[int]]) -> Samples:
    """Returns samples, from the lists of `replica_check`."""
    return tuple(map(tuple, digests))
