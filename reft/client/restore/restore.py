"""One restore: all ranks run the same steps together, into the same shape or into another one.

    open     this process is the rank's trainer;
             the slots and capsules that this rank reads  ─► OpenReport ┐ damaged, or replicas that
                                                                        │ differ: counts as lost,
    publish  another shape: host state that other ranks need            │ and all ranks make a
    match    which bytes go where                                       │
    make     live tensors for every leaf; capsules to their holders     │
    load     bytes over the process group; lost shards are decoded      │
                                                          ─► LoadReport ┘
    finish   host state                                   ─► RestoreResult

A step returns what the next step takes. A step stores nothing. Only `publish` and `match` know the
shape: `same_shape.py` or `reshard.py`. Each step may fail on one rank alone, so an exchange ends it
on all ranks; that of `make` ends `match`, too. After that of `finish` no rank refuses its state any
more, so daemons may free older versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from reft.client.link.exchange import gather, share, together
from reft.client.link.rank_group import RankGroup
from reft.client.restore.executor import NO_RANK, LoadReport, TransferExecutor
from reft.client.restore.materialize import live_index
from reft.client.restore.opened import (
    CapsuleFacts,
    OldRank,
    OpenReport,
    RestoreContext,
    RestoreMatch,
    open_old_rank,
)
from reft.client.restore.remote_slots import remote_read_s
from reft.client.restore.replay import ReplayReport, replay_s, replay_sections
from reft.client.restore.reshard import PublishedState, ShapeChange, facts_of
from reft.client.restore.same_shape import match_same_shape
from reft.client.restore.slot_reader import AtChunk, SlotReader
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Transport
from reft.client.restore.verify import PeerMessages, chunk_verifier
from reft.client.state.tensors import TensorIndex
from reft.console import say
from reft.core.coding.placement import Placement
from reft.core.layout.layout import Leaf
from reft.core.recovery.lost_slots import refuse_resized
from reft.core.recovery.plan import TransferSizes
from reft.core.recovery.replica_samples import are_mismatched
from reft.core.recovery.shard_matching import PieceSource
from reft.errors import FormatError, LayoutChanged, RestoreError
from reft.wire.slot_format import Bytes, SlotMap

SIZES = TransferSizes()


@dataclass(frozen=True)
class RestoreResult:
    """The result of one restore, the same on every rank apart from the tree.

    Attributes:
        damaged: old ranks whose slots or capsules are damaged, parity numbers of damaged parity
            slots, and replay numbers of refused replays. If there are any, nothing counts as
            restored.
        tree: the restored host state. The generators in it come back last. None if nothing was
            restored.
        lines: messages for the user about state that each old rank had of its own.
        is_mismatched: whether the old ranks are given up because replicas differ, without damage.
        reasons: why replays were refused.
        tensor_index: where each tensor was found, after missing ones were made; None if nothing was
            restored.
    """

    damaged: tuple[int, ...] = ()
    tree: Mapping[str, Any] | None = None
    lines: tuple[str, ...] = ()
    is_mismatched: bool = False
    reasons: tuple[str, ...] = ()
    tensor_index: TensorIndex | None = None


@dataclass(frozen=True)
class Restore:
    """One rank's steps of a restore; see the module.

    Args:
        context: what every step needs.
        predicted: the leaves that this rank had when the base's epoch began.
        change: the change of shape; None: the same shape.
    """

    context: RestoreContext
    predicted: Sequence[Leaf] = ()
    change: ShapeChange | None = None

    @property
    def remote_read_s(self) -> float:
        """How much longer `load` may take because slots lie on other nodes, in seconds."""
        sources, nodes = self.context.slots, self.context.nodes
        shared = remote_read_s(sources, self.context.readers.reader_of, nodes)
        if self.change:
            return shared
        # A rank that has moved reads unreplicated leaves from the slot on its earlier node.
        return shared + remote_read_s(sources, {old: old for old in sources}, nodes)

    @property
    def replay_s(self) -> float:
        """How long all ranks may wait for `replay`, in seconds; 0: nothing is replayed."""
        return replay_s(self.context.plan)

    def open(self) -> tuple[dict[int, OldRank], OpenReport]:
        """Opens slots and capsules; reports damage and raises no error for it."""
        context, opened, facts = self.context, dict[int, OldRank](), {}
        olds = {old for old, keeper in context.readers.keeper_of.items() if keeper == context.rank}
        damaged = []
        for old in sorted(olds if self.change else {*olds, context.rank}):
            try:
                each = open_old_rank(context, old)
                leaves = self.change.before[old] if self.change else self.predicted
                if each.slot is None and (self.change or old == context.rank):
                    refuse_resized(old, each.tree["riders"], leaves)
                if self.change:
                    facts[old] = facts_of(context.placement, old, each, leaves)
                opened[old] = each
            except FormatError:
                damaged.append(old)
        return opened, OpenReport(tuple(damaged), {old: each.samples for old, each in opened.items()}, facts)

    def replay(self) -> tuple[dict[int, SlotMap], ReplayReport]:
        """Replays the sections that this rank must make; reports refusals and raises no error."""
        own = {self.context.rank: self.predicted}
        return replay_sections(self.context, dict(enumerate(self.change.before)) if self.change else own)

    def publish(
        self, opened: Mapping[int, OldRank], reports: Sequence[OpenReport], rank_group: RankGroup
    ) -> PublishedState:
        """Returns the host state that ranks need of others. All ranks call it together."""
        if self.change is None:
            return PublishedState({})
        return self.change.publish(self.context, opened, _facts(reports), rank_group)

    def match(
        self, opened: Mapping[int, OldRank], reports: Sequence[OpenReport], published: PublishedState
    ) -> RestoreMatch:
        """Decides which bytes go where.

        Raises:
            LayoutChanged: the state does not fit; perhaps that of this rank alone.
        """
        if self.change is None:
            return match_same_shape(self.context, self.predicted, opened, SIZES)
        return self.change.match(self.context, opened, _facts(reports), published, SIZES)

    def make(self, match: RestoreMatch) -> TensorIndex:
        """Returns the index of the live tensors of every leaf; creates missing ones.

        Raises:
            LayoutChanged: the leaves are not those of the model and optimizer.
        """
        context = self.context
        return live_index(match.leaves, context.tracked, context.tensor_index, context.buffer)

    def load(
        self,
        match: RestoreMatch,
        tensors: Mapping[str, torch.Tensor],
        transport: Transport | None,
        at_chunk: AtChunk,
        replayed: Mapping[int, SlotMap] = MappingProxyType({}),
    ) -> LoadReport:
        """Fills the live tensors; reports damaged slots and faults. All ranks call it together.

        Args:
            match: which bytes go where.
            tensors: the live tensors.
            transport: to the other ranks.
            at_chunk: called before each chunk is read.
            replayed: replay number → the slot that this rank has made.

        Raises:
            RestoreError: bytes are not available.
        """
        context, layout = self.context, match.layout
        slots, damaged = self._near_slots(match, at_chunk)
        slots |= {number: SlotReader(slot, slot.header.data_bytes, at_chunk) for number, slot in replayed.items()}
        shards = {old for plan in match.plans for old in plan.made}
        sections = {old for plan in match.plans for old in plan.sections}
        executor = TransferExecutor(
            SIZES,
            context.placement.chunk_bytes,
            PeerMessages(transport, context.rank, len(context.placement.domains)),
            slots,
            FlatTensorView(layout.leaves, layout.offsets, tensors, copies=context.decoder.begin()),
            match.offsets,
            context.decoder,
            inline_leaves(match),
            {
                old: chunk_verifier(context.placement, old, each.lost_digests, old in shards, old in sections)
                for old, each in match.opened.items()
                if old in shards or old in sections
            },
        )
        report = executor.load(chain.from_iterable(plan.operations(context.rank) for plan in match.plans))
        return LoadReport(tuple(sorted({*damaged, *report.damaged})), report.faults)

    def _near_slots(self, match: RestoreMatch, at_chunk: AtChunk) -> tuple[dict[int, SlotReader], set[int]]:
        """Returns readers of the slots that this rank reads itself, and the damaged ones."""
        context, slots, damaged = self.context, dict[int, SlotReader](), set[int]()
        near = {
            number
            for plan in match.plans
            for number in plan.slots_read
            if number in context.slots and plan.readers.is_near(number, context.rank)
        }
        for number in sorted(near):
            try:
                opened = match.opened.get(number)
                slot = opened.slot if opened and opened.slot else context.opener.slot(context.slots[number])
                end = slot_bytes(context.placement, number)
                slots[number] = SlotReader(slot, max(end, opened.layout.data_bytes if opened else 0), at_chunk)
            except FormatError:
                damaged.add(number)
        return slots, damaged

    def finish(self, match: RestoreMatch, made: TensorIndex) -> RestoreResult:
        """Restores host state; all leaves are loaded. The objects of the user may raise anything.

        Args:
            match: has the host state.
            made: what `make` returned.

        Raises:
            LayoutChanged: the objects of this run are others.
        """
        self.context.host.restore(match.tree, match.lists)
        return RestoreResult(tree=match.tree, lines=match.lines, tensor_index=made)


def _facts(reports: Sequence[OpenReport]) -> dict[int, CapsuleFacts]:
    return {old: each for report in reports for old, each in report.facts.items()}


def slot_bytes(placement: Placement, number: int) -> int:
    """Returns the least size of a slot's data, by old rank or parity number."""
    world = len(placement.domains)
    if number < world:
        return placement.rank_placement(number).data_bytes
    where = placement.guard_lane_of(number - world)
    return placement.guard_lanes[where[0]].parity_bytes if where else 0


def inline_leaves(match: RestoreMatch) -> dict[int, Bytes]:
    """Returns old rank → its needed inline leaves, at the plans' offsets, for opened capsules.

    Raises:
        LayoutChanged: an inline leaf has another size than expected.
    """
    data: dict[int, bytearray] = {old: bytearray() for old in match.opened}
    for need in chain.from_iterable(plan.needs for plan in match.plans):
        where, old, at = need.location
        if where is PieceSource.CAPSULE and old in data:
            leaf = match.opened[old].tree["riders"][need.name]
            if len(leaf) != need.nbytes:
                raise LayoutChanged(f"{need.name} has {len(leaf)} bytes in the snapshot, not {need.nbytes}.")
            data[old] += bytes(max(at + need.nbytes - len(data[old]), 0))
            data[old][at : at + need.nbytes] = leaf
    return {old: np.frombuffer(each, np.uint8) for old, each in data.items()}


def run_restore(
    restore: Restore,
    rank_group: RankGroup,
    transport: Callable[[], Transport | None],
    at_chunk: AtChunk,
    register: Callable[[], object],
    secure: Callable[[], AbstractContextManager[None]],
) -> RestoreResult:
    """Runs all steps; all ranks call it together.

    An error of one rank, also in `register` or `secure`, is raised on all ranks.

    Args:
        restore: this rank's steps.
        rank_group: all ranks of the job.
        transport: creates the transport between ranks, on all ranks together.
        at_chunk: called before each chunk is read, from several threads.
        register: registers this rank, which only then may open slots.
        secure: brings the capsules of a sound version to their holders, while tensors are made.

    Raises:
        ReftError: see `register` and `secure`.
        LayoutChanged: the state does not fit; names the leaves.
        RestoreError: bytes are not available, or decoded bytes differ from the saved ones.
    """

    def begin() -> tuple[dict[int, OldRank], OpenReport]:
        register()
        return restore.open()

    def make() -> tuple[RestoreMatch, TensorIndex]:
        match = restore.match(opened, opens, published)
        with secure():
            return match, restore.make(match)

    opened, opens = share(rank_group, begin, OpenReport)
    if damaged := damaged_at_open(opens):
        return RestoreResult(damaged, is_mismatched=not any(report.damaged for report in opens))
    replayed: Mapping[int, SlotMap] = {}
    if restore.replay_s:
        replayed, reports = share(rank_group, restore.replay, ReplayReport, restore.replay_s)
        if refused := {number: why for report in reports for number, why in report.refused.items()}:
            return RestoreResult(tuple(sorted(refused)), reasons=tuple(why for _, why in sorted(refused.items())))
    published = restore.publish(opened, opens, rank_group)
    match, made = together(rank_group, make)
    for is_last in (False, True):
        loads = gather(
            rank_group,
            lambda: restore.load(match, made.tensors, transport(), at_chunk, replayed),
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
    return together(rank_group, lambda: restore.finish(match, made))


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
