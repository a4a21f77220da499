"""One attempt to restore a version into a job of another shape.

All ranks run the steps together:

open      the slots that this rank reads, and the capsules of old ranks that      ┐
          lost their slots; each old rank has one keeper                          │ damaged:
publish   what every old rank reported of its leaves, and each distinct part      │ counts as
          of host state once                                                      │ lost, and a
match     the same result on all ranks: transfers, or leaves that do not fit;     │ new plan is
          host state by the rules of host_state_resharding                        │ made
make      live tensors for every leaf                                             │
load      messages over the process group; lost shards are decoded and            │
          compared with their digests                                             ┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from reft.client.link.rank_group import RankGroup, bytes_of, text_of
from reft.client.link.slots import SlotLeases
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore import host_state_resharding
from reft.client.restore.host_state_resharding import HostStateResharding
from reft.client.restore.materialize import live_tensors
from reft.client.restore.remote_slots import RemoteSlots, remote_read_s
from reft.client.restore.reshard_decode import ChunkVerifier
from reft.client.restore.reshard_executor import ReshardExecutor
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Transport
from reft.client.restore.verified_slot import VerifiedSlotReader
from reft.client.snapshot.replica_check import are_mismatched, capsule_digests, earlier_digests
from reft.client.state import serialization
from reft.client.state.host_state import HostState
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.coding.placement import Placement
from reft.core.layout.layout import Layout, Leaf, pack
from reft.core.recovery.recovery import HeldSlot, RecoveryPlan
from reft.core.recovery.regather import ReshardPlan, TransferSizes, readers_of
from reft.core.recovery.shard_matching import ShardMatch, UnforeseenLeaves, is_same, match, pieces_of, wanted_leaves
from reft.core.text import counted, more
from reft.errors import FormatError, LayoutChanged, RestoreError
from reft.wire import capsule_format
from reft.wire.manifest import layouts_of
from reft.wire.messages import places_from, table_from, table_to
from reft.wire.slot_format import SlotMap
from reft.wire.v1 import daemon_pb2 as pb

LINES_MAX = 8  # problems that one error lists
DEFAULT_SIZES = TransferSizes()


@dataclass
class ReshardRestore:
    """One attempt to restore into another shape; see the module.

    Args:
        plan: a recovery plan with a base.
        placement: the placement that the base was written with.
        before: for each old rank the leaves in the manifest of the base's epoch.
        after: for each new rank the leaves predicted now, in the order in which they are created.
        mismatched: names of leaves whose bytes differed between old ranks.
        rank: the new rank.
        node: id of the node that this rank runs on.
        nodes: node id → its ranks, of the new job.
        tensor_index: the current index of the tracked objects.
        buffer: memory for tensors to create; if too small, another one is allocated.

    Attributes:
        lines: messages for the user about state that each rank had of its own; the same on all
            ranks.
    """

    plan: RecoveryPlan
    placement: Placement
    before: Sequence[Sequence[Leaf]]
    after: Sequence[Sequence[Leaf]]
    mismatched: Sequence[str]
    rank: int
    node: str
    nodes: Mapping[str, Sequence[int]]
    leases: SlotLeases
    remote: RemoteSlots
    tracked: TrackedObjects
    tensor_index: TensorIndex
    host: HostState
    buffer: HugePageBuffer
    rank_group: RankGroup
    lines: list[str] = field(default_factory=list)
    _slots: dict[int, SlotMap] = field(default_factory=dict)
    # Old rank → end of the slot's data that this rank reads.
    _ends: dict[int, int] = field(default_factory=dict)
    _trees: dict[int, dict[str, Any]] = field(default_factory=dict)
    _digests: dict[int, bytes] = field(default_factory=dict)
    _resharding: HostStateResharding | None = None
    _tree: dict[str, Any] = field(default_factory=dict)
    _wanted: Sequence[Leaf] = ()
    _tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def run(
        self,
        transport: Callable[[], Transport | None],
        at_chunk: Callable[[int], object],
        sizes: TransferSizes = DEFAULT_SIZES,
    ) -> list[int]:
        """Runs all steps; returns the old ranks whose slots or capsules are damaged.

        The result is the same on every rank. If it is not empty, the attempt has failed.

        Args:
            transport: creates the transport.
            at_chunk: called before each chunk is read.
            sizes: sizes of messages and buffers.

        Raises:
            LayoutChanged: the state does not fit; names the leaves.
            RestoreError: bytes are not available, or decoded bytes differ from the saved ones.
        """
        opened = self.rank_group.gather_or_raise(
            self._open, extra_s=remote_read_s(self.plan.sources, self._readers, self.nodes)
        )
        damaged = sorted({old for each in opened for old in each["damaged"]})
        if damaged:
            return damaged
        facts = {int(old): rank_facts for each in opened for old, rank_facts in each["about"].items()}
        if are_mismatched(rank_facts["compared"] for rank_facts in facts.values()):
            return sorted(facts)
        published = self.rank_group.gather_or_raise(lambda: self._publish(facts))
        shard_match = self._match(facts)
        self._map_host_state(facts, {digest: value for each in published for digest, value in each.items()})
        self._collect_lines(shard_match)
        reshard_plan = ReshardPlan(
            shard_match.needs, self.placement, self._readers, self._keepers, self._node_of, sizes
        )
        self.rank_group.gather_or_raise(self._make)
        results = self.rank_group.gather_or_raise(lambda: self._load(reshard_plan, transport, at_chunk))
        damaged = sorted({old for each in results for old in each["damaged"]})
        if damaged:
            return damaged
        wrong_chunks = {old: chunks for each in results for old, chunks in each["wrong"].items()}
        if wrong_chunks:
            old, chunks = min(wrong_chunks.items())
            raise RestoreError(
                f"chunk {chunks[0]} of rank {old}, decoded from its peers, differs from the saved bytes.",
                "bring back the lost node's memory, or go back to a checkpoint",
            )
        return []

    def finish(self) -> dict[str, Any]:
        """Restores host state and returns its tree; the generators in the tree come back last."""
        assert self._resharding is not None, "call run first"
        self.host.restore(self._tree, self._resharding.lists)
        return self._tree

    @property
    def _world(self) -> int:
        return len(self.after)

    @property
    def _readers(self) -> dict[int, int]:
        return readers_of({rank: source.node for rank, source in self.plan.sources.items()}, self.nodes, self._world)

    @property
    def _keepers(self) -> dict[int, int]:
        """Old rank → its keeper, a new rank.

        The keeper has the old rank's capsule, and decodes the old rank's slot if that is lost.
        """
        readers = self._readers
        return {old: readers.get(old, old % self._world) for old in range(len(self.before))}

    @property
    def _node_of(self) -> list[str]:
        """The node of each new rank."""
        node_of_rank = {rank: node for node, ranks in self.nodes.items() for rank in ranks}
        return [node_of_rank[rank] for rank in range(self._world)]

    # open

    def _open(self) -> dict[str, Any]:
        damaged, facts = [], {}
        for old, keeper in self._keepers.items():
            if keeper == self.rank:
                try:
                    facts[str(old)] = self._open_one(old)
                except FormatError:
                    damaged.append(old)
        return {"damaged": damaged, "about": facts}

    def _open_one(self, old: int) -> dict[str, Any]:
        """Returns one old rank's leaves and host state, from its capsule and slot.

        Raises:
            FormatError: the slot or capsule is damaged.
        """
        source = self.plan.sources.get(old)
        other_table = b""
        if source is None:
            assert self.plan.base is not None, "a capsule without a base"
            record = self.remote.capsule(self.plan.capsules[old].node, old, self.plan.base)
            tree, self._digests[old] = serialization.decode(record.capsule), record.digests
        else:
            slot = self._slots[old] = self._slot(source)
            tree, other_table = serialization.decode(slot.capsule()), self._other_leaves(old, slot.table())
        self._trees[old] = tree
        digests = {
            part: host_state_resharding.digest(value) for part, value in host_state_resharding.parts(tree).items()
        }
        return {
            "absent": tree["absent"],
            "others": text_of(other_table),
            "digests": digests,
            "step": tree["step"],
            "marked": tree["marked"],
            "compared": capsule_digests(tree) + earlier_digests(self.remote.earlier(self.plan, old)),
        }

    def _slot(self, source: HeldSlot) -> SlotMap:
        if source.node == self.node:
            return self.leases.take([source.slot])[0].map
        return self.remote.slot(source)

    def _other_leaves(self, old: int, data: bytes) -> bytes:
        """Returns the table of the leaves that lie elsewhere than the placement says.

        Empty if there are none.
        """
        layout, places = table_from(data), places_from(data)
        predicted = {leaf.name: leaf for leaf in self.before[old]}
        part = self.placement.rank_placement(old)
        self._ends[old] = part.data_bytes
        unreplicated_at = {
            leaf.name: part.unreplicated_offset + at
            for leaf, at in zip(part.unreplicated.leaves, part.unreplicated.offsets, strict=True)
        }
        moved = [
            (leaf, at)
            for leaf, at in zip(layout.leaves, layout.offsets, strict=True)
            if places[leaf.name] != pb.CELL
            and (
                predicted.get(leaf.name) != leaf
                or (places[leaf.name] == pb.UNREPLICATED and unreplicated_at.get(leaf.name) != at)
            )
        ]
        if not moved:
            return b""
        self._ends[old] = max(self._ends[old], *(at + leaf.nbytes for leaf, at in moved))
        return table_to(
            Layout(tuple(leaf for leaf, _ in moved), tuple(at for _, at in moved), layout.data_bytes), places
        )

    # publish

    def _publish(self, facts: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
        """Returns host state that other ranks may need, each distinct value once.

        The keeper of the lowest old rank that had a value publishes it.
        """
        own_values, seen, keepers = {}, set(), self._keepers
        is_shared = len({rank_facts["digests"]["random"] for rank_facts in facts.values()}) == 1
        for old, rank_facts in sorted(facts.items()):
            for part, digest in rank_facts["digests"].items():
                if part == "random" and not is_shared and (old >= self._world or keepers[old] == old):
                    continue  # no other rank continues these generators
                if digest not in seen and keepers[old] == self.rank:
                    own_values[digest] = text_of(
                        capsule_format.encode(host_state_resharding.parts(self._trees[old])[part])
                    )
                seen.add(digest)
        return own_values

    # match

    def _match(self, facts: Mapping[int, Mapping[str, Any]]) -> ShardMatch:
        """Returns which bytes go where.

        Raises:
            LayoutChanged: a leaf does not fit.
        """
        tables: dict[int, dict[str, Leaf]] = {}
        unforeseen = {old: _unforeseen_leaves(rank_facts) for old, rank_facts in facts.items()}

        def leaves_of(old: int) -> dict[str, Leaf]:
            leaves = self.before[old]
            return tables.setdefault(id(leaves), {leaf.name: leaf for leaf in leaves})

        pieces, problems = pieces_of(self.placement, leaves_of, unforeseen)
        wanted = wanted_leaves(self.after, pieces)
        self._wanted = wanted[self.rank]
        shard_match = match(pieces, wanted, self.mismatched)
        lines = sorted(problems + shard_match.problems)
        if lines:
            rest = [f"and {len(lines) - LINES_MAX} more"] if len(lines) > LINES_MAX else []
            raise LayoutChanged(
                f"the snapshot of {counted(len(self.before), 'rank')} cannot be restored into this job of {self._world}:\n  "
                + "\n  ".join(lines[:LINES_MAX] + rest),
                "start the job in its old shape, or under another name, or delete the snapshots with reft-cli purge",
            )
        return shard_match

    def _map_host_state(self, facts: Mapping[int, Mapping[str, Any]], published: Mapping[str, str]) -> None:
        values = {digest: capsule_format.decode(bytes_of(text)) for digest, text in published.items()}
        for old, tree in self._trees.items():
            parts = host_state_resharding.parts(tree)
            values |= {digest: parts[part] for part, digest in facts[old]["digests"].items()}
        objects = self.host.objects
        resharding = HostStateResharding(
            self.rank,
            self._world,
            [facts[old]["digests"] for old in range(len(self.before))],
            values,
            self.host.capture(0),
            [name for name, value in objects.items() if isinstance(value, torch.Generator)],
            [name for name, value in objects.items() if hasattr(value, "load_state_dicts")],
        )
        self._tree = resharding.tree(facts[0]["step"], facts[0]["marked"])
        self._resharding = resharding

    def _collect_lines(self, shard_match: ShardMatch) -> None:
        assert self._resharding is not None, "call _map_host_state first"
        self.lines = list(self._resharding.lines)
        if shard_match.own:
            self.lines.append(
                f"each old rank had its own {shard_match.own[0]}{more(len(shard_match.own) - 1, 'leaf', 'leaves')}: "
                "a rank gets that of the old rank with its number, a new rank that of the lowest old rank."
            )

    # make, load

    def _make(self) -> dict[str, Any]:
        self._tensors = live_tensors(self._wanted, self.tracked, self.tensor_index, self.buffer)
        return {}

    def _load(
        self, reshard_plan: ReshardPlan, transport: Callable[[], Transport | None], at_chunk: Callable[[int], object]
    ) -> dict[str, Any]:
        layout = pack(self._wanted)
        flat_view = FlatTensorView(layout.leaves, layout.offsets, self._tensors)
        offsets = {leaf.name: at for leaf, at in zip(layout.leaves, layout.offsets, strict=True)}
        slots = {old: VerifiedSlotReader(slot, self._ends[old], at_chunk) for old, slot in self._slots.items()}
        inline_leaves = {old: tree["riders"] for old, tree in self._trees.items()}
        verifiers = {old: self._verifier(old) for old in self._digests if reshard_plan.is_rebuilt(old)}
        is_pinned = any(tensor.device.type == "cuda" for tensor in self._tensors.values())
        ReshardExecutor(
            transport(), self.rank, reshard_plan, slots, inline_leaves, verifiers, flat_view, offsets, is_pinned
        ).run()
        wrong_chunks = {str(old): verifier.finish() for old, verifier in verifiers.items()}
        return {
            "damaged": [old for old, source in slots.items() if source.is_bad],
            "wrong": {old: chunks[:1] for old, chunks in wrong_chunks.items() if chunks},
        }

    def _verifier(self, old: int) -> ChunkVerifier:
        part = self.placement.rank_placement(old)
        end = max((block.offset + block.nbytes for block in part.blocks[: part.data_blocks]), default=0)
        return ChunkVerifier(np.frombuffer(self._digests[old], "<u8"), self.placement.chunk_bytes, end)


def leaves_by_rank(manifest: pb.Manifest) -> list[tuple[Leaf, ...]]:
    """Returns the predicted leaves of each rank, in the order of the placement.

    Ranks with the same leaves share one tuple.
    """
    layouts, index = layouts_of(manifest)
    leaves = [tuple(form.leaves()) for form in layouts.symbolic]
    return [leaves[i] for i in index]


def is_reshaped(before: pb.Manifest, after: pb.Manifest) -> bool:
    """Returns whether the ranks of the new job have other leaves than the old ranks."""
    if [before.layouts[i].digest for i in before.layout_of] == [after.layouts[i].digest for i in after.layout_of]:
        return False  # the usual and quick case: thousands of layouts need not be expanded
    return not is_same(leaves_by_rank(before), leaves_by_rank(after))


def _unforeseen_leaves(rank_facts: Mapping[str, Any]) -> UnforeseenLeaves:
    """Returns which leaves an old rank had otherwise than predicted."""
    other_leaves: list[tuple[Leaf, int | None]] = []
    data = bytes_of(rank_facts["others"])
    if data:
        layout, places = table_from(data), places_from(data)
        for leaf, at in zip(layout.leaves, layout.offsets, strict=True):
            other_leaves.append((replace(leaf, staged=False), at if places[leaf.name] == pb.UNREPLICATED else None))
    return UnforeseenLeaves(frozenset(rank_facts["absent"]), tuple(other_leaves))
