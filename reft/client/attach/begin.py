"""The step begin: makes the session of this rank, and says once what was restored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from reft.client.attach import report
from reft.client.attach.arguments import AttachContext
from reft.client.attach.engine import copy_engine
from reft.client.attach.introduce import Introduction
from reft.client.attach.plan import AttachPlan
from reft.client.attach.records import RecordMemory, make_recorder
from reft.client.link.reports import Reporter, ReporterFacts
from reft.client.link.slots import MappedSlot, SlotLeases
from reft.client.restore.restore import RestoreResult
from reft.client.session import Session
from reft.client.snapshot.engine import CopyEngine
from reft.client.snapshot.rank_slots import RankSlots
from reft.client.snapshot.save_planner import SavePlanner
from reft.client.snapshot.snapshot_thread import SnapshotFacts
from reft.client.snapshot.snapshotter import Snapshotter
from reft.client.snapshot.task import SnapshotHistory
from reft.client.state.restored_generators import restore_generators
from reft.client.state.structure import StructureFacts
from reft.client.state.tensors import TensorIndex
from reft.console import say
from reft.core.commit.snapshot_cadence import SnapshotCadence
from reft.core.commit.snapshot_interval import DueSteps, FailureHistory, IntervalEstimator
from reft.wire.daemon_launcher import DaemonRestarter

if TYPE_CHECKING:
    from reft.client.rehearsal.recorder import RehearsalRecorder


def begin(
    context: AttachContext,
    introduction: Introduction,
    plan: AttachPlan,
    result: RestoreResult,
    leases: SlotLeases,
    slots: Sequence[MappedSlot],
    counts: Sequence[int],
    records: RecordMemory | None = None,
) -> Session:
    """Returns the session; restores random generators, after all other state.

    Args:
        context: what every step needs.
        introduction: the ranks and nodes that take part.
        plan: where the job starts.
        result: what was restored.
        leases: the leases of this rank.
        slots: the slots for the next snapshots.
        counts: the groups that the script itself made, for each optimizer.
        records: the slots for gradient records; None if this rank records nothing.
    """
    step = plan.base.step if plan.base else 0
    restored_from = plan.restored_from(introduction.nodes)
    engine = copy_engine(context, introduction)
    index, tracked = introduction.state.tensor_index, introduction.state.tracked
    built = StructureFacts.of(tracked, index.leaves(), index.names).first_groups(tracked, counts)
    snapshots = make_snapshotter(
        context, introduction, plan, leases, slots, engine, SnapshotHistory(), step, built, records, result.tensor_index
    )
    tree, settings, generators = result.tree, context.settings, None
    if tree is not None:
        generators = restore_generators(tree["random"], settings.generators, context.request.state.values())
    rehearsal = _rehearsal(context, introduction) if settings.rehearse else None
    session = Session(
        snapshots,
        tracked.optimizers,
        step=step,
        restored_from=restored_from,
        counts_calls=tree is not None and not tree["marked"],
        cadence=_cadence(context, plan),
        seal_deadline_s=settings.seal_deadline_s,
        schedule=context.request.schedule,
        ask_persist=partial(introduction.daemon.ask_persist, introduction.job.id, settings.rpc_deadline_s),
        generators=generators,
        rehearsal=rehearsal,
    )
    if context.rank == 0:
        for line in announcement(context, introduction, plan, result, restored_from):
            say(line)
    if tree is not None:
        if tree["marked"]:
            session.resume_marking()
        if plan.must_protect_again:
            session.protect_again(tree["marked"])
    if rehearsal is not None:
        rehearsal.attached(step, restored_from)
    return session


def _rehearsal(context: AttachContext, introduction: Introduction) -> RehearsalRecorder:
    from reft.client.rehearsal.recorder import RehearsalFacts, RehearsalRecorder

    tracked, world = introduction.state.tracked, len(introduction.ranks.infos)
    facts = RehearsalFacts(context.settings.rehearse, context.rank, world, report.regroups(tracked, world))
    return RehearsalRecorder(facts, tracked, context.request.state)


def make_snapshotter(
    context: AttachContext,
    introduction: Introduction,
    plan: AttachPlan,
    leases: SlotLeases,
    slots: Sequence[MappedSlot],
    engine: CopyEngine,
    history: SnapshotHistory,
    step: int | None,
    built: StructureFacts | None,
    records: RecordMemory | None = None,
    bound: TensorIndex | None = None,
) -> Snapshotter:
    """Returns the snapshotter of the new epoch.

    Args:
        context: what every step needs.
        introduction: the ranks and nodes that take part.
        plan: the new epoch and its placement.
        leases: the leases of this rank.
        slots: the slots for the snapshots.
        engine: copies snapshots.
        history: the tasks of the session.
        step: the completed step; None for a new layout, whose first step the round names.
        built: what a restarted script builds; None if that is not known.
        records: the slots for gradient records; None if this rank records nothing.
        bound: the index of the tensors that were restored; None if nothing was.
    """
    settings, daemon, state, epoch = context.settings, introduction.daemon, introduction.state, plan.decision.epoch
    rank, tracked = context.rank, state.tracked
    reporter = Reporter(
        ReporterFacts(
            address=daemon.address,
            path=daemon.hello.local_socket,
            job=introduction.job.id,
            epoch=epoch,
            rank=rank,
            deadline_s=settings.rpc_deadline_s,
            refused=DaemonRestarter(settings, daemon.hello.unattended).refused,
        ),
        context.failpoints,
    )
    compared_steps = 2 * context.request.every
    if step is None:
        facts = SnapshotFacts(rank, epoch, plan.placement, state.names, -1, context.failpoints, compared_steps)
    else:
        facts = SnapshotFacts(rank, epoch, plan.placement, state.names, step + compared_steps, context.failpoints)
    return Snapshotter(
        facts,
        plan.decision,
        SavePlanner(tracked, plan.placement, rank, engine.parity_tiling, state.predicted.leaves, built, bound),
        state.host,
        engine,
        reporter,
        RankSlots(list(slots), leases, rank, leases.settings.slots, records.slots.mapped if records else ()),
        history,
        make_recorder(records, introduction, reporter, engine.copy_cpu, step) if records else None,
    )


def _cadence(context: AttachContext, plan: AttachPlan) -> SnapshotCadence:
    settings, request = context.settings, context.request
    history = FailureHistory(plan.manifest.trained_s, plan.manifest.failures)
    estimator = IntervalEstimator(settings.overhead_budget, settings.mtbf_s or history.mtbf_s)
    return SnapshotCadence(DueSteps(request.every, request.adapts), estimator)


def announcement(
    context: AttachContext,
    introduction: Introduction,
    plan: AttachPlan,
    result: RestoreResult,
    restored_from: str | None,
) -> list[str]:
    """Returns lines about the restored state, and the parts that a restart would not restore."""
    job, world = introduction.job, len(introduction.ranks.infos)
    lines = report.restored(job.id, plan.base, restored_from, plan.manifest, plan.survey, plan.recovery)
    if plan.base_manifest is not None and plan.is_reshaped:
        lines += report.reshaped(plan.base_manifest.world, world, result.lines)
    if plan.base is None and not job.named:
        earlier = report.earlier_runs(plan.survey, plan.manifest.script)
        lines += earlier or ([] if context.launch.under_agent else [report.unnamed()])
    if len(introduction.nodes) > 1 and context.launch.launch and not introduction.ranks.first.key_mark:
        lines.append(report.NO_KEY)
    lines += report.exchange(plan.placement, introduction.nodes)
    lines += report.exposure(plan.placement)
    return lines + report.not_covered(context.request, introduction.state.tracked, world)
