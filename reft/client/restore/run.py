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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from reft.client.link.exchange import gather, share, together
from reft.client.link.rank_group import RankGroup
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore.remote_slots import SlotOpener
from reft.client.restore.transport import Transport
from reft.client.restore.verified_slot import AtChunk
from reft.client.snapshot.replica_check import are_mismatched
from reft.client.state.host_state import HostState
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.coding.placement import Placement
from reft.core.recovery.recovery import RecoveryPlan
from reft.errors import RestoreError

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

    @property
    def slot_nodes(self) -> dict[int, str]:
        """Old rank → the node that has its slot."""
        return {old: source.node for old, source in self.plan.sources.items()}


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
class LoadReport:
    """What one rank tells all ranks of the bytes that it read and decoded.

    Attributes:
        damaged: old ranks whose slots are damaged.
        wrong: old rank → the first chunk that was decoded and differs from the saved bytes.
    """

    damaged: tuple[int, ...] = ()
    wrong: dict[int, int] = field(default_factory=dict)


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
        """How much longer `open` may take because slots lie on other nodes, in seconds."""

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
            RestoreError: bytes are not available, or decoded bytes differ from the saved ones.
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
    opened, opens = share(rank_group, restore.open, OpenReport, restore.remote_read_s)
    if damaged := damaged_at_open(opens):
        return RestoreResult(damaged)
    matched = restore.match(opened, opens, rank_group)
    tensors = together(rank_group, lambda: restore.make(matched))
    loads = gather(rank_group, lambda: restore.load(matched, tensors, transport(), at_chunk), LoadReport)
    if damaged := damaged_at_load(loads):
        return RestoreResult(damaged)
    return restore.finish(matched, tensors)


def damaged_at_open(reports: Sequence[OpenReport]) -> tuple[int, ...]:
    """Returns the old ranks whose slots and capsules must not be used.

    If replicas differ, nobody knows which one is right: these are all old ranks.
    """
    damaged = {old for report in reports for old in report.damaged}
    if are_mismatched(samples for report in reports for samples in report.samples.values()):
        damaged |= {old for report in reports for old in report.samples}
    return tuple(sorted(damaged))


def damaged_at_load(reports: Sequence[LoadReport]) -> tuple[int, ...]:
    """Returns the old ranks whose slots are damaged.

    Raises:
        RestoreError: no slot is damaged, and yet decoded bytes differ from the saved ones.
    """
    damaged = {old for report in reports for old in report.damaged}
    wrong = {old: chunk for report in reports for old, chunk in report.wrong.items()}
    if not damaged and wrong:
        old, chunk = min(wrong.items())
        raise RestoreError(
            f"chunk {chunk} of rank {old}, decoded from its peers, differs from the saved bytes.",
            "bring back the lost node's memory, or go back to a checkpoint",
        )
    return tuple(sorted(damaged))


def samples_of(digests: Sequence[Sequence[int]]) -> Samples:
    """Returns samples, from the lists of `replica_check`."""
    return tuple(map(tuple, digests))
