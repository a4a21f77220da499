"""`reft-cli recover --step`: goes back to an older step on purpose, for example after a loss spike.

    memory and storage ─► versions that can be restored ─► the one of the step ─► a decision:
    a new epoch that knows all others, with that version as its base

    storage has the decision ─► every daemon that answers has it ─► the next attach begins there

The decision is that of an attach that wrote nothing. So the rules of `reft.core.recovery.lineage`
hold: versions newer than the base count no more, and a node that comes back late brings none of
them back. Storage comes first: its decision alone sends the job back. Without storage, a decision
that a node of its manifest lacks does not count, so the manifest names only nodes that answered.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from reft.cli.ask import NoSuchJob, ask, job_status
from reft.cli.survey import survey
from reft.core.commit.decision import Decision
from reft.core.commit.version import Version
from reft.core.persist.stored_lineages import StoredLineage, lineage_of, newer_than_memory, refuse_rival
from reft.core.persist.stored_names import CheckpointName
from reft.core.recovery.lineage import known_to, next_epoch
from reft.core.text import counted
from reft.errors import AttachError, ConfigError
from reft.wire import messages
from reft.wire.inventory import JobSurvey, StoredHistory, lineages_from
from reft.wire.v1 import daemon_pb2 as pb

STORED_S = 120.0
DECIDE_S = 30.0


@dataclass(frozen=True)
class GoBackCommand:
    """One run of `reft-cli recover --step`.

    Args:
        address: of this node's daemon.
        job: name of the job.
        step: to go back to.
    """

    address: str
    job: str
    step: int

    @cached_property
    def base(self) -> Version:
        """The version to go back to.

        Raises:
            AttachError: trainers live, two histories are there, or the step can't be restored.
            ReftError: a daemon or the storage does not answer.
        """
        self._refuse_living()
        chosen = [each for each in {*self.in_memory, *self.on_storage} if each.step == self.step]
        if not chosen:
            raise AttachError(
                f"step {self.step} of job {self.job} can't be restored. Memory has {_steps(self.in_memory)}, storage has "
                f"{_steps(self.on_storage)}.",
                f"one of these steps; reft-cli list {self.job} shows them",
            )
        return max(chosen, key=lambda version: (version.order, version.epoch.ident))

    @cached_property
    def in_memory(self) -> list[Version]:
        """The versions that memory can restore, the newest one first."""
        return self._memory.restorable() if self._memory is not None else []

    @cached_property
    def on_storage(self) -> list[Version]:
        """The versions that storage can restore, the newest one first."""
        return self._lineage.restorable() if self._lineage is not None else []

    def newer(self) -> list[Version]:
        """Returns the versions that count no more after this, the newest one first."""
        versions = {*self.in_memory, *self.on_storage}
        return sorted((each for each in versions if self.base.is_older_than(each)), key=lambda each: each.order)[::-1]

    def run(self) -> list[str]:
        """Goes back; returns the names of the nodes that have the decision.

        Raises:
            ReftError: it is not carried out.
        """
        base, memory = self.base, self._memory
        decisions = list(memory.inventory.all_decisions) if memory is not None else []
        decisions += self._lineage.decisions if self._lineage is not None else ()
        decision = Decision(
            next_epoch(decisions, memory.held if memory is not None else (), secrets.token_bytes(16)),
            base, known_to(decisions), memory.guard_below(base) if memory is not None else None,
        )  # fmt: skip
        if self._lineage is not None:
            request = pb.StoreDecisionRequest(
                job=self.job, lineage=self._lineage.ident, decision=messages.decision_to(decision)
            )
            ask(self.address, "StoreDecision", request, STORED_S)
        return self._tell(memory, decision) if memory is not None else []

    def _tell(self, memory: JobSurvey, decision: Decision) -> list[str]:
        """Tells every daemon that answers, this node's last."""
        manifest, own = self._manifest(memory), ask(self.address, "Inventory", pb.InventoryRequest(job=self.job))
        request = pb.DecideRequest(manifest=manifest, decision=messages.decision_to(decision), goes_back=True)
        for kept, field in ((decision.base, request.base_manifest), (decision.guard, request.guard_manifest)):
            if kept is not None:
                field.CopyFrom(self._manifest_of(memory, kept))
        indexes = sorted(range(len(manifest.nodes)), key=lambda i: manifest.nodes[i].id == own.node_id)
        for index in indexes:
            request.node_index = index
            request.ClearField("node")
            if manifest.nodes[index].id != own.node_id:
                request.node.CopyFrom(manifest.nodes[index])
            ask(self.address, "Decide", request, DECIDE_S)
        return [memory.names[node.id] for node in manifest.nodes]

    def _manifest(self, memory: JobSurvey) -> pb.Manifest:
        """Returns the newest manifest with the nodes that answered; one has all other ranks, too.

        Nothing is ever written under this manifest.

        Raises:
            AttachError: no node of it answers.
        """
        assert memory.manifest is not None, "the daemon holds the job"
        manifest = pb.Manifest()
        manifest.CopyFrom(memory.manifest)
        present = [node for node in manifest.nodes if node.id in memory.replies]
        if not present:
            raise AttachError(f"no node of the newest attach of job {self.job} answers.", "start their daemons")
        absent = [rank for node in manifest.nodes if node.id not in memory.replies for rank in node.ranks]
        present[0].ranks.extend(absent)
        nodes = [pb.Node.FromString(node.SerializeToString()) for node in present]
        del manifest.nodes[:]
        manifest.nodes.extend(nodes)
        return manifest

    def _manifest_of(self, memory: JobSurvey, version: Version) -> pb.Manifest:
        """Returns the manifest that a version was written under."""
        if version.epoch in memory.manifests:
            return memory.manifests[version.epoch]
        assert self._lineage is not None and memory.manifest is not None, "only storage has the version"
        request = pb.StoredRequest(job=self.job, lineage=self._lineage.ident, name=str(CheckpointName.of(version)))
        stored = ask(self.address, "Stored", request, STORED_S)
        if stored.damage:
            raise AttachError(f"the checkpoint of {version} can't be used: {stored.damage}", "another step")
        stored.manifest.token, stored.manifest.job_mark = memory.manifest.token, messages.job_mark(memory.manifest)
        stored.manifest.lineage = self._lineage.ident
        manifest: pb.Manifest = stored.manifest
        return manifest

    def _refuse_living(self) -> None:
        with suppress(NoSuchJob):
            status = job_status(self.address, self.job)[0]
            living = sorted(rank.rank for rank in status.ranks if rank.alive)
            if living:
                raise AttachError(
                    f"job {self.job} has {counted(len(living), 'living trainer')} (first: rank {living[0]}).",
                    "end the job first, its launcher too; then go back, and start it again",
                )

    @cached_property
    def _memory(self) -> JobSurvey | None:
        """What memory holds, under the newest history; None: no daemon holds the job."""
        try:
            job_survey = survey(self.address, self.job)[0]
        except NoSuchJob:
            if self._stored is None:
                raise
            return None
        job_survey.inventory.refuse_rivals(self.job)
        lineage = self._lineage_known(job_survey)
        if lineage is None or not newer_than_memory(job_survey.decision, lineage):
            return job_survey
        history = StoredHistory(lineage.decisions, lineage.history(), manifest=job_survey.manifest)
        return JobSurvey(job_survey.replies, job_survey.silent, job_survey.emptied, storage=history)

    def _lineage_known(self, memory: JobSurvey | None) -> StoredLineage | None:
        known = memory.manifest.lineage if memory is not None and memory.manifest is not None else ""
        if memory is not None and not known:
            return None  # the job began before it had storage
        if self._stored is None:
            if known:
                raise ConfigError(
                    f"job {self.job} has checkpoints, and this node's daemon has no storage (--persist).",
                    "run this command on a node whose daemon writes checkpoints",
                )
            return None
        lineage = lineage_of(self.job, self._stored, known)
        if lineage is not None:
            refuse_rival(self.job, memory.decision if memory is not None else None, lineage)
        return lineage

    @cached_property
    def _lineage(self) -> StoredLineage | None:
        return self._lineage_known(self._memory)

    @cached_property
    def _stored(self) -> list[StoredLineage] | None:
        """What storage holds; None: this daemon has no storage."""
        try:
            reply: pb.StoredReply = ask(self.address, "Stored", pb.StoredRequest(job=self.job), STORED_S)
        except ConfigError:
            return None
        return lineages_from(reply)


def _steps(versions: Iterable[Version]) -> str:
    steps = [str(each.step) for each in versions]
    return f"the steps {', '.join(steps)}" if len(steps) > 1 else f"step {steps[0]}" if steps else "none"
