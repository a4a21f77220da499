"""One try to bring a version back into a job of another shape; all ranks take these steps together.

open      the slots that this rank reads, and capsules of old ranks that lost theirs: each old rank has one keeper   ┐ damaged:
publish   what every old rank said of its leaves, each distinct piece of host state once                             │ an erasure,
match     pure, the same on all ranks: needs, or what does not fit; host state by the rules of `inheritance`         │ and a new
make      live tensors for every leaf                                                                                │ plan
load      parcels over the process group, lost shards decoded and compared with their digests                        ┘
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
from reft.client.restore.remote_slots import RemoteSlots, far_s
from reft.client.restore.reshard_decode import ChunkVerifier
from reft.client.restore.reshard_executor import ReshardExecutor
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Transport
from reft.client.restore.verified_slot import VerifiedSlotReader
from reft.client.snapshot.replica_check import are_mismatched, compared, compared_before
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

LINES_MAX = 8  # leaves that one error names
DEFAULT_SIZES = TransferSizes()


@dataclass
class ReshardRestore:
    """See the module.

    Args:
        plan: with a base.
        placement: under which the base was written.
        before: for each old rank the leaves that its epoch's manifest had foreseen.
        after: for each new rank the leaves that are foreseen now, in the order in which they are made.
        mismatched: names of leaves that old ranks were found to hold with unlike bytes.
        rank: the new one.
        node: id of the node that this rank runs on.
        nodes: node id → its ranks, of the new job.
        tensor_index: what the subjects have by now.
        room: memory for tensors that do not exist yet; another is made if it is too small.

    Attributes:
        lines: what was done with state that is each rank's own, for a person; the same on all ranks.
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
    room: HugePageBuffer
    rank_group: RankGroup
    lines: list[str] = field(default_factory=list)
    _slots: dict[int, SlotMap] = field(default_factory=dict)
    _ends: dict[int, int] = field(default_factory=dict)  # of what is read of each slot's data
    _trees: dict[int, dict[str, Any]] = field(default_factory=dict)
    _digests: dict[int, bytes] = field(default_factory=dict)
    _inheritance: HostStateResharding | None = None
    _tree: dict[str, Any] = field(default_factory=dict)
    _wanted: Sequence[Leaf] = ()
    _tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def run(
        self,
        transport: Callable[[], Transport | None],
        at_chunk: Callable[[int], object],
        sizes: TransferSizes = DEFAULT_SIZES,
    ) -> list[int]:
        """All steps; the old ranks whose slots or capsules are damaged, the same on every rank: then nothing counts.

        Raises:
            LayoutChanged: the state does not fit, by name.
            RestoreError: bytes can't be had, or what was decoded is not what was saved.
        """
        said = self.rank_group.gather_or_raise(self._open, extra_s=far_s(self.plan.sources, self._readers, self.nodes))
        damaged = sorted({old for each in said for old in each["damaged"]})
        if damaged:
            return damaged
        facts = {int(old): about for each in said for old, about in each["about"].items()}
        if are_mismatched(about["compared"] for about in facts.values()):
            return sorted(facts)
        published = self.rank_group.gather_or_raise(lambda: self._publish(facts))
        found = self._match(facts)
        self._inherit(facts, {digest: value for each in published for digest, value in each.items()})
        self._tell(found)
        reshard_plan = ReshardPlan(found.needs, self.placement, self._readers, self._keepers, self._node_of, sizes)
        self.rank_group.gather_or_raise(self._make)
        results = self.rank_group.gather_or_raise(lambda: self._load(reshard_plan, transport, at_chunk))
        damaged = sorted({old for each in results for old in each["damaged"]})
        if damaged:
            return damaged
        wrong = {old: chunks for each in results for old, chunks in each["wrong"].items()}
        if wrong:
            old, chunks = min(wrong.items())
            raise RestoreError(
                f"chunk {chunks[0]} of rank {old}, which was decoded from its peers, is not what was saved.",
                "bring back the lost node's memory, or go back to a checkpoint",
            )
        return []

    def finish(self) -> dict[str, Any]:
        """Host state; the tree, whose generators come back last."""
        assert self._inheritance is not None, "run comes first"
        self.host.restore(self._tree, self._inheritance.lists)
        return self._tree

    @property
    def _world(self) -> int:
        return len(self.after)

    @property
    def _readers(self) -> dict[int, int]:
        return readers_of({rank: held.node for rank, held in self.plan.sources.items()}, self.nodes, self._world)

    @property
    def _keepers(self) -> dict[int, int]:
        """Old rank → the new rank that has its capsule, and decodes its slot if that is lost."""
        readers = self._readers
        return {old: readers.get(old, old % self._world) for old in range(len(self.before))}

    @property
    def _node_of(self) -> list[str]:
        """The node of each new rank."""
        found = {rank: node for node, ranks in self.nodes.items() for rank in ranks}
        return [found[rank] for rank in range(self._world)]

    # open

    def _open(self) -> dict[str, Any]:
        damaged, about = [], {}
        for old, keeper in self._keepers.items():
            if keeper == self.rank:
                try:
                    about[str(old)] = self._open_one(old)
                except FormatError:
                    damaged.append(old)
        return {"damaged": damaged, "about": about}

    def _open_one(self, old: int) -> dict[str, Any]:
        """What one old rank said of itself.

        Raises:
            FormatError: its slot or capsule is damaged.
        """
        held = self.plan.sources.get(old)
        others = b""
        if held is None:
            assert self.plan.base is not None, "a capsule without a base"
            record = self.remote.capsule(self.plan.capsules[old].node, old, self.plan.base)
            tree, self._digests[old] = serialization.decode(record.capsule), record.digests
        else:
            slot = self._slots[old] = self._slot(held)
            tree, others = serialization.decode(slot.capsule()), self._others(old, slot.table())
        self._trees[old] = tree
        digests = {
            part: host_state_resharding.digest(value) for part, value in host_state_resharding.parts(tree).items()
        }
        return {
            "absent": tree["absent"],
            "others": text_of(others),
            "digests": digests,
            "step": tree["step"],
            "marked": tree["marked"],
            "compared": compared(tree) + compared_before(self.remote.earlier(self.plan, old)),
        }

    def _slot(self, held: HeldSlot) -> SlotMap:
        if held.node == self.node:
            return self.leases.take([held.slot])[0].map
        return self.remote.slot(held)

    def _others(self, old: int, data: bytes) -> bytes:
        """The table of the leaves that lie where the placement does not say; empty if there are none."""
        layout, places = table_from(data), places_from(data)
        foreseen = {leaf.name: leaf for leaf in self.before[old]}
        part = self.placement.part(old)
        self._ends[old] = part.data_bytes
        kept = {
            leaf.name: part.unreplicated_offset + at
            for leaf, at in zip(part.unreplicated.leaves, part.unreplicated.offsets, strict=True)
        }
        found = [
            (leaf, at)
            for leaf, at in zip(layout.leaves, layout.offsets, strict=True)
            if places[leaf.name] != pb.CELL
            and (
                foreseen.get(leaf.name) != leaf or (places[leaf.name] == pb.UNREPLICATED and kept.get(leaf.name) != at)
            )
        ]
        if not found:
            return b""
        self._ends[old] = max(self._ends[old], *(at + leaf.nbytes for leaf, at in found))
        return table_to(
            Layout(tuple(leaf for leaf, _ in found), tuple(at for _, at in found), layout.data_bytes), places
        )

    # publish

    def _publish(self, facts: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
        """Host state that other ranks may need: each distinct value once, by the keeper of the lowest old rank that had it."""
        mine, seen, keepers = {}, set(), self._keepers
        is_shared = len({about["digests"]["random"] for about in facts.values()}) == 1
        for old, about in sorted(facts.items()):
            for part, digest in about["digests"].items():
                if part == "random" and not is_shared and (old >= self._world or keepers[old] == old):
                    continue  # nobody else goes on with these generators
                if digest not in seen and keepers[old] == self.rank:
                    mine[digest] = text_of(capsule_format.encode(host_state_resharding.parts(self._trees[old])[part]))
                seen.add(digest)
        return mine

    # match

    def _match(self, facts: Mapping[int, Mapping[str, Any]]) -> ShardMatch:
        """What goes where.

        Raises:
            LayoutChanged: something does not fit.
        """
        tables: dict[int, dict[str, Leaf]] = {}
        owns = {old: _own(about) for old, about in facts.items()}

        def leaves_of(old: int) -> dict[str, Leaf]:
            leaves = self.before[old]
            return tables.setdefault(id(leaves), {leaf.name: leaf for leaf in leaves})

        pieces, problems = pieces_of(self.placement, leaves_of, owns)
        wanted = wanted_leaves(self.after, pieces)
        self._wanted = wanted[self.rank]
        found = match(pieces, wanted, self.mismatched)
        lines = sorted(problems + found.problems)
        if lines:
            more = [f"and {len(lines) - LINES_MAX} more"] if len(lines) > LINES_MAX else []
            raise LayoutChanged(
                f"what {counted(len(self.before), 'rank')} held can't be brought into this job of {self._world}:\n  "
                + "\n  ".join(lines[:LINES_MAX] + more),
                "start the job in its old shape, or under another name, or drop what is held with reft-cli purge",
            )
        return found

    def _inherit(self, facts: Mapping[int, Mapping[str, Any]], published: Mapping[str, str]) -> None:
        values = {digest: capsule_format.decode(bytes_of(text)) for digest, text in published.items()}
        for old, tree in self._trees.items():
            parts = host_state_resharding.parts(tree)
            values |= {digest: parts[part] for part, digest in facts[old]["digests"].items()}
        objects = self.host.objects
        found = HostStateResharding(
            self.rank,
            self._world,
            [facts[old]["digests"] for old in range(len(self.before))],
            values,
            self.host.capture(0),
            [name for name, value in objects.items() if isinstance(value, torch.Generator)],
            [name for name, value in objects.items() if hasattr(value, "load_state_dicts")],
        )
        self._tree = found.tree(facts[0]["step"], facts[0]["marked"])
        self._inheritance = found

    def _tell(self, found: ShardMatch) -> None:
        assert self._inheritance is not None, "inherited by now"
        self.lines = list(self._inheritance.lines)
        if found.own:
            self.lines.append(
                f"each old rank kept its own {found.own[0]}{more(len(found.own) - 1, 'leaf', 'leaves')}: "
                "a rank has that of the old rank of its number, a new one that of the lowest."
            )

    # make, load

    def _make(self) -> dict[str, Any]:
        self._tensors = live_tensors(self._wanted, self.tracked, self.tensor_index, self.room)
        return {}

    def _load(
        self, reshard_plan: ReshardPlan, transport: Callable[[], Transport | None], at_chunk: Callable[[int], object]
    ) -> dict[str, Any]:
        layout = pack(self._wanted)
        flat_view = FlatTensorView(layout.leaves, layout.offsets, self._tensors)
        offsets = {leaf.name: at for leaf, at in zip(layout.leaves, layout.offsets, strict=True)}
        slots = {old: VerifiedSlotReader(slot, self._ends[old], at_chunk) for old, slot in self._slots.items()}
        inline_leaves = {old: tree["riders"] for old, tree in self._trees.items()}
        proofs = {old: self._proof(old) for old in self._digests if reshard_plan.is_rebuilt(old)}
        is_pinned = any(tensor.device.type == "cuda" for tensor in self._tensors.values())
        ReshardExecutor(
            transport(), self.rank, reshard_plan, slots, inline_leaves, proofs, flat_view, offsets, is_pinned
        ).run()
        wrong = {str(old): proof.finish() for old, proof in proofs.items()}
        return {
            "damaged": [old for old, source in slots.items() if source.is_bad],
            "wrong": {old: chunks[:1] for old, chunks in wrong.items() if chunks},
        }

    def _proof(self, old: int) -> ChunkVerifier:
        part = self.placement.part(old)
        end = max((block.offset + block.nbytes for block in part.blocks[: part.data_blocks]), default=0)
        return ChunkVerifier(np.frombuffer(self._digests[old], "<u8"), self.placement.chunk_bytes, end)


def leaves_by_rank(manifest: pb.Manifest) -> list[tuple[Leaf, ...]]:
    """The leaves that were foreseen for each rank, as the placement sees them; one object for ranks that have the same."""
    layouts, index = layouts_of(manifest)
    leaves = [tuple(form.leaves()) for form in layouts.symbolic]
    return [leaves[i] for i in index]


def is_reshaped(before: pb.Manifest, after: pb.Manifest) -> bool:
    """Whether ranks can't just take over what the old ranks of their numbers had."""
    if [before.layouts[i].digest for i in before.layout_of] == [after.layouts[i].digest for i in after.layout_of]:
        return False  # as always, and quick: thousands of layouts need not be written down
    return not is_same(leaves_by_rank(before), leaves_by_rank(after))


def _own(about: Mapping[str, Any]) -> UnforeseenLeaves:
    """What an old rank said of its leaves."""
    others: list[tuple[Leaf, int | None]] = []
    data = bytes_of(about["others"])
    if data:
        layout, places = table_from(data), places_from(data)
        for leaf, at in zip(layout.leaves, layout.offsets, strict=True):
            others.append((replace(leaf, staged=False), at if places[leaf.name] == pb.UNREPLICATED else None))
    return UnforeseenLeaves(frozenset(about["absent"]), tuple(others))
