"""Inventories of a job as daemons send them: read into `reft.core.recovery.inventory`, and their manifests kept.

own daemon's inventory (one rank a node) ─┐
survey of nodes that are not here any more ┴─► Findings ─► Inventory ─► recovery.plan: the same on every rank
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from reft.core.coding.placement import Placement
from reft.core.commit.decision import Decision
from reft.core.commit.snapshot_interval import FailureHistory
from reft.core.commit.version import Epoch, Version
from reft.core.recovery import recovery
from reft.core.recovery.inventory import Inventory, ManifestFacts, ManifestNode, NodeInventory
from reft.core.recovery.recovery import HeldCapsule, HeldSlot, RecoveryPlan
from reft.core.status.loss_analysis import LossAnalysis
from reft.core.status.protection import Protection, protection
from reft.wire import messages
from reft.wire.manifest import placement_of
from reft.wire.v1 import daemon_pb2 as pb


def is_itself(surveyed: pb.SurveyedNode) -> bool:
    """Whether the node itself has answered.

    What answers at its address with another id is another node, as after a reboot: the memory of the first is gone, and what
    the other one holds would count twice.
    """
    return surveyed.HasField("reply") and surveyed.reply.node_id == surveyed.node.id


def facts_from(manifest: pb.Manifest) -> ManifestFacts:
    """What decisions need of a manifest."""
    members = tuple(ManifestNode(node.id, node.name, node.domain) for node in manifest.nodes)
    return ManifestFacts(manifest.token, members, FailureHistory(manifest.trained_s, manifest.failures))


def inventory_from(node: str, reply: pb.InventoryReply) -> NodeInventory:
    """What the daemon of a node, named by its id, holds."""
    return NodeInventory(
        reply.node,
        messages.decision_from(reply.decision) if reply.HasField("decision") else None,
        tuple(messages.held_from(node, header) for header in reply.slots),
        tuple(messages.copy_from(node, copy) for copy in reply.capsules),
        reply.had_whole,
        reply.trained_s,
        reply.failed,
    )


@dataclass(frozen=True)
class JobSurvey:
    """The reply of each node that answered, and the inventory that they make.

    Attributes:
        replies: node id → what its daemon holds.
        silent: names of nodes of the newest manifest that did not answer.
        before: see `Inventory`.
    """

    replies: Mapping[str, pb.InventoryReply]
    silent: tuple[str, ...] = ()
    before: JobSurvey | None = None

    @cached_property
    def inventory(self) -> Inventory:
        """What follows from the replies, without their messages."""
        return Inventory(
            {node: inventory_from(node, reply) for node, reply in self.replies.items()},
            {epoch: facts_from(manifest) for epoch, manifest in self.manifests.items()},
            self.silent,
            self.before.inventory if self.before else None,
        )

    @cached_property
    def manifests(self) -> dict[Epoch, pb.Manifest]:
        """The manifest under which each epoch's versions were written."""
        found = dict(self.before.manifests) if self.before else {}
        for reply in self.replies.values():
            if not reply.HasField("decision"):
                continue
            decision = messages.decision_from(reply.decision)
            if reply.HasField("manifest"):  # a survey leaves out what another reply has
                found.setdefault(decision.epoch, reply.manifest)
            if decision.base is not None and reply.HasField("base_manifest"):
                found.setdefault(decision.base.epoch, reply.base_manifest)
        return found

    @property
    def manifest(self) -> pb.Manifest | None:
        """The newest manifest."""
        return self.manifests.get(self.decision.epoch) if self.decision else None

    @property
    def decision(self) -> Decision | None:
        """The one in force."""
        return self.inventory.decision

    @property
    def held(self) -> list[HeldSlot]:
        """The headers of all slots."""
        return self.inventory.held

    @property
    def copies(self) -> list[HeldCapsule]:
        """The headers of all capsules that nodes keep for ranks of other nodes."""
        return self.inventory.capsules

    @property
    def names(self) -> dict[str, str]:
        """Id → what a person calls the node."""
        return self.inventory.names

    @cached_property
    def nodes(self) -> dict[str, pb.Node]:
        """Every node that a manifest names or that answered, by its id, with its addresses where a manifest has them."""
        known = {
            node.id: node
            for epoch in sorted(self.manifests, key=lambda epoch: epoch.counter)
            for node in self.manifests[epoch].nodes
        }
        return {ident: pb.Node(name=reply.node, id=ident) for ident, reply in self.replies.items()} | known

    @cached_property
    def placements(self) -> dict[Epoch, Placement]:
        """Where the bytes of each epoch's versions lie; only epochs whose versions may still count."""
        return {
            epoch: placement_of(self.manifests[epoch]) for epoch in self.inventory.epochs if epoch in self.manifests
        }

    def protection(self) -> tuple[Protection, LossAnalysis | None] | None:
        """What survives what now; nodes are called by `names`."""
        held = [replace(slot, node=self.names[slot.node]) for slot in self.held]
        copies = [replace(copy, node=self.names[copy.node]) for copy in self.copies]
        return protection(held, copies, self.placements, self.decision, self.inventory.domains)

    def plan(self, erased: Collection[tuple[str, str, Version]]) -> RecoveryPlan:
        """The recovery plan.

        Args:
            erased: (node, name, version) of slots and kept capsules that failed their digests.
        """
        return self._planned(erased) if erased else self._undamaged

    @cached_property
    def _undamaged(self) -> RecoveryPlan:
        return self._planned(())

    def _planned(self, erased: Collection[tuple[str, str, Version]]) -> RecoveryPlan:
        return recovery.plan(self.held, self.copies, self.placements, self.decision, erased)

    def absent(self, nodes: Sequence[pb.Node]) -> list[pb.Node]:
        """The nodes of the newest manifest, and of the base's, that are not among `nodes`: they may still hold something."""
        return [self.nodes[ident] for ident in self.inventory.absent({node.id for node in nodes})]
