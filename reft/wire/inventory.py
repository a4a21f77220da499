"""Converts inventories of daemons into `reft.core.recovery.inventory`, and keeps manifests.

    own daemon's inventory (one rank a node) ─┐
    survey of nodes that are absent           ┴─► JobSurvey ─► Inventory ─► recovery.plan

The plan is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from reft.core.coding.placement import Placement
from reft.core.commit.decision import Decision
from reft.core.commit.snapshot_interval import FailureHistory
from reft.core.commit.version import Epoch, Version
from reft.core.persist.stored_lineages import StoredLineage
from reft.core.recovery import recovery
from reft.core.recovery.holdings import Holdings, judge_holdings
from reft.core.recovery.inventory import Inventory, KnownStep, ManifestFacts, ManifestNode, NodeInventory
from reft.core.recovery.recovery import HeldCapsule, HeldParity, HeldRecord, HeldSlot, RecoveryPlan
from reft.core.status.loss_analysis import LossAnalysis
from reft.core.status.protection import Protection, protection
from reft.wire import messages
from reft.wire.manifest import LayoutsByRank, layouts_of, placement_of
from reft.wire.v1 import daemon_pb2 as pb

Held = TypeVar("Held", bound=HeldSlot)


def is_itself(surveyed: pb.SurveyedNode) -> bool:
    """Returns whether the surveyed node itself has answered.

    An answer with another id comes from another node, for example after a reboot. The memory of the
    first node is lost then (*emptied*). The slots of the other node would count twice.
    """
    return surveyed.HasField("reply") and surveyed.reply.node_id == surveyed.node.id


def silence_in(surveyed: Iterable[pb.SurveyedNode]) -> dict[str, str]:
    """Returns name → reason, by name, for each node that gave no answer."""
    return dict(sorted((each.node.name, each.trouble) for each in surveyed if not each.HasField("reply")))


def facts_from(manifest: pb.Manifest) -> ManifestFacts:
    """Returns the parts of a manifest that decisions need."""
    members = tuple(ManifestNode(node.id, node.name, node.domain, tuple(node.ranks)) for node in manifest.nodes)
    return ManifestFacts(messages.job_mark(manifest), members, FailureHistory(manifest.trained_s, manifest.failures))


def inventory_from(node: str, reply: pb.InventoryReply) -> NodeInventory:
    """Returns the inventory that a node's daemon sent; `node` is the node's id."""
    return NodeInventory(
        reply.node,
        messages.decision_from(reply.decision) if reply.HasField("decision") else None,
        tuple(messages.held_slot_from(node, header) for header in reply.slots if not header.parity),
        tuple(messages.held_capsule_from(node, copy) for copy in reply.capsules),
        reply.had_whole,
        reply.trained_s,
        reply.failed,
        tuple(KnownStep(each.step, each.source) for each in reply.known),
        messages.restores_from(reply.restores) if reply.HasField("restores") else None,
        reply.reached,
        tuple(_held_from(node, header, HeldParity) for header in reply.slots if header.parity),
        tuple(_held_from(node, header, HeldRecord) for header in reply.records),
    )


def _held_from(node: str, header: pb.SlotHeader, kind: type[Held]) -> Held:
    slot = messages.held_slot_from(node, header)
    return kind(slot.node, slot.rank, slot.slot, slot.state, slot.version, slot.layout, slot.data_bytes)


@dataclass(frozen=True)
class StoredHistory:
    """What storage remembers of a job, and the checkpoint that daemons have opened of it.

    Attributes:
        decisions: of all attaches.
        chosen: the decision in force, if storage has a newer history or checkpoint than memory.
        version: the version of the opened checkpoint; None: none is open.
        manifest: the manifest that this version was written under; without a version, the newest
            one in memory, or None.
        age_s: since that checkpoint was complete.
        reason: a sentence: why memory was not used.
    """

    decisions: tuple[Decision, ...]
    chosen: Decision | None = None
    version: Version | None = None
    manifest: pb.Manifest | None = None
    age_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class JobSurvey:
    """The reply of each node that answered, and the inventory that the replies form.

    Attributes:
        replies: node id → the reply of its daemon.
        silent, emptied, before: see `Inventory`.
        storage: what storage holds of the job; None: it was not asked, or has nothing.
    """

    replies: Mapping[str, pb.InventoryReply]
    silent: Mapping[str, str] = field(default_factory=dict)
    emptied: tuple[str, ...] = ()
    before: JobSurvey | None = None
    storage: StoredHistory | None = None

    @cached_property
    def inventory(self) -> Inventory:
        """Returns the inventory that the replies form, without their messages."""
        return Inventory(
            {node: inventory_from(node, reply) for node, reply in self.replies.items()},
            {epoch: facts_from(manifest) for epoch, manifest in self.manifests.items()},
            self.silent,
            self.emptied,
            self.before.inventory if self.before else None,
            self.storage.decisions if self.storage else (),
            self.storage.chosen if self.storage else None,
        )

    @cached_property
    def manifests(self) -> dict[Epoch, pb.Manifest]:
        """Returns epoch → the manifest that its versions were written under."""
        manifests = dict(self.before.manifests) if self.before else {}
        for reply in self.replies.values():
            # a survey leaves out manifests that another reply has
            manifests = {**messages.manifests_from(reply), **manifests}
        if self.storage is not None and self.storage.manifest is not None and self.storage.version is not None:
            manifests.setdefault(self.storage.version.epoch, self.storage.manifest)
        return manifests

    @property
    def manifest(self) -> pb.Manifest | None:
        """Returns the newest manifest; None if no node and no opened checkpoint has it."""
        known = self.manifests.get(self.decision.epoch) if self.decision else None
        return self.storage.manifest if known is None and self.storage is not None else known

    @property
    def tokens(self) -> list[bytes]:
        """Returns the tokens that the answers name, those of the newest attach first."""
        newest = sorted(self.manifests, key=lambda epoch: epoch.counter, reverse=True)
        tokens = [token for epoch in newest for token in messages.known_tokens(self.manifests[epoch])]
        return [each for each in dict.fromkeys(tokens) if each][: messages.TOKENS_MAX]

    @property
    def not_recomputed(self) -> str:
        """Returns why a node gave up recomputing copies that auto had chosen; empty: none did."""
        return next((reply.not_recomputed for _, reply in sorted(self.replies.items()) if reply.not_recomputed), "")

    @property
    def decision(self) -> Decision | None:
        """Returns the decision in force; None if there is none."""
        return self.inventory.decision

    @property
    def held(self) -> list[HeldSlot]:
        """Returns the headers of all slots."""
        return self.inventory.held

    @property
    def parity(self) -> list[HeldParity]:
        """Returns the headers of all parity slots of the exchange."""
        return self.inventory.parity

    @property
    def records(self) -> list[HeldRecord]:
        """Returns the headers of all slots of gradient records."""
        return self.inventory.records

    @property
    def copies(self) -> list[HeldCapsule]:
        """Returns the headers of all capsules that nodes keep for ranks of other nodes."""
        return self.inventory.capsules

    @property
    def names(self) -> dict[str, str]:
        """Returns node id → name for people."""
        return self.inventory.names

    @cached_property
    def nodes(self) -> dict[str, pb.Node]:
        """Returns node id → node, for every node that a manifest names or that answered.

        Nodes of a manifest have their addresses.
        """
        known = {
            node.id: node
            for epoch in sorted(self.manifests, key=lambda epoch: epoch.counter)
            for node in self.manifests[epoch].nodes
        }
        return {ident: pb.Node(name=reply.node, id=ident) for ident, reply in self.replies.items()} | known

    @cached_property
    def layouts(self) -> dict[Epoch, LayoutsByRank]:
        """Returns epoch → layouts, for the epochs whose versions may still count."""
        return {epoch: layouts_of(self.manifests[epoch]) for epoch in self.inventory.epochs if epoch in self.manifests}

    @cached_property
    def placements(self) -> dict[Epoch, Placement]:
        """Returns epoch → placement, for the same epochs."""
        return {
            epoch: placement_of(self.manifests[epoch], known_layouts=layouts) for epoch, layouts in self.layouts.items()
        }

    def protection(self) -> tuple[Protection, LossAnalysis | None] | None:
        """Returns the losses that the state survives now. The nodes have the names of `names`."""
        held = [replace(slot, node=self.names[slot.node]) for slot in self.held]
        copies = [replace(copy, node=self.names[copy.node]) for copy in self.copies]
        parity = [replace(slot, node=self.names[slot.node]) for slot in self.parity]
        judged = protection(held, copies, self.placements, self.decision, self.inventory.domains, parity)
        members = len(self.manifest.nodes) if self.manifest else 0
        return None if judged is None else (replace(judged[0], members=members), judged[1])

    def plan_without(self, lost: Collection[str]) -> RecoveryPlan:
        """Returns the recovery plan after the loss of the nodes of these names."""
        gone = {ident for ident, name in self.names.items() if name in lost}
        held = [slot for slot in self.held if slot.node not in gone]
        copies = [copy for copy in self.copies if copy.node not in gone]
        parity = [slot for slot in self.parity if slot.node not in gone]
        records = [slot for slot in self.records if slot.node not in gone]
        return recovery.plan(held, copies, self.placements, self.decision, parity=parity, records=records)

    def plan(self, erased: Collection[tuple[str, str, Version]]) -> RecoveryPlan:
        """Returns the recovery plan of trainers.

        Args:
            erased: (node, name, version) of slots and capsules that failed their digests, and of
                replays that were refused.
        """
        return self._make_plan(erased) if erased else self._plan_without_erasures

    def plan_of(self, version: Version, erased: Collection[tuple[str, str, Version]] = ()) -> RecoveryPlan:
        """Returns the plan of exactly this version; without a base if it can't be restored.

        Args:
            version: the version.
            erased: as of `plan`.
        """
        plan = self._plan_up_to(version, erased)
        return plan if plan.base == version else RecoveryPlan(None)

    def guard_below(self, base: Version) -> Version | None:
        """Returns the newest version, not newer than `base`, that survives lost nodes."""
        return self._plan_up_to(base).guard

    def _plan_up_to(self, newest: Version, erased: Collection[tuple[str, str, Version]] = ()) -> RecoveryPlan:
        """Returns the plan as if there were no newer version; daemons can carry it out."""

        def is_kept(version: Version | None) -> bool:
            return version is not None and (version == newest or version.is_older_than(newest))

        held = [slot for slot in self.held if is_kept(slot.version)]
        copies = [copy for copy in self.copies if is_kept(copy.version)]
        parity = [slot for slot in self.parity if is_kept(slot.version)]
        return recovery.plan(held, copies, self.placements, self.decision, erased, parity)

    def restorable(self, erased: Collection[tuple[str, str, Version]] = ()) -> list[Version]:
        """Returns the versions that can be restored now, the newest one first.

        Args:
            erased: as of `plan`.
        """
        versions = {slot.version for slot in self.held if slot.version is not None}
        ordered = sorted(versions, key=lambda version: (*version.order, version.epoch.ident), reverse=True)
        return [version for version in ordered if self.plan_of(version, erased).base == version]

    def rebuild_plan(self, erased: Collection[tuple[str, str, Version]]) -> RecoveryPlan:
        """Returns the recovery plan of daemons: they have no torch, so they replay nothing."""
        return recovery.plan(self.held, self.copies, self.placements, self.decision, erased, self.parity)

    @cached_property
    def _plan_without_erasures(self) -> RecoveryPlan:
        return self._make_plan(())

    def _make_plan(self, erased: Collection[tuple[str, str, Version]]) -> RecoveryPlan:
        return recovery.plan(self.held, self.copies, self.placements, self.decision, erased, self.parity, self.records)

    def holdings(
        self, job: str, erased: Collection[tuple[str, str, Version]] = (), plan: RecoveryPlan | None = None
    ) -> Holdings:
        """Returns what is held of the job now.

        Args:
            job: name of the job.
            erased: as of `plan`.
            plan: the plan to judge; None: that of trainers.
        """
        return judge_holdings(job, self.inventory, plan or self.plan(erased), self.placements, erased)

    def absent(self, nodes: Sequence[pb.Node]) -> list[pb.Node]:
        """Returns the known nodes that are not among `nodes` and did not answer.

        Such nodes may still hold slots or capsules.
        """
        return [self.nodes[ident] for ident in self.inventory.absent_nodes({node.id for node in nodes})]


def lineages_from(listing: pb.StoredReply) -> list[StoredLineage]:
    """Returns what storage holds of a job."""
    return [
        StoredLineage(
            each.ident,
            tuple(messages.decision_from(decision) for decision in each.decisions),
            tuple(messages.version_from(checkpoint.version) for checkpoint in each.checkpoints),
            each.has_ended,
        )
        for each in listing.lineages
    ]
