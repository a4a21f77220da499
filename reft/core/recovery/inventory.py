"""Combines the daemons' inventories of a job.

It tells which history is in force, and how its nodes are named.

    one NodeInventory a node ─► Inventory ─► histories ─► one: recovery.plan
      that answered                          in force  └► several: a person must choose

A *manifest* lists the nodes and ranks of one attach. A *decision* is the result of one attach: its
epoch, and the base, which is the version that training starts from. A *history* is a decision and
the versions that count under it. The decision that no other one outranks is *in force*.

Invariants
  1. The same inventories give the same answers on every rank. The order of the nodes does not
     matter.
  2. A job has a random mark, which each later manifest keeps. A node whose manifest has another
     mark holds another job of the same name. It does not count for this job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from reft.core.commit.decision import Decision
from reft.core.commit.snapshot_interval import FailureHistory
from reft.core.commit.version import Epoch
from reft.core.recovery import lineage
from reft.core.recovery.recovery import HeldCapsule, HeldParity, HeldRecord, HeldSlot
from reft.core.recovery.restart_loop import RestoreCount, count_now
from reft.errors import AttachError


@dataclass(frozen=True)
class ManifestNode:
    """A node as a manifest names it.

    Attributes:
        id: id of the node.
        name: the name that a person gave the node; empty: none.
        domain: label of its failure domain; empty: the node fails alone.
        ranks: the ranks that run there.
    """

    id: str
    name: str = ""
    domain: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class ManifestFacts:
    """The parts of a manifest that decisions need.

    Attributes:
        mark: tells the job from any other job of its name.
        members: the nodes of the job.
        history: failures and training time of the job until the manifest was made.
    """

    mark: bytes
    members: tuple[ManifestNode, ...]
    history: FailureHistory


@dataclass(frozen=True)
class KnownStep:
    """A step that was whole once, as somebody knows who need not hold it.

    Attributes:
        step: the step; -1: not known which.
        source: who says so, for a person.
    """

    step: int
    source: str


@dataclass(frozen=True)
class NodeInventory:
    """The slots and capsules of the job that one node's daemon holds.

    Attributes:
        name: name of the node.
        decision: the newest decision that the daemon received; None: the daemon does not know the
            job.
        held: the headers of the daemon's slots.
        capsules: the headers of the capsules that the daemon keeps for ranks of other nodes.
        had_whole: whether a version of the job was ever whole, according to this daemon.
        trained_s: seconds that the job has trained under that decision.
        failed: whether the job failed under that decision.
        restores: how often the job was restored, by this daemon's record; None: never.
        reached: the newest step that a rank of the node has reported; -1 if none.
        known: steps that the daemon or an agent of the node knows to have been whole.
        parity: the headers of the daemon's parity slots.
        records: the headers of the daemon's record slots.
    """

    name: str
    decision: Decision | None = None
    held: tuple[HeldSlot, ...] = ()
    capsules: tuple[HeldCapsule, ...] = ()
    had_whole: bool = False
    trained_s: float = 0.0
    failed: bool = False
    known: tuple[KnownStep, ...] = ()
    restores: RestoreCount | None = None
    reached: int = -1
    parity: tuple[HeldParity, ...] = ()
    records: tuple[HeldRecord, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """The slots and capsules of all nodes that answered.

    Attributes:
        reports: node id → the inventory of its daemon.
        manifests: epoch → the manifest that its versions were written under, if any node has that
            manifest.
        silent: names of nodes of the newest manifest that did not answer → the reasons, perhaps "".
        emptied: names of such nodes where another daemon answered: what the node held is gone.
        before: the inventory of the first try of this attach; None in the first try. A later try
            follows if the first base turned out damaged. The first try's decision wrote nothing.
            So `before` says which history is in force.
        stored: the decisions that storage remembers.
        chosen: the decision in force, if storage has a newer history or checkpoint than memory.
    """

    reports: Mapping[str, NodeInventory]
    manifests: Mapping[Epoch, ManifestFacts]
    silent: Mapping[str, str] = field(default_factory=dict)
    emptied: tuple[str, ...] = ()
    before: Inventory | None = None
    stored: tuple[Decision, ...] = ()
    chosen: Decision | None = None

    @cached_property
    def decisions(self) -> dict[str, Decision]:
        """Returns node id → the decision that its daemon remembers."""
        return {node: each.decision for node, each in self.reports.items() if each.decision is not None}

    @property
    def all_decisions(self) -> list[Decision]:
        """Returns the decisions that any daemon or storage remembers."""
        return [*self.decisions.values(), *self.stored]

    @property
    def decision(self) -> Decision | None:
        """Returns the decision in force; None if no daemon knows the job."""
        return self.histories[0] if self.histories else None

    @cached_property
    def histories(self) -> list[Decision]:
        """Returns the decisions in force; several if the job continued in more than one history.

        attach and `reft-cli recover` refuse several: see `refuse_rivals`. `reft-cli status` shows
        the first one.
        """
        if self.chosen is not None:
            return [self.chosen]
        if self.before is not None:
            return self.before.histories
        # Members are the nodes of a manifest that still hold the same job, shown by its mark.
        # lineage needs them to see whether a decision reached all its nodes.
        known = {node: self.manifests.get(each.epoch) for node, each in self.decisions.items()}
        marks = {node: manifest.mark for node, manifest in known.items() if manifest is not None}
        members = {
            epoch: [member.id for member in manifest.members if marks.get(member.id) == manifest.mark]
            for epoch, manifest in self.manifests.items()
        }
        return lineage.histories(self.decisions, members, lineage.written_by(self.held, self.capsules))

    def refuse_rivals(self, job: str) -> None:
        """Raises AttachError if the job has more than one history.

        Then the job continued twice, and neither continuation knew of the other. A person must
        choose.
        """
        if len(self.histories) < 2:
            return
        lines = []
        for decision in self.histories:
            holders = [self.names[node] for node, each in self.decisions.items() if each == decision]
            steps = [each.version.step for each in self.held if each.version and each.version.epoch == decision.epoch]
            upto = f", up to step {max(steps)}" if steps else ""
            lines.append(f"epoch {decision.epoch.counter} on {', '.join(sorted(holders))}{upto}")
        raise AttachError(
            f"job {job} went on more than once, and neither continuation knew of the other: {'; '.join(lines)}.",
            f"reft-cli purge {job} on the nodes of the history to give up",
        )

    @property
    def members(self) -> set[str]:
        """Returns the ids of the nodes of the manifests in force.

        These are the newest one, and those of its base and guard.

        No other node writes a version that may still count.
        """
        return {
            member.id for epoch in self.epochs if epoch in self.manifests for member in self.manifests[epoch].members
        }

    @property
    def epochs(self) -> list[Epoch]:
        """Returns the epoch in force and those of its base and guard: versions of all may count."""
        decision = self.decision
        if decision is None:
            return []
        kept = (each.epoch for each in (decision, decision.base, decision.guard) if each is not None)
        return list(dict.fromkeys(kept))

    @cached_property
    def held(self) -> list[HeldSlot]:
        """Returns the headers of all slots."""
        return [slot for each in self.reports.values() for slot in each.held]

    @cached_property
    def capsules(self) -> list[HeldCapsule]:
        """Returns the headers of all capsules that nodes keep for ranks of other nodes."""
        return [copy for each in self.reports.values() for copy in each.capsules]

    @cached_property
    def parity(self) -> list[HeldParity]:
        """Returns the headers of all parity slots of the exchange."""
        return [each for report in self.reports.values() for each in report.parity]

    @cached_property
    def records(self) -> list[HeldRecord]:
        """Returns the headers of all slots of gradient records."""
        return [each for report in self.reports.values() for each in report.records]

    @property
    def had_whole(self) -> bool:
        """Returns whether a version of the job was ever whole.

        If so, attach must find one, or report the loss.
        """
        return any(each.had_whole for each in self.reports.values())

    @property
    def known(self) -> list[KnownStep]:
        """Returns the steps that somebody knows to have been whole, the newest first."""
        known = {each for report in self.reports.values() for each in report.known}
        return sorted(known, key=lambda each: (-each.step, each.source))

    @property
    def restores(self) -> RestoreCount | None:
        """Returns how often the job was restored without getting past a step; None: it got past."""
        if self.before is not None:
            return self.before.restores
        last = [self.reports[node] for node, each in self.decisions.items() if each == self.decision]
        return count_now([each.restores for each in last if each.restores], [each.reached for each in last])

    @property
    def history(self) -> FailureHistory:
        """Returns failures and training time of the job, the epoch in force included.

        Not one of `histories`: those are decisions.
        """
        if self.before is not None:
            return self.before.history
        decision = self.decision
        if decision is None or decision.epoch not in self.manifests:
            return FailureHistory()
        last = [self.reports[node] for node, each in self.decisions.items() if each.epoch == decision.epoch]
        if not last:
            return self.manifests[decision.epoch].history  # a history on storage, which no daemon remembers
        # A silent node may have failed and can't say so. So it counts as a failure.
        has_failed = bool(self.silent or self.emptied) or any(each.failed for each in last)
        return self.manifests[decision.epoch].history.after(max(each.trained_s for each in last), has_failed)

    @cached_property
    def nodes(self) -> dict[str, ManifestNode]:
        """Returns node id → node, for every node that a manifest names or that answered.

        Where manifests differ, the newest one counts.
        """
        known = {
            member.id: member
            for epoch in sorted(self.manifests, key=lambda epoch: epoch.counter)
            for member in self.manifests[epoch].members
        }
        return {ident: ManifestNode(ident, each.name) for ident, each in self.reports.items()} | known

    @cached_property
    def names(self) -> dict[str, str]:
        """Returns node id → name for people; a part of the id follows an ambiguous name.

        A node that was rebooted has its name under another id. So the nodes of the manifest in
        force keep their names, unless two of them have the same one.
        """
        decision = self.decision
        newest = self.manifests.get(decision.epoch) if decision is not None else None
        own = unique_names({member.id: member.name for member in newest.members} if newest is not None else {})
        every = unique_names({ident: node.name for ident, node in self.nodes.items()})
        return {ident: own.get(ident, name) for ident, name in every.items()}

    @property
    def domains(self) -> dict[str, str]:
        """Returns node name → failure domain, for each node that knows the job."""
        return {self.names[node]: self.nodes[node].domain or f"node {self.names[node]}" for node in self.decisions}

    def nodes_of(self, unit: str) -> list[str]:
        """Returns the names of the nodes that `unit` means; empty if there are none.

        A unit is the name of a node or of a failure domain, as `--what-if lose=UNIT` gives it.
        """
        return [name for ident, name in self.names.items() if unit in (name, self.nodes[ident].domain)]

    def absent_nodes(self, here: Collection[str]) -> list[str]:
        """Returns the ids of the nodes that a manifest names and that are missing.

        Missing nodes did not answer, and are not in `here`. They may still hold slots or capsules.

        Args:
            here: ids of the nodes that take part in this attach; empty for `reft-cli`.
        """
        named = {member.id for manifest in self.manifests.values() for member in manifest.members}
        return sorted(named - set(here) - set(self.reports))


def unique_names(nodes: Mapping[str, str]) -> dict[str, str]:
    """Returns node id → name for people; a part of the id makes it unique.

    Args:
        nodes: node id → the name that a person gave the node; perhaps empty.
    """
    count = Counter(nodes.values())
    return {ident: name if name and count[name] == 1 else marked_name(name, ident) for ident, name in nodes.items()}


def marked_name(name: str, ident: str) -> str:
    """Returns the name of a node with a part of its id."""
    return f"{name}#{ident[:6]}"
