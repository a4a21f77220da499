"""What the daemons hold of a job, and what follows from it: which history counts, and what its nodes are called.

    one NodeInventory a node that answered ─► Inventory ─► histories in force ─► one: recovery.plan
                                                                              └► several: a person must choose

Invariants
  1. The same inventories give the same answers on every rank; the order of the nodes does not matter.
  2. A node that holds another job of the same name says nothing of this one: its manifest has another token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from reft.core.commit.decision import Decision
from reft.core.commit.snapshot_interval import FailureHistory
from reft.core.commit.version import Epoch
from reft.core.recovery import lineage
from reft.core.recovery.recovery import HeldCapsule, HeldSlot
from reft.errors import AttachError


@dataclass(frozen=True)
class ManifestNode:
    """A node as a manifest names it.

    Attributes:
        name: that a person gave it; empty: none.
        domain: label of its failure domain; empty: it fails alone.
    """

    id: str
    name: str = ""
    domain: str = ""


@dataclass(frozen=True)
class ManifestFacts:
    """What decisions need of a manifest.

    Attributes:
        token: of the job.
        history: what the job had lived through when the manifest was made.
    """

    token: bytes
    members: tuple[ManifestNode, ...]
    history: FailureHistory


@dataclass(frozen=True)
class NodeInventory:
    """What the daemon of one node holds of the job.

    Attributes:
        name: of the node.
        decision: the newest that the daemon was told; None: it does not know the job.
        held, capsules: the headers of its slots, and of the capsules that it keeps for ranks of other nodes.
        had_whole: whether a version of the job was whole once, as far as it knows.
        trained_s: seconds for which the job has trained under that decision.
        failed: whether the job failed under it.
    """

    name: str
    decision: Decision | None = None
    held: tuple[HeldSlot, ...] = ()
    capsules: tuple[HeldCapsule, ...] = ()
    had_whole: bool = False
    trained_s: float = 0.0
    failed: bool = False


@dataclass(frozen=True)
class Inventory:
    """What all nodes that answered hold.

    Attributes:
        reports: node id → what its daemon holds.
        manifests: the manifest under which each epoch's versions were written, as far as a node has it.
        silent: names of nodes of the newest manifest that did not answer.
        before: what the same attach found before it told a decision whose base could not be loaded. Nothing was written under
            that one, so it ends no history: the one that was in force then still says what counts.
    """

    reports: Mapping[str, NodeInventory]
    manifests: Mapping[Epoch, ManifestFacts]
    silent: tuple[str, ...] = ()
    before: Inventory | None = None

    @cached_property
    def decisions(self) -> dict[str, Decision]:
        """Node id → the decision that its daemon remembers."""
        return {node: each.decision for node, each in self.reports.items() if each.decision is not None}

    @property
    def decision(self) -> Decision | None:
        """The one in force."""
        return self.histories[0] if self.histories else None

    @cached_property
    def histories(self) -> list[Decision]:
        """The decisions in force, the one that counts first; several where the job went on more than once."""
        if self.before is not None:
            return self.before.histories
        known = {node: self.manifests.get(each.epoch) for node, each in self.decisions.items()}
        tokens = {node: manifest.token for node, manifest in known.items() if manifest is not None}
        members = {
            epoch: [member.id for member in manifest.members if tokens.get(member.id) == manifest.token]
            for epoch, manifest in self.manifests.items()
        }
        return lineage.histories(self.decisions, members, lineage.written_by(self.held, self.capsules))

    def refuse_rivals(self, job: str) -> None:
        """Raises AttachError if the job went on twice, each time without knowing of the other: a person must choose."""
        if len(self.histories) < 2:
            return
        lines = []
        for decision in self.histories:
            holders = [self.names[node] for node, each in self.decisions.items() if each == decision]
            steps = [each.version.step for each in self.held if each.version and each.version.epoch == decision.epoch]
            upto = f", up to step {max(steps)}" if steps else ""
            lines.append(f"epoch {decision.epoch.counter} on {', '.join(sorted(holders))}{upto}")
        raise AttachError(
            f"job {job} went on more than once, each time without nodes that knew of the other: {'; '.join(lines)}.",
            f"reft-cli purge {job} on the nodes of what is to be given up",
        )

    @property
    def members(self) -> set[str]:
        """Ids of the nodes of the newest manifest and of its base's: nobody else writes what may still count."""
        return {
            member.id for epoch in self.epochs if epoch in self.manifests for member in self.manifests[epoch].members
        }

    @property
    def epochs(self) -> list[Epoch]:
        """The epoch in force, and its base's: their versions may still count."""
        decision = self.decision
        return [each.epoch for each in (decision, decision and decision.base) if each]

    @cached_property
    def held(self) -> list[HeldSlot]:
        """The headers of all slots."""
        return [slot for each in self.reports.values() for slot in each.held]

    @cached_property
    def capsules(self) -> list[HeldCapsule]:
        """The headers of all capsules that nodes keep for ranks of other nodes."""
        return [copy for each in self.reports.values() for copy in each.capsules]

    @property
    def had_whole(self) -> bool:
        """Whether a version of the job was whole once: it must be found, or its loss be said."""
        return any(each.had_whole for each in self.reports.values())

    @property
    def history(self) -> FailureHistory:
        """What the job has lived through, the epoch in force included."""
        if self.before is not None:
            return self.before.history
        decision = self.decision
        if decision is None or decision.epoch not in self.manifests:
            return FailureHistory()
        last = [self.reports[node] for node, each in self.decisions.items() if each.epoch == decision.epoch]
        has_failed = bool(self.silent) or any(each.failed for each in last)
        return self.manifests[decision.epoch].history.after(max(each.trained_s for each in last), has_failed)

    @cached_property
    def nodes(self) -> dict[str, ManifestNode]:
        """Every node that a manifest names or that answered, by its id; the newest manifest says last what it is."""
        known = {
            member.id: member
            for epoch in sorted(self.manifests, key=lambda epoch: epoch.counter)
            for member in self.manifests[epoch].members
        }
        return {ident: ManifestNode(ident, each.name) for ident, each in self.reports.items()} | known

    @cached_property
    def names(self) -> dict[str, str]:
        """Id → what a person calls the node: its name, and a piece of its id where two have the same."""
        count = Counter(node.name for node in self.nodes.values())
        return {
            ident: node.name if node.name and count[node.name] == 1 else f"{node.name}#{ident[:6]}"
            for ident, node in self.nodes.items()
        }

    @property
    def domains(self) -> dict[str, str]:
        """Name of each node that knows the job → its failure domain."""
        return {self.names[node]: self.nodes[node].domain or f"node {self.names[node]}" for node in self.decisions}

    def nodes_of(self, unit: str) -> list[str]:
        """The node of this name, and the nodes of the failure domain that is labelled so; empty if there are none."""
        return [name for ident, name in self.names.items() if unit in (name, self.nodes[ident].domain)]

    def absent(self, here: Collection[str]) -> list[str]:
        """Ids of the nodes of any manifest that are not in `here` and did not answer: they may still hold something."""
        named = {member.id for manifest in self.manifests.values() for member in manifest.members}
        return sorted(named - set(here) - set(self.reports))
