"""The steps plan and decide: where the job starts, the same on every rank.

    JobSurvey ─► RecoveryPlan: the base, or a fresh start, or an error
              ─► AttachPlan: new epoch, manifest, placement ─► decide: one rank a node stores the
                                                               decision, before any rank loads

`AttachTry` counts the tries: after a damaged base all ranks plan again, without what is damaged.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from reft.client.attach.arguments import AttachContext
from reft.client.attach.introduce import Description, Introduction
from reft.client.attach.inventory import Erasure
from reft.client.link.exchange import together
from reft.client.restore.reshard import is_reshaped
from reft.client.restore.restore import RestoreResult
from reft.config import Config
from reft.core.budget import SLOTS_EXCHANGE, default_slots, format_bytes
from reft.core.coding.placement import Placement
from reft.core.commit.decision import Decision
from reft.core.commit.version import Version
from reft.core.layout.cells import Division
from reft.core.recovery import holdings
from reft.core.recovery.lineage import known_to, next_epoch
from reft.core.recovery.recovery import HeldCapsule, HeldSlot, RecoveryPlan
from reft.core.recovery.restart_loop import stopped
from reft.errors import ConfigError, RestoreError
from reft.wire import messages
from reft.wire.inventory import JobSurvey
from reft.wire.manifest import placement_of, placing
from reft.wire.v1 import daemon_pb2 as pb


@dataclass(frozen=True)
class AttachTry:
    """One try to find a base that is sound.

    Attributes:
        number: 0 for the first try.
        erased: slots, capsules and replays that were given up in earlier tries.
        mismatched: those of them whose replicas differ, without any damage.
        first_survey: the survey of the first try, during later tries.
    """

    number: int = 0
    erased: frozenset[Erasure] = frozenset()
    mismatched: frozenset[Erasure] = frozenset()
    first_survey: JobSurvey | None = None

    def after(self, plan: AttachPlan, result: RestoreResult, tries: int) -> AttachTry:
        """Returns the next try: without the slots and capsules that this try gave up.

        Args:
            plan: the plan of this try.
            result: the old ranks whose slots or capsules were given up.
            tries: how many tries this attach has.

        Raises:
            RestoreError: every version that was tried is damaged.
        """
        if self.number + 1 >= tries:
            job = plan.manifest.job
            raise RestoreError(f"every version of job {job} that was tried is damaged.", f"reft-cli purge {job}")
        assert plan.base is not None, "only a base can be damaged"
        world = plan.survey.manifests[plan.base.epoch].world
        sources = [plan.recovery.source(number, world) for number in result.damaged]
        erased = frozenset(
            (source.node, source.slot, source.version) for source in sources if source.version is not None
        )
        mismatched = self.mismatched | erased if result.is_mismatched else self.mismatched
        return AttachTry(self.number + 1, self.erased | erased, mismatched, self.first_survey or plan.survey)


@dataclass(frozen=True)
class AttachPlan:
    """The result of the step plan.

    Attributes:
        recovery: the base, and where each rank's part of it is found.
        decision: the new epoch and the base.
        manifest: the manifest of the new epoch.
        placement: where the new epoch's bytes lie.
        survey: what all daemons hold of the job.
    """

    recovery: RecoveryPlan
    decision: Decision
    manifest: pb.Manifest
    placement: Placement
    survey: JobSurvey

    @property
    def base(self) -> Version | None:
        """The version that the job starts from; None for a fresh start."""
        return self.decision.base

    @property
    def base_manifest(self) -> pb.Manifest | None:
        """The manifest that the base was written under; None for a fresh start."""
        return manifest_of_base(self.survey, self.recovery)

    @property
    def guard_manifest(self) -> pb.Manifest | None:
        """The manifest that the guard was written under; None if it is the base's."""
        guard, base = self.decision.guard, self.base
        if guard is None or (base is not None and guard.epoch == base.epoch):
            return None
        return self.survey.manifests[guard.epoch]

    @cached_property
    def is_reshaped(self) -> bool:
        """Whether the job has another shape than the base."""
        return self.base_manifest is not None and is_reshaped(self.base_manifest, self.manifest)

    @property
    def must_protect_again(self) -> bool:
        """Whether the base has lost a node, lies on storage, or has another placement."""
        before = self.base_manifest
        has_moved = before is not None and placing(before) != placing(self.manifest)
        return bool(self.recovery.capsules) or self.is_from_storage or has_moved

    @property
    def is_from_storage(self) -> bool:
        """Whether any rank's part of the base comes from storage."""
        return any(source.is_stored for source in self.recovery.sources.values())

    def restored_from(self, nodes: Sequence[pb.Node]) -> str | None:
        """Returns the worst source of any rank: None, "memory", "peers" or "storage".

        Args:
            nodes: the nodes of the new job.
        """
        if self.base is None:
            return None
        if self.is_from_storage:
            return "storage"
        node_of = {rank: node.id for node in nodes for rank in node.ranks}
        has_moved = any(source.node != node_of.get(rank) for rank, source in self.recovery.sources.items())
        return "peers" if has_moved or self.recovery.capsules or self.is_reshaped else "memory"


def manifest_of_base(survey: JobSurvey, recovery: RecoveryPlan) -> pb.Manifest | None:
    """Returns the manifest that the base was written under; None for a fresh start."""
    return None if recovery.base is None else survey.manifests[recovery.base.epoch]


def recover(job: str, survey: JobSurvey, erased: Collection[Erasure], may_start_fresh: bool) -> RecoveryPlan:
    """Returns the base, and where each rank's part of it is found.

    Args:
        job: name of the job.
        survey: what all daemons hold of the job.
        erased: slots and capsules that must not be used.
        may_start_fresh: whether the job may start without a base. Else a person must decide.

    Raises:
        AttachError: the job has continued twice.
        RestoreError: no version is whole, and the job may not start fresh.
    """
    survey.inventory.refuse_rivals(job)
    recovery = survey.plan(erased)
    if recovery.base is None and not may_start_fresh:
        held = survey.holdings(job, erased)
        raise RestoreError(held.reason, held.remedy)
    return recovery


def recover_at_start(settings: Config, job: str, survey: JobSurvey, attempt: AttachTry) -> RecoveryPlan:
    """Returns the base: an older one if restores of the newest ended too often.

    A version whose replicas differ was never whole. So the job may start fresh if only such
    versions were given up, and no daemon knows of a whole one.

    Args:
        settings: with "newest" as `restore`, the newest version is restored however often it was.
        job, survey: see `recover`.
        attempt: what was given up.

    Raises:
        AttachError, RestoreError: see `recover`; or restores ended too often.
    """
    erased = attempt.erased
    recovery = recover(job, survey, erased, holdings.may_start_fresh(survey.inventory, erased - attempt.mismatched))
    count = survey.inventory.restores
    if recovery.base is None or count is None or not count.goes_back or settings.restore == "newest":
        return recovery
    copies: list[HeldSlot | HeldCapsule] = [*survey.held, *survey.copies]
    passed = {
        (each.node, each.slot, each.version)
        for each in copies
        if each.version is not None and each.version.step >= count.step
    }
    older = survey.plan({*erased, *passed})
    if count.stops or older.base is None:
        remedy = "read the logs of the ranks for what ends them; then start the job once with REFT_RESTORE=newest"
        if survey.storage is not None:  # only its newest checkpoint was opened
            remedy += (
                f"; or go back to an older checkpoint: reft-cli list {job}, then reft-cli recover {job} --step N --yes"
            )
        raise RestoreError(stopped(job, count), remedy)
    return older


def refuse_fresh_start(settings: Config, job: str, survey: JobSurvey) -> None:
    """Raises RestoreError if the settings require a restore; the same on every rank."""
    if settings.restore != "require":
        return
    known = [f"step {each.step}, says {each.source}" for each in survey.inventory.known if each.step >= 0]
    whole = f" Whole was {'; '.join(known)}." if known else ""
    raise RestoreError(
        f"{holdings.REQUIRE} is set, and no step of job {job} is held.{whole}",
        "check the job's name (REFT_JOB, --rdzv-id) and the nodes; to start at step 0, unset REFT_RESTORE",
    )


def make_plan(
    description: Description, survey: JobSurvey, recovery: RecoveryPlan, mismatched: Sequence[str], ident: bytes
) -> AttachPlan:
    """Returns the plan of the new epoch.

    Args:
        description: the new manifest, before anything was known of an earlier attach.
        survey: what all daemons hold of the job.
        recovery: the base, and where each rank's part of it is found.
        mismatched: names of the leaves of which each rank keeps its own copy.
        ident: id of the new epoch.
    """
    decisions = survey.inventory.all_decisions
    manifest = pb.Manifest()
    manifest.CopyFrom(description.manifest)
    if survey.manifest is not None:
        manifest.job_mark = messages.job_mark(survey.manifest)  # a job keeps its mark
        tokens = messages.earlier_tokens(survey.tokens, manifest.token)
        manifest.earlier_tokens.extend(tokens)
        manifest.lineage = survey.manifest.lineage or manifest.lineage  # and its checkpoints
    manifest.trained_s, manifest.failures = survey.inventory.history
    manifest.mismatched.extend(mismatched)
    placement = place(manifest, description.division)
    # An epoch that exchanges nothing protects no later version, so the guard would stay for ever.
    guard = recovery.guard if placement.guard_lanes else None
    decision = Decision(next_epoch(decisions, survey.held, ident), recovery.base, known_to(decisions), guard)
    return AttachPlan(recovery, decision, manifest, placement, survey)


def place(manifest: pb.Manifest, division: Division) -> Placement:
    """Returns the placement; chooses the number of slots if no rank asks for one.

    Args:
        manifest: the manifest of the new epoch.
        division: the cells, if all replicas are equal.
    """
    placement = placement_of(manifest, division)
    if manifest.slots:
        return placement
    manifest.slots = default_slots(placement.needs_exchange, bool(manifest.lineage))
    return replace(placement, slots=manifest.slots)


def slots_of(settings: Config, manifest: pb.Manifest) -> int:
    """Returns the number of slots of this rank: what it asks for, else what was chosen."""
    return settings.slots or manifest.slots


def refuse_few_slots(placement: Placement) -> None:
    """Raises ConfigError on every rank if the slots are too few for the exchange.

    This is for a fresh start. A job that goes on is not stopped; attach names what is exposed.
    """
    if placement.needs_exchange and placement.slots < SLOTS_EXCHANGE:
        nbytes = sum(size for lane in replace(placement, slots=SLOTS_EXCHANGE).guard_lanes for size in lane.sizes)
        raise ConfigError(
            f"slots is {placement.slots}; {format_bytes(nbytes)} of the state exist once, and nodes exchange parity of them "
            f"only with {SLOTS_EXCHANGE} slots or more.",
            f"slots={SLOTS_EXCHANGE}, or protect='none'",
        )


def decide(context: AttachContext, introduction: Introduction, plan: AttachPlan, trains: bool = False) -> None:
    """Stores the decision on every node. All ranks call it together.

    Args:
        context: what every step needs.
        introduction: the ranks and nodes that take part.
        plan: the decision.
        trains: whether the ranks are registered as trainers already, and stay so.

    Raises:
        ReftError: a daemon refused the decision, or does not answer; others may have it.
    """

    def store() -> None:
        if introduction.is_leader:
            introduction.daemon.call("Decide", decide_request(introduction, plan, trains))

    together(context.rank_group, store)


def decide_request(introduction: Introduction, plan: AttachPlan, trains: bool = False) -> pb.DecideRequest:
    """Returns the decision for this rank's daemon; see `decide`."""
    node, infos = introduction.node.id, introduction.ranks.infos
    told = plan.survey.replies[node].slots if node in plan.survey.replies else ()
    return pb.DecideRequest(
        manifest=plan.manifest,
        decision=messages.decision_to(plan.decision),
        node_index=[each.id for each in introduction.nodes].index(node),
        dropped=[slot.slot for slot in plan.recovery.dropped if slot.node == node],
        base_manifest=plan.base_manifest,
        guard_manifest=plan.guard_manifest,
        trainers=[infos[rank].process.pid for rank in introduction.node.ranks] if trains else (),
        counts_on_slots=plan.base is not None and not all(slot.stored for slot in told),
    )
