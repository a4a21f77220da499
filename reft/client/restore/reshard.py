"""The steps of one rank's restore into another shape; see `reft.client.restore.run`.

open     the slots that this rank reads, and the capsules of old ranks that lost their slots; each
         old rank has one keeper
match    each distinct part of host state is published once; then the same result on all ranks:
         transfers, or leaves that do not fit; host state by the rules of host_state_resharding
make     live tensors for every leaf
load     messages over the process group; lost shards are decoded and compared with their digests
finish   host state
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reft.client.link.exchange import gather
from reft.client.link.rank_group import RankGroup
from reft.client.restore import host_state_resharding
from reft.client.restore.executor import LiveTarget
from reft.client.restore.host_state_resharding import HostStateResharding
from reft.client.restore.load import LoadReport, chunk_verifier, load
from reft.client.restore.materialize import live_tensors
from reft.client.restore.remote_slots import remote_read_s
from reft.client.restore.reshard_match import leaves_elsewhere, match_leaves, parts_to_publish
from reft.client.restore.run import CapsuleFacts, OpenReport, RestoreContext, RestoreResult, Samples, samples_of
from reft.client.restore.slot_reader import AtChunk
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Transport
from reft.client.restore.verify import PeerMessages
from reft.client.snapshot.replica_check import capsule_digests, earlier_digests
from reft.client.state import serialization
from reft.core.layout.layout import Leaf, pack
from reft.core.recovery.plan import TransferPlan, TransferSizes, is_made
from reft.core.recovery.shard_matching import ShardMatch
from reft.core.text import more
from reft.errors import FormatError
from reft.wire import capsule_format
from reft.wire.slot_format import Bytes, SlotMap

Tree = Mapping[str, Any]
DEFAULT_SIZES = TransferSizes()


@dataclass(frozen=True)
class _OldRank:
    """What this rank opened of one old rank.

    Attributes:
        tree: the capsule's tree.
        facts: what all ranks must know.
        samples: the samples of its replicas.
        slot: its slot; None if it is lost.
        end: end of the slot's data that this rank reads.
        lost_digests: the digests of the lost slot's chunks; empty if the slot is not lost.
    """

    tree: Tree
    facts: CapsuleFacts
    samples: Samples
    slot: SlotMap | None = None
    end: int = 0
    lost_digests: bytes = b""


@dataclass(frozen=True)
class _MatchedState:
    """What goes where, for this new rank.

    Attributes:
        old_ranks: what this rank opened, by old rank.
        wanted: the leaves of this rank.
        transfer_plan: the transfers of all ranks.
        tree: the host state of this rank.
        lists: see `HostStateResharding`.
        lines: messages for the user; the same on all ranks.
    """

    old_ranks: Mapping[int, _OldRank]
    wanted: Sequence[Leaf]
    transfer_plan: TransferPlan
    tree: Tree
    lists: Mapping[str, Sequence[Any]]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class _PublishedState:
    """Host state that other ranks may need: digest → the encoded value."""

    values: dict[str, bytes]


@dataclass(frozen=True)
class ReshardRestore:
    """One rank's restore into another shape; see the module.

    Args:
        context: what every restore needs.
        before: for each old rank the leaves in the manifest of the base's epoch.
        after: for each new rank the leaves predicted now, in the order in which they are created.
        mismatched: names of leaves whose bytes differed between old ranks.
        sizes: sizes of messages and buffers.
    """

    context: RestoreContext
    before: Sequence[Sequence[Leaf]]
    after: Sequence[Sequence[Leaf]]
    mismatched: Sequence[str]
    sizes: TransferSizes = DEFAULT_SIZES

    @property
    def world(self) -> int:
        """The number of new ranks."""
        return len(self.after)

    @property
    def remote_read_s(self) -> float:
        """How much longer `load` may take because slots lie on other nodes, in seconds."""
        return remote_read_s(self.context.plan.sources, self.context.readers.reader_of, self.context.nodes)

    # open

    def open(self) -> tuple[dict[int, _OldRank], OpenReport]:
        """Opens the slots and capsules that this rank keeps."""
        old_ranks: dict[int, _OldRank] = {}
        damaged = []
        for old, keeper in self.context.readers.keeper_of.items():
            if keeper == self.context.rank:
                try:
                    old_ranks[old] = self._open_one(old)
                except FormatError:
                    damaged.append(old)
        samples = {old: each.samples for old, each in old_ranks.items()}
        facts = {old: each.facts for old, each in old_ranks.items()}
        return old_ranks, OpenReport(tuple(damaged), samples, facts)

    def _open_one(self, old: int) -> _OldRank:
        """Returns one old rank's leaves and host state, from its capsule and slot.

        Raises:
            FormatError: the slot or capsule is damaged.
        """
        plan, opener, placement = self.context.plan, self.context.opener, self.context.placement
        source = plan.sources.get(old)
        if source is None:
            record = opener.capsule(plan, old)
            tree = serialization.decode(record.capsule)
            return _OldRank(tree, _facts(tree), self._samples(old, tree), lost_digests=record.digests)
        slot = opener.slot(source)
        tree = serialization.decode(slot.capsule())
        others, end = leaves_elsewhere(placement, old, self.before[old], slot.table())
        return _OldRank(tree, _facts(tree, others), self._samples(old, tree), slot, end)

    def _samples(self, old: int, tree: Tree) -> Samples:
        return samples_of(
            capsule_digests(tree) + earlier_digests(self.context.opener.remote.earlier(self.context.plan, old))
        )

    # match

    def match(
        self, old_ranks: Mapping[int, _OldRank], reports: Sequence[OpenReport], rank_group: RankGroup
    ) -> _MatchedState:
        """Decides what goes where, after each distinct part of host state was published once.

        Raises:
            LayoutChanged: a leaf or a part of host state does not fit; the same on every rank.
        """
        context = self.context
        facts = {old: each for report in reports for old, each in report.facts.items()}
        published = gather(rank_group, lambda: self._publish(old_ranks, facts), _PublishedState)
        shard_match, wanted = match_leaves(context.placement, self.before, self.after, self.mismatched, facts)
        values = {digest: capsule_format.decode(data) for each in published for digest, data in each.values.items()}
        resharding = self._host_state(old_ranks, facts, values)
        tree = resharding.tree(facts[0].step, facts[0].marked)
        lost = [
            old
            for old in range(len(self.before))
            if old not in context.plan.sources and is_made(context.placement, old)
        ]
        transfer_plan = TransferPlan(shard_match.needs, context.placement, context.readers, lost, sizes=self.sizes)
        lines = (*resharding.lines, *_own_leaves(shard_match))
        return _MatchedState(old_ranks, wanted[context.rank], transfer_plan, tree, resharding.lists, lines)

    def _publish(self, old_ranks: Mapping[int, _OldRank], facts: Mapping[int, CapsuleFacts]) -> _PublishedState:
        values = {}
        for old, part in parts_to_publish(facts, self.context.readers.keeper_of, self.world, self.context.rank):
            value = host_state_resharding.parts(old_ranks[old].tree)[part]
            values[facts[old].digests[part]] = capsule_format.encode(value)
        return _PublishedState(values)

    def _host_state(
        self, old_ranks: Mapping[int, _OldRank], facts: Mapping[int, CapsuleFacts], values: Mapping[str, Any]
    ) -> HostStateResharding:
        """Returns the rules for this rank's host state.

        Args:
            old_ranks: what this rank opened.
            facts: old rank → its facts.
            values: digest → the published value.
        """
        kept = dict(values)
        for old, each in old_ranks.items():
            parts = host_state_resharding.parts(each.tree)
            kept |= {digest: parts[part] for part, digest in facts[old].digests.items()}
        host = self.context.host
        return HostStateResharding(
            rank=self.context.rank,
            world=self.world,
            digests=[facts[old].digests for old in range(len(self.before))],
            values=kept,
            live=host.capture(0),
            generators=[name for name, value in host.objects.items() if isinstance(value, torch.Generator)],
            takes_all=[name for name, value in host.objects.items() if hasattr(value, "load_state_dicts")],
        )

    # make, load, finish

    def make(self, matched: _MatchedState) -> Mapping[str, torch.Tensor]:
        """Returns the live tensor of every leaf; creates missing ones."""
        context = self.context
        return live_tensors(matched.wanted, context.tracked, context.tensor_index, context.buffer)

    def load(
        self,
        matched: _MatchedState,
        tensors: Mapping[str, torch.Tensor],
        transport: Transport | None,
        at_chunk: AtChunk,
    ) -> LoadReport:
        """Fills the live tensors; reports damaged slots and faults."""
        context, plan, layout = self.context, matched.transfer_plan, pack(matched.wanted)
        opened = {old: each.slot for old, each in matched.old_ranks.items() if each.slot is not None}
        slots, damaged = context.near_slots(plan.owners, opened, lambda old: self._data_end(matched, old), at_chunk)
        flat_view = FlatTensorView(layout.leaves, layout.offsets, tensors, copies=context.decoder.begin())
        offsets = {leaf.name: at for leaf, at in zip(layout.leaves, layout.offsets, strict=True)}
        report = load(
            plan.operations(context.rank),
            self.sizes,
            context.placement.chunk_bytes,
            PeerMessages(transport, context.rank),
            slots,
            LiveTarget(flat_view, offsets),
            context.decoder,
            {old: self._inline_leaves(plan, old, each.tree) for old, each in matched.old_ranks.items()},
            {
                old: chunk_verifier(context.placement, old, each.lost_digests)
                for old, each in matched.old_ranks.items()
                if old in plan.lost and old in plan.owners
            },
        )
        return LoadReport(tuple(sorted({*damaged, *report.damaged})), report.faults)

    def _data_end(self, matched: _MatchedState, old: int) -> int:
        """Returns the end of the data to read in an old rank's slot."""
        if old in matched.old_ranks:
            return matched.old_ranks[old].end
        return self.context.placement.rank_placement(old).unreplicated_offset

    def _inline_leaves(self, plan: TransferPlan, old: int, tree: Tree) -> Bytes:
        names = [name for name, _, _ in plan.inline_extents(old)]
        return np.frombuffer(bytearray(b"".join(tree["riders"][name] for name in names)), np.uint8)

    def finish(self, matched: _MatchedState, tensors: Mapping[str, torch.Tensor]) -> RestoreResult:
        """Restores host state; inline leaves came with the messages."""
        self.context.host.restore(matched.tree, matched.lists)
        return RestoreResult(tree=matched.tree, lines=matched.lines)


def _facts(tree: Tree, others: bytes = b"") -> CapsuleFacts:
    parts = host_state_resharding.parts(tree)
    digests = {part: host_state_resharding.digest(value) for part, value in parts.items()}
    return CapsuleFacts(tuple(tree["absent"]), others, digests, tree["step"], tree["marked"])


def _own_leaves(shard_match: ShardMatch) -> list[str]:
    """Returns a line about leaves of which each old rank had its own."""
    if not shard_match.own:
        return []
    return [
        f"each old rank had its own {shard_match.own[0]}{more(len(shard_match.own) - 1, 'leaf', 'leaves')}: "
        "a rank gets that of the old rank with its number, a new rank that of the lowest old rank."
    ]
