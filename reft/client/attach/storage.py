"""The step storage: a checkpoint, if memory has no base, or an older one than storage.

    one rank: its daemon lists storage ═► all ranks choose the same lineage and checkpoint
    one rank: its daemon reads the checkpoint's manifest ═► all ranks
    one rank a node: its daemon opens the node's share of the files, as slots of the job
    inventory again ─► JobSurvey, in which the checkpoint is held like any other version

Invariants
  1. Storage that can't be listed is not empty: attach stops. Only a restart within a launch goes on
     from memory then, since no other launch can have gone further.
  2. The newest history counts, not the greatest step: `reft.core.persist.stored_lineages`.
  3. A checkpoint that can't be used is left out, loudly, and the next older one is taken. If none
     can be used, attach stops. It also stops if a checkpoint that was opened is not whole then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from reft.client.attach import report
from reft.client.attach.arguments import AttachContext
from reft.client.attach.introduce import Introduction, leader_of
from reft.client.attach.inventory import take_inventory
from reft.client.attach.plan import AttachTry
from reft.client.link.exchange import gather_replies
from reft.console import say
from reft.core.budget import format_bytes
from reft.core.commit.version import Version
from reft.core.persist.file_shares import deal_files
from reft.core.persist.stored_lineages import StoredLineage, lineage_of, newer_than_memory, refuse_rival
from reft.core.persist.stored_names import CheckpointName
from reft.core.text import counted
from reft.errors import AttachError, ReftError, RestoreError
from reft.wire import messages
from reft.wire.inventory import JobSurvey, StoredHistory, facts_from, lineages_from
from reft.wire.v1 import daemon_pb2 as pb

ANSWER_S = 120.0  # the daemon answers before, if only that files are still being fetched
LISTING_S = 600.0  # texts of a long history; storage that answers nothing for a minute is given up before


@dataclass(frozen=True)
class StorageReader:
    """How the ranks of an attach ask storage. Each method is called by all ranks together.

    Attributes:
        context: what every step needs.
        introduction: the ranks and nodes that take part.
    """

    context: AttachContext
    introduction: Introduction

    def ask(self, lineage: str = "", name: str = "") -> pb.StoredReply:
        """Returns what storage holds, with the manifest of a checkpoint if one is named.

        With a lineage alone, it is asked for what that one holds: others may be damaged. A failure
        comes as `trouble`.
        """
        job, asker = self.introduction.job.id, self.introduction.ranks.persisting[0]

        def call() -> pb.StoredReply:
            try:
                request = pb.StoredRequest(job=job, lineage=lineage, name=name)
                reply: pb.StoredReply = self.introduction.daemon.call("Stored", request, LISTING_S)
            except ReftError as error:
                return pb.StoredReply(trouble=str(error))
            return reply

        is_asker = self.context.rank == asker
        return gather_replies(self.context.rank_group, is_asker, call, pb.StoredReply, LISTING_S)[asker]

    def open(self, lineage: str, version: Version, stored: pb.StoredReply) -> str:
        """Opens a checkpoint on all nodes; returns its damage, or nothing.

        A daemon that fetches objects answers now and then that it is not ready yet. It gives up
        storage that sends nothing for a minute.

        Raises:
            ReftError: a daemon does not answer, or storage fails.
        """
        nodes = [node for node in self.introduction.nodes if self._persists(node)]
        wrote = facts_from(stored.manifest).members
        shares = deal_files(stored.ranks, wrote, {node.id: node.name for node in nodes})
        request = pb.OpenStoredRequest(
            job=self.introduction.job.id,
            lineage=lineage,
            name=str(CheckpointName.of(version)),
            version=messages.version_to(version),
            ranks=shares.get(self.introduction.node.id, ()),
            asks_again=True,
        )

        call = partial(self.introduction.daemon.call, "OpenStored", request, ANSWER_S)
        opens = self.introduction.is_leader and self._persists(self.introduction.node)
        while True:
            opened = gather_replies(self.context.rank_group, opens, call, pb.OpenStoredReply, ANSWER_S)
            damage = next((each.damage for each in opened if each.damage), "")
            if damage or not any(each.opening for each in opened):
                return damage
            if self.context.rank == 0:
                say(f"fetched {format_bytes(sum(each.fetched_bytes for each in opened))} from storage so far.")

    def _persists(self, node: pb.Node) -> bool:
        return leader_of(node) in self.introduction.ranks.persisting


def take_storage(
    context: AttachContext, introduction: Introduction, survey: JobSurvey, attempt: AttachTry
) -> JobSurvey:
    """Returns the survey, with a checkpoint if memory has no base or an older one.

    All ranks call it together.

    Raises:
        AttachError: a person must choose a history.
        RestoreError: storage can't be listed; no checkpoint can be used, and memory has no base; or
            an opened checkpoint is not there any more.
        ReftError: a daemon does not answer.
    """
    job, memory = introduction.job, survey.manifest
    if not job.named or not introduction.ranks.persisting or (memory is not None and not memory.lineage):
        return survey  # or the job began before it had storage
    reader = StorageReader(context, introduction)
    listing = reader.ask(memory.lineage if memory is not None else "")
    if listing.trouble:
        launch = introduction.ranks.first.identity.launch
        if memory is None or memory.launch != launch or survey.plan(attempt.erased).base is None:
            raise RestoreError(listing.trouble)
        if context.rank == 0:
            say(f"storage does not answer; this launch goes on from memory. {listing.trouble}")
        return survey
    lineage = lineage_in(job.id, listing, memory, context.settings.lineage)
    if lineage is None:
        return survey
    refuse_rival(job.id, survey.decision, lineage)
    is_newer = newer_than_memory(survey.decision, lineage)
    history = StoredHistory(lineage.decisions, lineage.history() if is_newer else None, manifest=memory)
    opened = open_newest(reader, replace(survey, storage=history), lineage, listing, attempt)
    if opened.version is None:
        return replace(survey, storage=opened)
    after = replace(take_inventory(context, introduction, attempt.erased, attempt.first_survey), storage=opened)
    refuse_unopened(job.id, after, opened.version, attempt)
    return after


def refuse_unopened(job: str, survey: JobSurvey, version: Version, attempt: AttachTry) -> None:
    """Raises RestoreError if the survey lacks a part of the checkpoint that was opened.

    A daemon may have ended meanwhile. The attach would start fresh, or go back further.
    """
    base = survey.plan(attempt.erased).base
    if base is None or base.is_older_than(version):
        ranks = sorted({slot.rank for slot in survey.held if slot.version == version})
        raise RestoreError(
            f"the checkpoint of {version} of job {job} was opened, and now it can't be restored: the ranks whose files are "
            f"open are {', '.join(map(str, ranks[:64])) or 'none'}.",
            "start the job again; if that fails too, look at the storage by reft-cli verify DIR",
        )


def open_newest(
    reader: StorageReader, survey: JobSurvey, lineage: StoredLineage, listing: pb.StoredReply, attempt: AttachTry
) -> StoredHistory:
    """Opens the newest checkpoint that can be used, if it is newer than memory's base.

    Raises:
        RestoreError: no checkpoint can be used, and memory has no base.
        ReftError: a daemon does not answer, or storage fails.
    """
    job, base, history = reader.introduction.job.id, survey.plan(attempt.erased).base, survey.storage
    assert history is not None, "storage was listed"
    given_up = {version for _, name, version in attempt.erased if name.startswith("stored-")}
    newer = [each for each in lineage.restorable() if base is None or base.is_older_than(each)]
    damages: list[str] = []
    for version in (each for each in newer if each not in given_up):
        stored = reader.ask(lineage.ident, str(CheckpointName.of(version)))
        if stored.trouble:
            raise RestoreError(stored.trouble)
        damage = stored.damage or reader.open(lineage.ident, version, stored)
        if not damage:
            memory, manifest = history.manifest, stored.manifest
            if memory is not None:
                manifest.token, manifest.job_mark = memory.token, messages.job_mark(memory)
                manifest.earlier_tokens.extend(memory.earlier_tokens)
            else:
                own = reader.introduction.ranks.secrets
                manifest.token, manifest.job_mark = own.token, manifest.job_mark or own.ident(0)
            manifest.lineage = lineage.ident
            age_s, reason = age_of(version, listing), why_not_memory(job, survey, attempt)
            return StoredHistory(lineage.decisions, lineage.back_to(version), version, manifest, age_s, reason)
        damages.append(f"{version}: {damage}")
        if reader.context.rank == 0:
            say(report.unusable_checkpoint(version, damage))
    if base is None and lineage.checkpoints:
        raise RestoreError(
            f"job {job} has {counted(len(lineage.checkpoints), 'checkpoint')} in {listing.directory}, and none can be used: "
            + (" ".join(damages) if newer else "the newest attach went on from a step that none of them leads to."),
            f"look at them: reft-cli list {job}; reft-cli verify {listing.directory}; or start under another job name",
        )
    return history


def why_not_memory(job: str, survey: JobSurvey, attempt: AttachTry) -> str:
    """Returns a sentence on what memory lacks."""
    if not survey.inventory.decisions:
        return f"memory: no daemon of the {counted(len(survey.replies), 'node')} of this start holds the job."
    base = survey.plan(attempt.erased).base
    if base is not None:
        return f"memory: the newest step there is {base}."
    return f"memory: {survey.holdings(job, attempt.erased).reason}"


def lineage_in(job: str, listing: pb.StoredReply, memory: pb.Manifest | None, asked: str) -> StoredLineage | None:
    """Returns the lineage that the job goes on with; see `lineage_of`.

    Args:
        job: name of the job.
        listing: what storage holds of the job.
        memory: the newest manifest in memory; None: there is none.
        asked: the lineage that the user asked for; empty: none.

    Raises:
        AttachError: memory holds another lineage than the user asked for, or see `lineage_of`.
    """
    if asked and memory is not None and memory.lineage != asked:
        raise AttachError(
            f"REFT_LINEAGE asks for lineage {asked} of job {job}, and memory holds lineage {memory.lineage}.",
            f"unset REFT_LINEAGE; or reft-cli purge {job} to give up memory",
        )
    return lineage_of(job, lineages_from(listing), memory.lineage if memory is not None else "", asked)


def age_of(version: Version, listing: pb.StoredReply) -> float:
    """Returns the seconds since a checkpoint was complete."""
    return next(
        each.age_s
        for lineage in listing.lineages
        for each in lineage.checkpoints
        if messages.version_from(each.version) == version
    )
