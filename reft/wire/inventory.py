"""What the daemons hold of a job, as all ranks were told it; and the plan that follows from it.

own daemon's inventory (one rank a node) ─┐
survey of nodes that are not here any more ┴─► Findings ─► recovery.plan: the same on every rank
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from reft.core.coding.placement import Placement
from reft.core.commit.decision import Decision
from reft.core.commit.snapshot_interval import History
from reft.core.commit.version import Epoch, Version
from reft.core.recovery import lineage, recovery
from reft.core.recovery.recovery import Copy, Held, Plan
from reft.core.status.loss_analysis import Outlook
from reft.core.status.protection import Protection, protection
from reft.errors import AttachError
from reft.wire import messages
from reft.wire.manifest import placement_of
from reft.wire.v1 import daemon_pb2 as pb


def is_itself(surveyed: pb.Surveyed) -> bool:
    """Whether the node itself has answered.

    What answers at its address with another id is another node, as after a reboot: the memory of the first is gone, and what
    the other one holds would count twice.
    """
    return surveyed.HasField("reply") and surveyed.reply.node_id == surveyed.node.id


@dataclass(frozen=True)
class Findings:
    """One inventory for each node that answered.

    Attributes:
        replies: node id → what its daemon holds.
        silent: names of nodes of the newest manifest that did not answer.
        before: what the same attach found before it told a decision whose base could not be loaded. Nothing was written under
            that one, so it ends no history: the one that was in force then still says what counts.
    """

    replies: Mapping[str, pb.InventoryReply]
    silent: tuple[str, ...] = ()
    before: Findings | None = None

    @cached_property
    def decisions(self) -> list[Decision]:
        """Every decision that a daemon remembers."""
        return list(self._remembered.values())

    @cached_property
    def _remembered(self) -> dict[str, Decision]:
        """Node id → the decision that its daemon remembers."""
        return {
            node: messages.decision_from(reply.decision)
            for node, reply in self.replies.items()
            if reply.HasField("decision")
        }

    @property
    def decision(self) -> Decision | None:
        """The one in force."""
        return self._histories[0] if self._histories else None

    @cached_property
    def _histories(self) -> list[Decision]:
        if self.before is not None:
            return self.before._histories
        # A node that was purged and holds another job of this name says nothing of this one.
        known = {node: self.manifests.get(each.epoch) for node, each in self._remembered.items()}
        tokens = {node: manifest.token for node, manifest in known.items() if manifest is not None}
        members = {
            epoch: [node.id for node in manifest.nodes if tokens.get(node.id) == manifest.token]
            for epoch, manifest in self.manifests.items()
        }
        return lineage.histories(self._remembered, members, lineage.written_by(self.held, self.copies))

    def refuse_rivals(self, job: str) -> None:
        """Raises AttachError if the job went on twice, each time without knowing of the other: a person must choose."""
        if len(self._histories) < 2:
            return
        said = []
        for decision in self._histories:
            holders = [self.names[node] for node, each in self._remembered.items() if each == decision]
            steps = [each.version.step for each in self.held if each.version and each.version.epoch == decision.epoch]
            upto = f", up to step {max(steps)}" if steps else ""
            said.append(f"epoch {decision.epoch.counter} on {', '.join(sorted(holders))}{upto}")
        raise AttachError(
            f"job {job} went on more than once, each time without nodes that knew of the other: {'; '.join(said)}.",
            f"reft-cli purge {job} on the nodes of what is to be given up",
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
    def members(self) -> set[str]:
        """Ids of the nodes of the newest manifest and of its base's: nobody else writes what may still count."""
        decision = self.decision
        epochs = [each.epoch for each in (decision, decision and decision.base) if each]
        return {node.id for epoch in epochs if epoch in self.manifests for node in self.manifests[epoch].nodes}

    @cached_property
    def placements(self) -> dict[Epoch, Placement]:
        """Where the bytes of each epoch's versions lie; only epochs whose versions may still count."""
        wanted = {self.decision.epoch} if self.decision else set()
        if self.decision and self.decision.base:
            wanted.add(self.decision.base.epoch)
        return {epoch: placement_of(manifest) for epoch, manifest in self.manifests.items() if epoch in wanted}

    @cached_property
    def held(self) -> list[Held]:
        """The headers of all slots."""
        return [messages.held_from(node, header) for node, reply in self.replies.items() for header in reply.slots]

    @cached_property
    def copies(self) -> list[Copy]:
        """The headers of all capsules that nodes keep for ranks of other nodes."""
        return [messages.copy_from(node, copy) for node, reply in self.replies.items() for copy in reply.copies]

    @property
    def had_whole(self) -> bool:
        """Whether a version of the job was whole once: it must be found, or its loss be said."""
        return any(reply.had_whole for reply in self.replies.values())

    @property
    def history(self) -> History:
        """What the job has lived through, the epoch in force included."""
        if self.before is not None:
            return self.before.history
        if self.manifest is None or self.decision is None:
            return History()
        last = [self.replies[node] for node, each in self._remembered.items() if each.epoch == self.decision.epoch]
        has_failed = bool(self.silent) or any(reply.failed for reply in last)
        before = History(self.manifest.trained_s, self.manifest.failures)
        return before.after(max(reply.trained_s for reply in last), has_failed)

    @cached_property
    def nodes(self) -> dict[str, pb.Node]:
        """Every node that a manifest names or that answered, by its id; the newest manifest says last what it is."""
        known = {
            node.id: node
            for epoch in sorted(self.manifests, key=lambda epoch: epoch.counter)
            for node in self.manifests[epoch].nodes
        }
        return {ident: pb.Node(name=reply.node, id=ident) for ident, reply in self.replies.items()} | known

    @cached_property
    def names(self) -> dict[str, str]:
        """Id → what a person calls the node: its name, and a piece of its id where two have the same."""
        count = Counter(node.name for node in self.nodes.values())
        return {
            ident: node.name if node.name and count[node.name] == 1 else f"{node.name}#{ident[:6]}"
            for ident, node in self.nodes.items()
        }

    def nodes_of(self, unit: str) -> list[str]:
        """The node of this name, and the nodes of the failure domain that is labelled so; empty if there are none."""
        return [name for ident, name in self.names.items() if unit in (name, self.nodes[ident].domain)]

    def protection(self) -> tuple[Protection, Outlook | None] | None:
        """What survives what now; nodes are called by `names`."""
        names = self.names
        held = [replace(slot, node=names[slot.node]) for slot in self.held]
        copies = [replace(copy, node=names[copy.node]) for copy in self.copies]
        domains = {
            names[ident]: self.nodes[ident].domain or f"node {names[ident]}"
            for ident, reply in self.replies.items()
            if reply.HasField("decision")
        }
        return protection(held, copies, self.placements, self.decision, domains)

    def plan(self, erased: Collection[tuple[str, str, Version]]) -> Plan:
        """The recovery plan.

        Args:
            erased: (node, name, version) of slots and kept capsules that failed their digests.
        """
        return self._planned(erased) if erased else self._undamaged

    @cached_property
    def _undamaged(self) -> Plan:
        return self._planned(())

    def _planned(self, erased: Collection[tuple[str, str, Version]]) -> Plan:
        return recovery.plan(self.held, self.copies, self.placements, self.decision, erased)

    def absent(self, nodes: Sequence[pb.Node]) -> list[pb.Node]:
        """The nodes of the newest manifest, and of the base's, that are not among `nodes`: they may still hold something."""
        here = {node.id for node in nodes} | set(self.replies)
        found = {
            node.id: node for manifest in self.manifests.values() for node in manifest.nodes if node.id not in here
        }
        return [found[ident] for ident in sorted(found)]
